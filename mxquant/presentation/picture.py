"""What pictures have in common: colours, axes, legend, caption and file.

matplotlib is imported when one is drawn, and draws into files only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.extras import needs

FORMATS = (".png", ".pdf", ".svg")

# Okabe and Ito's palette, which the common kinds of colour blindness tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
# For series in order; the last four go on where six are not enough.
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#8C564B", "#000000", "#B2912F", "#7B2D8B")
# Of text beside the data and of the baseline, and of the lines of a grid.
GREY, GRID = "#555555", "#e6e6e6"

_DPI = 150
# Of a small font, on the safe side: how much text an inch holds, and how much of it a legend's handle takes.
_CAPTION_CHARACTERS, _LEGEND_CHARACTERS, _HANDLE_INCHES = 16, 13, 0.6
_LEGEND_LINE_INCHES = 0.19


def check_format(path: str | Path) -> None:
    """Raise ``MXQuantError`` unless the file's name ends in one of ``FORMATS`` and matplotlib is installed."""
    if Path(path).suffix.lower() not in FORMATS:
        raise MXQuantError(f"pictures are written as {', '.join(FORMATS)}, not as {Path(path).name!r}")
    needs(f"drawing {Path(path).name}", "matplotlib", extra="plot")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, whose parts make room for each other.

    It has no global state, so that nothing changes for a caller who plots as well.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axis(axis: Any, *, grid: str = "both", hidden: tuple[str, ...] = ("top", "right"), size: float = 9) -> None:
    """Light grid lines below the data, no ticks, no frame on the ``hidden`` sides; labels of ``size`` points."""
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=size, which="both", length=0)
    for side in hidden:
        axis.spines[side].set_visible(False)


def draw_interval(axis: Any, ends: tuple[float, float], y: float, color: str) -> None:
    """A horizontal bar from end to end."""
    axis.plot(ends, [y, y], color=color, linewidth=1.5, solid_capstyle="butt")


def add_legend(figure: Any, handles: Mapping[str, Any], title: str = "", **options: Any) -> None:
    """Names and their handles above all panels, in as many columns as fit; further lines make the figure taller."""
    if not handles:
        return
    width, height = figure.get_size_inches()
    entry = max(map(len, handles)) / _LEGEND_CHARACTERS + _HANDLE_INCHES
    columns = min(len(handles), max(1, int(width / entry)))
    lines = -(-len(handles) // columns)
    figure.set_size_inches(width, height + (lines - 1) * _LEGEND_LINE_INCHES)
    options = {"loc": "outside upper center", "frameon": False, "fontsize": 9, "columnspacing": 1.4} | options
    figure.legend(list(handles.values()), list(handles), title=title or None, ncols=columns, **options)


def add_caption(figure: Any, text: str) -> None:
    """Small text below everything, wrapped to the width of the figure."""
    width = int(figure.get_size_inches()[0] * _CAPTION_CHARACTERS)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")


def save(figure: Any, path: str | Path) -> None:
    """Write the file. Raises ``MXQuantError`` if its name ends in no known format or it cannot be written."""
    check_format(path)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise MXQuantError(f"cannot write the picture {path}: {error.strerror}") from error
