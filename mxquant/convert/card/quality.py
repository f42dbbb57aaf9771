"""Measured quality as tables of a card, from the JSON of ``mxquant eval``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxquant.errors import CheckpointError
from mxquant.presentation.table import markdown


def quality(report: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
    """Tables of an evaluation: this model, and the baseline if it has one."""
    models = evaluation.get("models")
    if not isinstance(models, list):
        raise CheckpointError("the evaluation has no models; give the JSON of mxquant eval --output")
    name = Path(str(report["out"])).name
    rows = [m for m in models if m["is_baseline"] or Path(str(m["source"])).name == name]
    if not any(not m["is_baseline"] for m in rows):
        others = ", ".join(str(m["source"]) for m in models)
        raise CheckpointError(f"the evaluation is of {others}, not of {name}")
    parts = []
    if any(m.get("perplexity") for m in rows):
        parts.append(_perplexities(rows))
        parts.append(_measured_on(rows, evaluation))
    tasks = _tasks(rows)
    return [p for p in (*parts, *tasks) if p]


def _perplexities(rows: list[Mapping[str, Any]]) -> str:
    several = any(len(row.get("perplexities") or {}) > 1 for row in rows)
    cells = []
    for row in rows:
        for text, found in _found(row).items():
            against = found.get("divergence") or {}
            cells.append(
                (
                    _label(row),
                    *([Path(text).name] if several else []),
                    _number(found.get("perplexity"), ".4g"),
                    _interval(against.get("perplexity_ratio"), against.get("perplexity_ratio_interval")),
                    _interval(against.get("kl"), against.get("kl_interval")),
                    _number(against.get("top1_agreement"), ".1%"),
                )
            )
    column = ("text",) if several else ()
    return markdown(("model", *column, "perplexity", "ratio to the baseline", "KL, nats a token", "same top-1"), cells)


def _found(row: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Figures by text; reports of one text may lack the text's name."""
    return row.get("perplexities") or {"": row.get("perplexity") or {}}


def _measured_on(rows: list[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> str:
    lines = []
    for text in evaluation.get("texts") or [evaluation.get("text") or {}]:
        measured = _found(rows[-1])
        found = measured.get(str(text.get("name"))) or measured.get("")
        if found and text:
            windows = f"{found['windows']} windows of {found['seq_len']} tokens of {Path(text['name']).name}"
            lines.append(f"{windows} (sha256 `{text['sha256'][:16]}`)")
    return f"{'; '.join(lines)}; in brackets, 95 % confidence." if lines else ""


def _tasks(rows: list[Mapping[str, Any]]) -> list[str]:
    found = {(task, metric): None for row in rows for task, m in row.get("tasks", {}).items() for metric in m}
    if not found:
        return []
    cells = []
    for task, metric in found:
        values = [row.get("tasks", {}).get(task, {}).get(metric) for row in rows]
        cells.append((task, metric, *("-" if v is None else _with_error(v) for v in values)))
    return [markdown(("task", "metric", *map(_label, rows)), cells)]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['name']} (baseline)" if row["is_baseline"] else str(row["name"])


def _with_error(metric: Mapping[str, Any]) -> str:
    if metric["value"] is None:
        return "none"
    error = "" if metric.get("stderr") is None else f" ± {metric['stderr']:.4f}"
    return f"{metric['value']:.4f}{error}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(value: float | None, ends: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" + (f" ({ends[0]:.4g} to {ends[1]:.4g})" if ends else "")
