"""The error of one element as a function of its place between the values of its format.

In units of the block scale, ``t = |x| / s``, the expected error is a polynomial of second degree
between knots, whatever the element format, the rounding and the metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mxquant.errors import TheoryError
from mxquant.schemes.formats import ELEMENTS, ElementFormat
from mxquant.theory.distributions import Distribution

METRICS = ("squared", "absolute")

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class ElementError:
    """``knots`` ``[n + 1]`` from 0 to infinity; ``coefficients`` ``[3, n]``: error ``c0 + c1 t + c2 t^2``.

    ``power``: the error of a number is the scale to this power times that of ``t``.
    """

    knots: np.ndarray
    coefficients: np.ndarray
    power: int

    def at(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Error of magnitudes ``x`` in blocks with this scale, ``> 0``."""
        t = x / scale
        c0, c1, c2 = self.coefficients[:, np.searchsorted(self.knots[1:-1], t)]
        return scale**self.power * (c0 + t * (c1 + t * c2))

    def up_to(self, top: np.ndarray, scale: np.ndarray, of: Distribution) -> np.ndarray:
        """Expected error of ``|X|`` where it is at most ``top``, zero elsewhere. Arrays ``[n]`` to ``[n]``."""
        edges = np.minimum(self.knots * scale[:, None], top[:, None])
        moments = of.moments(edges)
        terms = (
            c * (m[:, 1:] - m[:, :-1]) * scale[:, None] ** (self.power - k)
            for k, (c, m) in enumerate(zip(self.coefficients, moments, strict=True))
        )
        return sum(terms).sum(1)  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def element_error(element: str, rounding: str, metric: str) -> ElementError:
    """The error polynomial of an element format. Raises ``TheoryError`` for a metric that does not exist."""
    check_metric(metric)
    fmt = ELEMENTS[element]
    pieces = list(_PIECES[rounding, metric](_values(fmt)))
    knots = [start for start, _ in pieces] + [np.inf]
    return ElementError(np.array(knots), np.array([c for _, c in pieces]).T, 2 if metric == "squared" else 1)


def check_metric(metric: str) -> None:
    """Raise ``TheoryError`` unless this is one of ``METRICS``."""
    if metric not in METRICS:
        raise TheoryError(f"unknown metric {metric!r}; choose from {', '.join(METRICS)}")


def _values(fmt: ElementFormat) -> list[float]:
    return [fmt.magnitude(code) for code in range(fmt.max_code + 1)]


# Each yields the start of a piece and its polynomial; the last piece goes on to infinity (saturation).


def _nearest_squared(values: list[float]) -> Iterator[tuple[float, Coefficients]]:
    for start, v in zip(_turns(values), values, strict=True):
        yield start, (v * v, -2 * v, 1.0)


def _nearest_absolute(values: list[float]) -> Iterator[tuple[float, Coefficients]]:
    for start, v in zip(_turns(values), values, strict=True):
        if start < v:
            yield start, (v, -1.0, 0.0)
        yield v, (-v, 1.0, 0.0)


def _turns(values: list[float]) -> list[float]:
    """Where rounding to nearest turns to each value."""
    return [0.0, *((low + high) / 2 for low, high in pairwise(values))]


def _stochastic_squared(values: list[float]) -> Iterator[tuple[float, Coefficients]]:
    # Up with probability (t - low)/(high - low): the expected square is (high - t)(t - low).
    for low, high in pairwise(values):
        yield low, (-low * high, low + high, -1.0)
    top = values[-1]
    yield top, (top * top, -2 * top, 1.0)


def _stochastic_absolute(values: list[float]) -> Iterator[tuple[float, Coefficients]]:
    for low, high in pairwise(values):
        factor = 2 / (high - low)
        yield low, (-factor * low * high, factor * (low + high), -factor)
    yield values[-1], (-values[-1], 1.0, 0.0)


_PIECES = {
    ("nearest", "squared"): _nearest_squared,
    ("nearest", "absolute"): _nearest_absolute,
    ("stochastic", "squared"): _stochastic_squared,
    ("stochastic", "absolute"): _stochastic_absolute,
}
