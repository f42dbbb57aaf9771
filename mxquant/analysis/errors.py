"""Measuring what schemes do to the weights of a checkpoint, streamed from its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import mxquant.ops  # noqa: F401  (brings the kernels)
from mxquant.analysis.sensitivity import Sensitivity
from mxquant.analysis.statistics import WeightStats
from mxquant.checkpoint.reader import Checkpoint
from mxquant.errors import SchemeError
from mxquant.formats import QuantScheme
from mxquant.methods.rtn import QuantStats, RowQuantizer, check_weight, tensor_amax
from mxquant.parallel import Workers
from mxquant.plan import TensorPlan
from mxquant.qtensor import CHUNK_ELEMENTS, QTensor
from mxquant.scaling import global_scale_for
from mxquant.transformers.architectures import fused_group

# A sample is made of pieces of this many weights, so that it is spread over each tensor.
_SAMPLED_PIECE = 1 << 14


@dataclass(frozen=True)
class Measured:
    """What a scheme did to a tensor, or to several by ``+``.

    ``saturated_scales``: blocks with the format's largest scale, which may be too small for them.
    ``cost``: nats per token by :class:`Sensitivity`; 0 without one.
    """

    stats: QuantStats = field(default_factory=QuantStats)
    saturated_scales: int = 0
    cost: float = 0.0

    def __add__(self, other: Measured) -> Measured:
        saturated = self.saturated_scales + other.saturated_scales
        return Measured(self.stats + other.stats, saturated, self.cost + other.cost)

    @property
    def mse(self) -> float:
        """Squared error over squared norm."""
        return self.stats.error / self.stats.signal if self.stats.signal else 0.0

    def share(self, count: int) -> float:
        """``count`` blocks as a share of all."""
        return count / self.stats.blocks if self.stats.blocks else 0.0


@dataclass
class TensorErrors:
    """One tensor: its moments, and what each scheme did to it. ``global_scales``: of schemes that have one."""

    tensor: TensorPlan
    weights: WeightStats = field(default_factory=WeightStats)
    measured: dict[QuantScheme, Measured] = field(default_factory=dict)
    global_scales: dict[QuantScheme, float] = field(default_factory=dict)


Job = Callable[[], WeightStats | Measured]


def measure(
    checkpoint: Checkpoint,
    tensors: Sequence[TensorPlan],
    schemes: Sequence[QuantScheme],
    *,
    sensitivity: Mapping[str, Sensitivity] | None = None,
    sample: float = 1.0,
    progress: Callable[[int], None] = lambda weights: None,
) -> list[TensorErrors]:
    """Moments and errors of every tensor under every scheme.

    Parameters
    ----------
    tensors : of the checkpoint's plan; their schemes are ignored.
    sensitivity : by tensor name; fills ``Measured.cost``.
    sample : share of the rows to look at, evenly spread. Global scales come from whole tensors.
    progress : called with the number of weights done since the last call, each scheme counted.

    Raises ``WeightError`` for weights that are not finite, ``SchemeError`` for blocks larger than a tensor.
    """
    for scheme in schemes:
        check_blocks(scheme, tensors)
    found = {t.name: TensorErrors(t) for t in tensors}
    jobs = _Jobs(checkpoint, tensors, schemes, sensitivity or {}, sample, found)
    with Workers(torch.device("cpu")) as workers:
        for (name, scheme), part in workers.map(lambda job: (job[0], job[1]()), jobs):
            result = found[name]
            if isinstance(part, WeightStats):
                result.weights = result.weights + part
            else:
                assert scheme is not None
                result.measured[scheme] = result.measured.get(scheme, Measured()) + part
                progress(part.stats.elements)
    return list(found.values())


def check_blocks(scheme: QuantScheme, tensors: Sequence[TensorPlan]) -> None:
    """Raise ``SchemeError`` if a block of the scheme is larger than one of the tensors."""
    r, c = scheme.block_shape
    for t in tensors:
        rows, columns = t.matrix
        if r > rows or c > columns:
            block = f"blocks of {scheme.block_text}" + (" weights" if r == 1 else "")
            raise SchemeError(
                f"{scheme.text}: {block} are larger than {t.name}, which has {columns} input and {rows} output "
                "features; leave the scheme or the tensor out"
            )


class _Jobs:
    """Iterates over ``((tensor name, scheme or None), job)``; a job handles some rows."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Sequence[TensorPlan],
        schemes: Sequence[QuantScheme],
        sensitivity: Mapping[str, Sensitivity],
        sample: float,
        found: dict[str, TensorErrors],
    ):
        self._checkpoint, self._tensors, self._schemes = checkpoint, tensors, schemes
        self._sensitivity, self._found = sensitivity, found
        self._stride = max(1, round(1 / sample))
        self._piece = CHUNK_ELEMENTS if self._stride == 1 else _SAMPLED_PIECE
        self._group_amax: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[tuple[str, QuantScheme | None], Job]]:
        for t in self._tensors:
            weight = self._read(t)
            check_weight(weight, t.name)
            step = max(1, self._piece // weight.shape[1])
            for start in range(0, weight.shape[0], step * self._stride):
                yield (t.name, None), _moments(weight, start, start + step)
            for scheme in self._schemes:
                global_scale = None
                if scheme.global_scale:
                    global_scale = global_scale_for(self._amax(t, weight), scheme)
                    self._found[t.name].global_scales[scheme] = float(global_scale)
                quantizer = RowQuantizer(
                    weight,
                    scheme,
                    seed=0,
                    name=t.name,
                    global_scale=global_scale,
                    with_stats=True,
                    chunk_elements=self._piece,
                )
                for start in quantizer.starts[:: self._stride]:
                    sensitivity = self._sensitivity.get(t.name)
                    yield (t.name, scheme), _errors(quantizer, weight, start, scheme, global_scale, sensitivity)

    def _read(self, t: TensorPlan) -> torch.Tensor:
        weight = self._checkpoint.read(t.name)
        return weight.t() if t.transposed else weight

    def _amax(self, t: TensorPlan, weight: torch.Tensor) -> torch.Tensor:
        """As quantizing has it: projections that engines fuse share their largest magnitude."""
        group = fused_group(t.module) or t.name
        if group not in self._group_amax:
            members = [m for m in self._tensors if fused_group(m.module) == group]
            each = [tensor_amax(self._read(m)) for m in members] or [tensor_amax(weight)]
            self._group_amax[group] = torch.stack(each).amax()
        return self._group_amax[group]


def _moments(weight: torch.Tensor, start: int, stop: int) -> Job:
    return lambda: WeightStats.of(weight[start:stop])


def _errors(
    quantizer: RowQuantizer,
    weight: torch.Tensor,
    start: int,
    scheme: QuantScheme,
    global_scale: torch.Tensor | None,
    sensitivity: Sensitivity | None,
) -> Job:
    def job() -> Measured:
        chunk = quantizer(start)
        assert chunk.stats is not None
        fmt = scheme.scale_format
        saturated = 0
        if fmt.coded and not fmt.exponent_only and not scheme.global_scale:
            saturated = int((chunk.scale.view(torch.uint8) == fmt.max_code).sum())
        cost = 0.0
        if sensitivity is not None:
            shape = (chunk.stop - chunk.start, weight.shape[1])
            q = QTensor(chunk.packed, chunk.scale, global_scale, shape, scheme)
            cost = sensitivity.cost(q.dequantize().sub_(weight[chunk.start : chunk.stop]), chunk.start)
        return Measured(chunk.stats, saturated, cost)

    return job
