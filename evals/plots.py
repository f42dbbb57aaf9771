"""Pictures of evaluations. matplotlib is imported when one is drawn, and draws into files only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.errors import MXQuantError
from mxquant.evals.divergence import CONFIDENCE
from mxquant.evals.report import ModelResult

if TYPE_CHECKING:
    from mxquant.evals.divergence import Interval

FORMATS = (".png", ".pdf", ".svg")

# Okabe and Ito's palette, which the common kinds of colour blindness tell apart.
_BASELINE, _MODEL, _BROKEN = "#555555", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class _Panel:
    title: str
    value: Callable[[ModelResult], float | None]
    interval: Callable[[ModelResult], Interval | None]
    text: Callable[[float], str]


def check_format(path: str | Path) -> None:
    """Raise ``MXQuantError`` unless the file's name ends in one of ``FORMATS``."""
    if Path(path).suffix.lower() not in FORMATS:
        raise MXQuantError(f"pictures are written as {', '.join(FORMATS)}, not as {Path(path).name!r}")


def plot_comparison(results: Sequence[ModelResult], path: str | Path, caption: str = "") -> None:
    """One row a model, one panel a question: how much worse, how different, how large.

    Bars are 95 % confidence, the dashed line is the baseline. Models without a perplexity are
    named but have no mark. ``path`` ends in one of ``FORMATS``; ``caption`` goes below.
    """
    check_format(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(results)
    # A bare Figure has no global state, so that nothing changes for a caller who plots as well.
    figure = Figure(figsize=(1.9 + 2.9 * len(panels), 1.5 + 0.45 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel, results)
    axes[0].set_yticks(range(len(results)), [_label(row) for row in results])
    axes[0].set_ylim(len(results) - 0.4, -0.6)
    if any(_kl_interval(row) for row in results):
        caption += f"\nBars: {CONFIDENCE:.0%} confidence over windows, those of perplexity paired with the baseline."
    if caption:
        figure.supxlabel(caption.strip(), fontsize=7, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _panels(results: Sequence[ModelResult]) -> list[_Panel]:
    panels = []
    if any(_perplexity(row) is not None for row in results):
        panels.append(_Panel("perplexity", _perplexity, _perplexity_interval(results), lambda v: f"{v:.4g}"))
    if any(_kl(row) is not None for row in results):
        panels.append(_Panel("KL from baseline, nats/token", _kl, _kl_interval, lambda v: f"{v:.3g}"))
    panels.append(
        _Panel("weights in memory, MB", lambda row: row.weight_bytes / 1e6, lambda _: None, lambda v: f"{v:,.3g}")
    )
    return panels


def _draw(axis: Any, panel: _Panel, results: Sequence[ModelResult]) -> None:
    axis.set_title(panel.title, fontsize=10)
    highest = 0.0
    for y, row in enumerate(results):
        value = panel.value(row)
        if value is None:
            continue
        color = _BASELINE if row.is_baseline else _MODEL
        low, high = panel.interval(row) or (value, value)
        highest = max(highest, high)
        axis.plot([low, high], [y, y], color=color, linewidth=1.5, solid_capstyle="butt")
        axis.plot([value], [y], "s" if row.is_baseline else "o", color=color, markersize=6)
        axis.annotate(
            panel.text(value), (high, y), (7, 0), textcoords="offset points", va="center", fontsize=9, color=color
        )
        if row.is_baseline:
            axis.axvline(value, color=color, linewidth=0.8, linestyle="--", zorder=0)
    axis.set_xlim(*_limits(axis.dataLim.x0, highest))
    axis.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9, length=0)
    axis.locator_params(axis="x", nbins=4)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _limits(low: float, high: float) -> tuple[float, float]:
    """From zero where the smallest value is near it, else with some room; space for numbers at the right."""
    start = 0.0 if low < 0.5 * high else low - 0.15 * (high - low)
    span = (high - start) or abs(high) or 1.0
    return start - 0.04 * span, high + 0.34 * span


def _label(row: ModelResult) -> str:
    if row.is_baseline:
        return f"{row.name} (baseline)"
    known = row.scheme in row.name or row.scheme.startswith("dense")
    return row.name if known else f"{row.name}\n{row.scheme}"


def _perplexity(row: ModelResult) -> float | None:
    return None if row.perplexity is None else row.perplexity.perplexity


def _perplexity_interval(results: Sequence[ModelResult]) -> Callable[[ModelResult], Interval | None]:
    """The ratio's interval at the scale of the baseline's perplexity."""
    baseline = next((_perplexity(row) for row in results if row.is_baseline), None)

    def interval(row: ModelResult) -> Interval | None:
        divergence = row.perplexity.divergence if row.perplexity else None
        if baseline is None or divergence is None or divergence.ratio_interval is None:
            return None
        low, high = divergence.ratio_interval
        return low * baseline, high * baseline

    return interval


def _kl(row: ModelResult) -> float | None:
    return row.perplexity.divergence.kl if row.perplexity and row.perplexity.divergence else None


def _kl_interval(row: ModelResult) -> Interval | None:
    return row.perplexity.divergence.kl_interval if row.perplexity and row.perplexity.divergence else None
