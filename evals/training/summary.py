"""A study as figures: a row for each recipe, how far it is from the baseline, and all of it as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mxquant import __version__
from mxquant.evals.training.study import Study, perplexity
from mxquant.training.run import RunResult

# Raised when a key of the JSON changes its meaning or goes away; new keys may come at any time.
SCHEMA_VERSION = 1
CONFIDENCE = 0.95
_MONITORED = ("saturated", "zero_scale", "mismatch")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % confidence interval (None for one seed)."""

    mean: float
    half_width: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """From one value a seed, by Student's t; None without values."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0])
        from scipy.stats import t

        error = statistics.stdev(values) / len(values) ** 0.5
        return cls(statistics.fmean(values), float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error)

    def text(self, digits: int = 2, sign: bool = False) -> str:
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """One recipe over all seeds that did not diverge.

    ``loss``: of the last tenth of the steps; ``eval_loss``: held-out, with the forward of training;
    ``packed_loss``: with quantized weights only. Gaps are to the baseline of the same seed, in percent.
    """

    recipe: str
    runs: int
    loss: Estimate | None
    eval_loss: Estimate | None
    packed_loss: Estimate | None
    gap: Estimate | None
    eval_gap: Estimate | None
    monitored: dict[str, float]
    seconds_a_step: float | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("eval_loss", "packed_loss"):
            estimate = getattr(self, name)
            found[name.replace("loss", "perplexity")] = None if estimate is None else perplexity(estimate.mean)
        return found


def baseline_of(study: Study) -> str | None:
    """The recipe that the others are compared with: the first one that quantizes nothing."""
    return next((recipe.name for recipe in study.plan.recipes if not recipe.quantizes), None)


def rows(study: Study) -> list[Row]:
    """A row for each recipe that has a run, in the order of the recipes."""
    baseline = {run.seed: run for run in study.runs if run.recipe == baseline_of(study)}
    found = []
    for recipe in study.plan.recipes:
        runs = [run for run in study.runs if run.recipe == recipe.name]
        if runs:
            found.append(_row(recipe.name, runs, {} if recipe.name == baseline_of(study) else baseline))
    return found


def _row(recipe: str, runs: list[RunResult], baseline: dict[int, RunResult]) -> Row:
    whole = [run for run in runs if run.problem is None]
    seconds = [run.seconds_a_step for run in whole if run.seconds_a_step]
    return Row(
        recipe,
        len(runs),
        _mean(whole, lambda run: run.loss),
        _mean(whole, lambda run: run.eval_loss),
        _mean(whole, lambda run: run.packed_loss),
        _mean(whole, lambda run: _gap(run.loss, baseline.get(run.seed), "loss")),
        _mean(whole, lambda run: _gap(run.eval_loss, baseline.get(run.seed), "eval_loss")),
        _monitored(runs),
        statistics.fmean(seconds) if seconds else None,
        tuple(f"seed {run.seed}: {run.problem}" for run in runs if run.problem),
    )


def _mean(runs: list[RunResult], value: Callable[[RunResult], float | None]) -> Estimate | None:
    return Estimate.of([v for run in runs if (v := value(run)) is not None])


def _gap(loss: float | None, baseline: RunResult | None, name: str) -> float | None:
    """Percent above the baseline's."""
    reference = None if baseline is None else getattr(baseline, name)
    return None if loss is None or not reference else 100 * (loss / reference - 1)


def _monitored(runs: list[RunResult]) -> dict[str, float]:
    """Means over all monitored steps."""
    steps = [row for run in runs for row in run.curve if "mismatch" in row]
    return {name: statistics.fmean(row[name] for row in steps) for name in _MONITORED} if steps else {}


def to_dict(study: Study) -> dict[str, Any]:
    """The whole study, ready for JSON."""
    plan = study.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "mxquant": __version__,
        "model": {
            "name": plan.source.name,
            "pretrained": plan.source.pretrained,
            "parameters": study.parameters,
            "config": plan.source.config.to_diff_dict(),
        },
        "text": plan.text.to_dict(),
        "settings": asdict(plan.settings) | {"seeds": plan.seeds, "seq_len": plan.length},
        "tokens": {"train": study.train_tokens, "eval": study.eval_tokens, "step": study.tokens_a_step()},
        "recipes": [recipe.to_dict() for recipe in plan.recipes],
        "baseline": baseline_of(study),
        "rows": [row.to_dict() for row in rows(study)],
        "tasks": {name: [asdict(metric) for metric in metrics] for name, metrics in study.tasks.items()},
        "runs": [run.to_dict() for run in study.runs],
    }
