"""One training run on the Trainer of transformers, so that accelerate, FSDP and resuming come with it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from mxquant.errors import MXQuantError
from mxquant.training import callbacks
from mxquant.training.conversion import convert, decoder_blocks, noise_of, weights_only
from mxquant.training.data import Windows
from mxquant.training.recipes import TrainingRecipe, weights_as_yaml

DTYPES = ("float32", "bfloat16")
# Beside a checkpoint: the recipe for `mxquant quantize` that gives the weights of the training forward.
QUANT_RECIPE = "quantize.yaml"
_CURVE = {"loss", "eval_loss", "packed_loss"}
_RUN_FILE, _RESULT_FILE, _STATE_FILE = "run.json", "result.json", "trainer_state.json"


@dataclass(frozen=True)
class RunSettings:
    """How a run is made. Batches count windows of one process and micro-step; ``lr`` is the peak.

    ``dtype``: that of products outside the optimizer (bfloat16: autocast); parameters stay fp32.
    ``save_every``, ``eval_every``: steps, 0 for at the end only. ``monitor_every``: steps, 0 for never.
    """

    steps: int = 300
    batch_size: int = 4
    grad_accum: int = 1
    lr: float = 2.5e-3
    warmup: int = 30
    weight_decay: float = 0.1
    dtype: str = "float32"
    seed: int = 0
    save_every: int = 0
    eval_every: int = 0
    monitor_every: int = 20
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "grad_accum": 1}
        for name in (*least, "warmup", "save_every", "eval_every", "monitor_every"):
            if (value := getattr(self, name)) < least.get(name, 0):
                option = name.replace("_", "-")
                raise MXQuantError(f"--{option} must be at least {least.get(name, 0)}, not {value}")
        if not 0 < self.lr < float("inf"):
            raise MXQuantError(f"the learning rate must be positive, not {self.lr}")
        if self.dtype not in DTYPES:
            raise MXQuantError(f"unknown dtype {self.dtype!r}; choose from {', '.join(DTYPES)}")


@dataclass
class RunResult:
    """What became of a run.

    ``curve``: a row for each step (``step``, ``loss``, ``grad_norm``, ``learning_rate`` and, where it was
    monitored, ``saturated``, ``zero_scale``, ``mismatch``, ``roles``) and for each evaluation
    (``step``, ``eval_loss``). ``loss``: mean of the last tenth of the steps. ``eval_loss``: at the end, with
    the forward of training. ``packed_loss``: with its weights and activations in high precision, as the
    quantized checkpoint has it; None for recipes that quantize nothing. ``problem``: how it diverged.
    ``seconds_a_step``: of the steps made since the run was last taken up, evaluations between them included.
    """

    recipe: str
    seed: int
    steps: int
    curve: list[dict[str, Any]] = field(default_factory=list)
    loss: float | None = None
    eval_loss: float | None = None
    packed_loss: float | None = None
    problem: str | None = None
    seconds_a_step: float | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of every step, as far as they are finite."""
        return [row["loss"] for row in self.curve if row.get("loss") is not None]

    def finish(self) -> None:
        """Fill in what follows from the curve."""
        if self.problem is None:
            tail = self.losses[-max(1, len(self.losses) // 10) :]
            self.loss = sum(tail) / len(tail)
            self.eval_loss, self.packed_loss = self._last("eval_loss"), self._last("packed_loss")

    def _last(self, name: str) -> float | None:
        return next((row[name] for row in reversed(self.curve) if name in row), None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    model: PreTrainedModel,
    recipe: TrainingRecipe | str,
    windows: torch.Tensor,
    settings: RunSettings,
    folder: Path,
    *,
    eval_windows: torch.Tensor | None = None,
    resume: bool = False,
    allow_high: bool = False,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunResult:
    """Convert a model by a recipe and train it, in place; the checkpoint is left in ``folder``.

    Parameters
    ----------
    model : a causal LM with fp32 parameters.
    windows, eval_windows : int64 ``[n, length]`` token ids to train on and to evaluate on.
    resume : take up the last checkpoint in ``folder``, or return the result that is there.
    report : called with every row of the curve.

    A run that diverges is stopped and says so in its result; its weights are not saved. Raises
    ``MXQuantError`` when asked to resume a run that was made otherwise.
    """
    recipe = TrainingRecipe.of(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"windows": len(windows), "seq_len": windows.shape[1], "checksum": int(windows.sum())}
    done = _prepare(folder, {"recipe": recipe.to_dict(), "settings": asdict(settings), "data": data}, resume)
    if done is not None:
        return done
    blocks = decoder_blocks(model)
    convert(model, recipe, seed=settings.seed, allow_high=allow_high)
    if settings.gradient_checkpointing:
        # Its name in transformers 6, which 5 has too from some release on.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    checkpoint = _last_checkpoint(folder) if resume else None
    trainer, monitor, check = _trainer(model, windows, eval_windows, settings, folder)
    if report is not None:
        trainer.add_callback(callbacks.ProgressCallback(report))
    before = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    started = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        monitor.close()
    result = RunResult(recipe.name, settings.seed, trainer.state.global_step, problem=check.problem)
    if made := result.steps - before:
        result.seconds_a_step = (time.perf_counter() - started) / made
    if check.problem is None:
        if eval_windows is not None and "eval_loss" not in trainer.state.log_history[-2]:
            trainer.evaluate()
        if eval_windows is not None and recipe.quantizes:
            with weights_only(model):
                trainer.evaluate(metric_key_prefix="packed")
        trainer.save_model(str(folder))
        if trainer.is_world_process_zero() and recipe.quantizes:
            (folder / QUANT_RECIPE).write_text(weights_as_yaml(recipe, blocks))
    result.curve = [_tidy(row) for row in trainer.state.log_history if _CURVE & row.keys()]
    result.finish()
    if trainer.is_world_process_zero():
        (folder / _RESULT_FILE).write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    return result


def _prepare(folder: Path, description: dict[str, Any], resume: bool) -> RunResult | None:
    """Check that the folder holds nothing else; the result that is there already, if it is to be resumed."""
    file, result = folder / _RUN_FILE, folder / _RESULT_FILE
    if resume and file.exists():
        before = json.loads(file.read_text())
        for part, value in description.items():
            if before.get(part) != json.loads(json.dumps(value)):
                raise MXQuantError(
                    f"the run in {folder} was made with other {part}; resume it with the same options, "
                    "or use another --output"
                )
        if result.exists():
            return RunResult(**json.loads(result.read_text()))
    elif not resume and (result.exists() or _last_checkpoint(folder) is not None):
        raise MXQuantError(f"{folder} holds a run already; pass --resume to go on with it, or use another --output")
    if not file.exists() and int(os.environ.get("RANK", "0")) == 0:
        file.write_text(json.dumps(description, indent=1) + "\n")
    return None


def _last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that is whole: the Trainer writes its state last."""
    found = [p for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (p / _STATE_FILE).is_file()]
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def _trainer(
    model: PreTrainedModel,
    windows: torch.Tensor,
    eval_windows: torch.Tensor | None,
    settings: RunSettings,
    folder: Path,
) -> tuple[Trainer, callbacks.MonitorCallback, callbacks.DivergenceCallback]:
    arguments = _arguments(settings, folder, evaluates=eval_windows is not None)
    batch = settings.batch_size * settings.grad_accum * arguments.world_size
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(windows, seed=settings.seed, count=settings.steps * batch),
        eval_dataset=None if eval_windows is None else Windows(eval_windows),
    )
    trainer.remove_callback(PrinterCallback)
    noise = noise_of(model)
    if noise is not None:
        trainer.add_callback(callbacks.NoiseCallback(noise))
    monitor, check = (
        callbacks.MonitorCallback(settings.monitor_every or settings.steps + 1),
        callbacks.DivergenceCallback(),
    )
    if noise is not None and settings.monitor_every:
        trainer.add_callback(monitor)
    trainer.add_callback(check)
    return trainer, monitor, check


def _arguments(settings: RunSettings, folder: Path, *, evaluates: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.grad_accum,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.01},
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=settings.weight_decay,
        max_grad_norm=1.0,
        bf16=settings.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        torch_compile=settings.compile,
        seed=settings.seed,
        train_sampling_strategy="sequential",  # the data set has its own order
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy=SaveStrategy.STEPS if settings.save_every else SaveStrategy.NO,
        save_steps=settings.save_every or settings.steps,
        save_total_limit=2,
        eval_strategy="steps" if settings.eval_every and evaluates else "no",
        eval_steps=settings.eval_every or None,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _tidy(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the Trainer's log without what depends on the clock; null where JSON has no number."""
    row = {k: v for k, v in row.items() if k != "epoch" and not k.endswith(("_runtime", "_second"))}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
