"""What a run adds to the Trainer: noise that follows the steps, statistics, and a look for divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mxquant.training.monitor import Monitor
from mxquant.training.noise import Noise

# A run whose mean loss over a window of steps is this many nats above its lowest has diverged.
DIVERGED_NATS = 1.0
_WINDOW = 10


class NoiseCallback(TrainerCallback):
    """Sets the pass of the noise from the Trainer's step, so that a resumed run draws what it would have."""

    def __init__(self, noise: Noise):
        self._noise = noise

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._noise.start(state.global_step * args.gradient_accumulation_steps)


class MonitorCallback(TrainerCallback):
    """Monitors every ``every``-th step, the first one included, and adds what it saw to that step's log."""

    def __init__(self, every: int):
        self._every = every
        self._monitor: Monitor | None = None
        self._summary: dict[str, Any] | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._every == 0:
            self._monitor = Monitor().__enter__()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._summary = self._monitor.summary()
            self.close()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._summary is not None and "loss" in state.log_history[-1]:
            state.log_history[-1] |= self._summary
            self._summary = None

    def close(self) -> None:
        """Stop monitoring, whatever happened to the step."""
        if self._monitor is not None:
            self._monitor.__exit__(None, None, None)
            self._monitor = None


class DivergenceCallback(TrainerCallback):
    """Stops a run that has diverged; ``problem`` says how one could tell."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        steps = [row for row in state.log_history if "loss" in row]
        if steps and "loss" in state.log_history[-1]:
            self.problem = divergence([row["loss"] for row in steps], steps[-1].get("grad_norm", 0.0))
            if self.problem:
                self.problem = f"step {state.global_step}: {self.problem}"
                control.should_training_stop = True
                control.should_save = control.should_evaluate = False


class ProgressCallback(TrainerCallback):
    """Calls ``report(row)`` with every row of the log."""

    def __init__(self, report: Callable[[dict[str, Any]], None]):
        self._report = report

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._report(state.log_history[-1])


def divergence(losses: list[float], grad_norm: float = 0.0) -> str | None:
    """What shows that a run with these losses has diverged, or None.

    A loss or gradient norm that is not finite, or a mean over the last 10 losses that is one nat above
    the lowest such mean, or above the first loss.
    """
    if not math.isfinite(losses[-1]):
        return f"the loss is {losses[-1]}"
    if not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    if len(losses) < _WINDOW:
        return None
    means = [sum(losses[i : i + _WINDOW]) / _WINDOW for i in range(len(losses) - _WINDOW + 1)]
    lowest = min(losses[0], *means)
    if means[-1] > lowest + DIVERGED_NATS:
        return f"the loss rose from {lowest:.3f} to {means[-1]:.3f}, the mean of the last {_WINDOW} steps"
    return None
