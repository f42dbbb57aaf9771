"""Round-to-nearest (or stochastic) quantization of one weight, block by block, in row chunks.

This is the reference, in plain PyTorch. :mod:`mxquant.ops.operators` has the same functions, served by
compiled kernels where there are some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mxquant.codec import blocks as B
from mxquant.codec.amax import tensor_amax
from mxquant.codec.numerics import (
    effective_scale,
    magnitude_codes,
    magnitude_values,
    nearest_values,
    round_magnitude_stochastic,
    scale_dtype,
    sign_bits,
)
from mxquant.codec.packing import pack
from mxquant.codec.parallel import Workers
from mxquant.codec.qtensor import CHUNK_ELEMENTS, QTensor
from mxquant.codec.rng import derive_key, random_bits24
from mxquant.codec.scaling import block_scales, count_small_scales, global_scale_for
from mxquant.errors import WeightError
from mxquant.schemes.formats import QuantScheme

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class QuantStats:
    """What quantizing a tensor (or several, by ``+``) did to it.

    ``error`` and ``signal`` are sums of squares; blocks that are all zero count in ``blocks`` only.
    """

    elements: int = 0
    blocks: int = 0
    zero_scales: int = 0
    subnormal_scales: int = 0
    saturated: int = 0
    error: float = 0.0
    signal: float = 0.0

    def __add__(self, other: QuantStats) -> QuantStats:
        return QuantStats(**{f: getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__})

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared norm."""
        return math.sqrt(self.error / self.signal) if self.signal else 0.0

    @property
    def zero_share(self) -> float:
        """The share of blocks whose scale is zero, though they are not."""
        return self.zero_scales / self.blocks if self.blocks else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite where nothing was lost."""
        if not self.error or not self.signal:
            return math.inf
        return 10 * math.log10(self.signal / self.error)


# Packed rows, their stored scales and, where asked for, statistics.
QuantizedRows = tuple[torch.Tensor, torch.Tensor, QuantStats | None]
# The type of quantize_rows.
RowFunction = Callable[[torch.Tensor, QuantScheme, int, torch.Tensor | None, int, bool], QuantizedRows | None]


@dataclass
class RowChunk:
    """Quantized rows ``start .. stop`` of a weight."""

    start: int
    stop: int
    packed: torch.Tensor
    scale: torch.Tensor
    stats: QuantStats | None


def quantize_tensor(
    weight: torch.Tensor,
    scheme: QuantScheme,
    *,
    seed: int = 0,
    name: str = "weight",
    global_scale: torch.Tensor | None = None,
) -> QTensor:
    """Quantize a weight ``[out_features, in_features]``.

    Parameters
    ----------
    weight : 2-D fp32, bf16 or fp16; the arithmetic is fp32 whatever it is.
    seed, name : what stochastic rounding draws from: the same pair gives the same bytes anywhere.
    global_scale : fp32 ``[1]`` to use in place of the one that the weight itself asks for.

    Raises ``WeightError`` for NaN, infinities, unsupported shapes or dtypes, and global scales that
    are not positive.
    """
    weight, global_scale = checked(weight, scheme, name, global_scale)
    shape = (weight.shape[0], weight.shape[1])
    packed = torch.empty(scheme.packed_shape(shape), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(scheme.scale_shape(shape), dtype=scale_dtype(scheme.scale_format), device=weight.device)
    r = scheme.block_shape[0]
    for chunk in quantize_chunks(weight, scheme, seed=seed, name=name, global_scale=global_scale):
        packed[chunk.start : chunk.stop] = chunk.packed
        scale[chunk.start // r : -(-chunk.stop // r)] = chunk.scale
    return QTensor(packed, scale, global_scale, shape, scheme)


def quantize_chunks(
    weight: torch.Tensor,
    scheme: QuantScheme,
    *,
    seed: int,
    name: str,
    global_scale: torch.Tensor | None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Iterator[RowChunk]:
    """Quantize a weight a few rows at a time; the bytes do not depend on the chunk size."""
    job = RowQuantizer(weight, scheme, seed=seed, name=name, global_scale=global_scale, chunk_elements=chunk_elements)
    if len(job.starts) == 1:
        yield job(0)
        return
    with Workers(weight.device) as workers:
        yield from workers.map(job, job.starts)


def quantize_rows(
    rows: torch.Tensor,
    scheme: QuantScheme,
    key: int,
    global_scale: torch.Tensor | None,
    first_row: int,
    with_stats: bool,
) -> QuantizedRows | None:
    """Quantize rows that begin at ``first_row`` of a weight; None if something is not finite.

    ``rows``: fp32, bf16 or fp16; ``first_row``: a multiple of the block's height. ``key``: what
    :func:`mxquant.codec.rng.derive_key` makes of seed and name.
    """
    x = rows.to(torch.float32).contiguous()
    return _quantize_rows(x, scheme, global_scale, key, first_row, with_stats)


class RowQuantizer:
    """Quantizes a weight's rows from ``start`` on, for each ``start`` in ``starts``; thread-safe.

    ``device``: where to compute (None: where the weight is). The bytes depend neither on it nor on
    ``chunk_elements``, the number of elements in one chunk. ``quantize``: :func:`quantize_rows`, or
    one that does the same faster (:func:`mxquant.ops.operators.quantize_rows`).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scheme: QuantScheme,
        *,
        seed: int,
        name: str,
        global_scale: torch.Tensor | None,
        device: torch.device | None = None,
        with_stats: bool = False,
        chunk_elements: int = CHUNK_ELEMENTS,
        quantize: RowFunction = quantize_rows,
    ):
        self._quantize = quantize
        self._weight, self._scheme, self._name = weight, scheme, name
        self._device = device or weight.device
        self._global_scale = None if global_scale is None else global_scale.to(self._device)
        self._key, self._with_stats = derive_key(seed, name), with_stats
        rows, columns = weight.shape
        height = scheme.block_shape[0]
        self._step = max(1, chunk_elements // columns // height) * height
        self.starts = range(0, rows, self._step)

    def __call__(self, start: int) -> RowChunk:
        stop = min(start + self._step, self._weight.shape[0])
        x = self._weight[start:stop].to(self._device)
        result = self._quantize(x, self._scheme, self._key, self._global_scale, start, self._with_stats)
        if result is None:
            raise _non_finite(x, start, self._name)
        return RowChunk(start, stop, *result)


def checked(
    weight: torch.Tensor, scheme: QuantScheme, name: str, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight that can be quantized, detached, and its global scale: the given one or its own, if any."""
    check_weight(weight, name)
    weight = weight.detach()
    if global_scale is not None:
        return weight, check_global_scale(global_scale, scheme, name)
    return weight, global_scale_for(tensor_amax(weight), scheme) if scheme.global_scale else None


def check_weight(weight: torch.Tensor, name: str) -> None:
    if weight.ndim != 2 or weight.numel() == 0:
        raise WeightError(f"{name}: only matrices can be quantized, not shape {list(weight.shape)}")
    if weight.dtype not in FLOAT_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise WeightError(f"{name}: cannot quantize {str(weight.dtype).removeprefix('torch.')} weights; need {names}")


def check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise ``WeightError`` for NaN or infinity in a float tensor of any shape, naming the first."""
    if tensor.numel() and not bool(tensor_amax(tensor).isfinite()):
        raise first_non_finite(tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1), name)


def check_global_scale(global_scale: torch.Tensor, scheme: QuantScheme, name: str) -> torch.Tensor:
    if not scheme.global_scale:
        raise WeightError(f"{name}: {scheme.text} has no global scale, but one was given")
    one = global_scale.dtype == torch.float32 and global_scale.numel() == 1
    if not one or not 0 < float(global_scale) < math.inf:
        raise WeightError(f"{name}: the global scale must be one positive, finite fp32 number, not {global_scale}")
    return global_scale.detach().reshape(1)


def _quantize_rows(
    x: torch.Tensor,
    scheme: QuantScheme,
    global_scale: torch.Tensor | None,
    key: int,
    first_row: int,
    with_stats: bool,
) -> QuantizedRows | None:
    """:func:`quantize_rows` of fp32 rows that are contiguous."""
    element, fmt = scheme.element_format, scheme.scale_format
    rows, columns = x.shape
    blocks = B.split(x, scheme.block_shape)
    amax = B.amax(blocks)
    if not bool(amax.isfinite().all()):
        return None
    scale = block_scales(blocks, amax, scheme, global_scale)
    effective = effective_scale(scale, fmt, global_scale)[:, None, :, None]
    # A block whose scale is zero is lost; dividing by infinity says so without a branch.
    divisor = torch.where(effective > 0, effective, torch.inf)
    magnitude = blocks.abs().div_(divisor)
    if scheme.rounding == "stochastic":
        bits = random_bits24(key, _element_index(blocks, first_row, columns))
        codes = round_magnitude_stochastic(magnitude, element, bits)
        values = magnitude_values(codes, element)
    else:
        values = nearest_values(magnitude, element)
        codes = magnitude_codes(values, element)
    stats = _stats(x, blocks, magnitude, values, amax, scale, effective, scheme) if with_stats else None
    codes8 = codes.to(torch.uint8).view(-1, blocks.shape[2] * blocks.shape[3])[:rows, :columns]
    packed = pack(codes8 | sign_bits(x, element), element.bits)
    return packed, scale.view(scale_dtype(fmt)), stats


def _element_index(blocks: torch.Tensor, first_row: int, columns: int) -> torch.Tensor:
    """Row-major index of each element in the whole weight; the indices of padding are not used."""
    row_blocks, r, column_blocks, c = blocks.shape
    row = torch.arange(first_row, first_row + row_blocks * r, device=blocks.device).view(row_blocks, r, 1, 1)
    column = torch.arange(column_blocks * c, device=blocks.device).view(1, 1, column_blocks, c)
    return row * columns + column


def _stats(
    x: torch.Tensor,
    blocks: torch.Tensor,
    magnitude: torch.Tensor,
    values: torch.Tensor,
    amax: torch.Tensor,
    scale: torch.Tensor,
    effective: torch.Tensor,
    scheme: QuantScheme,
) -> QuantStats:
    zero, subnormal = count_small_scales(scale, amax, scheme.scale_format)
    # Squares of what is very small or very large leave the range of fp32.
    error = values.mul_(effective).sub_(blocks.abs()).flatten().to(torch.float64)
    flat = x.view(-1).to(torch.float64)
    return QuantStats(
        elements=x.numel(),
        blocks=amax.numel(),
        zero_scales=zero,
        subnormal_scales=subnormal,
        saturated=int((magnitude > scheme.element_format.max).sum()),
        error=float(torch.dot(error, error)),
        signal=float(torch.dot(flat, flat)),
    )


def first_non_finite(weight: torch.Tensor, name: str) -> WeightError:
    """The error that names the first NaN or infinity of a matrix that holds one."""
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    chunks = ((row, weight[row : row + step]) for row in range(0, weight.shape[0], step))
    return next(_non_finite(x, row, name) for row, x in chunks if not bool(x.isfinite().all()))


def _non_finite(x: torch.Tensor, first_row: int, name: str) -> WeightError:
    row, column = (~x.isfinite()).nonzero()[0].tolist()
    value = float(x[row, column])
    return WeightError(f"{name}: {value} at row {first_row + row}, column {column}; weights must be finite")
