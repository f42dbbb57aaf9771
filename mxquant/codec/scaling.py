"""Scale rules: from a block to its scale, and from a tensor to its global scale.

Notation: ``amax`` is a block's largest magnitude, ``M`` the element format's largest value (6 for
E2M1), ``g`` the global scale (1 without one), ``Q`` rounding to the nearest representable scale.

Rules for scales with a mantissa (e4m3, ue5m3)

=================  =====================================================================
absmax             ``Q(g * amax/M)``; may be zero, then the block is lost (arXiv 2601.19026)
absmax-nonzero     as absmax, but a block that is not all zero gets at least the smallest scale
ceil               the smallest scale ``s`` with ``amax <= M * s/g``: nothing saturates
four-over-six      the better, by squared error, of the scales that map amax to 6 and to 4
                   (arXiv 2512.02010); at least the smallest scale
search             least squared error over the scales from 1 code below absmax's to 6 above
                   (an idea of arXiv 2605.12464); at least the smallest scale
=================  =====================================================================

Rules for power-of-two scales (e8m0), with ``E = floor(log2 M)``

=================  =====================================================================
floor              ``2^(floor(log2 amax) - E)`` (OCP MX v1.0, section 6.3)
ceil               ``2^(ceil(log2 amax) - E)``: nothing saturates
even               as floor, amax's mantissa first rounded to the element's mantissa bits
rceil              ``2^ceil(log2(amax/M))``, truncation-free (arXiv 2607.24953): nothing saturates
oas                ``2^ceil(log2(amax/H))``, H half a step above M (7 for E2M1)
search             least squared error over floor's scale times 1/2, 1, 2 and 4
=================  =====================================================================

Scales of fp32 and bf16 know ``absmax`` only. All scales are held small enough for ``M * s`` to be
finite in fp32, which matters above 2.5e38 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mxquant.codec import blocks as B
from mxquant.codec.numerics import decode_scale, effective_scale, encode_scale, nearest_values
from mxquant.schemes.formats import ElementFormat, QuantScheme, ScaleFormat

_FP32_MAX = torch.finfo(torch.float32).max
# The reciprocal of numbers this large is rounded to 21 bits; the margin keeps decoded values finite.
_LARGEST_AMAX = _FP32_MAX * (1 - 2.0**-20)
# Offsets in codes, tried in this order; the first of equals wins. The best scale maps a block's largest
# element near 6 (offsets -1 to 1) or near 4 (3 to 6; fewer where scales are subnormal and so further
# apart). On Gaussian, Laplace and real weights these leave at most 1 % more error than all codes.
SEARCH_CODES = (0, -1, 1, 2, 3, 4, 5, 6)
SEARCH_BINADES = (0, 1, -1, 2)


def global_scale_for(amax: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The fp32 global scale, shape ``[1]``, of a tensor with largest magnitude ``amax`` (0-dim fp32).

    It maps ``amax`` to the largest element times the largest block scale: 448 for e4m3 (as NVFP4
    does), 114688 for ue5m3; four-over-six leaves room for its larger scales with 256 and 65536.
    Power-of-two and float scales have range to spare: 1. An all-zero tensor gets 1.
    """
    return global_scales(amax, scheme).reshape(1)


def global_scales(amax: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The global scale for each of several largest magnitudes; see :func:`global_scale_for`."""
    fmt = scheme.scale_format
    target = fmt.max if fmt.coded and not fmt.exponent_only else 1.0
    if scheme.scale_rule == "four-over-six" and target > 1.0:
        target = 2.0 ** math.floor(math.log2(target))
    # In this order it is bit for bit what NVFP4 writers compute.
    scale = amax.to(torch.float32).clamp(max=_LARGEST_AMAX).reciprocal() * (target * scheme.element_format.max)
    return torch.where(amax > 0, scale.clamp(max=_FP32_MAX), 1.0)


def block_scales(
    blocks: torch.Tensor, amax: torch.Tensor, scheme: QuantScheme, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """Stored scales ``[row_blocks, column_blocks]`` of fp32 blocks, by the scheme's rule.

    ``blocks``: ``[row_blocks, r, column_blocks, c]`` from :func:`mxquant.codec.blocks.split`; ``amax``:
    their maxima. 8-bit formats give uint8 codes, the study formats floats.
    """
    element, fmt, rule = scheme.element_format, scheme.scale_format, str(scheme.scale_rule)
    if not fmt.coded:
        return _float_scales(amax, element, fmt, global_scale)
    if fmt.exponent_only:
        largest = largest_power_of_two(element, fmt)
        start = _power_of_two_codes(amax, element, fmt, rule, global_scale)
        if rule == "search":
            candidates = [_shifted(start, offset, 0, largest) for offset in SEARCH_BINADES]
            start = _search(blocks, amax, scheme, global_scale, candidates)
        elif rule == "rceil":
            start = _smallest_unsaturated(start, amax, scheme, global_scale, largest)
    else:
        start = encode_scale(_quotient(amax, element.max, global_scale), fmt, up=rule == "ceil")
        if rule == "ceil":
            start = _smallest_unsaturated(start, amax, scheme, global_scale, fmt.max_code)
        elif rule == "four-over-six":
            four = encode_scale(_quotient(amax, 4.0, global_scale), fmt)
            candidates = [_shifted(codes, 0, 1, fmt.max_code) for codes in (start, four)]
            start = _search(blocks, amax, scheme, global_scale, candidates)
        elif rule == "search":
            candidates = [_shifted(start, offset, 1, fmt.max_code) for offset in SEARCH_CODES]
            start = _search(blocks, amax, scheme, global_scale, candidates)
        if rule in ("absmax-nonzero", "four-over-six", "search"):
            start = torch.where(amax > 0, start.clamp(min=1), 0)
    return start


def count_small_scales(scale: torch.Tensor, amax: torch.Tensor, fmt: ScaleFormat) -> tuple[int, int]:
    """How many blocks that are not all zero have a zero scale, and how many a subnormal one."""
    if not fmt.coded or not fmt.has_zero:
        return 0, 0
    value = decode_scale(scale, fmt)
    alive = amax > 0
    zero = int((alive & (value == 0)).sum())
    return zero, int((alive & (value < fmt.min_normal)).sum()) - zero


def _quotient(amax: torch.Tensor, target: float, global_scale: torch.Tensor | None) -> torch.Tensor:
    scale = amax / target
    return scale if global_scale is None else global_scale * scale


def _float_scales(
    amax: torch.Tensor, element: ElementFormat, fmt: ScaleFormat, global_scale: torch.Tensor | None
) -> torch.Tensor:
    largest = _FP32_MAX / element.max * (1 - 2.0 ** -(fmt.mantissa_bits + 1))
    return encode_scale(_quotient(amax, element.max, global_scale).clamp(max=largest), fmt)


def largest_power_of_two(element: ElementFormat, fmt: ScaleFormat) -> int:
    """The largest code whose scale times the largest element is finite in fp32."""
    return fmt.max_code - element.max_exponent


def power_of_two_carry(element: ElementFormat, rule: str) -> int:
    """What a rule for power-of-two scales adds to the fp32 bits of ``amax``.

    The carry into the exponent does the rounding: with the mantissa of a threshold T,
    ``bits + (0x7FFFFF - mantissa(T))`` moves up to the next binade exactly the values whose mantissa
    is above T's. ``search`` starts from ``floor``.
    """
    half_a_step = 2.0 ** (element.max_exponent - element.mantissa_bits) / 2
    return {
        "floor": 0,
        "search": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - element.mantissa_bits),
        "rceil": 0x7FFFFF - _mantissa(element.max),
        "oas": 0x7FFFFF - _mantissa(element.max + half_a_step),
    }[rule]


def _power_of_two_codes(
    amax: torch.Tensor, element: ElementFormat, fmt: ScaleFormat, rule: str, global_scale: torch.Tensor | None
) -> torch.Tensor:
    scaled = amax if global_scale is None else amax * global_scale
    codes = ((scaled.view(torch.int32) + power_of_two_carry(element, rule)) >> 23) - element.max_exponent
    return codes.clamp_(0, largest_power_of_two(element, fmt)).to(torch.uint8)


def _mantissa(value: float) -> int:
    fraction, _ = math.frexp(value)
    return int((fraction * 2 - 1) * (1 << 23))


def _smallest_unsaturated(
    codes: torch.Tensor, amax: torch.Tensor, scheme: QuantScheme, global_scale: torch.Tensor | None, largest: int
) -> torch.Tensor:
    """The smallest codes, up to ``largest``, with ``amax <= M * fl32(s/g)``, from a guess at most one code off.

    The guess comes from a rounded ``g * amax``; this settles it, exactly.
    """
    codes = _shifted(codes, -1, 0, largest)
    for _ in range(2):
        scale = effective_scale(codes, scheme.scale_format, global_scale)
        # Cut in two, a scale times M needs no rounding, so neither does the comparison.
        high = (scale.view(torch.int32) & ~0xFFF).view(torch.float32)
        m = scheme.element_format.max
        too_small = amax - high * m > (scale - high) * m
        codes = codes + (too_small & (codes < largest)).to(torch.uint8)
    return codes


def _shifted(codes: torch.Tensor, offset: int, low: int, high: int) -> torch.Tensor:
    return (codes.to(torch.int16) + offset).clamp_(low, high).to(torch.uint8)


def _search(
    blocks: torch.Tensor,
    amax: torch.Tensor,
    scheme: QuantScheme,
    global_scale: torch.Tensor | None,
    candidates: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The candidate codes with the least squared error in each block; the first of equals wins."""
    element, fmt = scheme.element_format, scheme.scale_format
    magnitudes = B.as_columns(blocks).abs()
    quotient = torch.empty_like(magnitudes)
    best_codes, best_error = candidates[0], torch.full_like(amax, torch.inf)
    for codes in candidates:
        scale = effective_scale(codes, fmt, global_scale)
        # A scale that a large global scale turned into zero would lose the block: error NaN, never better.
        scale = torch.where(scale > 0, scale, torch.inf)
        torch.div(magnitudes, scale.view(1, -1), out=quotient)
        residual = nearest_values(quotient, element).sub_(quotient)
        # In units of amax nothing under- or overflows, whatever the size of the weights.
        error = B.ordered_sum(residual.mul_(residual)).view(amax.shape) * (scale / amax) ** 2
        better = error < best_error
        best_codes = torch.where(better, codes, best_codes)
        best_error = torch.where(better, error, best_error)
    return best_codes
