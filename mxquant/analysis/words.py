"""Schemes and numbers in sentences."""

from __future__ import annotations

from mxquant.analysis.diagnosis import Diagnosis
from mxquant.schemes.formats import QuantScheme


def name(d: Diagnosis, scheme: QuantScheme) -> str:
    """A scheme with its error, and the expected KL where it is known."""
    error = f"{scheme.text} (error {percent(d.measured(scheme).mse ** 0.5)}"
    return f"{error}, expected KL {d.total_cost(scheme):.3g})" if d.calibration else f"{error})"


def percent(share: float) -> str:
    """``7.9%``, ``31%``, ``0.02%``: two digits."""
    value = 100 * share
    return f"{value:.0f}%" if value >= 99.5 or value == 0 else f"{value:.2g}%"


def span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2g}" if high < 1.05 * low else f"{low:.2g} to {high:.2g}"
