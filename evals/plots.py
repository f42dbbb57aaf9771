"""The picture that compares evaluated models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.evals.intervals import CONFIDENCE
from mxquant.evals.results import ModelResult
from mxquant.presentation import picture

if TYPE_CHECKING:
    from mxquant.evals.divergence import Divergence
    from mxquant.evals.intervals import Interval

_PANELS_ABREAST = 4
# Of a normal distribution, so many standard errors on either side hold 95 %.
_TWO_SIDED = 1.96


@dataclass(frozen=True)
class _Panel:
    title: str
    value: Callable[[ModelResult], float | None]
    interval: Callable[[ModelResult], Interval | None]
    text: Callable[[float], str]


def plot_comparison(results: Sequence[ModelResult], path: str | Path, caption: str = "") -> None:
    """One row a model, one panel a question: how much worse, how different, how good at tasks, how large.

    Bars are 95 % confidence, the dashed line is the baseline. Models without a figure are named but
    have no mark. ``path`` ends in one of ``picture.FORMATS``; ``caption`` goes below.
    """
    picture.check_format(path)
    panels = _panels(results)
    abreast = min(len(panels), _PANELS_ABREAST)
    lines = math.ceil(len(panels) / abreast)
    caption = "\n".join(line for line in (caption, _explanation(results)) if line)
    height = lines * (0.75 + 0.45 * len(results)) + 0.25 + 0.14 * len(caption.splitlines())
    figure = picture.new_figure(1.9 + 2.9 * abreast, height)
    grid = figure.subplots(lines, abreast, sharey=True, squeeze=False)
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw(axis, panel, results)
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    for axis in grid[:, 0]:
        axis.set_yticks(range(len(results)), [_label(row) for row in results])
    grid[0, 0].set_ylim(len(results) - 0.4, -0.6)
    picture.add_caption(figure, caption)
    picture.save(figure, path)


def _panels(results: Sequence[ModelResult]) -> list[_Panel]:
    panels = []
    texts = list(dict.fromkeys(text for row in results for text in row.perplexities))
    for text in texts:
        on = f"\n{Path(text).name}" if len(texts) > 1 else ""
        if any(_perplexity(row, text) is not None for row in results):
            panels.append(_perplexity_panel(results, text, f"perplexity{on}"))
        if any(_divergence(row, text) is not None for row in results):
            panels.append(_kl_panel(text, f"KL from baseline, nats/token{on}"))
    panels += [_task_panel(*key) for key in dict.fromkeys((m.task, m.name) for row in results for m in row.tasks)]
    size = _Panel("weights in memory, MB", lambda row: row.weight_bytes / 1e6, lambda _: None, lambda v: f"{v:,.3g}")
    return [*panels, size]


def _perplexity_panel(results: Sequence[ModelResult], text: str, title: str) -> _Panel:
    """With the ratio's interval at the scale of the baseline's perplexity."""
    baseline = next((_perplexity(row, text) for row in results if row.is_baseline), None)

    def interval(row: ModelResult) -> Interval | None:
        found = _divergence(row, text)
        if baseline is None or found is None or found.ratio_interval is None:
            return None
        return found.ratio_interval[0] * baseline, found.ratio_interval[1] * baseline

    return _Panel(title, lambda row: _perplexity(row, text), interval, lambda v: f"{v:.4g}")


def _kl_panel(text: str, title: str) -> _Panel:
    def kl(row: ModelResult) -> float | None:
        found = _divergence(row, text)
        return None if found is None else found.kl

    def interval(row: ModelResult) -> Interval | None:
        found = _divergence(row, text)
        return None if found is None else found.kl_interval

    return _Panel(title, kl, interval, lambda v: f"{v:.3g}")


def _task_panel(task: str, name: str) -> _Panel:
    """A metric; its bar is that of the difference from the baseline where there is one, else its own."""

    def value(row: ModelResult) -> float | None:
        metric = row.metric(task, name)
        return None if metric is None or not math.isfinite(metric.value) else metric.value

    def interval(row: ModelResult) -> Interval | None:
        if (metric := row.metric(task, name)) is None:
            return None
        difference = row.difference(metric)
        error = metric.stderr if difference is None else difference.stderr
        at = metric.value
        return None if error is None or row.is_baseline else (at - _TWO_SIDED * error, at + _TWO_SIDED * error)

    return _Panel(f"{task}\n{name}", value, interval, lambda v: f"{v:.4g}")


def _explanation(results: Sequence[ModelResult]) -> str:
    """What the bars mean, if there are any."""
    parts = []
    if any(found.divergence and found.divergence.kl_interval for r in results for found in r.perplexities.values()):
        parts.append("over windows, those of perplexity paired with the baseline")
    if any(row.tasks for row in results):
        compared = any(row.baseline is not None for row in results)
        parts.append("of the difference from the baseline over paired items" if compared else "over a task's items")
    return f"Bars: {CONFIDENCE:.0%} confidence, {'; '.join(parts)}." if parts else ""


def _draw(axis: Any, panel: _Panel, results: Sequence[ModelResult]) -> None:
    axis.set_title(panel.title, fontsize=10)
    highest = 0.0
    for y, row in enumerate(results):
        value = panel.value(row)
        if value is None:
            continue
        color = picture.GREY if row.is_baseline else picture.BLUE
        low, high = panel.interval(row) or (value, value)
        highest = max(highest, high)
        picture.draw_interval(axis, (low, high), y, color)
        axis.plot([value], [y], "s" if row.is_baseline else "o", color=color, markersize=6)
        axis.annotate(
            panel.text(value), (high, y), (7, 0), textcoords="offset points", va="center", fontsize=9, color=color
        )
        if row.is_baseline:
            axis.axvline(value, color=color, linewidth=0.8, linestyle="--", zorder=0)
    axis.set_xlim(*_limits(axis.dataLim.x0, highest))
    picture.style_axis(axis, grid="x", hidden=("top", "right", "left"))
    axis.locator_params(axis="x", nbins=4)


def _limits(low: float, high: float) -> tuple[float, float]:
    """From zero where the smallest value is near it, else with some room; space for numbers at the right."""
    start = min(low, 0.0) if low < 0.5 * high else low - 0.15 * (high - low)
    span = (high - start) or abs(high) or 1.0
    return start - 0.04 * span, high + 0.34 * span


def _label(row: ModelResult) -> str:
    if row.is_baseline:
        return f"{row.name} (baseline)"
    known = row.scheme in row.name or row.scheme.startswith("dense")
    return row.name if known else f"{row.name}\n{row.scheme}"


def _perplexity(row: ModelResult, text: str) -> float | None:
    found = row.perplexities.get(text)
    return None if found is None else found.perplexity


def _divergence(row: ModelResult, text: str) -> Divergence | None:
    found = row.perplexities.get(text)
    return None if found is None else found.divergence
