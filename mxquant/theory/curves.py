"""Errors over a range of sigma."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxquant.schemes.formats import QuantScheme
from mxquant.theory.expected import error, total_error
from mxquant.theory.parts import ErrorParts


@dataclass(frozen=True, eq=False)
class Curve:
    """The errors ``parts`` of one scheme, one for each of ``sigmas``."""

    scheme: QuantScheme
    sigmas: np.ndarray
    parts: tuple[ErrorParts, ...]

    def of(self, name: str) -> np.ndarray:
        """One attribute of :class:`ErrorParts`, e.g. ``total`` or ``zero_scales``, at every sigma."""
        return np.array([getattr(p, name) for p in self.parts])


def curve(scheme: QuantScheme, sigmas: Iterable[float], **options: Any) -> Curve:
    """The error at each sigma. ``options``: those of :func:`mxquant.theory.error`."""
    points = np.array([float(s) for s in sigmas])
    return Curve(scheme, points, tuple(error(scheme, s, **options) for s in points))


def is_periodic(scheme: QuantScheme) -> bool:
    """Whether the error depends on the phase of sigma within its octave only (power-of-two scales)."""
    return scheme.scale_format.exponent_only and not scheme.global_scale


def octave_mean(scheme: QuantScheme, *, phases: int = 64, **options: Any) -> float:
    """Mean of the error over the octave of sigma from 1 to 2; of power-of-two scales, over any octave."""
    return float(np.mean([total_error(scheme, 2.0 ** (i / phases), **options) for i in range(phases)]))
