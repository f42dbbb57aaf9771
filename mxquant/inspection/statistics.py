"""What the numbers in a checkpoint are like: block scales, element codes, dense tensors; counted, not sampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mxquant.checkpoint.formats.packed import Matrix
from mxquant.codec.packing import unpack
from mxquant.schemes.formats import ElementFormat, ScaleFormat

_CHUNK = 1 << 22


@dataclass
class ScaleStats:
    """Block scales of one format. ``binades``: how many lie in ``[2^e, 2^(e+1))``, by ``e``; zeros and
    what is ``invalid`` (NaN, infinite, negative) not among them. ``codes``: by code; empty for floats."""

    format: ScaleFormat
    count: int = 0
    zero: int = 0
    subnormal: int = 0
    largest: int = 0
    invalid: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    binades: Counter[int] = field(default_factory=Counter)

    def add(self, stored: torch.Tensor) -> None:
        """Count scales as they are stored."""
        if self.format.coded:
            self._add_codes(code_counts(stored.contiguous().view(torch.uint8)))
        else:
            for chunk in _chunks(stored.reshape(-1)):
                self._add_values(chunk.to(torch.float64))

    def merge(self, other: ScaleStats) -> None:
        for name in ("count", "zero", "subnormal", "largest", "invalid"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.codes.update(other.codes)
        self.binades.update(other.binades)

    def _add_codes(self, counts: list[int]) -> None:
        for code, n in enumerate(counts):
            if not n:
                continue
            value = self.format.value(code)
            self.count += n
            self.codes[code] += n
            if math.isnan(value):
                self.invalid += n
                continue
            self.zero += n if value == 0 else 0
            self.subnormal += n if 0 < value < self.format.min_normal else 0
            self.largest += n if code == self.format.max_code else 0
            if value > 0:
                self.binades[math.frexp(value)[1] - 1] += n

    def _add_values(self, values: torch.Tensor) -> None:
        bad = ~values.isfinite() | (values < 0)
        self.count += values.numel()
        self.invalid += int(bad.sum())
        self.zero += int((values == 0).sum())
        self.binades.update(_binades(values[~bad & (values > 0)]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format.name,
            "count": self.count,
            "zero": self.zero,
            "subnormal": self.subnormal,
            "largest_code": self.largest,
            "invalid": self.invalid,
            "binades": {str(e): n for e, n in sorted(self.binades.items())},
            "codes": {str(c): n for c, n in sorted(self.codes.items())},
        }


@dataclass
class ElementStats:
    """Element codes of one format. ``codes``: how often each occurs, sign included."""

    format: ElementFormat
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codes = self.codes or [0] * (1 << self.format.bits)

    def add(self, matrix: Matrix) -> None:
        columns, bits = matrix.weight.shape[1], self.format.bits
        for start, stop in matrix.chunks(_CHUNK):
            packed = matrix.packed[start:stop].contiguous()
            if bits == 4 and columns % 2 == 0:  # bytes are counted eight times as fast as codes
                counts = [0] * 16
                for byte, n in enumerate(code_counts(packed)):
                    counts[byte & 15] += n
                    counts[byte >> 4] += n
            else:
                counts = code_counts(unpack(packed, bits, columns))
            self.codes = [a + b for a, b in zip(self.codes, counts, strict=False)]

    def merge(self, other: ElementStats) -> None:
        self.codes = [a + b for a, b in zip(self.codes, other.codes, strict=True)]

    @property
    def count(self) -> int:
        return sum(self.codes)

    @property
    def zero(self) -> int:
        """Zeros of either sign."""
        return self._of(lambda magnitude: magnitude == 0)

    @property
    def subnormal(self) -> int:
        return self._of(lambda magnitude: 0 < magnitude < 1 << self.format.mantissa_bits)

    @property
    def largest(self) -> int:
        return self._of(lambda magnitude: magnitude == self.format.max_code)

    @property
    def invalid(self) -> int:
        """Codes past the largest: NaN and infinities of fp8."""
        return self._of(lambda magnitude: magnitude > self.format.max_code)

    def _of(self, wanted: Any) -> int:
        mask = (1 << (self.format.bits - 1)) - 1
        return sum(n for code, n in enumerate(self.codes) if wanted(code & mask))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format.name,
            "count": self.count,
            "zero": self.zero,
            "subnormal": self.subnormal,
            "largest_code": self.largest,
            "invalid": self.invalid,
            "codes": self.codes,
        }


@dataclass
class DenseStats:
    """Values of a float tensor; moments are over finite ones, ``binades`` of magnitudes as in :class:`ScaleStats`."""

    count: int = 0
    zero: int = 0
    nan: int = 0
    infinite: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    binades: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, tensor: torch.Tensor, *, histogram: bool = True) -> DenseStats:
        stats = cls()
        for chunk in _chunks(tensor.reshape(-1)):
            x = chunk.to(torch.float64)
            finite = x if bool(x.isfinite().all()) else x[x.isfinite()]
            stats.count += x.numel()
            stats.nan += int(x.isnan().sum())
            stats.infinite += int(x.isinf().sum())
            stats.zero += int((finite == 0).sum())
            if finite.numel():
                low, high = torch.aminmax(finite)
                stats.smallest, stats.largest = min(stats.smallest, float(low)), max(stats.largest, float(high))
                stats.total += float(finite.sum())
                stats.squares += float(torch.dot(finite, finite))
                if histogram:
                    stats.binades.update(_binades(finite[finite != 0].abs()))
        return stats

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite

    @property
    def mean(self) -> float:
        return self.total / self.finite if self.finite else 0.0

    @property
    def std(self) -> float:
        """Standard deviation, of the population."""
        return math.sqrt(max(0.0, self.squares / self.finite - self.mean**2)) if self.finite else 0.0

    @property
    def amax(self) -> float:
        return max(abs(self.smallest), abs(self.largest)) if self.finite else 0.0

    def to_dict(self) -> dict[str, Any]:
        found = {"count": self.count, "zero": self.zero, "nan": self.nan, "infinite": self.infinite}
        if not self.finite:
            return found
        moments = {"min": self.smallest, "max": self.largest, "mean": self.mean, "std": self.std, "amax": self.amax}
        return {**found, **moments, "binades": {str(e): n for e, n in sorted(self.binades.items())}}


def code_counts(codes: torch.Tensor) -> list[int]:
    """How often each of the 256 bytes occurs in a uint8 tensor."""
    total = torch.zeros(256, dtype=torch.int64)
    for chunk in _chunks(codes.reshape(-1)):
        total += torch.bincount(chunk, minlength=256)
    return [int(n) for n in total]


def _binades(values: torch.Tensor) -> dict[int, int]:
    """How many positive fp64 values lie in each ``[2^e, 2^(e+1))``."""
    if not values.numel():
        return {}
    exponents, counts = torch.unique(torch.frexp(values).exponent - 1, return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]
