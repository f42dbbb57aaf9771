"""Moments of a weight, gathered chunk by chunk: how wide it is, how heavy its tails are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightStats:
    """Moments of some numbers; those of several parts are joined by ``+``.

    ``m2``, ``m3``, ``m4``: sums of powers of the distance from the mean; ``largest``: greatest magnitude.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, x: torch.Tensor) -> WeightStats:
        """Moments of a tensor of any shape and float dtype; fp32 differences, float64 sums."""
        flat = x.detach().to(torch.float32).flatten()
        if not flat.numel():
            return cls()
        low, high = torch.aminmax(flat)
        largest = float(torch.maximum(-low, high))
        # In units of the largest value no power under- or overflows.
        unit = largest if 0 < largest < math.inf else 1.0
        flat = flat / unit
        mean = float(flat.mean(dtype=torch.float64))
        distance = flat - mean
        square = distance * distance
        m2, m3, m4 = (float(t.sum(dtype=torch.float64)) for t in (square, square * distance, square * square))
        return cls(flat.numel(), mean * unit, m2 * unit**2, m3 * unit**3, m4 * unit**4, largest)

    def __add__(self, other: WeightStats) -> WeightStats:
        """Pébay's update (SAND2008-6212), exact for parts of any size."""
        n = self.count + other.count
        if not self.count or not other.count:
            return other if other.count else self
        a, b, d = self.count, other.count, other.mean - self.mean
        m2 = self.m2 + other.m2 + d**2 * a * b / n
        m3 = self.m3 + other.m3 + d**3 * a * b * (a - b) / n**2 + 3 * d * (a * other.m2 - b * self.m2) / n
        m4 = (
            self.m4
            + other.m4
            + d**4 * a * b * (a * a - a * b + b * b) / n**3
            + 6 * d**2 * (a * a * other.m2 + b * b * self.m2) / n**2
            + 4 * d * (a * other.m3 - b * self.m3) / n
        )
        return WeightStats(n, self.mean + d * b / n, m2, m3, m4, max(self.largest, other.largest))

    @property
    def sigma(self) -> float:
        """Standard deviation."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    @property
    def kurtosis(self) -> float:
        """Fourth moment over squared variance: 3 for a Gaussian, 1.8 if uniform; 0 where nothing varies."""
        return self.count * self.m4 / self.m2**2 if self.m2 else 0.0

    @property
    def peak(self) -> float:
        """Largest magnitude over the standard deviation."""
        return self.largest / self.sigma if self.m2 else 0.0

    def to_dict(self) -> dict[str, float]:
        return {
            "mean": self.mean,
            "sigma": self.sigma,
            "kurtosis": self.kurtosis,
            "largest": self.largest,
            "largest_over_sigma": self.peak,
        }
