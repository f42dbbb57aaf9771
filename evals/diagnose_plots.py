"""Maps of a diagnosis: layer by projection, one map a question."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxquant.analysis.advice_on_scales import SHARE
from mxquant.analysis.diagnosis import Diagnosis, Mix
from mxquant.analysis.measure import MatrixErrors
from mxquant.analysis.places import place
from mxquant.presentation import picture
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.rules import rules_note

_SIGMA = "\N{GREEK SMALL LETTER SIGMA}"
_MISSING = "#f2f2f2"


@dataclass(frozen=True)
class _Map:
    """``values``: ``[projections, layers]``, NaN where there is no such matrix."""

    title: str
    values: np.ndarray
    colors: str
    form: Callable[[float], str]
    logarithmic: bool = False


def plot_diagnosis(d: Diagnosis, mix: Mix, path: str | Path) -> None:
    """The width of the weights, the error or expected cost of the best single scheme, and the mix.

    ``path`` ends in ``.png``, ``.pdf`` or ``.svg``.
    """
    picture.check_format(path)
    grid = _Grid(d)
    maps = _maps(d, mix, grid)
    columns, rows = len(grid.layers), len(grid.projections)
    width, height = min(16.0, 3.4 + 0.27 * columns), 0.62 + 0.26 * rows
    figure = picture.new_figure(max(7.2, width), 0.75 + height * (len(maps) + 1))
    axes = figure.subplots(len(maps) + 1, 1, squeeze=False, sharex=True)[:, 0]
    for axis, what in zip(axes, maps, strict=False):
        _draw_values(figure, axis, what)
    _draw_schemes(axes[-1], d, mix, grid)
    for axis in axes:
        _style(axis, grid)
    axes[-1].set_xlabel("layer", fontsize=9, color=picture.GREY)
    figure.suptitle(_title(d), fontsize=11, x=0.01, ha="left")
    picture.save(figure, path)


class _Grid:
    """Projections as rows, layers as columns; modules in no layer have a column at the end."""

    def __init__(self, d: Diagnosis):
        self.projections = list(d.groups)
        self.cells: dict[tuple[int, int], list[MatrixErrors]] = defaultdict(list)
        numbers = {place(t.tensor.module)[0] for t in d.matrices}
        known = sorted(n for n in numbers if n is not None)
        self.layers = [str(n) for n in known] + [""] * (None in numbers)
        column = {n: i for i, n in enumerate(known)} | {None: len(known)}
        for row, members in enumerate(d.groups.values()):
            for t in members:
                self.cells[row, column[place(t.tensor.module)[0]]].append(t)

    def values(self, of: Callable[[list[MatrixErrors]], float]) -> np.ndarray:
        found = np.full((len(self.projections), len(self.layers)), np.nan)
        for cell, members in self.cells.items():
            found[cell] = of(members)
        return found


def _maps(d: Diagnosis, mix: Mix, grid: _Grid) -> list[_Map]:
    best = d.best(mix.budget) or min(d.schemes, key=d.total_cost)
    sigma = grid.values(lambda ts: float(np.sqrt(np.mean([t.weights.sigma**2 for t in ts]))))
    error = grid.values(lambda ts: 100 * d.measured(best, ts).mse ** 0.5)
    maps = [
        _Map(f"{_SIGMA}, standard deviation of the weights", sigma, "viridis", lambda v: f"{v:.2g}", True),
        _Map(f"error of {best.text}, %", error, "magma_r", lambda v: f"{v:.3g}"),
        *_small_scales(d, grid),
    ]
    if d.calibration:
        total = d.total_cost(best)
        share = grid.values(lambda ts: 100 * sum(d.cost(t, best) for t in ts) / total)
        title = f"share of the expected KL of {best.text} ({total:.3g} nats per token), %"
        maps.append(_Map(title, share, "magma_r", lambda v: f"{v:.2g}", True))
    return maps


def _small_scales(d: Diagnosis, grid: _Grid) -> list[_Map]:
    """What it costs that scales are too small for their format, for the scheme where most are; none where few are."""

    def lost(scheme: QuantScheme) -> float:
        m = d.measured(scheme)
        return m.share(m.stats.zero_scales + m.stats.subnormal_scales)

    worst = max(d.schemes, key=lost)
    if lost(worst) <= SHARE:
        return []
    error = grid.values(lambda ts: 100 * d.measured(worst, ts).mse ** 0.5)
    title = f"error of {worst.text}, {lost(worst):.0%} of whose scales are zero or subnormal, %"
    return [_Map(title, error, "magma_r", lambda v: f"{v:.3g}")]


def _draw_values(figure: Any, axis: Any, what: _Map) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    finite = what.values[np.isfinite(what.values) & ((what.values > 0) | (not what.logarithmic))]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    logarithmic = what.logarithmic and high > 4 * low > 0
    if not logarithmic:  # differences that do not matter should not look as if they did
        middle = float(np.median(finite)) if finite.size else 0.5
        low, high = min(low, 0.95 * middle), max(high, 1.25 * middle, 1e-12)
    else:  # the smallest of a wide range are all the same to the eye
        low = max(low, high / 1000)
    norm = (LogNorm if logarithmic else Normalize)(low, high, clip=True)
    colors = colormaps[what.colors].with_extremes(bad=_MISSING)
    image = axis.imshow(what.values, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axis, fraction=0.02, pad=0.01, aspect=9)
    bar.outline.set_visible(False)
    if logarithmic:
        ticks = np.geomspace(low, high, 4)
        bar.set_ticks(ticks)
        bar.ax.yaxis.set_minor_locator(NullLocator())
    else:
        bar.locator = MaxNLocator(4)
        bar.update_ticks()
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: what.form(value)))
    bar.ax.tick_params(labelsize=7.5, length=0, colors=picture.GREY)
    axis.set_title(what.title, fontsize=9.5, loc="left", pad=4)


def _draw_schemes(axis: Any, d: Diagnosis, mix: Mix, grid: _Grid) -> None:
    """The scheme of each matrix; a cell of several shows the commonest."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    schemes = sorted(set(mix.chosen.values()), key=d.bits_per_weight)
    ramp = colormaps["YlGnBu"](np.linspace(0.18, 0.95, max(2, len(schemes))))[: len(schemes)]

    def commonest(members: list[MatrixErrors]) -> float:
        chosen = [mix.chosen[t.tensor.name] for t in members]
        return schemes.index(max(schemes, key=chosen.count))

    colors = ListedColormap(ramp).with_extremes(bad=_MISSING)
    axis.imshow(
        grid.values(commonest), cmap=colors, vmin=-0.5, vmax=len(schemes) - 0.5, aspect="auto", interpolation="nearest"
    )
    handles = [Patch(color=c, label=_label(d, mix, s)) for c, s in zip(ramp, schemes, strict=True)]
    axis.legend(
        handles=handles,
        ncols=len(handles),
        loc="lower right",
        bbox_to_anchor=(1.005, 0.99),
        frameon=False,
        fontsize=8,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        borderaxespad=0,
        labelcolor=picture.GREY,
    )
    axis.set_title(f"mix for {mix.budget:g} bits per weight", fontsize=9.5, loc="left", pad=4)


def _label(d: Diagnosis, mix: Mix, scheme: QuantScheme) -> str:
    parameters = sum(t.parameters for t in d.matrices if mix.chosen[t.tensor.name] == scheme)
    return f"{scheme.text} ({parameters / d.parameters:.0%})"


def _style(axis: Any, grid: _Grid) -> None:
    axis.set_yticks(range(len(grid.projections)), grid.projections)
    step = max(1, len(grid.layers) // 16)
    places = range(0, len(grid.layers), step)
    axis.set_xticks(places, [grid.layers[i] for i in places])
    axis.tick_params(labelsize=8, length=0, colors=picture.GREY)
    # White lines between the cells.
    axis.set_xticks(_between(len(grid.layers)), minor=True)
    axis.set_yticks(_between(len(grid.projections)), minor=True)
    axis.grid(which="minor", color="white", linewidth=0.8)
    axis.tick_params(which="minor", length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _between(count: int) -> Iterable[float]:
    return np.arange(1, count) - 0.5


def _title(d: Diagnosis) -> str:
    millions = d.parameters / 1e6
    count = f"{millions:,.1f}" if millions >= 1 else f"{millions:.2g}"
    title = f"{d.plan.source.resolve().name}: {count} M linear weights"
    if d.calibration:
        title += f", calibrated on {d.calibration.tokens:,} tokens of {Path(d.calibration.text).name}"
    return f"{title}\nscale rules: {rules_note(d.schemes)}"
