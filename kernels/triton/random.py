"""Random bits for stochastic rounding: :mod:`mxquant.codec.rng`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits24(key_low, key_high, index):
    """24 random bits (int32) for int64 row-major element indices and a 64-bit key in two int32 halves."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    x = _mix(low ^ key_low.to(tl.uint32, bitcast=True))
    x = _mix(x + ((high * 0x9E3779B9) ^ key_high.to(tl.uint32, bitcast=True)))
    return (x >> 8).to(tl.int32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)
