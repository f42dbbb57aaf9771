"""The operators of :mod:`mxquant.ops.operators` on CPUs, and the rules by which they are served here.

======================  ====================================================================
quantize                fp32, bf16, fp16 -> fp4_e2m1 with 8-bit scales, any rule and rounding
dequantize              any element format with 8-bit scales -> fp32, bf16, fp16
linear                  fp32, bf16, fp16 activations, fp4_e2m1 weights with 8-bit scales
all                     blocks whose columns are a power of two from 8 to 1024 (and up to 4096 rows)
======================  ====================================================================

Everything else is left to the reference. The bytes are the same either way.
"""

from __future__ import annotations

from ctypes import byref, c_float
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mxquant.codec.numerics import element_table, scale_dtype
from mxquant.codec.rounding import QuantStats
from mxquant.codec.scaling import SEARCH_BINADES, SEARCH_CODES, largest_power_of_two, power_of_two_carry
from mxquant.kernels.cpu import library as L
from mxquant.kernels.cpu.calls import LinearCall
from mxquant.schemes.formats import QuantScheme

_MANTISSA_RULES = {"absmax": 0, "absmax-nonzero": 1, "ceil": 2, "four-over-six": 3, "search": 4}
_CARRY, _RCEIL, _POWER_SEARCH = 5, 6, 7


class _Rule(NamedTuple):
    number: int
    carry: int = 0
    largest: int = 0
    offsets: tuple[int, ...] = ()


def unavailable() -> str | None:
    """Why there is no library to call, or None."""
    lib = L.load()
    return lib if isinstance(lib, str) else None


def why_not_quantize(weight: torch.Tensor, scheme: QuantScheme) -> str | None:
    if weight.dtype not in L.DTYPES:
        return f"weights are {weight.dtype}"
    return _why_not_scheme(scheme, True)


def why_not_dequantize(
    packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], scheme: QuantScheme, dtype: torch.dtype
) -> str | None:
    if dtype not in L.DTYPES:
        return f"the result is {dtype}"
    return _why_not_scheme(scheme, False)


def why_not_linear(x: torch.Tensor, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    if x.dtype not in L.DTYPES:
        return f"activations are {x.dtype}"
    if x.numel() == 0:
        return "there are no activations"
    return _why_not_scheme(scheme, True)


def why_not_linear_grad(grad: torch.Tensor, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    return "the weight is decoded, by the kernel for that, and multiplied by PyTorch"


def describe(operator: str, *arguments: Any) -> str:
    """Which kernel serves a call that ``why_not_<operator>`` has no objection to."""
    return f"mxquant.kernels.cpu: {operator} at level {L.level()}"


def quantize(
    weight: torch.Tensor, scheme: QuantScheme, seed_key: int, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Packed elements and stored scales; None if something is not finite."""
    made = quantize_rows(weight, scheme, seed_key, global_scale, 0, False)
    return made and made[:2]


def quantize_rows(
    rows: torch.Tensor,
    scheme: QuantScheme,
    seed_key: int,
    global_scale: torch.Tensor | None,
    first_row: int,
    with_stats: bool,
) -> tuple[torch.Tensor, torch.Tensor, QuantStats | None] | None:
    """Quantize rows that begin at ``first_row`` of a weight; None if something is not finite."""
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    shape = (rows.shape[0], rows.shape[1])
    packed = torch.empty(scheme.packed_shape(shape), dtype=torch.uint8)
    scale = torch.empty(scheme.scale_shape(shape), dtype=torch.uint8)
    g = 0.0 if global_scale is None else float(global_scale)
    rule, fmt = _rule(scheme), _format(scheme, g)
    tables = _quant_tables(scheme, rows.dtype, g)  # held while in use: threads that meet in a cache keep one of theirs
    job = L.QuantJob(
        x=rows.data_ptr(), rows=shape[0], columns=shape[1], stride=rows.stride(0), dtype=L.DTYPES[rows.dtype],
        block_rows=scheme.block_shape[0], block_columns=scheme.block_shape[1],
        rule=rule.number, carry=rule.carry, largest=rule.largest,
        format=fmt, tables=tables.data_ptr(),
        stochastic=scheme.rounding == "stochastic", with_stats=with_stats, threads=torch.get_num_threads(),
        tries=len(rule.offsets), offsets=(c_float * 16)(*rule.offsets),
        key=seed_key, first_row=first_row, packed=packed.data_ptr(), scale=scale.data_ptr(),
    )  # fmt: skip
    status = L.library().mxq_quantize(byref(job))
    if status == L.NOT_FINITE:
        return None
    L.check(status)
    stats = None
    if with_stats:
        stats = QuantStats(
            rows.numel(), scale.numel(), job.zero_scales, job.subnormal_scales, job.saturated, job.error, job.signal
        )
    return packed, scale.view(scale_dtype(scheme.scale_format)), stats


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense weight."""
    packed, scale = packed.contiguous(), scale.contiguous()
    out = torch.empty(shape, dtype=dtype)
    g = 0.0 if global_scale is None else float(global_scale)
    job = L.DequantJob(
        packed=packed.data_ptr(), scale=scale.data_ptr(), rows=shape[0], columns=shape[1],
        dtype=L.DTYPES[dtype], bits=scheme.element_format.bits,
        block_rows=scheme.block_shape[0], block_columns=scheme.block_shape[1],
        format=_format(scheme, g), out=out.data_ptr(), threads=torch.get_num_threads(),
    )  # fmt: skip
    if scheme.element == "fp4_e2m1":
        table = _decode_table(scheme.scale, dtype, g)  # held while in use, as above
        job.table = table.data_ptr()
    else:
        table = element_table(scheme.element)
        job.elements = table.data_ptr()
    L.check(L.library().mxq_dequantize(byref(job)))
    return out


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
) -> torch.Tensor:
    """``x @ W.T + bias``; products of bf16 numbers where the processor has them, of fp32 elsewhere."""
    if bias is not None:
        bias = bias.contiguous() if bias.dtype in L.DTYPES else bias.to(torch.float32)
    table = _decode_table(scheme.scale, torch.bfloat16, 0.0)
    y = LinearCall(packed.contiguous(), scale.contiguous(), global_scale, bias, shape, scheme, table)(x)
    assert y is not None, "ask why_not_linear first"
    return y


def linear_call(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
) -> LinearCall | None:
    """A prepared :func:`linear` that refers to these tensors; None if it would have to copy some of them."""
    tensors = [t for t in (packed, scale, global_scale, bias) if t is not None]
    if _why_not_scheme(scheme, True) is not None or not all(t.is_cpu and t.is_contiguous() for t in tensors):
        return None
    if bias is not None and bias.dtype not in L.DTYPES:
        return None
    table = _decode_table(scheme.scale, torch.bfloat16, 0.0)
    return LinearCall(packed, scale, global_scale, bias, shape, scheme, table)


@lru_cache(maxsize=256)
def _why_not_scheme(scheme: QuantScheme, fp4_only: bool) -> str | None:
    rows, columns = scheme.block_shape
    if fp4_only and scheme.element != "fp4_e2m1":
        return f"elements are {scheme.element}"
    if not scheme.scale_format.coded:
        return f"block scales are {scheme.scale}"
    if columns & (columns - 1) or not 8 <= columns <= 1024 or rows > 4096:
        return f"blocks are {scheme.block_text}"
    return None


@lru_cache(maxsize=256)
def _rule(scheme: QuantScheme) -> _Rule:
    """What the library calls the scheme's rule; for powers of two see ``power_of_two_carry``."""
    fmt, rule = scheme.scale_format, str(scheme.scale_rule)
    if not fmt.exponent_only:
        return _Rule(_MANTISSA_RULES[rule], offsets=SEARCH_CODES)
    number = {"rceil": _RCEIL, "search": _POWER_SEARCH}.get(rule, _CARRY)
    element = scheme.element_format
    return _Rule(number, power_of_two_carry(element, rule), largest_power_of_two(element, fmt), SEARCH_BINADES)


def _format(scheme: QuantScheme, global_scale: float) -> L.ScaleFormat:
    fmt = scheme.scale_format
    return L.ScaleFormat(fmt.mantissa_bits, fmt.bias, fmt.max_code, global_scale)


@lru_cache(maxsize=64)
def _quant_tables(scheme: QuantScheme, dtype: torch.dtype, global_scale: float) -> torch.Tensor:
    return L.table("mxq_quant_tables", _format(scheme, global_scale), dtype, L.QUANT_TABLES)


@lru_cache(maxsize=64)
def _decode_table(scale: str, dtype: torch.dtype, global_scale: float) -> torch.Tensor:
    return L.table("mxq_decode_table", _format(QuantScheme(scale=scale), global_scale), dtype, L.DECODE_TABLE)
