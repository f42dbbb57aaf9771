"""The picture of a sweep, in the manner of the paper: quality against block size, a line a scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.evals.sweep.inversions import Line, inputs_name, lines_of
from mxquant.presentation import picture

if TYPE_CHECKING:
    from mxquant.evals.sweep.cells import Cell
    from mxquant.evals.sweep.run import Sweep


@dataclass(frozen=True)
class Style:
    """How the lines of a scale look: size of the marker and width of the line, in points."""

    color: str
    marker: str
    size: float
    width: float


# A scale looks the same in every picture. Good formats lie on each other:
# what is drawn first is larger and shows around what comes after.
STYLES: dict[str, Style] = {
    "e8m0": Style(picture.PURPLE, "^", 6.5, 1.6),
    "e4m3": Style(picture.VERMILION, "o", 9.5, 3.0),
    "e4m3+global": Style(picture.BLUE, "s", 7.5, 2.4),
    "ue5m3": Style(picture.GREEN, "D", 5.0, 1.7),
    "ue5m3+global": Style(picture.SKY, "d", 6.0, 1.7),
    "ue5m3-61440": Style("#44AA99", "v", 5.0, 1.7),
    "bf16": Style("#222222", "x", 4.5, 0.9),
    "fp32": Style("#777777", "+", 5.0, 0.9),
}
_OTHERS = Style(picture.ORANGE, "p", 6.0, 1.6)
# Further lines of one scale, which differ in rule, element or shape: dashes, and other markers inside.
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")
# What is this many times the dense perplexity or more has left the picture.
_CEILING = 12.0
# Steps of a logarithmic axis, from coarse to fine; the first that give four ticks are taken.
_STEPS = (
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 4, 5, 7),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    tuple(1 + 0.1 * i for i in range(90)),
)


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes, and the dense model they are compared with."""

    title: str
    lines: Sequence[Line]
    dense: Cell


@dataclass(frozen=True)
class _Metric:
    label: str
    value: Callable[[Cell], float | None]


PERPLEXITY = _Metric("perplexity", lambda cell: cell.perplexity)
KL = _Metric("KL from dense, nats/token", lambda cell: cell.kl or None)


def plot_sweep(sweep: Sweep, path: str | Path, caption: str = "") -> None:
    """Draw a sweep into a file that ends in one of ``picture.FORMATS``.

    A column for each kind of inputs; perplexity above, KL below, where differences between good
    formats show that perplexity hides.
    """
    lines = lines_of(sweep.cells)
    titles = {line.inputs: inputs_name(line.inputs) for line in lines}
    panels = [Panel(title, [m for m in lines if m.inputs == inputs], sweep.dense) for inputs, title in titles.items()]
    draw(panels, path, (PERPLEXITY, KL), caption)


def draw(
    panels: Sequence[Panel], path: str | Path, metrics: Sequence[_Metric] = (PERPLEXITY,), caption: str = ""
) -> None:
    """Panels side by side, a row for each metric; all panels of a row share their axis."""
    picture.check_format(path)
    figure = picture.new_figure(1.1 + 4.0 * len(panels), 0.8 + 3.2 * len(metrics))
    grid = figure.subplots(len(metrics), len(panels), sharey="row", sharex="col", squeeze=False)
    for row, metric in zip(grid, metrics, strict=True):
        reach = _reach(panels, metric)
        for axis, panel in zip(row, panels, strict=True):
            _draw_panel(axis, panel, metric, reach.cap)
            axis.set_ylim(reach.low, reach.high)
            if reach.is_log:
                _log_axis(axis, reach.low, reach.high)
        row[0].set_ylabel(metric.label, fontsize=10)
    for axis, panel in zip(grid[0], panels, strict=True):
        axis.set_title(panel.title, fontsize=10, loc="left", color="#222222")
    for axis in grid[-1]:
        axis.set_xlabel("block size (elements that share a scale)", fontsize=9)
    handles = {h.get_label(): h for axis in grid[0] for h in axis.get_lines() if not h.get_label().startswith("_")}
    names = list(dict.fromkeys(["dense", *(line.name for panel in panels for line in panel.lines)]))
    legend = {name: handles[name] for name in names if name in handles}
    picture.add_legend(figure, legend, handlelength=2.4)
    picture.add_caption(figure, caption)
    picture.save(figure, path)


def _draw_panel(axis: Any, panel: Panel, metric: _Metric, cap: float) -> None:
    if (floor := metric.value(panel.dense)) is not None:
        axis.axhline(floor, color=picture.GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label="dense")
    drawn: dict[str, int] = {}
    for line in sorted(panel.lines, key=lambda line: -_style(line).size):
        drawn[line.scale] = drawn.get(line.scale, -1) + 1
        _draw_line(axis, line, metric, drawn[line.scale], cap)
    _mark_outside(axis, panel, metric, cap)
    sizes = sorted({cell.spec.block_size for line in panel.lines for cell in line.cells if cell.spec})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
    picture.style_axis(axis)


def _draw_line(axis: Any, line: Line, metric: _Metric, repetition: int, cap: float) -> None:
    style = _style(line)
    if repetition:
        style = Style(style.color, _MARKERS[repetition % len(_MARKERS)], 5.5, 1.5)
    points = [(cell.spec.block_size, metric.value(cell)) for cell in line.cells if cell.spec]
    axis.plot(
        [x for x, _ in points],
        [math.nan if y is None else min(y, cap) for _, y in points],
        _DASHES[repetition % len(_DASHES)],
        color=style.color,
        marker=style.marker,
        markersize=style.size,
        markerfacecolor="white",
        markeredgewidth=1.5,
        linewidth=style.width,
        label=line.name,
    )


def _mark_outside(axis: Any, panel: Panel, metric: _Metric, cap: float) -> None:
    """Say below the top of the axis what is beyond it, or is not there at all."""
    below: dict[int, int] = {}
    for line in panel.lines:
        for cell in line.cells:
            y = metric.value(cell)
            if cell.spec is None or (y is not None and y <= cap) or (y is None and cell.perplexity is not None):
                continue
            x = cell.spec.block_size
            below[x] = below.get(x, 0) + 1
            place = (0, -1 - 9 * below[x])
            text = "none" if y is None else f"↑{y:.0e}".replace("e+", "e")
            axis.annotate(
                text, (x, cap), place, textcoords="offset points", fontsize=7, color=_style(line).color, ha="center"
            )


def _style(line: Line) -> Style:
    return STYLES.get(line.scale, _OTHERS)


@dataclass(frozen=True)
class _Reach:
    """Ends of an axis; ``cap`` is where values that are larger are drawn, just below ``high``."""

    low: float
    cap: float
    high: float
    is_log: bool


def _reach(panels: Sequence[Panel], metric: _Metric) -> _Reach:
    cells = [cell for panel in panels for line in panel.lines for cell in line.cells]
    floors = [y for panel in panels if (y := metric.value(panel.dense)) is not None]
    values = [y for cell in cells if (y := metric.value(cell)) is not None] + floors
    if not values:
        return _Reach(0.0, 1.0, 1.0, False)
    ceiling = _CEILING * max(floors) if floors else math.inf
    low, cap = min(values), min(max(values), ceiling)
    if cap > 1.6 * low:
        room = (cap / low) ** 0.06
        return _Reach(low / room, cap, cap * room, True)
    room = 0.06 * (cap - low) or 0.05 * cap
    return _Reach(low - room, cap, cap + room, False)


def _log_axis(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis whose ticks are round numbers, not only powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator(round_ticks(low, high)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 4:
            break
    return ticks[:: -(-len(ticks) // 9)]
