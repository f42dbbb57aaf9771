"""From packed bytes and scale codes to numbers, in registers.

An fp4_e2m1 code is ``s e e m``. Moved to where fp32 has its sign, the lowest two bits of its
exponent and the highest of its mantissa, it *is* an fp32 number, 2^126 times too small, and its
subnormal (0.5) becomes an fp32 subnormal, so no case needs a branch::

    byte          h h h h s e e m                          the low nibble of a byte
    << 28         s e e m 0000 0000 0000 ...               the sign where it belongs
    >> 6 (arith)  s ssss ssee m 000 0000 ...               the sign is copied downwards
    & 0x81C00000  s 0000 00ee m 000 0000 ...               value * 2^-126

Three integer instructions a weight, the same on every chip. The factor 2^126 is multiplied into the
block scale, once a block, as far as fp32's range allows; :data:`EXPONENTS` says what is left over.

Scales: ue5m3 and e4m3 codes shifted by 20 bits are fp32 numbers with the wrong bias (subnormals
included), put right by one exact multiplication, the top binade of ue5m3 (infinity and NaN if it were an
fp16 number, ``code << 7``) like the others; an e8m0 code is an fp32 exponent. No chip needs fp8 types.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.schemes.formats import SCALES

# Scale formats by the bit layout that the kernels know; ue5m3-61440 is ue5m3 that never writes its
# top binade.
LAYOUTS = {"e8m0": 0, "e4m3": 1, "ue5m3": 2, "ue5m3-61440": 2}
E8M0 = tl.constexpr(LAYOUTS["e8m0"])
E4M3 = tl.constexpr(LAYOUTS["e4m3"])
UE5M3 = tl.constexpr(LAYOUTS["ue5m3"])

# Whether kernels run on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1), which rounds to bf16
# by cutting bits off and multiplies bf16 matrices wrongly: there products are done in fp32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_SIGN_AND_MAGNITUDE = tl.constexpr(0x81C00000 - (1 << 32))
_TWO_126 = tl.constexpr(2.0**126)
_E4M3_BIAS = tl.constexpr(2.0 ** (127 - SCALES["e4m3"].bias))
_UE5M3_BIAS = tl.constexpr(2.0 ** (127 - SCALES["ue5m3"].bias))

# Weight tiles hold ``value * 2^-e``: (scale layout, operand is fp16) -> e. For fp32 and bf16 operands the
# largest scale times 2^(126 - e) should be finite in fp32; e8m0 has too many binades for that. In fp16
# all weights must be finite and whole multiples of 2^-24; ue5m3's range leaves 4 to 6.
EXPONENTS = {
    (LAYOUTS["e8m0"], False): 0,
    (LAYOUTS["e4m3"], False): 18,
    (LAYOUTS["ue5m3"], False): 18,
    (LAYOUTS["e4m3"], True): 14,
    (LAYOUTS["ue5m3"], True): 4,
}


@triton.jit
def power_of_two(exponent: tl.constexpr):
    """2^exponent as fp32, for exponents from -126 to 127."""
    bits: tl.constexpr = (exponent + 127) << 23
    return tl.full([], bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def tiny_low(byte):
    """Low nibbles of int32 bytes as fp32 ``element * 2^-126``."""
    return (((byte << 28) >> 6) & _SIGN_AND_MAGNITUDE).to(tl.float32, bitcast=True)


@triton.jit
def tiny_high(byte):
    """High nibbles of int32 bytes as fp32 ``element * 2^-126``."""
    return (((byte << 24) >> 6) & _SIGN_AND_MAGNITUDE).to(tl.float32, bitcast=True)


@triton.jit
def element_at(word, i: tl.constexpr):
    """Nibble ``i`` of int32 words as fp32 elements."""
    shift: tl.constexpr = 28 - 4 * i
    return (((word << shift) >> 6) & _SIGN_AND_MAGNITUDE).to(tl.float32, bitcast=True) * _TWO_126


@triton.jit
def decode_scale(code, LAYOUT: tl.constexpr):
    """int32 scale codes -> fp32, exactly; codes without a value give NaN."""
    if LAYOUT == E8M0:
        bits = tl.where(code == 0, 1 << 22, code << 23)
        return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    small = (code << 20).to(tl.float32, bitcast=True)
    if LAYOUT == E4M3:
        return tl.where(code >= 127, float("nan"), small * _E4M3_BIAS)
    return tl.where(code == 255, float("nan"), small * _UE5M3_BIAS)


@triton.jit
def scaled_pair(byte, code, LAYOUT: tl.constexpr, EXPONENT: tl.constexpr, FP16: tl.constexpr):
    """Both weights of int32 bytes, given each byte's scale code: fp32 ``value * 2^-EXPONENT``, exactly.

    ``FP16``: whether they are to become fp16 numbers, which EXPONENT then sees to. Shapes broadcast.
    """
    if LAYOUT == E8M0 or (FP16 and LAYOUT == UE5M3):
        # scale * 2^(126 - EXPONENT) is too much for fp32 where the scale is above 1: then in two steps.
        STEP: tl.constexpr = 126 if LAYOUT == E8M0 else 64
        large = code > (127 if LAYOUT == E8M0 else 119)
        first = tl.where(large, power_of_two(STEP), 1.0)
        rest = tl.where(large, power_of_two(126 - EXPONENT - STEP), power_of_two(126 - EXPONENT))
        second = decode_scale(code, LAYOUT) * rest
        low, high = tiny_low(byte) * first * second, tiny_high(byte) * first * second
    else:
        factor = decode_scale(code, LAYOUT) * power_of_two(126 - EXPONENT)
        low, high = tiny_low(byte) * factor, tiny_high(byte) * factor
    return low, high


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """fp32 to ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, nearest, bits).to(tl.float32, bitcast=True)
    return value.to(dtype)
