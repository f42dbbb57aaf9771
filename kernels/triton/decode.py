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
included), put right by one exact multiplication; an e8m0 code is an fp32 exponent. For fp16, ue5m3's
``code << 7`` has the right bias already; only its top binade needs help.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.formats import SCALES

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

# Weight tiles hold ``value * 2^-e``: (scale layout, operand is fp16) -> e. The largest scale times
# 2^(126 - e) must be finite in fp32, and in fp16 the largest weight; 0 where neither is needed or,
# for e8m0 with its 254 binades, possible.
EXPONENTS = {
    (LAYOUTS["e8m0"], False): 0,
    (LAYOUTS["e4m3"], False): 18,
    (LAYOUTS["ue5m3"], False): 18,
    (LAYOUTS["e4m3"], True): 0,
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
def decode_scale_fp16(code, LAYOUT: tl.constexpr):
    """int32 codes of e4m3 or ue5m3 -> fp16 ``scale * 2^-e`` of :data:`EXPONENTS`, exactly.

    ue5m3's top binade would be fp16's infinities, so it is taken from the binade four below, which
    is what the factor 2^-4 asks for anyway.
    """
    if LAYOUT == E4M3:
        small = (code << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(code >= 127, float("nan"), small * 256.0).to(tl.float16)
    normal = ((code - 32) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    low = (code << 7).to(tl.int16).to(tl.float16, bitcast=True) * 0.0625
    return tl.where(code == 255, float("nan"), tl.where(code >= 40, normal, low)).to(tl.float16)


@triton.jit
def scale_factor(code, LAYOUT: tl.constexpr, EXPONENT: tl.constexpr):
    """What ``tiny`` elements are multiplied by: the block scale times ``2^(126 - EXPONENT)``."""
    return decode_scale(code, LAYOUT) * power_of_two(126 - EXPONENT)


@triton.jit
def scaled_pair(byte, code, LAYOUT: tl.constexpr, EXPONENT: tl.constexpr, FP16: tl.constexpr):
    """Both weights of int32 bytes, given each byte's scale code: fp32 (fp16 where ``FP16``),
    ``value * 2^-EXPONENT`` exactly. Shapes broadcast."""
    if FP16:
        scale = decode_scale_fp16(code, LAYOUT)
        low = (tiny_low(byte) * _TWO_126).to(tl.float16) * scale
        high = (tiny_high(byte) * _TWO_126).to(tl.float16) * scale
    elif LAYOUT == E8M0:
        # Two steps: 2^126 times a scale can be too much for fp32.
        scale = decode_scale(code, LAYOUT)
        low = tiny_low(byte) * _TWO_126 * scale
        high = tiny_high(byte) * _TWO_126 * scale
    else:
        factor = scale_factor(code, LAYOUT, EXPONENT)
        low = tiny_low(byte) * factor
        high = tiny_high(byte) * factor
    return low, high


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """fp32 to ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, nearest, bits).to(tl.float32, bitcast=True)
    return value.to(dtype)
