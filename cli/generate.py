"""``mxquant generate``."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import console, handle_errors, human_bytes, write_json
from mxquant.cli.options import loading_options

if TYPE_CHECKING:
    from mxquant.evals.generation import Generated

_EPILOG = """\b
Examples:
  mxquant generate ./Llama-3-8B-nvfp4 "The three laws of robotics are"
  mxquant generate ./Llama-3-8B-nvfp4 "Write a haiku." --temperature 0.7 --top-p 0.9 --seed 1
  cat question.txt | mxquant generate ./Llama-3-8B-nvfp4 - --chat --json
"""


# Logits divided by less would not be finite.
_COLDEST = 1e-3


class _Temperature(click.FloatRange):
    """0, or a number that logits can be divided by."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if number and not _COLDEST <= number < math.inf:
            self.fail(f"{value} is neither 0 nor a finite number of at least {_COLDEST}", param, ctx)
        return number


@click.command("generate", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("path", type=click.Path())
@click.argument("prompt")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Maximum number of new tokens."
)
@click.option(
    "--temperature",
    type=_Temperature(),
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 is greedy decoding.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the most likely tokens with this total probability.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for sampling.")
@click.option(
    "--chat/--raw",
    default=None,
    help="Apply the tokenizer's chat template to PROMPT, or continue PROMPT as it is.  [default: --chat if it has one]",
)
@loading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON when done.")
@handle_errors
def generate_command(path: str, prompt: str, **options: Any) -> None:
    """Continue PROMPT (- reads standard input) with the model PATH, and print the text as it is generated.

    PATH is a folder or a hub id, quantized or dense. Weights that mxquant can read stay packed. Speed and the
    memory held go to standard error.
    """
    if options["top_p"] < 1 and options["temperature"] == 0:
        raise click.UsageError("--top-p requires --temperature above 0")
    if prompt == "-":
        prompt = _read_stdin()
    with console().status("starting"):
        from mxquant.evals.find_model import find_model
        from mxquant.evals.models import load_model, quiet_transformers

        quiet_transformers(progress_bars=False)
    as_json = options.pop("as_json")
    loading = {name: options.pop(name) for name in ("dtype", "device", "trust_remote_code")}
    with console().status("loading the model"):
        source = find_model(path, trust_remote_code=loading["trust_remote_code"])
        model = load_model(source, **loading)
    from mxquant.evals.generation import GenerateSettings, generate

    found = generate(model, prompt, GenerateSettings(**options), None if as_json else _print)
    if as_json:
        write_json(found.to_dict())
        return
    click.echo()
    click.echo(_figures(found), err=True)


def _read_stdin() -> str:
    from mxquant.errors import MXQuantError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MXQuantError(f"standard input is not UTF-8 (byte {error.start})") from error


def _print(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _figures(found: Generated) -> str:
    bits = "" if found.bits_per_weight is None else f", {found.bits_per_weight:.2f} bits"
    rate = "" if found.tokens_per_second is None else f" ({found.tokens_per_second:.1f} tokens/s)"
    held = "" if found.process_bytes is None else f", {human_bytes(found.process_bytes)} held in all"
    return (
        f"{found.prompt_tokens} prompt tokens in {found.prompt_seconds:.2f} s, {found.tokens} new in "
        f"{found.seconds:.2f} s{rate}, until {found.stopped}. "
        f"Weights {human_bytes(found.weight_bytes)} ({found.scheme}{bits}){held}."
    )
