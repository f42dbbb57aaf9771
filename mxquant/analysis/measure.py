"""Measuring what schemes do to the weights of a checkpoint, streamed from its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from mxquant.analysis.sensitivity import Sensitivity
from mxquant.analysis.statistics import WeightStats
from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec.amax import tensor_amax
from mxquant.codec.parallel import Workers
from mxquant.codec.qtensor import CHUNK_ELEMENTS, QTensor
from mxquant.codec.rounding import QuantStats, RowQuantizer, check_weight
from mxquant.codec.scaling import global_scale_for
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import SchemeError
from mxquant.ops.operators import dequantize, quantize_rows
from mxquant.schemes.formats import QuantScheme

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
class MatrixErrors:
    """One matrix: its moments, and what each scheme did to it. ``global_scales``: of schemes that have one.

    ``tensor``: the tensor that it is, or one of whose matrices it is (number ``index``, of an expert).
    """

    tensor: TensorPlan
    name: str
    index: int = 0
    weights: WeightStats = field(default_factory=WeightStats)
    measured: dict[QuantScheme, Measured] = field(default_factory=dict)
    global_scales: dict[QuantScheme, float] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return prod(self.tensor.matrix)


Job = Callable[[], WeightStats | Measured]


def measure(
    checkpoint: Checkpoint,
    tensors: Sequence[TensorPlan],
    schemes: Sequence[QuantScheme],
    *,
    sensitivity: Mapping[str, Sensitivity] | None = None,
    sample: float = 1.0,
    progress: Callable[[int], None] = lambda weights: None,
) -> list[MatrixErrors]:
    """Moments and errors of every matrix under every scheme.

    Parameters
    ----------
    tensors : of the checkpoint's plan, with their groups; their schemes are ignored.
    sensitivity : by the name of the matrix; fills ``Measured.cost``.
    sample : share of the rows to look at, evenly spread. Global scales come from whole matrices.
    progress : called with the number of weights done since the last call, each scheme counted.

    Raises ``WeightError`` for weights that are not finite, ``SchemeError`` for blocks larger than a matrix.
    """
    for scheme in schemes:
        check_blocks(scheme, tensors)
    jobs = _Jobs(checkpoint, tensors, schemes, sensitivity or {}, sample)
    with Workers(torch.device("cpu")) as workers:
        for (matrix, wanted), part in workers.map(lambda job: (job[0], job[1]()), jobs):
            if isinstance(part, WeightStats):
                matrix.weights = matrix.weights + part
            else:
                assert wanted is not None
                matrix.measured[wanted] = matrix.measured.get(wanted, Measured()) + part
                progress(part.stats.elements)
    return jobs.matrices


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
    """Iterates over ``((matrix, scheme or None), job)``; a job handles some rows. ``matrices``: those met so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Sequence[TensorPlan],
        schemes: Sequence[QuantScheme],
        sensitivity: Mapping[str, Sensitivity],
        sample: float,
    ):
        self.matrices: list[MatrixErrors] = []
        self._checkpoint, self._tensors, self._schemes = checkpoint, tensors, schemes
        self._sensitivity = sensitivity
        self._stride = max(1, round(1 / sample))
        self._piece = CHUNK_ELEMENTS if self._stride == 1 else _SAMPLED_PIECE
        self._groups: dict[str, list[TensorPlan]] = defaultdict(list)
        for t in tensors:
            if t.group is not None:
                self._groups[t.group].append(t)
        self._group_amax: dict[tuple[str, int], torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[tuple[MatrixErrors, QuantScheme | None], Job]]:
        for t in self._tensors:
            for index, (name, weight) in enumerate(t.read_matrices(self._checkpoint)):
                check_weight(weight, name)
                matrix = MatrixErrors(t, name, index)
                self.matrices.append(matrix)
                step = max(1, self._piece // weight.shape[1])
                for start in range(0, weight.shape[0], step * self._stride):
                    yield (matrix, None), _moments(weight, start, start + step)
                for scheme in self._schemes:
                    for job in self._scheme_jobs(matrix, weight, scheme):
                        yield (matrix, scheme), job

    def _scheme_jobs(self, matrix: MatrixErrors, weight: torch.Tensor, scheme: QuantScheme) -> Iterator[Job]:
        global_scale = None
        if scheme.global_scale:
            global_scale = global_scale_for(self._amax(matrix, weight), scheme)
            matrix.global_scales[scheme] = float(global_scale)
        quantizer = RowQuantizer(
            weight,
            scheme,
            seed=0,
            name=matrix.name,
            global_scale=global_scale,
            with_stats=True,
            chunk_elements=self._piece,
            quantize=quantize_rows,
        )
        sensitivity = self._sensitivity.get(matrix.name)
        for start in quantizer.starts[:: self._stride]:
            yield _errors(quantizer, weight, start, scheme, global_scale, sensitivity)

    def _amax(self, matrix: MatrixErrors, weight: torch.Tensor) -> torch.Tensor:
        """As quantizing has it: matrices that engines fuse share their largest magnitude."""
        group = matrix.tensor.group
        if group is None:
            return tensor_amax(weight)
        key = (group, matrix.index)
        if key not in self._group_amax:
            members = [t.read_matrix(self._checkpoint, matrix.index) for t in self._groups[group]]
            self._group_amax[key] = torch.stack([tensor_amax(m) for m in members]).amax()
        return self._group_amax[key]


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
            cost = sensitivity.cost(dequantize(q).sub_(weight[chunk.start : chunk.stop]), chunk.start)
        return Measured(chunk.stats, saturated, cost)

    return job
