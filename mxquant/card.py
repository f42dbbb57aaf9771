"""The model card of an output: ``README.md`` with the front matter that the hub reads.

:func:`model_card` makes the text from plain data; :func:`write_card` keeps the card of the source
beside it, as ``README.source.md``. This module imports neither torch nor the hub's library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mxquant.checkpoint.layout import REPORT_NAME
from mxquant.errors import CheckpointError

CARD_NAME, SOURCE_CARD_NAME = "README.md", "README.source.md"
# What of the source's front matter holds for the output too.
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# Says that a card is ours, and so not the source's.
_OURS = ("quantized_by", "mxquant")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)/?$")

_LOAD_CT = """\
The weights are in compressed-tensors' format. vLLM, SGLang and transformers read them without mxquant:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{path}")
```

transformers makes them dense when it runs them. With mxquant installed, `mxquant.load("{path}")` keeps them packed.
"""
_LOAD_NATIVE = """\
The weights are in mxquant's own format and stay packed in memory. mxquant must be installed, not imported:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{path}")
```

Without mxquant, loading fails. `mxquant dequantize` writes a dense checkpoint for other tools.
"""


def model_card(
    report: Mapping[str, Any],
    *,
    base_model: str | None = None,
    source_card: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    path: str | None = None,
) -> str:
    """The text of ``README.md``.

    Parameters
    ----------
    report : :meth:`mxquant.report.QuantReport.to_dict`, or the file beside the weights.
    base_model : hub id of the source; None takes it from the report, where a hub id was quantized.
    source_card : the card of the source; license, language and pipeline are carried from it.
    evaluation : the JSON of ``mxquant eval --output``, which names this model among its models.
    path : what to load in examples; None takes the name of the output's folder.

    Raises ``CheckpointError`` for an evaluation of other models.
    """
    base_model = base_model or hub_id(str(report["source"]))
    name = path or Path(str(report["out"])).name
    quality = [] if evaluation is None else _quality(report, evaluation)
    loading = _LOAD_NATIVE if report["on_disk"] == "mxquant" else _LOAD_CT
    parts = [
        _front_matter(report, base_model, source_card),
        f"# {name.rpartition('/')[2]}",
        _summary(report, base_model),
        "## Size and format",
        *_formats(report),
        "## Quality",
        *(quality or ["Only the error of the weights, above, was measured."]),
        "## How to load it",
        loading.format(path=name).strip(),
        "## What stayed dense",
        _dense(report),
        "## Made with",
        _made_with(report),
    ]
    if source_card is not None:
        parts.append(f"The card of the source is kept as [{SOURCE_CARD_NAME}]({SOURCE_CARD_NAME}).")
    return "\n\n".join(parts) + "\n"


def write_card(
    folder: Path,
    report: Mapping[str, Any],
    *,
    base_model: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    path: str | None = None,
) -> Path:
    """Write the card of the output in ``folder``; a card of the source that lies there is kept under another name."""
    card, kept = folder / CARD_NAME, folder / SOURCE_CARD_NAME
    if card.exists() and not is_ours(_read(card)):
        card.replace(kept)
    source_card = _read(kept) if kept.exists() else None
    if base_model is None and card.exists():
        base_model = front_matter(_read(card)).get("base_model")  # one that was given before
    text = model_card(report, base_model=base_model, source_card=source_card, evaluation=evaluation, path=path)
    card.write_text(text, encoding="utf-8")
    return card


def restore_card(folder: Path) -> None:
    """Undo :func:`write_card` in a folder that holds a dense model again."""
    card, kept = folder / CARD_NAME, folder / SOURCE_CARD_NAME
    if card.exists() and is_ours(_read(card)):
        card.unlink()
        if kept.exists():
            kept.replace(card)


def read_report(folder: Path) -> dict[str, Any]:
    """The report that quantizing left in an output. Raises ``CheckpointError`` where there is none."""
    path = folder / REPORT_NAME
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {REPORT_NAME}, so it is no output of mxquant quantize") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(report, dict) or not {"out", "on_disk", "schemes", "groups", "dense"} <= report.keys():
        raise CheckpointError(f"{path}: not a report of mxquant quantize")
    return report


def is_ours(card: str) -> bool:
    """Whether :func:`model_card` made the card."""
    key, value = _OURS
    return front_matter(card).get(key) == value


def front_matter(card: str) -> dict[str, Any]:
    """The YAML at the head of a card; empty where there is none, or none that can be read."""
    match = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def hub_id(source: str) -> str | None:
    """The hub id that a folder in the hub's cache is a snapshot of; None for other folders."""
    match = _SNAPSHOT.search(source.replace("\\", "/"))
    return f"{match['owner']}/{match['name']}" if match else None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _front_matter(report: Mapping[str, Any], base_model: str | None, source_card: str | None) -> str:
    carried = front_matter(source_card or "")
    fields: dict[str, Any] = {key: carried[key] for key in _CARRIED if key in carried}
    fields = {**fields, "library_name": "transformers", "pipeline_tag": fields.get("pipeline_tag", "text-generation")}
    if base_model is not None:
        fields |= {"base_model": base_model, "base_model_relation": "quantized"}
    fields[_OURS[0]] = _OURS[1]
    theirs = carried.get("tags")
    tags = [str(t) for t in theirs] if isinstance(theirs, list) else []
    fields["tags"] = list(dict.fromkeys([*tags, "mxquant", *_tags(report)]))
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _tags(report: Mapping[str, Any]) -> list[str]:
    found = [f"{bits}-bit" for bits in sorted({_bits(s) for s in report["schemes"].values()})]
    found += sorted({s["element"].split("_")[0] for s in report["schemes"].values()})
    found += [name for name in report["schemes"] if name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8")]
    return found + ([report["on_disk"]] if report["on_disk"] != "mxquant" else [])


def _bits(scheme: Mapping[str, Any]) -> int:
    return int(scheme["element"][2])


def _summary(report: Mapping[str, Any], base_model: str | None) -> str:
    if base_model is not None:
        base = f"[{base_model}](https://huggingface.co/{base_model})"
    else:
        base = f"`{Path(str(report['source'])).name}`"
    match = _SNAPSHOT.search(str(report["source"]))
    revision = f" (revision `{match['revision']}`)" if match else ""
    share = report["quantized_parameters"] / report["parameters"]
    return (
        f"{base}{revision}, its weights quantized to {report['bits_per_weight']:.3g} bits by mxquant: "
        f"{share:.1%} of {_count(report['parameters'])} parameters."
    )


def _formats(report: Mapping[str, Any]) -> list[str]:
    before, after = report["bytes_before"], report["bytes_after"]
    sqnr = "" if report["sqnr_db"] is None else f" (SQNR {report['sqnr_db']:.1f} dB)"
    rows = [
        ("size before", _bytes(before)),
        ("size after", f"{_bytes(after)}, {before / after:.2f} times smaller"),
        ("bits per quantized weight", f"{report['bits_per_weight']:.3f}, scales included"),
        ("relative error of the weights", f"{report['relative_error']:.4f}{sqnr}"),
        ("activations as it runs", report["activations"]),
        ("KV cache as it runs", report["kv_cache"]),
        ("format on disk", report["on_disk"]),
    ]
    rows = [(what, value) for what, value in rows if value != "none"]
    layers = [
        (
            name,
            scheme["element"],
            scheme["scale"] + (" and a global scale" if scheme["global_scale"] else ""),
            "x".join(map(str, scheme["block"])) if isinstance(scheme["block"], list) else scheme["block"],
            scheme["scale_rule"],
            ", ".join(g["projection"] for g in report["groups"] if g["scheme"] == name),
        )
        for name, scheme in report["schemes"].items()
    ]
    return [
        _table(("", ""), rows),
        _table(("scheme", "elements", "block scales", "block", "scale rule", "layers"), layers),
    ]


def _dense(report: Mapping[str, Any]) -> str:
    rows = [(d["reason"], d["tensors"], _count(d["parameters"]), f"`{d['example']}`") for d in report["dense"]]
    rows += [(f"tied to `{other}`", 0, "0", f"`{name}`") for name, other in report["tied"].items()]
    return _table(("because", "tensors", "parameters", "for example"), rows)


def _made_with(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    seed = f"; seed {report['seed']}" if any(s["rounding"] != "nearest" for s in report["schemes"].values()) else ""
    return f"{versions}{seed}. All figures are in [{REPORT_NAME}]({REPORT_NAME})."


def _quality(report: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
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
    cells = []
    for row in rows:
        found = row.get("perplexity") or {}
        against = found.get("divergence") or {}
        cells.append(
            (
                _label(row),
                _number(found.get("perplexity"), ".4g"),
                _interval(against.get("perplexity_ratio"), against.get("perplexity_ratio_interval")),
                _interval(against.get("kl"), against.get("kl_interval")),
                _number(against.get("top1_agreement"), ".1%"),
            )
        )
    return _table(("model", "perplexity", "ratio to the baseline", "KL, nats a token", "same top-1"), cells)


def _measured_on(rows: list[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> str:
    text, found = evaluation.get("text") or {}, rows[-1].get("perplexity") or {}
    if not text or not found:
        return ""
    return (
        f"{found['windows']} windows of {found['seq_len']} tokens of {text['name']} "
        f"(sha256 `{text['sha256'][:16]}`); in brackets, 95 % confidence."
    )


def _tasks(rows: list[Mapping[str, Any]]) -> list[str]:
    found = {(task, metric): None for row in rows for task, m in row.get("tasks", {}).items() for metric in m}
    if not found:
        return []
    cells = []
    for task, metric in found:
        values = [row.get("tasks", {}).get(task, {}).get(metric) for row in rows]
        cells.append((task, metric, *("-" if v is None else _with_error(v) for v in values)))
    return [_table(("task", "metric", *map(_label, rows)), cells)]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['name']} (baseline)" if row["is_baseline"] else str(row["name"])


def _with_error(metric: Mapping[str, Any]) -> str:
    error = "" if metric.get("stderr") is None else f" ± {metric['stderr']:.4f}"
    return f"{metric['value']:.4f}{error}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(value: float | None, ends: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" + (f" ({ends[0]:.4g} to {ends[1]:.4g})" if ends else "")


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _count(number: int) -> str:
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
