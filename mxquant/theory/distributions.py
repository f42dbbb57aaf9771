"""Distributions of weights: symmetric, with mean zero and standard deviation one.

The theory needs little of each: the density and the first moments of ``|X|`` up to a point, all in
closed form. Lengths are in standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from scipy import special

from mxquant.errors import TheoryError

Array = np.ndarray


class Distribution(Protocol):
    """``X`` with variance one, seen through its magnitude ``|X|``; hashable."""

    def __hash__(self) -> int: ...

    @property
    def reach(self) -> float:
        """Magnitude beyond which lies less than 1e-10 of the energy; may be infinite."""

    @property
    def text(self) -> str:
        """What :func:`distribution` reads back."""

    def density(self, x: Array) -> Array:
        """Density of ``|X|`` at ``x >= 0``."""

    def moments(self, x: Array) -> tuple[Array, Array, Array]:
        """Integrals of 1, ``y`` and ``y^2`` times the density of ``|X|``, over ``y`` from 0 to ``x``."""

    def exceeded_by(self, p: Array) -> Array:
        """The magnitude that ``|X|`` exceeds with probability ``p``."""


@dataclass(frozen=True)
class Gaussian:
    reach: ClassVar[float] = 10.0
    text: ClassVar[str] = "gaussian"

    def density(self, x: Array) -> Array:
        return np.sqrt(2 / np.pi) * np.exp(-x * x / 2)

    def moments(self, x: Array) -> tuple[Array, Array, Array]:
        x = np.minimum(x, 40.0)  # where the density is zero; infinity times zero would be NaN
        density, below = self.density(x), special.erf(x / np.sqrt(2))
        return below, np.sqrt(2 / np.pi) - density, below - x * density

    def exceeded_by(self, p: Array) -> Array:
        return -special.ndtri(p / 2)


@dataclass(frozen=True)
class Laplace:
    reach: ClassVar[float] = 30.0
    text: ClassVar[str] = "laplace"

    def density(self, x: Array) -> Array:
        return np.sqrt(2) * np.exp(-np.sqrt(2) * x)

    def moments(self, x: Array) -> tuple[Array, Array, Array]:
        y = np.minimum(np.sqrt(2) * x, 700.0)
        tail = np.exp(-y)
        return -np.expm1(-y), (1 - tail * (1 + y)) / np.sqrt(2), 1 - tail * (1 + y + y * y / 2)

    def exceeded_by(self, p: Array) -> Array:
        return -np.log(p) / np.sqrt(2)


@dataclass(frozen=True)
class Uniform:
    reach: ClassVar[float] = 3**0.5
    text: ClassVar[str] = "uniform"

    def density(self, x: Array) -> Array:
        return np.where(x <= self.reach, 1 / self.reach, 0.0)

    def moments(self, x: Array) -> tuple[Array, Array, Array]:
        x = np.minimum(x, self.reach)
        return x / self.reach, x**2 / (2 * self.reach), x**3 / (3 * self.reach)

    def exceeded_by(self, p: Array) -> Array:
        return self.reach * (1 - p)


@dataclass(frozen=True)
class StudentT:
    """Student's t with ``df`` degrees of freedom, scaled to variance one, hence ``df > 2``."""

    df: float = 5.0

    def __post_init__(self) -> None:
        if not 2 < self.df < np.inf:
            raise TheoryError(
                f"student-t with {self.df:g} degrees of freedom has no standard deviation to speak of; "
                "give a number above 2, such as student-t:5"
            )

    @property
    def text(self) -> str:
        return f"student-t:{self.df:g}"

    @property
    def reach(self) -> float:
        # The density is below peak * (x^2/(n-2))^-(n+1)/2; the energy of that has a simple integral.
        n = self.df
        log_energy_beyond_1 = np.log(2) + self._log_peak + (n + 1) / 2 * np.log(n - 2) - np.log(n - 2)
        with np.errstate(over="ignore"):
            return float(np.exp((log_energy_beyond_1 + 10 * np.log(10)) / (n - 2)))

    @property
    def _log_peak(self) -> float:
        """Logarithm of the density of X at 0."""
        n = self.df
        return float(special.gammaln((n + 1) / 2) - special.gammaln(n / 2) - np.log(np.pi * (n - 2)) / 2)

    @property
    def _unit(self) -> float:
        """Standard deviation of t itself."""
        return float(np.sqrt(self.df / (self.df - 2)))

    def _spread(self, x: Array) -> Array:
        """Root of ``1 + x^2/(n-2)``, of which the density is a power."""
        return np.hypot(1, x / np.sqrt(self.df - 2))

    def density(self, x: Array) -> Array:
        return 2 * np.exp(self._log_peak) * self._spread(x) ** -(self.df + 1)

    def moments(self, x: Array) -> tuple[Array, Array, Array]:
        n = self.df
        below = 1 - 2 * special.stdtr(n, -x * self._unit)
        # x^2 (1 + x^2/(n-2))^-(n+1)/2 is a difference of densities of t with n - 2 and n degrees.
        fewer = 1 - 2 * special.stdtr(n - 2, -x)
        first = self.density(np.zeros(())) * (n - 2) / (n - 1)
        return (
            below,
            first * (1 - self._spread(x) ** -(n - 1)),
            (n - 1) * fewer - (n - 2) * below,
        )

    def exceeded_by(self, p: Array) -> Array:
        return -special.stdtrit(self.df, p / 2) / self._unit


_SIMPLE: dict[str, Distribution] = {d.text: d for d in (Gaussian(), Laplace(), Uniform())}
NAMES = (*_SIMPLE, "student-t")


def distribution(of: str | Distribution) -> Distribution:
    """The distribution that a text stands for: ``gaussian``, ``laplace``, ``uniform``, ``student-t:DF``.

    ``student-t`` alone has five degrees of freedom. Raises ``TheoryError`` for anything else.
    """
    if not isinstance(of, str):
        return of
    name, _, degrees = of.strip().lower().partition(":")
    if name in _SIMPLE and not degrees:
        return _SIMPLE[name]
    if name == "student-t":
        try:
            return StudentT(float(degrees)) if degrees else StudentT()
        except ValueError as error:
            if isinstance(error, TheoryError):
                raise
            raise TheoryError(f"distribution {of!r}: {degrees!r} is not a number of degrees of freedom") from None
    raise TheoryError(f"unknown distribution {of!r}; choose from {', '.join(NAMES)} (student-t:4 has 4 degrees)")


def maximum_quantiles(logits: np.ndarray, size: int, of: Distribution) -> np.ndarray:
    """Quantiles of the largest of ``size`` magnitudes, at probabilities given as logits ``log(p / (1-p))``."""
    log_p = -np.logaddexp(0, -logits)
    return of.exceeded_by(-np.expm1(log_p / size))
