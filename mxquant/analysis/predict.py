"""What a scheme would cost a tensor if its weights were Gaussian, to compare with what it does cost."""

from __future__ import annotations

import math
from functools import lru_cache

from mxquant.schemes.formats import QuantScheme
from mxquant.theory.expected import total_error
from mxquant.theory.levels import is_sampled

# Errors of rules that have to be sampled are read off a curve with this many points an octave.
_POINTS_PER_OCTAVE = 4


def gaussian_mse(scheme: QuantScheme, sigma: float, global_scale: float | None = None) -> float | None:
    """Expected squared error of independent N(0, sigma^2) weights, relative to sigma^2; None if sigma is 0.

    ``global_scale``: of the tensor, for schemes that have one. See :func:`mxquant.theory.error`.
    """
    if not 0 < sigma < math.inf:
        return None
    # Only the product counts: weights g times as wide need a global scale of 1.
    one = 1.0 if scheme.global_scale else None
    width = sigma * (global_scale or 1.0) if scheme.global_scale else sigma
    if not is_sampled(scheme):
        return total_error(scheme, width, global_scale=one)
    place = math.log2(width) * _POINTS_PER_OCTAVE
    low = math.floor(place)
    a, b = _point(scheme, low, one), _point(scheme, low + 1, one)
    return a + (b - a) * (place - low)


@lru_cache(maxsize=4096)
def _point(scheme: QuantScheme, place: int, global_scale: float | None) -> float:
    return total_error(scheme, 2.0 ** (place / _POINTS_PER_OCTAVE), global_scale=global_scale)
