"""``mxquant train``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import console, handle_errors, write_json
from mxquant.cli.options import check_task_options, task_options
from mxquant.extras import needs
from mxquant.schemes.formats import ROUNDINGS

if TYPE_CHECKING:
    from mxquant.evals.training.study import Plan, Study
    from mxquant.training.recipes import TrainingRecipe

_EPILOG = """\b
Examples:
  mxquant train --recipe bf16 --recipe mxfp4-1d --recipe fp4-2d --output ./runs
  mxquant train --recipe fp4-2d --recipe bf16 --seeds 0,1,2 --steps 1000 --output ./runs --resume
  mxquant train --from ./model --recipe ue5m3-2d --text notes.txt --lr 1e-4 --output ./tuned
  mxquant quantize ./tuned/ue5m3-2d --recipe ./tuned/ue5m3-2d/quantize.yaml
  mxquant train --config olmo-1b.json --recipe fp4-2d-qk8 --dry-run
  accelerate launch --num_processes 8 -m mxquant.cli.main train --recipe fp4-2d --output ./runs

\b
Recipes:
  bf16            nothing is quantized: the baseline
  mxfp4-1d        blocks of 32, scales rounded down, rounding to nearest (naive)
  mxfp4-1d-tf-sr  the same blocks, truncation-free scales, stochastic gradients
  fp4-2d          32x32 tiles, truncation-free scales, stochastic gradients (arXiv 2607.24953)
  fp4-2d-qk8      fp4-2d with MXFP8 for queries and keys: the whole recipe of that paper
  nvfp4           NVFP4 with 16x16 weight tiles and a Hadamard transform (arXiv 2509.25149)
  ue5m3-2d        fp4-2d with UE5M3 scales
  FILE.yaml       one of your own: ordered rules, formats for each role
"""

_LR_SCRATCH, _LR_CHECKPOINT = 2.5e-3, 1e-4


@click.command("train", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="NAME|FILE",
    help="Training recipe, see below; may be given several times.  [default: bf16, fp4-2d]",
)
@click.option("--from", "pretrained", metavar="MODEL", help="Dense checkpoint to start from, a folder or hub id.")
@click.option("--config", metavar="FILE", help="config.json of a model to train from scratch.  [default: a tiny Llama]")
@click.option("--tokenizer", metavar="FOLDER", help="Tokenizer for --config.  [default: the bundled model's]")
@click.option(
    "--text",
    default="builtin",
    show_default=True,
    metavar="builtin|FILE|DATASET",
    help="Python's documentation, a UTF-8 file, or a data set: a folder or hub id, owner/name or owner/name:config.",
)
@click.option("--text-column", default="text", show_default=True, help="Column of a data set.")
@click.option("--eval-text", metavar="builtin|wikitext2|FILE", help="Text to evaluate on.  [default: a held-out part]")
@click.option("--eval-windows", type=click.IntRange(min=1), help="Use only its first N windows.")
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Optimizer steps.")
@click.option("--batch-size", type=click.IntRange(min=1), default=4, show_default=True, help="Windows per batch.")
@click.option(
    "--grad-accum", type=click.IntRange(min=1), default=1, show_default=True, help="Micro-batches per optimizer step."
)
@click.option("--seq-len", type=click.IntRange(min=2), help="Tokens per window.  [default: 512, or the model's limit]")
@click.option("--lr", type=float, help=f"Peak learning rate.  [default: {_LR_SCRATCH}; with --from {_LR_CHECKPOINT}]")
@click.option("--warmup", type=click.IntRange(min=0), help="Linear warm-up steps.  [default: a tenth of --steps]")
@click.option(
    "--seed",
    "--seeds",
    "seeds",
    default="0",
    show_default=True,
    metavar="N,N,...",
    help="Seeds; each recipe is run with each.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Dtype of products (autocast); parameters and the optimizer are fp32.",
)
@click.option("--block", metavar="N|RxC", help="Block or tile of every FP4 operand instead of the recipe's.")
@click.option(
    "--rounding",
    multiple=True,
    metavar="ROLE=HOW",
    help="Rounding of weight, activation or gradient, e.g. gradient=nearest.",
)
@click.option("--exclude", multiple=True, metavar="REGEX", help="Keep matching modules in high precision.")
@click.option("--allow-high", is_flag=True, help="Allow weights that cannot be trained in FP4, such as fused experts.")
@click.option("--save-every", type=click.IntRange(min=1), help="Steps between checkpoints to resume from.")
@click.option("--eval-every", type=click.IntRange(min=1), help="Steps between evaluations.")
@click.option(
    "--monitor-every",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Steps between measurements of the quantization; 0 turns them off.",
)
@click.option(
    "--gradient-checkpointing", is_flag=True, help="Recompute activations in the backward pass to save memory."
)
@click.option("--compile", is_flag=True, help="Compile the model with torch.compile.")
@task_options
@click.option("--trust-remote-code", is_flag=True, help="Allow running code that comes with a checkpoint.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="mxquant-train",
    show_default=True,
    help="Output folder for checkpoints and results.",
)
@click.option("--resume", is_flag=True, help="Resume the runs in the output folder.")
@click.option("--dry-run", is_flag=True, help="Print memory and theoretical speed-up of each recipe, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def train_command(**options: Any) -> None:
    """Train a model with FP4 linear layers, simulated exactly.

    With several recipes each is trained on the same data from the same start. Leaves a checkpoint for
    each in OUTPUT, with the recipe by which `mxquant quantize` gives the very weights that forward saw,
    and curves.png, study.json. A run that diverges is stopped and reported; the others go on.
    """
    check_task_options(options)
    recipes = _recipes(options)
    if options["pretrained"] and (options["config"] or options["tokenizer"]):
        raise click.UsageError("--from cannot be combined with --config or --tokenizer")
    if not options["dry_run"]:
        needs("mxquant train", "matplotlib", extra="plot")
        if len(_seeds(options["seeds"])) > 1:
            needs("--seeds", "scipy", extra="eval")
    from mxquant.cli import train_tables
    from mxquant.cli.evaluating import prepare_libraries

    prepare_libraries()
    from mxquant.evals.training.study import is_main_process

    plan = _plan(recipes, options)
    if options["dry_run"]:
        costs = plan.costs()
        if options["as_json"]:
            write_json([cost.to_dict() for cost in costs])
        else:
            train_tables.print_costs(plan.source.name, costs)
        return
    study = _run(plan, options)
    if not is_main_process():
        return
    if options["as_json"]:
        from mxquant.evals.training.summary import to_dict

        write_json(to_dict(study))
        return
    train_tables.print_study(study)
    click.echo(f"Wrote curves.png, study.json and the checkpoints to {options['output']}.")


def _recipes(options: dict[str, Any]) -> tuple[TrainingRecipe, ...]:
    from mxquant.training.recipes import TrainingRecipe

    found = []
    for name in options["recipes"] or ("bf16", "fp4-2d"):
        recipe = TrainingRecipe.of(name)
        if recipe.quantizes:
            rounding = dict(_role_and_rounding(text) for text in options["rounding"])
            recipe = recipe.override(block=options["block"], rounding=rounding, exclude=options["exclude"])
        found.append(recipe)
    return tuple(found)


def _role_and_rounding(text: str) -> tuple[str, str]:
    role, equals, how = text.partition("=")
    if not equals or how not in ROUNDINGS:
        raise click.UsageError(f"--rounding {text!r} must look like gradient=nearest or gradient=stochastic")
    return role, how


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"--seeds {text!r} must be numbers such as 0,1,2") from error


def _plan(recipes: tuple[TrainingRecipe, ...], options: dict[str, Any]) -> Plan:
    """Everything that can be wrong is found here, before anything is trained."""
    from mxquant.evals.text import EvalText
    from mxquant.evals.training.initial_model import from_checkpoint, from_config
    from mxquant.evals.training.study import Plan
    from mxquant.evals.training.text import TrainingText, load_training_text
    from mxquant.training.run import RunSettings

    steps, warmup = options["steps"], options["warmup"]
    given: dict[str, Any] = {
        **{name: options[name] for name in ("steps", "batch_size", "grad_accum", "dtype", "monitor_every")},
        **{name: options[name] or 0 for name in ("save_every", "eval_every")},
    }
    settings = RunSettings(
        lr=options["lr"] or (_LR_CHECKPOINT if options["pretrained"] else _LR_SCRATCH),
        warmup=steps // 10 if warmup is None else warmup,
        **given,
        gradient_checkpointing=options["gradient_checkpointing"],
        compile=options["compile"],
    )
    with console().status("reading model and text"):
        if options["pretrained"]:
            source = from_checkpoint(options["pretrained"], trust_remote_code=options["trust_remote_code"])
        else:
            source = from_config(options["config"], options["tokenizer"])
        if options["dry_run"]:
            text = TrainingText("none", (), EvalText("none", ""))
        else:
            # English has about 4 characters a token; 8 leave room for texts with more.
            tokens = steps * options["batch_size"] * options["grad_accum"] * (options["seq_len"] or 512)
            text = load_training_text(
                options["text"],
                eval_text=options["eval_text"],
                column=options["text_column"],
                characters=8 * tokens,
            )
        plan = Plan(
            source,
            text,
            recipes,
            settings,
            seeds=_seeds(options["seeds"]),
            seq_len=options["seq_len"],
            eval_windows=options["eval_windows"],
            allow_high=options["allow_high"],
        )
        plan.check()
    return plan


def _run(plan: Plan, options: dict[str, Any]) -> Study:
    from mxquant.cli.evaluating import stage
    from mxquant.evals.run import silent
    from mxquant.evals.training.plots import plot_study
    from mxquant.evals.training.study import is_main_process, run_study
    from mxquant.evals.training.summary import to_dict

    tasks, output = None, options["output"]
    if options["tasks"] is not None:
        from mxquant.evals.tasks import TaskSet

        tasks = TaskSet(options["tasks"].split(","), options["include_path"])

    def finished(study: Study) -> None:
        """Write the results so far to disk after each run."""
        if is_main_process():
            write_json(to_dict(study), output / "study.json")
            with contextlib.suppress(ValueError):  # nothing to draw: every run diverged at once
                plot_study(study, output / "curves.png")
            if problem := study.runs[-1].problem:
                console().print(f"[yellow]Warning:[/] {study.runs[-1].recipe} diverged at {problem}")

    output.mkdir(parents=True, exist_ok=True)
    return run_study(
        plan,
        output,
        resume=options["resume"],
        tasks=tasks,
        task_options={"limit": options["limit"], "num_fewshot": options["num_fewshot"]},
        stage=stage if is_main_process() else silent,
        finished=finished,
    )
