"""Pictures of expected errors: against the width of the weights, and taken apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mxquant.evals.theory_study import by_scale
from mxquant.presentation import picture
from mxquant.theory import Crossover, Curve, is_periodic

_PARTS = {
    "others": ("the other elements", picture.SKY),
    "maximum": ("the maximum of each block", picture.ORANGE),
    "zero": ("blocks whose scale is zero", picture.VERMILION),
}
_BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
_SIGMA = "\N{GREEK SMALL LETTER SIGMA}"
_SIGMA_LABEL = f"{_SIGMA}, standard deviation of the weights"
_ERROR_LABELS = {"squared": f"mean squared error / {_SIGMA}²", "absolute": f"mean absolute error / {_SIGMA}"}


def plot_error_curves(
    curves: Sequence[Curve],
    path: str | Path,
    *,
    crossovers: Sequence[Crossover] = (),
    marks: Mapping[str, float] | None = None,
    metric: str = "squared",
    title: str = "",
    caption: str = "",
) -> None:
    """Error against sigma, both logarithmic: a panel a scale, a line and colour a block.

    ``crossovers`` get a ring on their curves and their sigma in writing. ``marks``: names and sigmas of
    models, say, drawn as dotted lines. ``path`` ends in ``.png``, ``.pdf`` or ``.svg``.
    """
    picture.check_format(path)
    panels = by_scale(curves)
    colors = _block_colors(curves)
    figure, axes = _figure(len(panels), height=3.9, share_y=True)
    for axis, (name, members) in zip(axes, panels.items(), strict=True):
        for curve in members:
            block = curve.scheme.block_text
            axis.plot(curve.sigmas, curve.of("total"), color=colors[block], linewidth=1.8, label=block, zorder=3)
        _style(axis, name, curves[0].sigmas)
        _draw_marks(axis, marks or {})
        _draw_crossovers(axis, members, crossovers)
    _share_height(axes, np.concatenate([curve.of("total") for curve in curves]))
    for axis in axes[:: _columns(len(axes))]:
        axis.set_ylabel(_ERROR_LABELS[metric], fontsize=9)
    lines = {line.get_label(): line for axis in axes for line in axis.lines if line.get_label() in colors}
    _finish(figure, path, {f"block {block}": lines[block] for block in colors}, title, caption)


def plot_parts(
    curves: Sequence[Curve],
    path: str | Path,
    *,
    metric: str = "squared",
    title: str = "",
    caption: str = "",
) -> None:
    """What the error consists of: for each curve a stack of its three parts, and below it their shares.

    The upper axis is linear and ends at a few times the smallest error, since parts add up on a linear
    axis only. ``path`` as for :func:`plot_error_curves`.
    """
    picture.check_format(path)
    figure, axes = _figure(len(curves), height=4.6, stacked=True)
    top = 4 * min(float(curve.of("total").min()) for curve in curves)
    top = min(top, 1.05 * max(float(curve.of("total").max()) for curve in curves))
    for (upper, lower), curve in zip(axes, curves, strict=True):
        parts = np.array([curve.of(name) for name in _PARTS])
        colors = [color for _, color in _PARTS.values()]
        upper.stackplot(curve.sigmas, parts, colors=colors, linewidth=0)
        upper.plot(curve.sigmas, parts.sum(0), color=picture.GREY, linewidth=1)
        lower.stackplot(curve.sigmas, 100 * parts / parts.sum(0), colors=colors, linewidth=0)
        _style(upper, curve.scheme.spelled(rule=True), curve.sigmas)
        _style(lower, "", curve.sigmas)
        upper.set_ylim(0, top)
        lower.set_ylim(0, 100)
        upper.set_xlabel("")
        upper.tick_params(labelbottom=False)
    for upper, lower in axes[:: _columns(len(axes))]:
        upper.set_ylabel(_ERROR_LABELS[metric], fontsize=9)
        lower.set_ylabel("share of it, %", fontsize=9)
    patches = axes[0][0].collections[: len(_PARTS)]
    handles = {text: patch for (text, _), patch in zip(_PARTS.values(), patches, strict=True)}
    _finish(figure, path, handles, title, caption)


def _figure(panels: int, height: float, share_y: bool = False, stacked: bool = False) -> tuple[Any, list[Any]]:
    """A figure and its panels in reading order: axes, or with ``stacked`` pairs of them."""
    columns = _columns(panels)
    rows = math.ceil(panels / columns)
    figure = picture.new_figure(max(0.6 + 3.9 * columns, 6.4), 0.7 + height * rows)
    if not stacked:
        axes = list(figure.subplots(rows, columns, sharex=True, sharey=share_y, squeeze=False).flat)
        for axis in axes[panels:]:
            axis.remove()
        return figure, axes[:panels]
    grid = figure.subplots(2 * rows, columns, squeeze=False, sharex=True, height_ratios=[3, 2] * rows)
    pairs = [(grid[2 * r][c], grid[2 * r + 1][c]) for r in range(rows) for c in range(columns)]
    for pair in pairs[panels:]:
        for axis in pair:
            axis.remove()
    return figure, pairs[:panels]


def _columns(panels: int) -> int:
    """Panels in a row: three, or two where that leaves no gap."""
    return 2 if panels in (2, 4) else min(panels, 3)


def _style(axis: Any, name: str, sigmas: np.ndarray) -> None:
    axis.set_title(name, fontsize=10, loc="left")
    axis.set_xscale("log")
    axis.set_xlim(sigmas[0], sigmas[-1])
    axis.set_xlabel(_SIGMA_LABEL, fontsize=9)
    picture.style_axis(axis)
    axis.tick_params(labelbottom=True)


def _draw_crossovers(axis: Any, members: Sequence[Curve], crossovers: Sequence[Crossover]) -> None:
    """A ring where two curves of this panel cross, and a list of the places."""
    places: dict[str, list[float]] = {}
    low, high = members[0].sigmas[0], members[0].sigmas[-1]
    for crossing in crossovers:
        pair = [c for c in members if c.scheme in (crossing.better_above, crossing.better_below)]
        if len(pair) != 2 or not low <= crossing.sigma <= high:
            continue
        height = np.exp(np.interp(math.log(crossing.sigma), np.log(pair[0].sigmas), np.log(pair[0].of("total"))))
        axis.plot([crossing.sigma], [height], "o", color="black", markerfacecolor="white", markersize=5, zorder=5)
        places.setdefault(" v ".join(c.scheme.block_text for c in pair), []).append(crossing.sigma)
    if places:
        lines = [_where(blocks, at, is_periodic(members[0].scheme)) for blocks, at in places.items()]
        axis.text(
            0.98, 0.98, "\n".join([f"blocks change order at {_SIGMA}", *lines]), transform=axis.transAxes, fontsize=8,
            va="top", ha="right", color=picture.GREY, linespacing=1.35, bbox=_BLANK, zorder=1.8,
        )  # fmt: skip


def _where(blocks: str, sigmas: Sequence[float], periodic: bool) -> str:
    """``8 v 16: .0194``; where they repeat, those of one octave."""
    shown = [s for s in sigmas if s < 2 * sigmas[0] * (1 - 1e-6)] if periodic else sigmas[:3]
    more = " and each octave on" if periodic else ", …" if len(shown) < len(sigmas) else ""
    return f"{blocks}: {', '.join(f'{s:.3g}'.removeprefix('0').replace('e-0', 'e-') for s in shown)}{more}"


def _draw_marks(axis: Any, marks: Mapping[str, float]) -> None:
    for name, sigma in marks.items():
        axis.axvline(sigma, color=picture.GREY, linewidth=0.9, linestyle=":", zorder=1)
        axis.text(
            sigma, 0.45, name, transform=axis.get_xaxis_transform(), rotation=90, fontsize=8, color=picture.GREY,
            va="center", ha="center", bbox=_BLANK,
        )  # fmt: skip


def _block_colors(curves: Sequence[Curve]) -> dict[str, Any]:
    """Colours from dark to light as blocks grow, the same in every panel."""
    from matplotlib import colormaps

    sizes = {curve.scheme.block_text: math.prod(curve.scheme.block_shape) for curve in curves}
    ordered = sorted(sizes, key=lambda text: sizes[text])
    places = np.linspace(0.0, 0.88, len(ordered)) if len(ordered) > 1 else [0.3]
    return dict(zip(ordered, colormaps["viridis"](places), strict=True))


def _share_height(axes: Sequence[Any], values: np.ndarray) -> None:
    """One range for all: logarithmic, unless the values differ too little to need it."""
    low, high = float(values.min()), float(values.max())
    if high < 3 * low:
        axes[0].set_ylim(low - 0.1 * (high - low), high + 0.4 * (high - low) + 1e-9)
        return
    for axis in axes:
        axis.set_yscale("log")
    axes[0].set_ylim(low / 1.2, high * 1.35)


def _finish(figure: Any, path: str | Path, handles: Mapping[str, Any], title: str, caption: str) -> None:
    """The legend under the title, the caption below all; then the file."""
    picture.add_legend(
        figure, handles, title, title_fontproperties={"size": 11}, alignment="left", loc="outside upper left",
        handlelength=1.3,
    )  # fmt: skip
    picture.add_caption(figure, caption)
    picture.save(figure, path)
