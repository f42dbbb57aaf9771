"""The expected error of a scheme, taken apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorParts:
    """Expected error per element, relative to ``sigma^2`` (squared) or to ``sigma`` (absolute).

    Attributes
    ----------
    others : of the elements that are not the largest of their block.
    maximum : of the largest ones.
    zero : of all elements of blocks whose scale is zero: everything they hold.
    zero_scales, subnormal_scales : shares of blocks whose scale is zero, or has lost mantissa bits.
    saturated_scales : share of blocks that the largest scale of the format is too small for.
    clipped : share of blocks whose maximum is above the largest element times the scale.
    standard_error : of ``total``; zero where it is a formula, not zero where it had to be sampled.
    """

    others: float
    maximum: float
    zero: float
    zero_scales: float = 0.0
    subnormal_scales: float = 0.0
    saturated_scales: float = 0.0
    clipped: float = 0.0
    standard_error: float = 0.0

    @property
    def total(self) -> float:
        return self.others + self.maximum + self.zero
