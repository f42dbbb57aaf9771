"""What quantizing a model did, as data: per tensor, per group of layers and in total."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from mxquant.methods.rtn import QuantStats
from mxquant.plan import QuantPlan, TensorPlan


@dataclass
class QuantReport:
    """The result of :func:`mxquant.quantize_model`.

    ``stats``: what happened to each quantized tensor. ``seconds``: reading, quantizing and writing.
    ``peak_bytes``: largest anonymous memory of the process meanwhile, ``base_bytes`` of it held
    before; None where the system does not tell.
    """

    plan: QuantPlan
    out: str
    stats: dict[str, QuantStats]
    seconds: float
    peak_bytes: int | None
    base_bytes: int | None
    seed: int
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> QuantStats:
        return sum(self.stats.values(), QuantStats())

    @property
    def parameters_per_second(self) -> float:
        return self.plan.parameters / self.seconds if self.seconds else math.inf

    def groups(self) -> list[dict[str, Any]]:
        """Quantized layers by projection and scheme, in model order."""
        members: dict[tuple[str, str], list[TensorPlan]] = defaultdict(list)
        for t in self.plan.quantized:
            assert t.scheme is not None
            members[t.module.rpartition(".")[2], t.scheme.name].append(t)
        rows = []
        for (projection, scheme), tensors in members.items():
            stats = sum((self.stats[t.name] for t in tensors), QuantStats())
            parameters, size = sum(t.parameters for t in tensors), sum(t.bytes_after for t in tensors)
            rows.append(
                {
                    "projection": projection,
                    "scheme": scheme,
                    "tensors": len(tensors),
                    "parameters": parameters,
                    "bytes": size,
                    "bits_per_weight": 8 * size / parameters,
                    **summary(stats),
                }
            )
        return rows

    def dense(self) -> list[dict[str, Any]]:
        """What stayed dense, by reason."""
        members: dict[str, list[TensorPlan]] = defaultdict(list)
        for t in self.plan.dense:
            members[t.reason].append(t)
        return [
            {
                "reason": reason,
                "tensors": len(tensors),
                "parameters": sum(t.parameters for t in tensors),
                "bytes": sum(t.bytes_after for t in tensors),
                "example": tensors[0].name,
            }
            for reason, tensors in members.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan.to_dict()
        tensors = plan.pop("tensors")
        for t in tensors:
            if t["name"] in self.stats:
                t |= summary(self.stats[t["name"]])
        return {
            "out": self.out,
            **plan,
            **summary(self.total),
            "seconds": self.seconds,
            "parameters_per_second": self.parameters_per_second,
            "peak_anonymous_bytes": self.peak_bytes,
            "base_anonymous_bytes": self.base_bytes,
            "seed": self.seed,
            "schemes": {t.scheme.name: t.scheme.to_dict() for t in self.plan.quantized if t.scheme},
            "versions": self.versions,
            "groups": self.groups(),
            "dense": self.dense(),
            "tensors": tensors,
        }


def summary(stats: QuantStats) -> dict[str, Any]:
    """The figures of one tensor or group. JSON has no infinity: a lossless SQNR is None."""
    counts = asdict(stats)
    for private in ("error", "signal"):
        counts.pop(private)
    sqnr = stats.sqnr_db
    return {"relative_error": stats.relative_error, "sqnr_db": sqnr if math.isfinite(sqnr) else None, **counts}
