"""What quantizing a model did, as data: per tensor, per group of layers and in total."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxquant.checkpoint.fingerprint import without_times
from mxquant.checkpoint.layout import REPORT_NAME
from mxquant.checkpoint.writer import shard_bytes, shard_names
from mxquant.codec.rounding import QuantStats
from mxquant.convert.plan import QuantPlan, TensorPlan


@dataclass
class QuantReport:
    """The result of :func:`mxquant.quantize_model`.

    ``stats``: what happened to each quantized tensor. ``seconds``: reading, quantizing and writing.
    ``peak_bytes``: largest anonymous memory of the process meanwhile, ``base_bytes`` of it held
    before; None where the system does not tell. ``resumed_parameters``: of tensors that an earlier
    run had written. ``source_files``: size and checksum of each file of the source.
    """

    plan: QuantPlan
    out: str
    stats: dict[str, QuantStats]
    seconds: float
    peak_bytes: int | None
    base_bytes: int | None
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    source_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    resumed_parameters: int = 0

    @classmethod
    def of_output(
        cls, out: Path, plan: QuantPlan, seed: int, versions: dict[str, str], source: dict[str, dict[str, Any]]
    ) -> QuantReport | None:
        """The report of the output that is there already, if ``plan`` would write the same again; None if not.

        ``source``: the fingerprint of the source. Files that it does not hash whole must be older than the output.
        """
        path = out / REPORT_NAME
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            stats = {t["name"]: _restored(t) for t in saved["tensors"] if t["scheme"]}
            sizes = [(out / name).stat().st_size for name in shard_names(len(plan.shards))]
            whole = sizes == [*map(shard_bytes, plan.shards)] and (out / "config.json").is_file()
            newer = any(f.get("mtime_ns", 0) > path.stat().st_mtime_ns for f in source.values())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        files = without_times(source)
        report = cls(plan, str(out), stats, 0.0, None, None, seed, versions, files, plan.parameters)
        ours = json.loads(json.dumps(report.to_file()))
        same = {**ours, "source": None} == {**saved, "source": None}  # the same folder may be spelled in two ways
        return report if same and not newer and whole else None

    @property
    def total(self) -> QuantStats:
        return sum(self.stats.values(), QuantStats())

    @property
    def parameters_per_second(self) -> float:
        done = self.plan.parameters - self.resumed_parameters
        return done / self.seconds if self.seconds else math.inf if done else 0.0

    def _worst(self, figure: Callable[[QuantStats], float]) -> tuple[str, float]:
        """The layer with the largest ``figure``, and that."""
        values = {name: figure(stats) for name, stats in self.stats.items()}
        name = max(values, key=lambda n: values[n])
        return name, values[name]

    @property
    def mean_relative_error(self) -> float:
        """The relative errors of the layers, by their numbers of weights: no single weight decides it."""
        elements = sum(stats.elements for stats in self.stats.values())
        return (
            sum(stats.relative_error * stats.elements for stats in self.stats.values()) / elements if elements else 0.0
        )

    def headline(self) -> dict[str, Any]:
        """What a report begins with: figures that one large weight cannot make look good, and the worst layers."""
        error_of, error = self._worst(lambda stats: stats.relative_error)
        zero_of, zero = self._worst(lambda stats: stats.zero_share)
        return {
            "mean_relative_error": self.mean_relative_error,
            "worst_relative_error": {"layer": error_of, "value": error},
            "worst_zero_scales": {"layer": zero_of, "share": zero},
        }

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
        return {
            "out": self.out,
            "seconds": self.seconds,
            "parameters_per_second": self.parameters_per_second,
            "peak_anonymous_bytes": self.peak_bytes,
            "base_anonymous_bytes": self.base_bytes,
            "resumed_parameters": self.resumed_parameters,
            **self.to_file(),
        }

    def to_file(self) -> dict[str, Any]:
        """The report as it is kept in the output, whose bytes depend on source and recipe, not on the run."""
        plan = self.plan.to_dict()
        tensors = plan.pop("tensors")
        for t in tensors:
            if t["name"] in self.stats:
                stats = self.stats[t["name"]]
                t |= {**summary(stats), "squared_error": stats.error, "squared_norm": stats.signal}
        return {
            **plan,
            **self.headline(),
            **summary(self.total),
            "seed": self.seed,
            "schemes": {t.scheme.name: t.scheme.to_dict() for t in self.plan.quantized if t.scheme},
            "versions": self.versions,
            "source_files": self.source_files,
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


def _restored(tensor: dict[str, Any]) -> QuantStats:
    counts = ("elements", "blocks", "zero_scales", "subnormal_scales", "saturated")
    figures = {name: tensor[name] for name in counts}
    return QuantStats(**figures, error=tensor["squared_error"], signal=tensor["squared_norm"])
