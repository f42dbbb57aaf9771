"""What an evaluation found out about one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxquant.evals.intervals import paired_error

if TYPE_CHECKING:
    from mxquant.evals.models import EvalModel
    from mxquant.evals.perplexity import Perplexity
    from mxquant.evals.tasks import Metric


@dataclass
class ModelResult:
    """One model's row. Sizes in bytes; see :class:`mxquant.evals.models.EvalModel`.

    ``perplexities``: by name of the text. ``baseline``: the row that this one is compared with.
    """

    name: str
    source: str
    scheme: str
    bits_per_weight: float | None
    disk_bytes: int | None
    weight_bytes: int
    dtype: str
    device: str
    is_baseline: bool = False
    perplexities: dict[str, Perplexity] = field(default_factory=dict)
    tasks: list[Metric] = field(default_factory=list)
    baseline: ModelResult | None = field(default=None, repr=False)

    @classmethod
    def of(cls, model: EvalModel) -> ModelResult:
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
        )

    @property
    def perplexity(self) -> Perplexity | None:
        """That on the first text."""
        return next(iter(self.perplexities.values()), None)

    def metric(self, task: str, name: str) -> Metric | None:
        return next((m for m in self.tasks if (m.task, m.name) == (task, name)), None)

    def difference(self, metric: Metric) -> Difference | None:
        """How far a metric of this row is from the baseline's; None without one."""
        other = self.baseline.metric(metric.task, metric.name) if self.baseline is not None else None
        return None if other is None else Difference.of(metric, other)

    def to_dict(self) -> dict[str, Any]:
        tasks: dict[str, dict[str, Any]] = {}
        for metric in self.tasks:
            difference = self.difference(metric)
            against = None if difference is None else {"value": difference.value, "stderr": difference.stderr}
            tasks.setdefault(metric.task, {})[metric.name] = metric.to_dict() | {"difference": against}
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
            "perplexities": {text: found.to_dict() for text, found in self.perplexities.items()},
            "tasks": tasks,
        }


@dataclass(frozen=True)
class Difference:
    """A metric minus the baseline's; ``stderr`` is that of the items' paired differences, None where
    the metric is no mean over items."""

    value: float
    stderr: float | None

    @classmethod
    def of(cls, metric: Metric, baseline: Metric) -> Difference:
        paired = None if metric.items is None or baseline.items is None else paired_error(metric.items, baseline.items)
        return cls(metric.value - baseline.value, paired)
