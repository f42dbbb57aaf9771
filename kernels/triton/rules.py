"""Scale rules on the GPU: the maximum of a block -> its scale code, as :mod:`mxquant.codec.scaling` defines them.

Bit for bit the same: the same fp32 operations in the same order, divisions correctly rounded (``div_rn``;
``/`` would become an approximation), no fused multiply-add (kernels that use this are compiled with
``enable_fp_fusion=False``). Blocks are rows: ``[BLOCKS, ELEMENTS]``, maxima ``[BLOCKS]``. Elements are
fp4_e2m1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.codec.scaling import largest_power_of_two, power_of_two_carry
from mxquant.kernels.triton.decode import E4M3, E8M0, decode_scale
from mxquant.kernels.triton.names import E8M0_RULES, MANTISSA_RULES
from mxquant.schemes.formats import ELEMENTS, SCALES

# Codes of the rules, by name: what kernels are specialized on.
RULES = {name: number for number, name in enumerate(dict.fromkeys(E8M0_RULES + MANTISSA_RULES))}
FLOOR, CEIL, EVEN, RCEIL, OAS, SEARCH, ABSMAX, NONZERO, FOUR_OVER_SIX = (tl.constexpr(v) for v in RULES.values())

_E2M1 = ELEMENTS["fp4_e2m1"]
_CARRY = tl.constexpr(tuple(power_of_two_carry(_E2M1, rule) for rule in ("floor", "ceil", "even", "rceil", "oas")))
_LARGEST_E8M0 = tl.constexpr(largest_power_of_two(_E2M1, SCALES["e8m0"]))
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_INF = tl.constexpr(float("inf"))


@triton.jit
def nearest_magnitude(x):
    """E2M1 values nearest to fp32 ``x >= 0``, ties to even, saturating at 6."""
    exponent = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shifter = tl.minimum(tl.maximum(exponent, 1.0), 4.0) * (1.5 * 4194304.0)
    return tl.minimum((x + shifter) - shifter, 6.0)


@triton.jit
def effective(code, global_ptr, LAYOUT: tl.constexpr):
    """``fl32(scale / global)`` of int32 codes."""
    scale = decode_scale(code, LAYOUT)
    if global_ptr is not None:
        scale = tl.div_rn(scale, tl.load(global_ptr))
    return scale


@triton.jit
def divided(x, code, global_ptr, LAYOUT: tl.constexpr):
    """``x / fl32(scale / global)``, correctly rounded: x ``[BLOCKS, ELEMENTS]``, code ``[BLOCKS]``.

    A block whose scale is zero is lost; dividing by infinity says so without a branch. A power of two
    has an exact inverse, and a product is rounded once as a quotient is.
    """
    if LAYOUT == E8M0 and global_ptr is None:
        inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
        quotient = x * inverse[:, None]
    else:
        scale = effective(code, global_ptr, LAYOUT)
        scale = tl.where(scale > 0, scale, _INF)
        quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return quotient


@triton.jit
def block_codes(x, amax, global_ptr, LAYOUT: tl.constexpr, RULE: tl.constexpr, MAX_CODE: tl.constexpr):
    """int32 scale codes ``[BLOCKS]`` of magnitudes ``x`` ``[BLOCKS, ELEMENTS]`` with maxima ``amax``."""
    if LAYOUT == E8M0:
        start = _power_of_two(amax, global_ptr, FLOOR if RULE == SEARCH else RULE)
        if RULE == SEARCH:
            best = start
            error = _error(x, amax, start, global_ptr, LAYOUT)
            for i in tl.static_range(3):
                code = _clamp(start + (1 if i == 0 else (-1 if i == 1 else 2)), 0, _LARGEST_E8M0)
                best, error = _better(x, amax, code, best, error, global_ptr, LAYOUT)
            start = best
        elif RULE == RCEIL:
            start = _smallest_unsaturated(start, amax, global_ptr, LAYOUT, _LARGEST_E8M0)
        return start

    start = _encode(_quotient(amax, 6.0, global_ptr), LAYOUT, MAX_CODE, RULE == CEIL)
    if RULE == CEIL:
        start = _smallest_unsaturated(start, amax, global_ptr, LAYOUT, MAX_CODE)
    elif RULE == FOUR_OVER_SIX:
        best = _clamp(start, 1, MAX_CODE)
        error = _error(x, amax, best, global_ptr, LAYOUT)
        four = _clamp(_encode(_quotient(amax, 4.0, global_ptr), LAYOUT, MAX_CODE, False), 1, MAX_CODE)
        start, error = _better(x, amax, four, best, error, global_ptr, LAYOUT)
    elif RULE == SEARCH:
        best = _clamp(start, 1, MAX_CODE)
        error = _error(x, amax, best, global_ptr, LAYOUT)
        for i in tl.static_range(7):  # -1, then 1 to 6
            code = _clamp(start + (-1 if i == 0 else i), 1, MAX_CODE)
            best, error = _better(x, amax, code, best, error, global_ptr, LAYOUT)
        start = best
    if (RULE == NONZERO) | (RULE == FOUR_OVER_SIX) | (RULE == SEARCH):
        start = tl.where(amax > 0, tl.maximum(start, 1), 0)
    return start


@triton.jit
def _quotient(amax, target: tl.constexpr, global_ptr):
    scale = tl.div_rn(amax, tl.full(amax.shape, target, tl.float32))
    if global_ptr is not None:
        scale = tl.load(global_ptr) * scale
    return scale


@triton.jit
def _encode(x, LAYOUT: tl.constexpr, MAX_CODE: tl.constexpr, UP: tl.constexpr):
    """``numerics.encode_magnitude`` for e4m3 and ue5m3: nearest-even, or upwards."""
    BIAS: tl.constexpr = 7 if LAYOUT == E4M3 else 15
    # The largest scale, from its code: (8 + mantissa) * 2^(exponent - bias - 3).
    LARGEST: tl.constexpr = (8 + MAX_CODE % 8) * 2.0 ** (MAX_CODE // 8 - BIAS - 3)
    x = tl.minimum(x, LARGEST)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    steps = x * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = tl.ceil(steps) if UP else steps + _ROUNDER - _ROUNDER
    return tl.minimum(((exponent - (1 - BIAS)) << 3) + steps.to(tl.int32), MAX_CODE)


@triton.jit
def _power_of_two(amax, global_ptr, RULE: tl.constexpr):
    if global_ptr is not None:
        amax = amax * tl.load(global_ptr)
    carry: tl.constexpr = _CARRY[RULE]
    return _clamp(((amax.to(tl.int32, bitcast=True) + carry) >> 23) - 2, 0, _LARGEST_E8M0)


@triton.jit
def _smallest_unsaturated(code, amax, global_ptr, LAYOUT: tl.constexpr, LARGEST: tl.constexpr):
    """The smallest code with ``amax <= 6 * fl32(s/g)``, from a guess at most one off."""
    code = _clamp(code - 1, 0, LARGEST)
    for _ in tl.static_range(2):
        scale = effective(code, global_ptr, LAYOUT)
        high = (scale.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
        too_small = amax - high * 6.0 > (scale - high) * 6.0
        code = tl.where(too_small & (code < LARGEST), code + 1, code)
    return code


@triton.jit
def _clamp(code, low: tl.constexpr, high: tl.constexpr):
    return tl.minimum(tl.maximum(code, low), high)


@triton.jit
def _error(x, amax, code, global_ptr, LAYOUT: tl.constexpr):
    """Squared error of the blocks with these scales; never better than infinity where that is no number."""
    error = _raw_error(x, amax, code, global_ptr, LAYOUT)
    return tl.where(error < _INF, error, _INF)


@triton.jit
def _better(x, amax, code, best, best_error, global_ptr, LAYOUT: tl.constexpr):
    error = _raw_error(x, amax, code, global_ptr, LAYOUT)
    better = error < best_error
    return tl.where(better, code, best), tl.where(better, error, best_error)


@triton.jit
def _raw_error(x, amax, code, global_ptr, LAYOUT: tl.constexpr):
    scale = effective(code, global_ptr, LAYOUT)
    scale = tl.where(scale > 0, scale, _INF)
    quotient = divided(x, code, global_ptr, LAYOUT)
    residual = nearest_magnitude(quotient) - quotient
    relative = tl.div_rn(scale, amax)
    return _ordered_sum(residual * residual) * (relative * relative)


@triton.jit
def _ordered_sum(x):
    """Sum of each row by halving: ``x[i] + x[i + n/2]``, the order of ``mxquant.codec.blocks.ordered_sum``."""
    if x.shape[1] == 1:
        total = x.reshape(x.shape[0])
    else:
        total = _ordered_sum(tl.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), 1))
    return total
