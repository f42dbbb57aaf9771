"""``inspect_checkpoint`` and ``inspect_tensor``: what a checkpoint holds, as data."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.headers import TensorInfo
from mxquant.checkpoint.layout import FLOAT_DTYPES
from mxquant.checkpoint.reader import Checkpoint, resolve_source
from mxquant.errors import CheckpointError
from mxquant.inspection.statistics import DenseStats, ElementStats, ScaleStats

# Called with the name of a tensor that has been looked at, how many have been, and how many there are.
Progress = Callable[[str, int, int], None]


class Steps:
    """Counts what has been looked at, and tells ``progress``."""

    def __init__(self, total: int, progress: Progress | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, name: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(name, self._done, self._total)


@dataclass
class WeightSummary:
    """A packed weight and what its numbers are like; without ``scales`` and ``elements`` if only headers were read."""

    weight: PackedWeight
    nbytes: int
    scales: ScaleStats | None = None
    elements: ElementStats | None = None
    global_scales: list[float] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included."""
        return 8 * self.nbytes / self.weight.parameters

    def to_dict(self) -> dict[str, Any]:
        w = self.weight
        return {
            "name": w.name,
            "scheme": w.scheme.name,
            "element": w.scheme.element,
            "scale": w.scheme.scale,
            "block": list(w.scheme.block_shape),
            "shape": list(w.shape),
            "experts": w.experts,
            "transposed": w.transposed,
            "parameters": w.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
            "tensors": {role: part.name for role, part in w.parts.items()},
            "global_scale": self.global_scales or None,
            "global_scale_is": ("factor" if w.multiplied else "divisor") if "global_scale" in w.parts else None,
            "scales": None if self.scales is None else self.scales.to_dict(),
            "elements": None if self.elements is None else self.elements.to_dict(),
        }


@dataclass
class Inspection:
    """What is in a checkpoint.

    ``unknown``: why its packed weights are not understood, if they are not. ``roles``: what each
    tensor is: packed, scale, global_scale, activation scale, dense, or unknown. ``dense``: numbers of
    dense float tensors, where they were read.
    """

    checkpoint: Checkpoint
    quantization: dict[str, Any] | None
    unknown: str | None
    weights: list[WeightSummary]
    roles: dict[str, str]
    dense: dict[str, DenseStats] = field(default_factory=dict)

    @property
    def method(self) -> str | None:
        return None if self.quantization is None else str(self.quantization.get("quant_method"))

    @property
    def dense_tensors(self) -> list[TensorInfo]:
        return [t for t in self.checkpoint.tensors.values() if self.roles[t.name] == "dense"]

    @property
    def packed_parameters(self) -> int:
        return sum(w.weight.parameters for w in self.weights)

    @property
    def parameters(self) -> int:
        return self.packed_parameters + sum(prod(t.shape) for t in self.dense_tensors)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits of a packed weight, scales included; None where nothing is packed."""
        return 8 * sum(w.nbytes for w in self.weights) / self.packed_parameters if self.weights else None

    def scale_stats(self) -> dict[str, ScaleStats]:
        """Block scales of the whole checkpoint, by scheme."""
        found: dict[str, ScaleStats] = {}
        for w in self.weights:
            if w.scales is not None:
                name = w.weight.scheme.name
                found.setdefault(name, ScaleStats(w.weight.scheme.scale_format)).merge(w.scales)
        return found

    def element_stats(self) -> dict[str, ElementStats]:
        """Element codes of the whole checkpoint, by scheme."""
        found: dict[str, ElementStats] = {}
        for w in self.weights:
            if w.elements is not None:
                name = w.weight.scheme.name
                found.setdefault(name, ElementStats(w.weight.scheme.element_format)).merge(w.elements)
        return found

    def to_dict(self) -> dict[str, Any]:
        files: dict[str, dict[str, Any]] = {}
        for t in self.checkpoint.tensors.values():
            entry = files.setdefault(t.file.name, {"name": t.file.name, "bytes": t.file.stat().st_size, "tensors": 0})
            entry["tensors"] += 1
        return {
            "path": str(self.checkpoint.folder),
            "architectures": self.checkpoint.config.get("architectures"),
            "model_type": self.checkpoint.config.get("model_type"),
            "quant_method": self.method,
            "not_understood": self.unknown,
            "quantization_config": self.quantization,
            "files": list(files.values()),
            "bytes": self.checkpoint.nbytes,
            "parameters": self.parameters,
            "packed_parameters": self.packed_parameters,
            "bits_per_weight": self.bits_per_weight,
            "schemes": {w.weight.scheme.name: w.weight.scheme.to_dict() for w in self.weights},
            "scales": {name: s.to_dict() for name, s in self.scale_stats().items()},
            "elements": {name: s.to_dict() for name, s in self.element_stats().items()},
            "weights": [w.to_dict() for w in self.weights],
            "tensors": [self._tensor(t) for t in self.checkpoint.tensors.values()],
        }

    def _tensor(self, t: TensorInfo) -> dict[str, Any]:
        found = {
            "name": t.name,
            "dtype": t.dtype,
            "shape": list(t.shape),
            "bytes": t.nbytes,
            "file": t.file.name,
            "role": self.roles[t.name],
        }
        return found | ({"values": self.dense[t.name].to_dict()} if t.name in self.dense else {})


def open_checkpoint(path: str | Path, *, revision: str | None = None) -> Checkpoint:
    """A folder or hub id. Raises ``CheckpointError`` in one line."""
    return Checkpoint(resolve_source(path, revision=revision))


def inspect_checkpoint(
    checkpoint: Checkpoint, *, headers_only: bool = False, progress: Progress | None = None
) -> Inspection:
    """Describe every tensor of a checkpoint, and unless ``headers_only`` count what is in them."""
    try:
        layout, unknown = registry.find(checkpoint), None
    except CheckpointError as error:  # what is not understood can still be listed
        layout, unknown = Layout(None), str(error)
    quantization = registry.quantization_of(checkpoint.config, checkpoint.folder)
    found = Inspection(checkpoint, quantization, unknown, [], _roles(checkpoint, layout))
    dense = [] if headers_only else [t for t in found.dense_tensors if t.dtype in FLOAT_DTYPES]
    advance = Steps(len(layout.weights) + len(dense), progress)
    for weight in layout.weights:
        found.weights.append(_summarize(checkpoint, weight, headers_only))
        advance(weight.name)
    for t in dense:
        found.dense[t.name] = DenseStats.of(checkpoint.read(t.name), histogram=False)
        advance(t.name)
    return found


def inspect_tensor(checkpoint: Checkpoint, name: str) -> tuple[TensorInfo, WeightSummary | DenseStats | None]:
    """One tensor by its name, that of the dense tensor it stands for, or that of its module.

    A packed weight, or one of its tensors, gives the whole weight; a dense float tensor its values;
    others nothing but their header. Raises ``CheckpointError`` with names that are close.
    """
    layout = registry.find(checkpoint)
    for weight in layout.weights:
        parts = [part.name for part in weight.parts.values()]
        if name in (weight.name, weight.module, *parts):
            summary = _summarize(checkpoint, weight, headers_only=False)
            return checkpoint.tensors[name if name in parts else parts[0]], summary
    info = checkpoint.tensors.get(name) or checkpoint.tensors.get(f"{name}.weight")
    if info is None:
        names = [*checkpoint.tensors, *(w.module for w in layout.weights)]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise CheckpointError(f"{checkpoint.folder} has no tensor {name}{hint}")
    return info, DenseStats.of(checkpoint.read(info.name)) if info.dtype in FLOAT_DTYPES else None


def _summarize(checkpoint: Checkpoint, weight: PackedWeight, headers_only: bool) -> WeightSummary:
    parts = [checkpoint.tensors[p.name] for p in weight.parts.values() if p.name in checkpoint.tensors]
    summary = WeightSummary(weight, sum(t.nbytes for t in parts))
    if not headers_only:
        summary.scales = ScaleStats(weight.scheme.scale_format)
        summary.elements = ElementStats(weight.scheme.element_format)
        for matrix in weight.read(checkpoint):
            summary.scales.add(matrix.scale)
            summary.elements.add(matrix)
            if isinstance(matrix.global_scale, torch.Tensor):
                summary.global_scales.append(float(matrix.global_scale))
    return summary


def _roles(checkpoint: Checkpoint, layout: Layout) -> dict[str, str]:
    roles = dict.fromkeys(checkpoint.tensors, "dense")
    roles |= dict.fromkeys(layout.activation_scales, "activation scale")
    roles |= dict.fromkeys(layout.unlisted, "unknown")
    for weight in layout.weights:
        roles |= {part.name: role for role, part in weight.parts.items() if part.name in roles}
    return roles
