"""What an evaluation found: one row a model, as JSON and as tables for people."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxquant import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from mxquant.evals.divergence import Interval
    from mxquant.evals.models import EvalModel
    from mxquant.evals.perplexity import Perplexity
    from mxquant.evals.tasks import Metric
    from mxquant.evals.text import EvalText

# Raised when a key of the JSON changes its meaning or goes away; new keys may come at any time.
SCHEMA_VERSION = 1

# Columns of a terminal that take the whole table.
_WIDE = 120


@dataclass
class ModelResult:
    """One model's row. Sizes in bytes; see :class:`mxquant.evals.models.EvalModel`."""

    name: str
    source: str
    scheme: str
    bits_per_weight: float | None
    disk_bytes: int | None
    weight_bytes: int
    dtype: str
    device: str
    is_baseline: bool = False
    perplexity: Perplexity | None = None
    tasks: list[Metric] = field(default_factory=list)

    @classmethod
    def of(cls, model: EvalModel, *, is_baseline: bool = False) -> ModelResult:
        """A row without results for a loaded model."""
        return cls(
            name=model.name,
            source=model.source,
            scheme=model.scheme,
            bits_per_weight=model.bits_per_weight,
            disk_bytes=model.disk_bytes,
            weight_bytes=model.weight_bytes,
            dtype=str(model.model.dtype).removeprefix("torch."),
            device=str(model.device),
            is_baseline=is_baseline,
        )

    def to_dict(self) -> dict[str, Any]:
        tasks: dict[str, dict[str, Any]] = {}
        for metric in self.tasks:
            tasks.setdefault(metric.task, {})[metric.name] = metric.to_dict()
        return {
            "name": self.name,
            "source": self.source,
            "is_baseline": self.is_baseline,
            "scheme": self.scheme,
            "bits_per_weight": self.bits_per_weight,
            "disk_bytes": self.disk_bytes,
            "weight_bytes": self.weight_bytes,
            "dtype": self.dtype,
            "device": self.device,
            "perplexity": None if self.perplexity is None else self.perplexity.to_dict(),
            "tasks": tasks,
        }


@dataclass
class Report:
    """All rows of one evaluation, the text they were measured on and the settings used."""

    results: list[ModelResult]
    text: EvalText | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """One line for each model that has no valid perplexity."""
        rows = [(row.name, row.perplexity) for row in self.results if row.perplexity is not None]
        return [f"{name}: {measured.problem}" for name, measured in rows if measured.problem]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without NaN or infinity. Keys are stable within a schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "versions": versions(),
            "text": None if self.text is None else self.text.to_dict(),
            "settings": self.settings,
            "models": [row.to_dict() for row in self.results],
        }

    def tables(self, width: int) -> list[Table]:
        """Tables for a terminal of ``width`` columns: sizes and perplexity, then tasks."""
        made = _model_tables(self.results, width)
        if any(row.tasks for row in self.results):
            made.append(_task_table(self.results))
        return made

    def footnote(self) -> str:
        """What the reader of the tables must know, in a few lines."""
        lines = [self.measured_on()]
        if any(row.perplexity and row.perplexity.divergence for row in self.results):
            lines.append("Ratio and KL are against the baseline; ± is 95 % confidence over (paired) windows.")
        return "\n".join(line for line in lines if line)

    def measured_on(self) -> str:
        """The text and the windows, in a few lines; empty without a perplexity."""
        measured = [row.perplexity for row in self.results if row.perplexity and not row.perplexity.problem]
        if not measured or self.text is None:
            return ""
        note = f" ({self.text.note})" if self.text.note else ""
        lines = [f"Text {self.text.name}{note}, sha256 {self.text.sha256[:16]}."]
        for windows, seq_len, bos in dict.fromkeys((m.windows, m.seq_len, m.bos) for m in measured):
            after = ", each after a BOS token" if bos else ""
            lines.append(f"{windows} windows of {seq_len} tokens{after}: {windows * (seq_len - 1)} predicted tokens.")
        if len(lines) > 2:
            lines.append("The tokenizers differ, so these perplexities cannot be compared.")
        return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a figure."""
    found: dict[str, str | None] = {"mxquant": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "lm_eval"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def megabytes(count: int | None) -> str:
    """``123.4`` MB (10^6 bytes), or a dash."""
    if count is None:
        return "-"
    return f"{count / 1e6:,.{2 if count < 1e7 else 1 if count < 1e9 else 0}f}"


def _table(left: list[str], right: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in left:
        table.add_column(title, overflow="fold", min_width=min(len(title), 12))
    for title in right:
        table.add_column(title, justify="right", overflow="fold")
    return table


def _model_tables(results: list[ModelResult], width: int) -> list[Table]:
    """Sizes and quality beside each other, or below each other where the terminal is narrow."""
    from rich.markup import escape

    sizes = {"bits": _bits, "disk MB": lambda r: megabytes(r.disk_bytes), "RAM MB": lambda r: megabytes(r.weight_bytes)}
    speed = {"tokens/s": _tokens_per_second}
    quality: dict[str, Callable[[ModelResult], str]] = {"perplexity": _perplexity}
    if any(row.perplexity and row.perplexity.divergence for row in results):
        quality |= {"ratio": _ratio, "KL, nats": _kl, "same top-1": _agreement}
    if not any(row.perplexity for row in results):
        layout = [(["model", "weights"], sizes)]
    elif width >= _WIDE:
        layout = [(["model", "weights"], sizes | quality | speed)]
    else:
        layout = [(["model", "weights"], sizes | speed), (["model"], quality)]
    tables = []
    for left, right in layout:
        table = _table(left, list(right))
        for row in results:
            names = [escape(row.name), escape(row.scheme)][: len(left)]
            table.add_row(*names, *(cell(row) for cell in right.values()))
        tables.append(table)
    return tables


def _bits(row: ModelResult) -> str:
    return "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3g}"


def _perplexity(row: ModelResult) -> str:
    if row.perplexity is None:
        return "-"
    value = row.perplexity.perplexity
    if value is None:
        return "[red]none[/red]"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _tokens_per_second(row: ModelResult) -> str:
    measured = row.perplexity
    return "-" if measured is None or measured.problem else f"{measured.tokens / max(measured.seconds, 1e-9):,.0f}"


def _ratio(row: ModelResult) -> str:
    if row.is_baseline:
        return "baseline"
    found = row.perplexity.divergence if row.perplexity else None
    return "-" if found is None else with_error(found.ratio, found.ratio_interval)


def _kl(row: ModelResult) -> str:
    found = row.perplexity.divergence if row.perplexity else None
    return "-" if found is None else with_error(found.kl, found.kl_interval)


def _agreement(row: ModelResult) -> str:
    found = row.perplexity.divergence if row.perplexity else None
    return "-" if found is None else f"{found.agreement:.1%}"


def with_error(value: float, interval: Interval | None) -> str:
    """``1.0412 ± 0.0021``: half the interval's width, to two digits, after the value."""
    error = 0.0 if interval is None else (interval[1] - interval[0]) / 2
    digits = min(max(1 - math.floor(math.log10(error)), 0), 5) if error > 0 else 4
    return f"{value:.{digits}f}" + ("" if interval is None else f" ± {error:.{digits}f}")


def _task_table(results: list[ModelResult]) -> Table:
    from rich.markup import escape

    names = [escape(row.name) + (" (baseline)" if row.is_baseline else "") for row in results]
    table = _table(["task", "metric"], names)
    found = {(metric.task, metric.name): None for row in results for metric in row.tasks}
    by_row = [{(metric.task, metric.name): metric for metric in row.tasks} for row in results]
    for task, name in found:
        metrics = [metrics.get((task, name)) for metrics in by_row]
        table.add_row(task, name, *("-" if metric is None else _task_cell(metric) for metric in metrics))
    return table


def _task_cell(metric: Metric) -> str:
    return f"{metric.value:.4f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.4f}")
