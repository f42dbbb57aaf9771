"""Options that commands share: number formats, how models are loaded, and which text and tasks they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mxquant.extras import needs
from mxquant.schemes.formats import ELEMENTS, PRESETS, ROUNDINGS, SCALES, QuantScheme, scale_rules

F = TypeVar("F", bound=Callable[..., Any])


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which ``--help`` lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


scheme_options = all_of(
    click.option("--scheme", metavar="SCHEME", help="Scheme as text, e.g. e4m3+global/8/absmax; see below."),
    click.option("--format", "preset", type=click.Choice(list(PRESETS)), help="Preset to start from; see below."),
    click.option("--element", type=click.Choice(list(ELEMENTS)), help="Element format.  [default: fp4_e2m1]"),
    click.option("--scale", type=click.Choice(list(SCALES)), help="Block scale format.  [default: ue5m3]"),
    click.option("--block", metavar="N|RxC", help="Block length along the input features, or a tile.  [default: 16]"),
    click.option("--global-scale/--no-global-scale", default=None, help="Add one fp32 scale per tensor."),
    click.option("--scale-rule", type=click.Choice(scale_rules()), help="How a block's scale is computed; see below."),
    click.option("--rounding", type=click.Choice(ROUNDINGS), help="Rounding of elements.  [default: nearest]"),
)
SCHEME_HELP = """\b
Schemes:
  --scheme takes a scheme as recipes write it: preset, element, scale (+global for
  a global scale), block, scale rule and rounding, separated by slashes. The other
  options override parts of it, or of the preset given with --format. --scale resets
  the scale: no global scale and the new format's default rule, unless given too.

\b
Presets:
  mxfp4  fp4_e2m1, e8m0 scales, blocks of 32        nvfp4  fp4_e2m1, e4m3 scales, blocks of 16, global scale
  mxfp8  fp8_e4m3, e8m0 scales, blocks of 32        mxfp6  fp6_e2m3, e8m0 scales, blocks of 32

\b
Scale rules (the first is the default):
  e4m3, ue5m3  search, absmax, absmax-nonzero, ceil, four-over-six
  e8m0         even, floor, ceil, rceil, oas, search
  bf16, fp32   absmax
"""
seq_len_option = click.option(
    "--seq-len",
    type=click.IntRange(min=2),
    help="Tokens per window.  [default: 2048, or the models' limit if smaller]",
)
batch_size_option = click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Windows or items per batch."
)
task_options = all_of(
    click.option(
        "--tasks",
        metavar="A,B=FILE",
        help="lm-eval tasks to run, by name or YAML file; hellaswag and lambada also take a local JSONL file.",
    ),
    click.option("--limit", type=click.FloatRange(min=0, min_open=True), help="Items per task; a fraction if below 1."),
    click.option(
        "--num-fewshot", type=click.IntRange(min=0), help="Few-shot examples per item.  [default: the task's]"
    ),
    click.option("--include-path", type=click.Path(), help="Folder with your own task YAML files."),
)
loading_options = all_of(
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Dtype of activations and dense weights; auto is the checkpoint's.",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="Device: cpu, cuda, cuda:1, ...; auto uses CUDA if available.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Allow running code that comes with a checkpoint."),
)


def check_task_options(options: dict[str, Any]) -> None:
    """Raise ``UsageError`` for options that say how to run tasks where there are none, or without lm-eval."""
    if options["tasks"] is None:
        for name in ("limit", "num_fewshot", "include_path"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} requires --tasks")
    else:
        needs("--tasks", "lm_eval", extra="eval")


def scheme_from(options: dict[str, Any]) -> QuantScheme | None:
    """The scheme that ``scheme_options`` ask for, as ``QuantScheme.merge`` has it; None where none was given."""
    text, preset = options["scheme"], options["preset"]
    changes = {name: options[name] for name in QuantScheme.__dataclass_fields__ if options[name] is not None}
    if text is not None and preset is not None:
        raise click.UsageError(
            f"--scheme and --format cannot be combined; write both as one scheme, e.g. --scheme {preset}/16"
        )
    if text is None and preset is None and not changes:
        return None
    base = QuantScheme() if text is None else QuantScheme.parse(text)
    return (base if preset is None else QuantScheme.preset(preset)).merge(**changes)
