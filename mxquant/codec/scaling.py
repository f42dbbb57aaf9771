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
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    if rule_of(scheme).headroom and target > 1.0:
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
    return rule_of(scheme).scales(Blocks(blocks, amax, scheme, global_scale))


def count_small_scales(scale: torch.Tensor, amax: torch.Tensor, fmt: ScaleFormat) -> tuple[int, int]:
    """How many blocks that are not all zero have a zero scale, and how many a subnormal one."""
    if not fmt.coded or not fmt.has_zero:
        return 0, 0
    value = decode_scale(scale, fmt)
    alive = amax > 0
    zero = int((alive & (value == 0)).sum())
    return zero, int((alive & (value < fmt.min_normal)).sum()) - zero


class Blocks(NamedTuple):
    """Blocks whose scales are wanted.

    ``values``: fp32 ``[row_blocks, r, column_blocks, c]`` from :func:`mxquant.codec.blocks.split`;
    ``amax``: their largest magnitudes, ``[row_blocks, column_blocks]``; ``global_scale``: fp32, or None.
    """

    values: torch.Tensor
    amax: torch.Tensor
    scheme: QuantScheme
    global_scale: torch.Tensor | None


def _absmax_float(b: Blocks) -> torch.Tensor:
    element, fmt = b.scheme.element_format, b.scheme.scale_format
    largest = _FP32_MAX / element.max * (1 - 2.0 ** -(fmt.mantissa_bits + 1))
    return encode_scale(_quotient(b, element.max).clamp(max=largest), fmt)


def _absmax(b: Blocks) -> torch.Tensor:
    return encode_scale(_quotient(b, b.scheme.element_format.max), b.scheme.scale_format)


def _absmax_nonzero(b: Blocks) -> torch.Tensor:
    return _nonzero(_absmax(b), b)


def _ceil(b: Blocks) -> torch.Tensor:
    fmt = b.scheme.scale_format
    return _smallest_unsaturated(encode_scale(_quotient(b, b.scheme.element_format.max), fmt, up=True), b, fmt.max_code)


def _four_over_six(b: Blocks) -> torch.Tensor:
    fmt = b.scheme.scale_format
    four = encode_scale(_quotient(b, 4.0), fmt)
    return _nonzero(_search([_shifted(codes, 0, 1, fmt.max_code) for codes in (_absmax(b), four)], b), b)


def _search_codes(b: Blocks) -> torch.Tensor:
    start = _absmax(b)
    return _nonzero(_search([_shifted(start, o, 1, b.scheme.scale_format.max_code) for o in SEARCH_CODES], b), b)


def _power_of_two(b: Blocks) -> torch.Tensor:
    """floor, ceil, even and oas; rceil and search start from it."""
    element, fmt = b.scheme.element_format, b.scheme.scale_format
    scaled = b.amax if b.global_scale is None else b.amax * b.global_scale
    carry = power_of_two_carry(element, str(b.scheme.scale_rule))
    codes = ((scaled.view(torch.int32) + carry) >> 23) - element.max_exponent
    return codes.clamp_(0, largest_power_of_two(element, fmt)).to(torch.uint8)


def _rceil(b: Blocks) -> torch.Tensor:
    largest = largest_power_of_two(b.scheme.element_format, b.scheme.scale_format)
    return _smallest_unsaturated(_power_of_two(b), b, largest)


def _search_binades(b: Blocks) -> torch.Tensor:
    start, largest = _power_of_two(b), largest_power_of_two(b.scheme.element_format, b.scheme.scale_format)
    return _search([_shifted(start, offset, 0, largest) for offset in SEARCH_BINADES], b)


class ScaleRule(NamedTuple):
    """``scales``: from blocks to their stored scales, ``[row_blocks, column_blocks]``: uint8 codes, or floats.

    ``headroom``: some scales are larger than absmax's; the global scale leaves room for them.
    """

    scales: Callable[[Blocks], torch.Tensor]
    headroom: bool = False


# The rules of the tables above, by kind of scale and by their name in the formats' ``rules``.
RULES: dict[str, dict[str, ScaleRule]] = {
    "mantissa": {
        "absmax": ScaleRule(_absmax),
        "absmax-nonzero": ScaleRule(_absmax_nonzero),
        "ceil": ScaleRule(_ceil),
        "four-over-six": ScaleRule(_four_over_six, headroom=True),
        "search": ScaleRule(_search_codes),
    },
    "power of two": {
        "floor": ScaleRule(_power_of_two),
        "ceil": ScaleRule(_power_of_two),
        "even": ScaleRule(_power_of_two),
        "rceil": ScaleRule(_rceil),
        "oas": ScaleRule(_power_of_two),
        "search": ScaleRule(_search_binades),
    },
    "float": {"absmax": ScaleRule(_absmax_float)},
}


def rule_of(scheme: QuantScheme) -> ScaleRule:
    """The scheme's row in ``RULES``."""
    fmt = scheme.scale_format
    kind = "float" if not fmt.coded else "power of two" if fmt.exponent_only else "mantissa"
    return RULES[kind][str(scheme.scale_rule)]


def _quotient(b: Blocks, target: float) -> torch.Tensor:
    scale = b.amax / target
    return scale if b.global_scale is None else b.global_scale * scale


def _nonzero(codes: torch.Tensor, b: Blocks) -> torch.Tensor:
    """At least the smallest scale for blocks that are not all zero; zero for those that are."""
    return torch.where(b.amax > 0, codes.clamp(min=1), 0)


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


def _mantissa(value: float) -> int:
    fraction, _ = math.frexp(value)
    return int((fraction * 2 - 1) * (1 << 23))


def _smallest_unsaturated(codes: torch.Tensor, b: Blocks, largest: int) -> torch.Tensor:
    """The smallest codes, up to ``largest``, with ``amax <= M * fl32(s/g)``, from a guess at most one code off.

    The guess comes from a rounded ``g * amax``; this settles it, exactly.
    """
    codes = _shifted(codes, -1, 0, largest)
    for _ in range(2):
        scale = effective_scale(codes, b.scheme.scale_format, b.global_scale)
        # Cut in two, a scale times M needs no rounding, so neither does the comparison.
        high = (scale.view(torch.int32) & ~0xFFF).view(torch.float32)
        m = b.scheme.element_format.max
        too_small = b.amax - high * m > (scale - high) * m
        codes = codes + (too_small & (codes < largest)).to(torch.uint8)
    return codes


def _shifted(codes: torch.Tensor, offset: int, low: int, high: int) -> torch.Tensor:
    return (codes.to(torch.int16) + offset).clamp_(low, high).to(torch.uint8)


def _search(candidates: Sequence[torch.Tensor], b: Blocks) -> torch.Tensor:
    """The candidate codes with the least squared error in each block; the first of equals wins."""
    element, fmt, amax = b.scheme.element_format, b.scheme.scale_format, b.amax
    magnitudes = B.as_columns(b.values).abs()
    quotient = torch.empty_like(magnitudes)
    best_codes, best_error = candidates[0], torch.full_like(amax, torch.inf)
    for codes in candidates:
        scale = effective_scale(codes, fmt, b.global_scale)
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
