"""Pictures of a study: loss, distance from the baseline, and values that differ between the products."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mxquant.evals.training.study import Study
from mxquant.evals.training.summary import baseline_of
from mxquant.presentation import picture
from mxquant.training.run import RunResult

BASELINE = "#777777"
# Steps that a smoothed curve is a mean over, as a share of all.
_SMOOTHING = 1 / 15
# Up to so many recipes, the ranges of their seeds are shaded.
_SHADED_RECIPES = 5


def plot_study(study: Study, path: str | Path) -> None:
    """Curves over the steps, means over seeds, smoothed; the range of the seeds is shaded.

    Not with many recipes: their ranges cover one another, and nothing could be told apart.
    """
    baseline = baseline_of(study)
    panels = [_draw_loss]
    if any(run.recipe == baseline for run in study.runs) and any(run.recipe != baseline for run in study.runs):
        panels.append(_draw_gap)
    if any("mismatch" in row for run in study.runs for row in run.curve):
        panels += [_draw_mismatch, _draw_saturated]
    figure = picture.new_figure(4.1 * len(panels), 4.4)
    for axis, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axis, study)
        axis.set_xlabel("step", fontsize=9)
        axis.locator_params(axis="x", nbins=6, integer=True)
        picture.style_axis(axis, size=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    picture.add_legend(figure, dict(zip(labels, handles, strict=True)))
    picture.add_caption(figure, caption_of(study))
    picture.save(figure, path)


def color_of(study: Study, recipe: str) -> str:
    """The same for a recipe in every picture of the study."""
    quantized = [r.name for r in study.plan.recipes if r.quantizes]
    return picture.COLORS[quantized.index(recipe) % len(picture.COLORS)] if recipe in quantized else BASELINE


def _runs(study: Study) -> list[tuple[str, list[RunResult]]]:
    names = [recipe.name for recipe in study.plan.recipes]
    grouped = [(name, [run for run in study.runs if run.recipe == name]) for name in names]
    return [(name, runs) for name, runs in grouped if runs]


def _draw_loss(axis: Any, study: Study) -> None:
    axis.set_title("training loss, nats per token", fontsize=10)
    tops = []
    for name, runs in _runs(study):
        whole = [run for run in runs if run.problem is None]
        curves = [_smooth(run.losses, study) for run in whole or runs]
        _band(axis, curves, color_of(study, name), name, _is_shaded(study))
        tops += [curve[len(curve) // 8] for curve in curves]
        for run in runs:
            if run.problem and run.losses:
                axis.plot(
                    len(run.losses), run.losses[-1], "x", color=color_of(study, name), markersize=8, clip_on=False
                )
    low = min(min(_smooth(run.losses, study)) for run in study.runs if run.losses)
    height = max(tops) - low or 1.0
    axis.set_ylim(low - 0.05 * height, max(tops) + 0.1 * height)


def _draw_gap(axis: Any, study: Study) -> None:
    """From the last three quarters: at first, losses are close and noise is all there is to see."""
    baseline = baseline_of(study)
    axis.set_title(f"training loss above {baseline}, %", fontsize=10)
    reference = {run.seed: run.losses for run in study.runs if run.recipe == baseline and run.problem is None}
    axis.axhline(0, color=BASELINE, linewidth=1)
    for name, runs in _runs(study):
        pairs = [(run.losses, reference[run.seed]) for run in runs if run.seed in reference and run.problem is None]
        curves = [100 * (_smooth(mine, study) / _smooth(theirs, study) - 1) for mine, theirs in pairs]
        if curves and name != baseline:
            _band(axis, curves, color_of(study, name), name, _is_shaded(study))


def _draw_mismatch(axis: Any, study: Study) -> None:
    axis.set_title("an operand's two values: relative difference", fontsize=10)
    _draw_monitored(axis, study, "mismatch")


def _draw_saturated(axis: Any, study: Study) -> None:
    axis.set_title("share of blocks that saturate", fontsize=10)
    _draw_monitored(axis, study, "saturated")


def _draw_monitored(axis: Any, study: Study, what: str) -> None:
    for name, runs in _runs(study):
        seen = [row for row in runs[0].curve if what in row]
        steps, values = [row["step"] for row in seen], [row[what] for row in seen]
        axis.plot(steps, values, color=color_of(study, name), linewidth=1.5, clip_on=False)  # zero is on the frame
    axis.set_ylim(bottom=0)


def _is_shaded(study: Study) -> bool:
    return len(study.plan.seeds) > 1 and len(study.plan.recipes) <= _SHADED_RECIPES


def _band(axis: Any, curves: Sequence[np.ndarray], color: str, label: str, shaded: bool) -> None:
    length = min(map(len, curves))
    values = np.stack([curve[:length] for curve in curves])
    steps = np.arange(1, length + 1)
    axis.plot(steps, values.mean(0), color=color, linewidth=1.5, label=label)
    if shaded and len(values) > 1:
        axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def _smooth(losses: Sequence[float], study: Study) -> np.ndarray:
    """Means over the last steps, fewer at the start."""
    width = max(1, round(study.plan.settings.steps * _SMOOTHING))
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def caption_of(study: Study, what: str | None = None) -> str:
    """What was trained, on what and how; ``what`` the picture shows, if not curves."""
    settings, seeds = study.plan.settings, len(study.plan.seeds)
    if what is None:
        width = max(1, round(settings.steps * _SMOOTHING))
        shown = f"Means over {width} steps" + (f" and {seeds} seeds" if seeds > 1 else "")
        shown += ", their range shaded." if _is_shaded(study) else "."
    else:
        shown = f"{what} over {seeds} seeds, paired."
    return (
        f"{study.plan.source.name}, {study.parameters:,} parameters; {study.plan.text.name} text, "
        f"{settings.steps} steps of {study.tokens_a_step():,} tokens, peak learning rate {settings.lr:g}, "
        f"products in {settings.dtype}. {shown}"
    )
