"""How far figures may be off: bootstrap intervals over windows, standard errors of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

Interval = tuple[float, float]

CONFIDENCE = 0.95
# Fewer values have too few different resamples for the ends of an interval.
FEWEST = 5

_RESAMPLES = 10_000
_SEED = 0
# Values drawn at once, 32 MB as float64.
_DRAWN = 1 << 22


def bootstrap_interval(values: torch.Tensor, confidence: float = CONFIDENCE) -> Interval | None:
    """Confidence interval of the mean of ``values`` (``[n]``) by the bootstrap; None for n < ``FEWEST``.

    The values are one number a window. Tokens within a window are not independent, windows nearly
    are, so the window is the unit: an interval over tokens would be several times too narrow. For a
    *paired* interval they are differences between two models on the same windows.

    Means of resamples of n values, drawn with replacement, and their percentiles. Those lie a bit
    further out than the confidence says, to make up for the variance of few values that a resample
    underestimates: the expanded percentile interval of Hesterberg, The American Statistician 69
    (2015). The random numbers have a fixed seed, so that an interval can be had again.
    """
    count = len(values)
    if count < FEWEST:
        return None
    means = np.sort(_resampled_means(values.double().numpy()))
    low, high = np.quantile(means, [_tail(count, confidence), 1 - _tail(count, confidence)])
    return float(low), float(high)


def _tail(count: int, confidence: float) -> float:
    """The share of resamples beyond either end."""
    from scipy.stats import norm, t

    return float(norm.cdf(math.sqrt(count / (count - 1)) * t.ppf((1 - confidence) / 2, count - 1)))


def _resampled_means(values: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(_SEED)
    means, rows = [], max(1, _DRAWN // len(values))
    for start in range(0, _RESAMPLES, rows):
        drawn = generator.integers(0, len(values), (min(rows, _RESAMPLES - start), len(values)))
        means.append(values[drawn].mean(1))
    return np.concatenate(means)


def paired_error(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Standard error of the difference between two means over the same items; None for fewer than two.

    For right and wrong answers it is what McNemar's test looks at: only items that one model gets
    right and the other wrong count, however many there are of the rest.
    """
    if len(values) != len(baseline) or len(values) < 2:
        return None
    difference = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    return float(difference.std(ddof=1) / math.sqrt(len(difference)))
