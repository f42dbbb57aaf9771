"""What an evaluation found: one row a model, as JSON and as tables for people."""

from __future__ import annotations

import importlib.metadata
import platform
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

    def tables(self) -> list[Table]:
        """Tables for a terminal: perplexity and sizes, then tasks."""
        made = []
        if any(row.perplexity for row in self.results):
            made.append(_perplexity_table(self.results))
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
        """The text and the windows, in two lines; empty without a perplexity."""
        measured = next((row.perplexity for row in self.results if row.perplexity), None)
        if measured is None or self.text is None:
            return ""
        note = f" ({self.text.note})" if self.text.note else ""
        bos = ", each after a BOS token" if measured.bos else ""
        return (
            f"Text {self.text.name}{note}, sha256 {self.text.sha256[:16]}.\n"
            f"{measured.windows} windows of {measured.seq_len} tokens{bos}: {measured.tokens} predicted tokens."
        )


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


def _empty_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _perplexity_table(results: list[ModelResult]) -> Table:
    compared = any(row.perplexity and row.perplexity.divergence for row in results)
    table = _empty_table()
    table.add_column("model", overflow="fold", min_width=12)
    table.add_column("weights", overflow="fold")
    for title in ("bits", "disk MB", "RAM MB", "perplexity"):
        table.add_column(title, justify="right")
    for title in ("ratio", "KL, nats/token", "same top-1") if compared else ():
        table.add_column(title, justify="right")
    table.add_column("tokens/s", justify="right")
    for row in results:
        bits = "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3g}"
        cells = [row.name, row.scheme, bits, megabytes(row.disk_bytes), megabytes(row.weight_bytes)]
        table.add_row(*cells, *_measured_cells(row, compared))
    return table


def _measured_cells(row: ModelResult, compared: bool) -> list[str]:
    measured = row.perplexity
    if measured is None or measured.perplexity is None:
        return ["[red]not finite[/red]" if measured else "-", *(["-"] * (4 if compared else 1))]
    cells = [f"{measured.perplexity:.4g}" if measured.perplexity < 1000 else f"{measured.perplexity:,.0f}"]
    if compared:
        divergence = measured.divergence
        if divergence is None:
            cells += ["baseline", "", ""]
        else:
            cells += [
                with_error(divergence.ratio, divergence.ratio_interval),
                with_error(divergence.kl, divergence.kl_interval),
                f"{divergence.agreement:.1%}",
            ]
    return [*cells, f"{measured.tokens / max(measured.seconds, 1e-9):,.0f}"]


def with_error(value: float, interval: Interval | None) -> str:
    """``1.0412 ± 0.0021``: half the interval's width after the value."""
    if interval is None:
        return f"{value:.4f}"
    return f"{value:.4f} ± {(interval[1] - interval[0]) / 2:.4f}"


def _task_table(results: list[ModelResult]) -> Table:
    table = _empty_table()
    table.add_column("task")
    table.add_column("metric")
    for row in results:
        table.add_column(row.name + (" (baseline)" if row.is_baseline else ""), justify="right", overflow="fold")
    found = {(metric.task, metric.name): None for row in results for metric in row.tasks}
    by_row = [{(metric.task, metric.name): metric for metric in row.tasks} for row in results]
    for task, name in found:
        metrics = [metrics.get((task, name)) for metrics in by_row]
        table.add_row(task, name, *("-" if metric is None else _task_cell(metric) for metric in metrics))
    return table


def _task_cell(metric: Metric) -> str:
    return f"{metric.value:.4f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.4f}")
