"""Where two schemes change places: the widths of weights at which their errors are equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from mxquant.errors import TheoryError
from mxquant.schemes.formats import QuantScheme
from mxquant.theory.expected import check_sigma, error, total_error
from mxquant.theory.levels import is_sampled

LOW, HIGH = 1e-5, 10.0
# Errors this close, relative, are equal: both schemes lose everything, say, or are the same there.
_EQUAL = 1e-9
_POINTS_PER_OCTAVE, _SAMPLED_POINTS_PER_OCTAVE = 32, 4


@dataclass(frozen=True)
class Crossover:
    """At ``sigma`` the errors of two schemes are equal; ``better_above`` and ``better_below`` have less beside it."""

    sigma: float
    better_above: QuantScheme
    better_below: QuantScheme


def crossovers(
    scheme_small: QuantScheme,
    scheme_large: QuantScheme | None = None,
    *,
    low: float = LOW,
    high: float = HIGH,
    **options: Any,
) -> list[Crossover]:
    """Every sigma from ``low`` to ``high`` at which two schemes change order, ascending.

    ``scheme_large`` None: the first scheme with a block of twice the size. ``options``: those of
    :func:`mxquant.theory.error`. Two crossings closer than 2 % can escape, as can two within a fifth of
    an octave where a rule has to be sampled.

    Without limits at either end, errors with power-of-two scales depend on the phase of sigma within
    the octave alone, so their crossings repeat in every octave.
    """
    for sigma in (low, high):
        check_sigma(sigma)
    if low >= high:
        raise TheoryError(f"the range of sigma must ascend, not {low:g} to {high:g}")
    large = doubled(scheme_small) if scheme_large is None else scheme_large
    sampled = any(map(is_sampled, (scheme_small, large)))
    compare = _Comparison(scheme_small, large, sampled, options)
    per_octave = _SAMPLED_POINTS_PER_OCTAVE if sampled else _POINTS_PER_OCTAVE
    count = max(2, math.ceil(math.log2(high / low) * per_octave) + 1)
    found, last = [], (math.nan, 0)
    for place in np.linspace(math.log(low), math.log(high), count):
        sign = compare.sign(place)
        if sign * last[1] < 0:
            sigma = math.exp(brentq(compare.excess, last[0], place, xtol=1e-7))
            found.append(Crossover(sigma, *((scheme_small, large) if sign < 0 else (large, scheme_small))))
        last = (place, sign) if sign else last
    return found


def doubled(scheme: QuantScheme) -> QuantScheme:
    """The scheme with blocks of twice as many elements: twice as long, or a tile twice as wide."""
    rows, columns = scheme.block_shape
    return replace(scheme, block=2 * columns if rows == 1 else (rows, 2 * columns))


@dataclass(frozen=True)
class _Comparison:
    """How much larger the error of the small blocks is, as a function of ``log sigma``."""

    small: QuantScheme
    large: QuantScheme
    sampled: bool
    options: dict[str, Any]

    def excess(self, place: float) -> float:
        first, second = (total_error(s, math.exp(place), **self.options) for s in (self.small, self.large))
        return first - second

    def sign(self, place: float) -> int:
        """-1, 1, or 0 where it cannot be determined."""
        if self.sampled:
            parts = [error(s, math.exp(place), **self.options) for s in (self.small, self.large)]
            first, second = (p.total for p in parts)
            unsure = 2 * math.hypot(*(p.standard_error for p in parts))
        else:
            first, second = (total_error(s, math.exp(place), **self.options) for s in (self.small, self.large))
            unsure = _EQUAL * second
        return 0 if abs(first - second) <= unsure else int(math.copysign(1, first - second))
