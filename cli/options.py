"""Options that commands share: how models are loaded, and which text and tasks they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which ``--help`` lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


seq_len_option = click.option(
    "--seq-len",
    type=click.IntRange(min=2),
    help="Tokens in a window.  [default: 2048, or the models' limit if smaller]",
)
batch_size_option = click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Windows or items at once."
)
task_options = all_of(
    click.option(
        "--tasks",
        metavar="A,B=FILE",
        help="lm-eval tasks to run as well, by name or YAML file; hellaswag and lambada with a JSONL file of yours.",
    ),
    click.option("--limit", type=click.FloatRange(min=0, min_open=True), help="Items per task; a share if below 1."),
    click.option(
        "--num-fewshot", type=click.IntRange(min=0), help="Solved examples before each item.  [default: the task's]"
    ),
    click.option("--include-path", type=click.Path(), help="Folder of task YAMLs of your own."),
)
loading_options = all_of(
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Of activations and dense weights; auto is the checkpoint's.",
    ),
    click.option(
        "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto is CUDA if there is one."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with a checkpoint."),
)


def check_task_options(options: dict[str, Any]) -> None:
    """Raise ``UsageError`` for options that say how to run tasks where there are none."""
    if options["tasks"] is None:
        for name in ("limit", "num_fewshot", "include_path"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --tasks")
