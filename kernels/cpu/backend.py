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
from typing import NamedTuple

import torch

from mxquant.codec.numerics import element_table, scale_dtype
from mxquant.codec.rounding import QuantStats
from mxquant.codec.scaling import SEARCH_BINADES, SEARCH_CODES, largest_power_of_two, power_of_two_carry
from mxquant.kernels.backend import Backend, Operation, PreparedLinear
from mxquant.kernels.cpu import library as L
from mxquant.kernels.cpu.calls import LinearCall
from mxquant.schemes.formats import QuantScheme

# What the library calls the rules; those with 5 differ in `power_of_two_carry` only.
_MANTISSA_RULES = {"absmax": 0, "absmax-nonzero": 1, "ceil": 2, "four-over-six": 3, "search": 4}
_POWER_RULES = {"floor": 5, "ceil": 5, "even": 5, "oas": 5, "rceil": 6, "search": 7}


class _Rule(NamedTuple):
    number: int
    carry: int = 0
    largest: int = 0
    offsets: tuple[int, ...] = ()


class CpuBackend(Backend):
    """The compiled library; see the module's docstring for what it serves."""

    name = "cpu"

    def unavailable(self) -> str | None:
        """Why there is no library to call; None if there is one."""
        lib = L.load()
        return lib if isinstance(lib, str) else None

    def why_not(
        self,
        operation: Operation,
        x: torch.Tensor,
        shape: tuple[int, int],
        scheme: QuantScheme,
        *,
        dtype: torch.dtype | None = None,
        activations: QuantScheme | None = None,
        per_token: bool = False,
    ) -> str | None:
        if operation in ("quantize", "quantize_rows"):
            if x.dtype not in L.DTYPES:
                return f"weights are {x.dtype}"
            return _why_not_scheme(scheme, True) or _why_not_rule(scheme)
        if operation == "dequantize":
            return f"the result is {dtype}" if dtype not in L.DTYPES else _why_not_scheme(scheme, False)
        if operation == "linear":
            if x.dtype not in L.DTYPES:
                return f"activations are {x.dtype}"
            return "there are no activations" if x.numel() == 0 else _why_not_scheme(scheme, True)
        if operation == "linear_grad":
            return "the weight is decoded, by the kernel for that, and multiplied by PyTorch"
        return f"the CPU kernels have no {operation}"

    def describe(self, operation: Operation, x: torch.Tensor | None = None, scheme: QuantScheme | None = None) -> str:
        return f"mxquant.kernels.cpu: {operation} at level {L.level()}"

    def quantize(
        self, weight: torch.Tensor, scheme: QuantScheme, seed_key: int, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Packed elements and stored scales; None if something is not finite."""
        made = self.quantize_rows(weight, scheme, seed_key, global_scale, 0, False)
        return made and made[:2]

    def quantize_rows(
        self,
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
        tables = _quant_tables(
            scheme, rows.dtype, g
        )  # held while in use: threads that meet in a cache keep one of theirs
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
        self,
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
        self,
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
        assert y is not None, "ask why_not first"
        return y

    def prepare_linear(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> PreparedLinear | None:
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


def _why_not_rule(scheme: QuantScheme) -> str | None:
    known = _POWER_RULES if scheme.scale_format.exponent_only else _MANTISSA_RULES
    return None if scheme.scale_rule in known else f"the library does not know the scale rule {scheme.scale_rule}"


@lru_cache(maxsize=256)
def _rule(scheme: QuantScheme) -> _Rule:
    """What the library calls the scheme's rule; for powers of two see ``power_of_two_carry``."""
    fmt, rule = scheme.scale_format, str(scheme.scale_rule)
    if not fmt.exponent_only:
        return _Rule(_MANTISSA_RULES[rule], offsets=SEARCH_CODES)
    element = scheme.element_format
    return _Rule(
        _POWER_RULES[rule], power_of_two_carry(element, rule), largest_power_of_two(element, fmt), SEARCH_BINADES
    )


def _format(scheme: QuantScheme, global_scale: float) -> L.ScaleFormat:
    fmt = scheme.scale_format
    return L.ScaleFormat(fmt.mantissa_bits, fmt.bias, fmt.max_code, global_scale)


@lru_cache(maxsize=64)
def _quant_tables(scheme: QuantScheme, dtype: torch.dtype, global_scale: float) -> torch.Tensor:
    return L.table("mxq_quant_tables", _format(scheme, global_scale), dtype, L.QUANT_TABLES)


@lru_cache(maxsize=64)
def _decode_table(scale: str, dtype: torch.dtype, global_scale: float) -> torch.Tensor:
    return L.table("mxq_decode_table", _format(QuantScheme(scale=scale), global_scale), dtype, L.DECODE_TABLE)
