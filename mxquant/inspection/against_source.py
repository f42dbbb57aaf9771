"""Whether a checkpoint is what its dense source gives: dense tensors byte for byte, packed weights by their error
and, where scheme and seed are known, by their bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.formats.packed import Matrix, PackedWeight
from mxquant.checkpoint.layout import FLOAT_DTYPES, REPORT_NAME
from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec.amax import group_amax
from mxquant.codec.scaling import global_scale_for
from mxquant.convert import open_source as sources
from mxquant.errors import CheckpointError, WeightError
from mxquant.inspection.faults import Verification
from mxquant.inspection.summary import Steps
from mxquant.ops.operators import quantize_tensor
from mxquant.schemes.formats import QuantScheme

# Without a report to compare with: no rounding to the nearest element comes near this error.
_IMPLAUSIBLE = 0.5
# The report's sums are fp32, these fp64: how far apart the errors may be, relatively, and where they are mere rounding.
_SAME_ERROR = 1e-3
_FP32_ROUNDING = 2.0**-23
_CHUNK = 1 << 24
# Matrices looked at in a stack of experts, unless all are.
_EXPERTS = 4


@dataclass(frozen=True)
class Said:
    """What the report beside our own outputs says: schemes and errors by tensor, and the seed."""

    schemes: dict[str, QuantScheme]
    errors: dict[str, float]
    seed: int


def read_report(checkpoint: Checkpoint) -> Said | None:
    """The report in the folder; None where there is none. Raises ``CheckpointError`` for one that cannot be read."""
    path = checkpoint.folder / REPORT_NAME
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        schemes = {name: QuantScheme.from_dict(fields) for name, fields in data["schemes"].items()}
        packed = [t for t in data["tensors"] if t["scheme"]]
        return Said(
            {t["name"]: schemes[t["scheme"]] for t in packed},
            {t["name"]: float(t["relative_error"]) for t in packed},
            int(data["seed"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a report of mxquant: {error!r}") from error


def open_source(path: str | Path) -> Checkpoint:
    """A checkpoint that can be quantized: dense, or gpt-oss's own. Raises ``CheckpointError`` for any other."""
    source = sources.open_source(path)
    method = registry.method_of(source.config, source.folder)
    if method is not None and not source.decoded:
        raise CheckpointError(f"--source {source.folder} is quantized itself ({method}); give the dense model")
    return source


def check_dense_tensors(
    checkpoint: Checkpoint, layout: Layout, source: Checkpoint, tied: set[str], found: Verification, advance: Steps
) -> None:
    """Every dense tensor is the source's, byte for byte, and none of the source's is lost; ``tied`` ones may be."""
    parts = layout.part_names | {*layout.activation_scales, *layout.unlisted}
    same = 0
    for info in checkpoint.tensors.values():
        if info.name in parts:
            continue
        other = source.tensors.get(info.name)
        if other is None:
            found.add("dense", f"{info.name} is not in the source")
        elif (info.dtype, info.shape) != (other.dtype, other.shape):
            was = f"{other.dtype} {list(other.shape)}"
            found.add("dense", f"{info.name} is {info.dtype} {list(info.shape)}, in the source {was}")
        elif (place := _first_difference(checkpoint.read(info.name), source.read(info.name))) is not None:
            found.add("dense", f"{info.name} differs from the source, first at byte {place}")
        else:
            same += 1
        advance(info.name)
    kept = {*checkpoint.tensors, *(w.name for w in layout.weights), *tied}
    for name in source.tensors:
        if name not in kept:
            found.add("dense", f"{name} of the source is lost")
    found.checked["dense tensors equal to the source"] = same


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> int | None:
    x, y = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    for start in range(0, x.numel(), _CHUNK):
        left, right = x[start : start + _CHUNK], y[start : start + _CHUNK]
        if not torch.equal(left, right):
            return start + int((left != right).nonzero()[0])
    return None


def sample(weights: Sequence[PackedWeight], count: int | None) -> list[PackedWeight]:
    """``count`` of the weights, evenly spread over all; None takes every one."""
    if count is None or count >= len(weights):
        return list(weights)
    return [weights[(2 * i + 1) * len(weights) // (2 * count)] for i in range(count)]


class SourceComparison:
    """Compares packed weights with those of the source; ``everything``: also each expert of a stack."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Checkpoint,
        groups: Iterable[list[PackedWeight]],
        everything: bool,
    ):
        self._checkpoint, self._source, self._everything = checkpoint, source, everything
        self._said = read_report(checkpoint)
        self._groups = {weight.name: members for members in groups for weight in members}
        self.requantized = 0
        self.errors: dict[str, float] = {}

    def __call__(self, weights: Iterable[PackedWeight], found: Verification, advance: Steps) -> None:
        for weight in weights:
            self._compare(weight, found)
            advance(weight.name)
        found.checked |= {
            "packed weights compared with the source": len(self.errors),
            "of them quantized again": self.requantized,
            "largest relative error": max(self.errors.values(), default=None),
        }

    def _compare(self, weight: PackedWeight, found: Verification) -> None:
        info = self._source.tensors.get(weight.name)
        if info is None or info.shape != weight.dense_shape or info.dtype not in FLOAT_DTYPES:
            was = "not there" if info is None else f"{info.dtype} {list(info.shape)}"
            found.add("weights", f"{weight.name} is {list(weight.dense_shape)}, in the source {was}")
            return
        scheme = self._scheme(weight)
        chosen = self._experts(weight)
        error = signal = 0.0
        again = scheme is not None
        for index, matrix in enumerate(weight.read(self._checkpoint)):
            if index not in chosen:
                continue
            x = self._read(weight, index)
            squares = _squares(matrix, x)
            error, signal = error + squares[0], signal + squares[1]
            if scheme is not None:
                again = self._requantize(index, matrix, x, scheme, found) and again
        self.requantized += again
        self._check_error(weight, math.sqrt(error / signal) if signal else math.sqrt(error), chosen, found)

    def _read(self, weight: PackedWeight, index: int) -> torch.Tensor:
        """A matrix ``[out, in]`` of the source."""
        alone = weight.experts is None
        x = self._source.read(weight.name) if alone else self._source.read_part(weight.name, index)
        return x.t() if weight.transposed else x

    def _experts(self, weight: PackedWeight) -> set[int]:
        count = weight.matrices
        if self._everything or count <= _EXPERTS:
            return set(range(count))
        return {(2 * i + 1) * count // (2 * _EXPERTS) for i in range(_EXPERTS)}

    def _check_error(self, weight: PackedWeight, error: float, chosen: set[int], found: Verification) -> None:
        self.errors[weight.name] = error
        said = None if self._said is None else self._said.errors.get(weight.name)
        if said is not None and len(chosen) == weight.matrices:
            if not abs(error - said) <= _SAME_ERROR * said + _FP32_ROUNDING:
                found.add("weights", f"{weight.name} has relative error {error:.6f}, the report says {said:.6f}")
        elif not error <= _IMPLAUSIBLE and said is None:
            found.add("weights", f"{weight.name} has relative error {error:.3f}: another weight than the source's")

    def _scheme(self, weight: PackedWeight) -> QuantScheme | None:
        """The whole scheme, rule and rounding included, where this library wrote the weight; else None."""
        if self._said is not None and weight.name in self._said.schemes:
            return self._said.schemes[weight.name]
        # Without a report there is no seed.
        known = weight.format.says_rules and weight.scheme.rounding == "nearest"
        return weight.scheme if known else None

    def _requantize(
        self,
        index: int,
        matrix: Matrix,
        x: torch.Tensor,
        scheme: QuantScheme,
        found: Verification,
    ) -> bool:
        """Whether quantizing the source again gives the same bytes; a fault if not."""
        weight = matrix.weight
        name = weight.name if weight.experts is None else f"{weight.name}.{index}"
        divisor = matrix.global_scale
        try:
            if scheme.global_scale and divisor is not None:
                wanted = global_scale_for(self._group_amax(weight, index), scheme)
                if not torch.equal(wanted, divisor):
                    text = f"its global scale is {float(divisor):.9g}, the source asks for {float(wanted):.9g}"
                    found.add("weights", f"{name}: {text}")
                    return False
            seed = self._said.seed if self._said else 0
            q = quantize_tensor(x.contiguous(), scheme, seed=seed, name=name, global_scale=divisor)
        except WeightError as error:
            found.add("weights", f"the source's {error}")
            return False
        scale = weight.format.stored_scale(q.scale, scheme)
        for what, ours, theirs in (("block scales", scale, matrix.scale), ("elements", q.packed, matrix.packed)):
            ours, theirs = ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
            if ours.shape != theirs.shape:
                found.add("weights", f"{name}: the report says {scheme.text}, whose {what} have another shape")
                return False
            differ = int((ours != theirs).sum())
            if differ:
                found.add("weights", f"{name}: {differ} bytes of its {what} are not what {scheme.text} gives")
                return False
        return True

    def _group_amax(self, weight: PackedWeight, index: int) -> torch.Tensor:
        """The largest magnitude that sets the global scale: of the weight and all that engines fuse with it."""
        members = [w for w in self._groups[weight.name] if w.name in self._source.tensors and index < w.matrices]
        return group_amax(self._read(w, index) for w in members)


def _squares(matrix: Matrix, x: torch.Tensor) -> tuple[float, float]:
    """Sums of squares, in fp64, of the error and of the source."""
    error = signal = 0.0
    for start, stop in matrix.chunks():
        rows = x[start:stop].to(torch.float64)
        difference = (matrix.dequantize(start, stop).to(torch.float64) - rows).reshape(-1)
        rows = rows.reshape(-1)
        error += float(torch.dot(difference, difference))
        signal += float(torch.dot(rows, rows))
    return error, signal
