"""Several recipes and seeds, trained one after the other on the same data from the same start."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mxquant.errors import MXQuantError
from mxquant.evals.models import EvalModel
from mxquant.evals.run import Stage, silent
from mxquant.evals.training.initial_model import ModelSource
from mxquant.evals.training.text import TrainingText, heldout_windows, training_windows
from mxquant.evals.windows import window_length
from mxquant.training.conversion import choose, convert, weights_only
from mxquant.training.cost import Cost, cost
from mxquant.training.recipes import TrainingRecipe
from mxquant.training.run import RunResult, RunSettings, train

if TYPE_CHECKING:
    from mxquant.evals.tasks import Metric, TaskSet

DEFAULT_SEQ_LEN = 512


@dataclass(frozen=True)
class Plan:
    """All that a study depends on. ``seq_len``: tokens in a window, None for 512 or the model's limit;
    ``eval_windows``: how many held-out windows, None for all. ``settings.seed`` is replaced by ``seeds``."""

    source: ModelSource
    text: TrainingText
    recipes: tuple[TrainingRecipe, ...]
    settings: RunSettings
    seeds: tuple[int, ...] = (0,)
    seq_len: int | None = None
    eval_windows: int | None = None
    allow_high: bool = False

    @property
    def length(self) -> int:
        """Tokens in a window."""
        limit = getattr(self.source.config.get_text_config(), "max_position_embeddings", None)
        return window_length(self.seq_len or min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN), {self.source.name: limit})

    def check(self) -> None:
        """Raise ``MXQuantError`` for what can be known to be wrong before anything is trained."""
        names = [recipe.name for recipe in self.recipes]
        for name, seeds in (("recipe", names), ("seed", self.seeds)):
            if len(set(seeds)) < len(seeds):
                raise MXQuantError(f"a {name} is given twice: {', '.join(map(str, seeds))}")
        model, _ = self.source.on_meta(), self.length
        for recipe in self.recipes:
            choose(model, recipe, allow_high=self.allow_high)

    def costs(self) -> list[Cost]:
        """The cost of each recipe by the cost model."""
        model = self.source.on_meta()
        return [cost(model, recipe, allow_high=self.allow_high) for recipe in self.recipes]

    def folder(self, output: Path, recipe: str, seed: int) -> Path:
        """Where a run has its checkpoint."""
        return output / (recipe if len(self.seeds) == 1 else f"{recipe}-seed{seed}")


@dataclass
class Study:
    """What was found: the runs so far, and what they were made of."""

    plan: Plan
    parameters: int = 0
    train_tokens: int = 0
    eval_tokens: int = 0
    runs: list[RunResult] = field(default_factory=list)
    tasks: dict[str, list[Metric]] = field(default_factory=dict)

    def tokens_a_step(self) -> int:
        """Tokens that all processes see in one step."""
        settings = self.plan.settings
        return settings.batch_size * settings.grad_accum * self.plan.length * int(os.environ.get("WORLD_SIZE", "1"))


def run_study(
    plan: Plan,
    output: Path,
    *,
    resume: bool = False,
    tasks: TaskSet | None = None,
    task_options: dict[str, Any] | None = None,
    stage: Stage = silent,
    finished: Callable[[Study], None] = lambda study: None,
) -> Study:
    """Train by every recipe, seed by seed; the study continues after a run that diverges.

    Each run leaves its checkpoint in a folder of its own under ``output``. ``finished`` is called after each
    with what is known by then. ``tasks`` are run, with ``task_options``, on the checkpoints as
    quantization leaves them.
    """
    plan.check()
    with stage("tokenizing"):
        windows = training_windows(plan.text, plan.source.tokenizer, plan.length)
        heldout = heldout_windows(plan.text, plan.source.tokenizer, plan.length, plan.eval_windows)
    study = Study(plan, train_tokens=windows.numel(), eval_tokens=heldout.numel())
    for seed in plan.seeds:
        for recipe in plan.recipes:
            settings = replace(plan.settings, seed=seed)
            folder = plan.folder(output, recipe.name, seed)
            model = plan.source.make(seed)
            study.parameters = model.num_parameters()
            with stage(folder.name) as progress:
                result = train(
                    model, recipe, windows, settings, folder, eval_windows=heldout, resume=resume,
                    allow_high=plan.allow_high, report=_reporter(progress, settings.steps),
                )  # fmt: skip
            del model
            study.runs.append(result)
            if is_main_process() and result.problem is None:
                plan.source.tokenizer.save_pretrained(folder)
                if tasks is not None:
                    study.tasks[folder.name] = _run_tasks(folder, recipe, plan, tasks, task_options or {})
            finished(study)
    return study


def is_main_process() -> bool:
    """Whether this process writes and prints, under ``accelerate launch`` and ``torchrun``."""
    return int(os.environ.get("RANK", "0")) == 0


def perplexity(loss: float | None) -> float | None:
    """``exp`` of a loss in nats a token; None where there is none, infinite where it overflows."""
    return None if loss is None else math.exp(loss) if loss < 700 else math.inf


def _reporter(progress: Callable[[int, int], None], steps: int) -> Callable[[dict[str, Any]], None]:
    def report(row: dict[str, Any]) -> None:
        if "loss" in row:
            progress(row["step"], steps)

    return report


def _run_tasks(
    folder: Path, recipe: TrainingRecipe, plan: Plan, tasks: TaskSet, options: dict[str, Any]
) -> list[Metric]:
    """Tasks on a checkpoint with its weights as quantizing it would leave them."""
    source = replace(plan.source, pretrained=str(folder))
    model = convert(source.make(0), recipe, allow_high=plan.allow_high).eval()
    if torch.cuda.is_available():
        model.to("cuda")
    with weights_only(model):
        return tasks.run(EvalModel(folder.name, str(folder), model, plan.source.tokenizer), **options)
