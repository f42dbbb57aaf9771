"""Which block scale a block gets, as a table: intervals of ``amax`` and the scale of each.

This covers the scale rules that look at ``amax`` alone, with the formulas of :mod:`mxquant.codec.scaling`.
The boundaries are exact; which side a boundary itself belongs to has no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mxquant.schemes.formats import ElementFormat, QuantScheme, ScaleFormat

# Rules that look at amax alone and are tabled here. The others choose by the whole block, or are new.
TABLED_RULES = ("absmax", "absmax-nonzero", "floor", "ceil", "even", "rceil", "oas")


def is_sampled(scheme: QuantScheme) -> bool:
    """Whether the error of a scheme has to be sampled, because no table gives its scale by ``amax``."""
    return scheme.scale_rule not in TABLED_RULES


@dataclass(frozen=True, eq=False)
class Levels:
    """Blocks with ``bounds[k] <= amax < bounds[k+1]`` get ``scales[k]``, which ascend from 0 or above.

    The scales are those that multiply elements, the global scale divided out. ``subnormal``: which of
    them have lost mantissa bits. ``complete``: the last one is the largest of the format.
    """

    bounds: np.ndarray
    scales: np.ndarray
    subnormal: np.ndarray
    complete: bool = True

    def seen_by(self, sigma: float, reach: float) -> Levels:
        """Only the levels that blocks of standard deviation ``sigma`` can meet, in units of ``sigma``."""
        # A block with amax below 1e-5 sigma holds less than 1e-10 of the energy, and is that rare as well.
        first, last = np.searchsorted(self.bounds[1:-1], (1e-5 * sigma, reach * sigma))
        bounds, seen = self.bounds[first : last + 2] / sigma, slice(first, last + 1)
        bounds[0], bounds[-1] = 0.0, np.inf
        complete = bool(last == len(self.scales) - 1)
        return Levels(bounds, self.scales[seen] / sigma, self.subnormal[seen], complete)


@lru_cache(maxsize=256)
def scale_levels(scheme: QuantScheme, global_scale: float = 1.0) -> Levels:
    """The table of a scheme whose rule looks at ``amax`` only and whose scales are not fp32 (exact)."""
    fmt, element, rule = scheme.scale_format, scheme.element_format, str(scheme.scale_rule)
    if fmt.exponent_only:
        values = np.array([fmt.value(code) for code in range(fmt.max_code - element.max_exponent + 1)])
        turns = values[:-1] * _largest_amax_at_one(element, rule)
    else:
        values = _float_values(fmt)
        turns = values[:-1] if rule == "ceil" else (values[:-1] + values[1:]) / 2
        turns = turns * element.max
    if rule == "absmax-nonzero":
        values, turns = values[1:], turns[1:]
    bounds = np.concatenate(([0.0], turns, [np.inf])) / global_scale
    return Levels(bounds, values / global_scale, (values > 0) & (values < fmt.min_normal))


def _float_values(fmt: ScaleFormat) -> np.ndarray:
    """All scales of a format with a mantissa; of bf16 the normal ones that leave ``amax`` finite."""
    if fmt.coded:
        return np.array([fmt.value(code) for code in range(fmt.max_code + 1)])
    mantissa = 1 + np.arange(2**fmt.mantissa_bits) / 2**fmt.mantissa_bits
    return np.outer(np.exp2(np.arange(fmt.min_exponent, 120)), mantissa).ravel()


def _largest_amax_at_one(element: ElementFormat, rule: str) -> float:
    """The largest ``amax`` that a rule for power-of-two scales gives the scale 1."""
    power = 2.0**element.max_exponent
    step = power / 2**element.mantissa_bits
    return {
        "floor": 2 * power,
        "ceil": power,
        # From here the mantissa, rounded to the element's bits, carries into the exponent.
        "even": 2 * power - step / 2,
        "rceil": element.max,
        "oas": element.max + step / 2,
    }[rule]
