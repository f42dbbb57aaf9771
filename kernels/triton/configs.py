"""Tile shapes: a short, reasoned list for each class of shapes, the default first.

The default depends on shapes and the chip's number of multiprocessors only, so results are the same
bits in every run. ``tuned`` may choose another one by measuring, when asked to (see
:mod:`mxquant.kernels.triton.tuning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

MULTIPROCESSORS = 132  # of a chip that is not here (compiling for another machine): H100 and H200


@dataclass(frozen=True)
class Config:
    """``m`` is 1 for the GEMV kernel; ``splits`` is the number of parts K is cut into."""

    m: int
    n: int
    k: int
    threads: int
    stages: int
    splits: int = 1
    group: int = 8

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k} t{self.threads} s{self.stages} split{self.splits}"


# GEMV: a warp covers 32 x 16 bytes = 1024 weights of a row, a thread 64 bytes of a tile, all of them
# in flight at once. The narrower one is for short rows.
_GEMV = (Config(1, 16, 1024, 128, 1), Config(1, 8, 1024, 128, 1), Config(1, 16, 512, 128, 1))
# Skinny: bytes are what costs, so a deep tile along K and enough stages to keep loads in flight.
_SKINNY = (Config(16, 64, 256, 128, 3), Config(16, 64, 128, 128, 4), Config(16, 128, 128, 128, 3))
# Between: the weight is still read once.
_MIDDLE = (Config(64, 128, 64, 256, 3), Config(64, 64, 128, 128, 3))
# GEMM: decoding a weight is worth 128 or 256 multiplications with it.
_LARGE = (Config(128, 128, 64, 256, 3), Config(256, 128, 64, 256, 3), Config(128, 128, 64, 128, 3))
# fp32 and fp16 activations that are split into bf16 terms take more registers.
_SKINNY_TERMS = (Config(16, 64, 128, 128, 3),)
_TERMS = (Config(32, 64, 64, 128, 3),)


def candidates(m: int, n: int, k: int, terms: int, multiprocessors: int = MULTIPROCESSORS) -> list[Config]:
    """Configurations worth trying for ``[m, k] x [n, k]^T``, the default first."""
    found: tuple[Config, ...]
    if m == 1:
        found = _GEMV
    elif m <= 16:
        found = _SKINNY if terms == 1 else _SKINNY_TERMS
    elif terms > 1:
        found = _TERMS
    elif m <= 64:
        found = _MIDDLE
    else:
        found = _LARGE
    return [_split(c, m, n, k, multiprocessors) for c in found]


def shape_class(m: int) -> str:
    """What a tuned choice is remembered for, beside n, k and the scheme."""
    return next(
        name for bound, name in ((1, "1"), (16, "16"), (64, "64"), (512, "512"), (1 << 62, "large")) if m <= bound
    )


def _split(config: Config, m: int, n: int, k: int, multiprocessors: int) -> Config:
    """Cut K where tiles of the output alone would leave multiprocessors idle.

    Four programs on each keep its memory pipes full. The parts are equal, and no part is shorter than
    two steps.
    """
    programs = triton.cdiv(m, config.m) * triton.cdiv(n, config.n)
    steps = triton.cdiv(k, config.k)
    wanted = 4 * multiprocessors if config.m <= 16 else multiprocessors
    splits = max(1, min(wanted // programs, steps // 2, 16))
    while steps % splits:
        splits -= 1
    return replace(config, splits=splits)
