"""What ``mxquant theory`` prints for people."""

from __future__ import annotations

import numpy as np

from mxquant import theory
from mxquant.cli.common import output_console
from mxquant.evals.theory_study import TheoryReport, bits_per_weight, by_scale
from mxquant.presentation.table import Table

# Rows that stand for a curve, whatever its number of points.
_CURVE_ROWS = 13
_BETTER = ("better below", "better above")


def print_theory(report: TheoryReport, as_curves: bool) -> None:
    """The errors, as a few points of curves or with all their parts; crossovers; notes."""
    console = output_console()
    for table in _curve_tables(report) if as_curves else [_point_table(report)]:
        console.print(table)
    if report.crossovers is not None:
        console.print(_crossover_table(report))
    for note in report.notes():
        console.print(note, soft_wrap=True)


def _point_table(report: TheoryReport) -> Table:
    errors, shares = ("error", "others", "maximum", "zero"), ("zero scale", "subnormal", "clipped")
    title = "Expected error, its parts, and shares of blocks"
    table = Table.of(title, ("scale, rule",), ("block", "bits/w", "sigma", *errors, *shares))
    for i, sigma in enumerate(report.curves[0].sigmas):
        for curve in report.curves:
            p, scheme = curve.parts[i], curve.scheme
            numbers = [_error(value) for value in (p.total, p.others, p.maximum, p.zero)]
            blocks = [_share(value) for value in (p.zero_scales, p.subnormal_scales, p.clipped)]
            name = scheme.spelled(block=False, rule=True), scheme.block_text
            where = f"{bits_per_weight(scheme):.2f}", f"{sigma:.4g}"
            table.add(*name, *where, *numbers, *blocks, ends_section=curve is report.curves[-1])
    return table


def _curve_tables(report: TheoryReport) -> list[Table]:
    tables = []
    for name, curves in by_scale(report.curves).items():
        table = Table.of(f"Expected error: {name}", ("sigma",), tuple(f"block {c.scheme.block_text}" for c in curves))
        sigmas = curves[0].sigmas
        for i in np.unique(np.linspace(0, len(sigmas) - 1, _CURVE_ROWS).round().astype(int)):
            table.add(f"{sigmas[i]:.3g}", *(_error(curve.parts[i].total) for curve in curves))
        tables.append(table)
    return tables


def _crossover_table(report: TheoryReport) -> Table:
    """Each pair of blocks and where it changes order; for power-of-two scales in the first octave."""
    table = Table.of("Where neighbouring blocks change order", ("scale, rule", "blocks"), ("sigma", *_BETTER))
    for pair in report.pairs:
        names = pair[0].spelled(block=False, rule=True), " v ".join(scheme.block_text for scheme in pair)
        found = report.crossings_of(pair)
        if report.span and theory.is_periodic(pair[0]):
            found = [c for c in found if c.sigma < 2 * report.span[0]]
        for c in found:
            table.add(*names, f"{c.sigma:.4g}", c.better_below.block_text, c.better_above.block_text)
        if not found:
            table.add(*names, "nowhere", "", "")
    return table


def _error(value: float) -> str:
    if value < 1e-12:
        return "0"
    return f"{value:.5f}" if value >= 1e-5 else f"{value:.0e}"


def _share(value: float) -> str:
    if value < 1e-12:
        return "0"
    return f"{value:.2%}" if value >= 5e-5 else "<0.01%"
