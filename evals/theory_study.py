"""Expected errors of several schemes, computed together: rows of data for JSON, CSV, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mxquant import theory
from mxquant.presentation.table import Table
from mxquant.schemes.formats import QuantScheme

# Phases of sigma for the mean over an octave; fewer where each costs a sample.
_PHASES, _SAMPLED_PHASES = 64, 8


@dataclass
class TheoryReport:
    """Errors of schemes at some sigmas, and where neighbouring blocks change order.

    Attributes
    ----------
    curves : one for each scheme, at the same sigmas.
    options : those of :func:`mxquant.theory.error` that all have in common.
    span, pairs, crossovers : the range of sigma in which schemes were compared, and where they cross;
        None if they were not computed.
    octave_means : mean error of power-of-two scales over an octave of sigma.
    """

    curves: list[theory.Curve]
    options: dict[str, Any]
    span: tuple[float, float] | None
    pairs: list[tuple[QuantScheme, QuantScheme]]
    crossovers: list[theory.Crossover] | None
    octave_means: dict[QuantScheme, float]

    @property
    def schemes(self) -> list[QuantScheme]:
        return [curve.scheme for curve in self.curves]

    @property
    def weights(self) -> str:
        """What the weights are, in a sentence: all distributions but one are named after people."""
        name, _, degrees = self.options["distribution"].partition(":")
        return name if name == "uniform" else name.capitalize() + (f"({degrees})" if degrees else "")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a scheme and sigma; errors as in :class:`mxquant.theory.ErrorParts`."""
        return [
            {
                "scheme": curve.scheme.text,
                "element": curve.scheme.element,
                "scale": curve.scheme.scale_text,
                "block": curve.scheme.block_text,
                "rule": curve.scheme.scale_rule,
                "rounding": curve.scheme.rounding,
                "bits_per_weight": bits_per_weight(curve.scheme),
                "sigma": float(sigma),
                "total": parts.total,
                **asdict(parts),
            }
            for curve in self.curves
            for sigma, parts in zip(curve.sigmas, curve.parts, strict=True)
        ]

    def crossings_of(self, pair: tuple[QuantScheme, QuantScheme]) -> list[theory.Crossover]:
        return [c for c in self.crossovers or () if {c.better_above, c.better_below} == set(pair)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. ``crossovers`` is null if they were not computed."""
        found = [
            {
                "sigma": c.sigma,
                "better_above": c.better_above.text,
                "better_below": c.better_below.text,
                "every_octave": theory.is_periodic(c.better_above),
            }
            for c in self.crossovers or ()
        ]
        return {
            "options": self.options,
            "errors": self.rows,
            "octave_means": {scheme.text: mean for scheme, mean in self.octave_means.items()},
            "crossovers": None if self.crossovers is None else found,
        }

    def notes(self) -> list[str]:
        """What the reader of a table or picture must know, a sentence or two each."""
        unit = "sigma^2" if self.options["metric"] == "squared" else "sigma"
        elements = ", ".join(dict.fromkeys(scheme.element for scheme in self.schemes))
        notes = [f"Mean {self.options['metric']} error of {self.weights} weights in {elements}, relative to {unit}."]
        if self.octave_means:
            means = ", ".join(
                f"{scheme.spelled(rule=True, preset=False)} {mean:.5f}" for scheme, mean in self.octave_means.items()
            )
            notes.append(f"e8m0: errors and crossovers repeat in every octave of sigma. Mean over one: {means}.")
        if any(map(theory.is_sampled, self.schemes)):
            notes.append("Sampled, since the rule looks at the whole block: " + self._sampled())
        if any(scheme.global_scale for scheme in self.schemes):
            size = self.options["tensor_elements"]
            notes.append(f"Global scale: that of a tensor of {size:,} weights whose largest is at its median.")
        return notes

    def _sampled(self) -> str:
        curves = [curve for curve in self.curves if theory.is_sampled(curve.scheme)]
        worst = max(float((curve.of("standard_error") / curve.of("total")).max()) for curve in curves)
        texts = ", ".join(curve.scheme.spelled(rule=True) for curve in curves)
        return f"{texts} (standard error up to {worst:.2%} of the error)."

    def write_csv(self, path: str | Path) -> None:
        table = Table.of("", [], self.rows[0])
        for row in self.rows:
            table.add(*row.values())
        Path(path).write_text(table.to_csv(), encoding="utf-8", newline="\r\n")


def study(
    schemes: Sequence[QuantScheme],
    sigmas: Sequence[float],
    *,
    distribution: str = "gaussian",
    metric: str = "squared",
    tensor_elements: int = theory.TENSOR_ELEMENTS,
    span: tuple[float, float] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TheoryReport:
    """Errors of all schemes at all sigmas, and with ``span`` all crossovers of neighbouring blocks in it.

    ``advance`` is called :func:`steps` times. Other arguments: as for :func:`mxquant.theory.error`.
    """
    options: dict[str, Any] = {"distribution": distribution, "metric": metric, "tensor_elements": tensor_elements}
    curves = []
    for scheme in schemes:
        parts = []
        for sigma in sigmas:
            parts.append(theory.error(scheme, sigma, **options))
            advance()
        curves.append(theory.Curve(scheme, np.array(sigmas, dtype=float), tuple(parts)))
    means = {}
    for scheme in filter(theory.is_periodic, schemes):
        phases = _SAMPLED_PHASES if theory.is_sampled(scheme) else _PHASES
        means[scheme] = theory.octave_mean(scheme, phases=phases, **options)
    pairs = neighbours(schemes)
    found: list[theory.Crossover] = []
    if span:
        for small, large in pairs:
            found += theory.crossovers(small, large, low=span[0], high=span[1], **options)
            advance()
    return TheoryReport(curves, options, span, pairs, found if span else None, means)


def steps(schemes: Sequence[QuantScheme], sigmas: Sequence[float], crossovers: bool) -> int:
    """How often :func:`study` calls ``advance``."""
    return len(schemes) * len(sigmas) + (len(neighbours(schemes)) if crossovers else 0)


def neighbours(schemes: Sequence[QuantScheme]) -> list[tuple[QuantScheme, QuantScheme]]:
    """Schemes to compare: those that differ in the block only, each with the next larger; alone, with twice its own."""
    groups: dict[Any, list[QuantScheme]] = {}
    for scheme in schemes:
        key = (scheme.element, scheme.scale, scheme.global_scale, scheme.scale_rule, scheme.rounding)
        groups.setdefault(key, []).append(scheme)
    pairs = []
    for members in groups.values():
        ordered = sorted(members, key=lambda s: math.prod(s.block_shape))
        pairs += list(pairwise(ordered)) or [(ordered[0], theory.doubled(ordered[0]))]
    return pairs


def bits_per_weight(scheme: QuantScheme) -> float:
    """Stored bits per weight of a large tensor."""
    return scheme.element_format.bits + scheme.scale_format.bits / math.prod(scheme.block_shape)


def by_scale(curves: Sequence[theory.Curve]) -> dict[str, list[theory.Curve]]:
    """Curves whose schemes differ in the block only, under what they share."""
    groups: dict[str, list[theory.Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.scheme.spelled(block=False, rule=True), []).append(curve)
    return groups
