"""Random bits for stochastic rounding: a counter-based generator in plain integer arithmetic.

The bits of element ``i`` of a tensor are a pure function of a 64-bit key (seed and tensor name)
and of ``i``, its row-major index, so the same seed gives the same bytes on every device, thread
count and chunking. With ``key = key_hi << 32 | key_lo``, in 32-bit wrapping arithmetic::

    mix(x) = x ^= x >> 16; x *= 0x21f0aaad; x ^= x >> 15; x *= 0xd35a2d97; x ^= x >> 15
    bits   = mix(mix(lo32(i) ^ key_lo) + (key_hi ^ hi32(i) * 0x9e3779b9))

The mixer is a low-bias 32-bit hash found by Chris Wellons' hash prospector (public domain).
"""

from __future__ import annotations

import hashlib

import torch


def derive_key(seed: int, *names: str | int) -> int:
    """A 64-bit key from a seed and whatever names the tensor (its name, a training step, ...)."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits24(key: int, index: torch.Tensor) -> torch.Tensor:
    """24 random bits for each element index.

    ``index``: int64 tensor of row-major element indices. Returns int32, values in [0, 2^24).
    """
    low, high = _signed(key & 0xFFFFFFFF), _signed(key >> 32)
    x = _mix(index.to(torch.int32) ^ low)  # the conversion keeps the low 32 bits
    x = _mix(x + ((index >> 32).to(torch.int32) * _signed(0x9E3779B9) ^ high))
    return _shift_right(x, 8)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * 0x21F0AAAD
    x = (x ^ _shift_right(x, 15)) * _signed(0xD35A2D97)
    return x ^ _shift_right(x, 15)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift of int32: torch's own keeps the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
