"""Encode, decode and round elements and scales in plain PyTorch: the reference for all kernels.

All arithmetic is fp32 and element-wise, so results do not depend on device, thread count or
chunking. Every format is a minifloat, and one formula encodes them all. For ``x >= 0`` let ``e``
be the exponent of ``x``, not below the format's smallest exponent ``emin``, and ``m`` the number
of mantissa bits. Then::

    steps = x / 2^(e - m)                    (exact: a power of two)
    code  = (e - emin) * 2^m + round(steps)

Rounding up to the next power of two carries into the exponent by itself, and subnormals are the
case ``e = emin``. Codes saturate at the format's largest.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from mxquant.codec.packing import unpack
from mxquant.schemes.formats import ELEMENTS, SCALES, ElementFormat, ScaleFormat

_SCALE_DTYPES = {
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "ue5m3": torch.uint8,
    "ue5m3-61440": torch.uint8,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}

_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def scale_dtype(fmt: ScaleFormat) -> torch.dtype:
    """The dtype that block scales of this format are stored in."""
    return _SCALE_DTYPES[fmt.name]


@lru_cache(maxsize=64)
def element_table(name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32 value of every element code: shape ``[2^bits]``. Codes past the largest are NaN."""
    fmt = ELEMENTS[name]
    sign = 1 << (fmt.bits - 1)
    values = [fmt.value(c) if c & (sign - 1) <= fmt.max_code else float("nan") for c in range(2 * sign)]
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def scale_table(name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32 value of every code of an 8-bit scale format: shape ``[256]``; unused codes are NaN."""
    fmt = SCALES[name]
    return torch.tensor([fmt.value(c) for c in range(256)], dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _pair_table(name: str, device: torch.device | str) -> torch.Tensor:
    """Both fp32 values of every packed fp4 byte as one int64 word: shape ``[256]``."""
    byte = torch.arange(256, device=device)
    pairs = torch.stack([element_table(name, device)[byte & 15], element_table(name, device)[byte >> 4]], -1)
    return pairs.view(torch.int64).flatten()


def exponent_and_step(x: torch.Tensor, min_exponent: int, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponent ``e`` (int32) of ``x >= 0``, at least ``min_exponent``, and ``2^(m - e)`` (fp32)."""
    exponent = ((x.view(torch.int32) >> 23) - 127).clamp_(min=min_exponent)
    inverse_step = ((mantissa_bits + 127 - exponent) << 23).view(torch.float32)
    return exponent, inverse_step


def encode_magnitude(x: torch.Tensor, fmt: ElementFormat | ScaleFormat, up: bool = False) -> torch.Tensor:
    """Codes (int32) of fp32 values ``x >= 0``, rounded to nearest-even or, with ``up``, upwards."""
    x = x.clamp(max=fmt.max)  # larger values saturate anyway, and infinities have no exponent
    exponent, inverse_step = exponent_and_step(x, fmt.min_exponent, fmt.mantissa_bits)
    steps = x * inverse_step
    rounded = steps.ceil_() if up else steps.round_()
    return ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + rounded.to(torch.int32)


def encode_scale(x: torch.Tensor, fmt: ScaleFormat, up: bool = False) -> torch.Tensor:
    """fp32 values ``>= 0`` -> stored scales: uint8 codes, or floats for the study formats.

    Nearest-even, or upwards with ``up``; values above the largest scale saturate to it. Power-of-two
    scales are made by their own rules, see :mod:`mxquant.codec.scaling`.
    """
    if fmt.name == "fp32":
        return x
    if fmt.name == "bf16":
        return x.to(torch.bfloat16)
    if fmt.exponent_only:
        raise ValueError("e8m0 scales come from a scale rule, not from rounding a quotient")
    return encode_magnitude(x, fmt, up).to(torch.uint8)


def decode_scale(stored: torch.Tensor, fmt: ScaleFormat) -> torch.Tensor:
    """Stored scales (codes, float8 or floats) -> fp32 values of the same shape."""
    if not fmt.coded:
        return stored.to(torch.float32)
    codes = stored.view(torch.uint8) if stored.dtype != torch.uint8 else stored
    table = scale_table(fmt.name, stored.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def effective_scale(stored: torch.Tensor, fmt: ScaleFormat, global_scale: torch.Tensor | None) -> torch.Tensor:
    """``fl32(block_scale / global_scale)``: what elements are multiplied by and divided by."""
    scale = decode_scale(stored, fmt)
    return scale if global_scale is None else scale / global_scale


def nearest_values(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Element values (fp32) nearest to ``x >= 0``, ties to even, saturating.

    The step between neighbours is a power of two ``2^(e - m)`` given by the exponent ``e`` of ``x``
    (within the format's). Adding ``1.5 * 2^23`` steps leaves fp32 no bits below one step, so that its
    own rounding to nearest-even does the work; subtracting them again is exact.
    """
    exponent = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e, or 0 for subnormals
    exponent.clamp_(2.0**fmt.min_exponent, 2.0**fmt.max_exponent)
    shifter = exponent.mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    return (x + shifter).sub_(shifter).clamp_(max=fmt.max)


def magnitude_codes(values: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Codes (fp32 holding integers) of fp32 magnitudes that are values of the format."""
    if fmt.name in _FLOAT8:  # values of the format are exact in PyTorch's dtype, whose bits are the codes
        return values.to(_FLOAT8[fmt.name]).view(torch.uint8).to(torch.float32)
    if fmt.name != "fp4_e2m1":
        return encode_magnitude(values, fmt).to(torch.float32)
    # 0 .5 1 1.5 2 3 4 6 lie on three straight lines, of which the lowest is the code.
    codes = values * 2
    scratch = values + 2
    torch.minimum(codes, scratch, out=codes)
    torch.mul(values, 0.5, out=scratch)
    return torch.minimum(codes, scratch.add_(4), out=codes)


def round_magnitude(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Magnitude codes (fp32 holding integers) of ``x >= 0``, nearest-even, saturating."""
    return magnitude_codes(nearest_values(x, fmt), fmt)


def round_magnitude_stochastic(x: torch.Tensor, fmt: ElementFormat, bits24: torch.Tensor) -> torch.Tensor:
    """Magnitude codes (fp32 holding integers) of ``x >= 0`` under stochastic rounding.

    Between neighbours ``lo <= x <= hi`` the upper is taken with probability
    ``(x - lo) / (hi - lo)``, resolved to 2^-24; values beyond the largest saturate. ``bits24``:
    int32 random bits in [0, 2^24), one for each element (:func:`mxquant.codec.rng.random_bits24`).
    """
    x = x.clamp(max=fmt.max)
    exponent, inverse_step = exponent_and_step(x, fmt.min_exponent, fmt.mantissa_bits)
    steps = x * inverse_step
    floor = steps.floor()
    up = bits24.to(torch.float32) < (steps - floor) * 2.0**24
    base = (exponent - fmt.min_exponent) << fmt.mantissa_bits
    return base + floor + up


def magnitude_values(codes: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """fp32 values of magnitude codes held in fp32."""
    if fmt.name == "fp4_e2m1":
        # 0 .5 1 1.5 2 3 4 6 is the largest of three straight lines through the codes.
        values = codes * 0.5
        scratch = codes - 2
        torch.maximum(values, scratch, out=values)
        return torch.maximum(values, scratch.sub_(2).mul_(2), out=values)
    table = element_table(fmt.name, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def decode_packed(packed: torch.Tensor, fmt: ElementFormat, columns: int) -> torch.Tensor:
    """Packed bytes ``[rows, ...]`` -> fp32 elements ``[rows, columns]``, not yet scaled."""
    if fmt.bits == 4:
        words = _pair_table(fmt.name, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
        return words.view(torch.float32).view(packed.shape[0], -1)[:, :columns]
    codes = unpack(packed, fmt.bits, columns)
    table = element_table(fmt.name, packed.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def sign_bits(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """uint8 sign bit of fp32 ``x`` at its place in a code of this format; that of -0.0 is set."""
    shift = 32 - fmt.bits
    return (x.view(torch.int32) >> shift).to(torch.uint8) & (1 << (fmt.bits - 1))
