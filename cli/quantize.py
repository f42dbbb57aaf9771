"""``mxquant quantize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import console, handle_errors, printable, progress, write_json
from mxquant.cli.default_out import default_out
from mxquant.cli.options import SCHEME_HELP, scheme_from, scheme_options
from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

if TYPE_CHECKING:
    from mxquant.checkpoint.reader import Checkpoint
    from mxquant.convert.plan import QuantPlan
    from mxquant.convert.report import QuantReport

_EPILOG = f"""\b
Examples:
  mxquant quantize meta-llama/Llama-3-8B --scale ue5m3 --block 16
  mxquant quantize ./model --format nvfp4 --out ./model-nvfp4
  mxquant quantize ./model --scheme e4m3+global/16/absmax
  mxquant quantize ./model --scale ue5m3 --block 32x32 --exclude 'layers\\.0\\.' --dry-run
  mxquant quantize ./model --scale e4m3 --block 8 --activations e4m3+token/8 --kv-cache ue5m3/16
  mxquant quantize ./model --recipe recipe.yaml --json
  mxquant quantize ./model --format nvfp4 --max-shard-size 2GB --resume

{SCHEME_HELP}
\b
Schemes of activations and of the KV cache are written in the same way: ue5m3/16,
e4m3+global/16 (one global scale for all tokens) or e4m3+token/16 (one for each
token). Their default scale rule is absmax, or even for e8m0; "same" is the weights'
format with that rule. Both are simulated at run time: values are rounded, then
computed with in the model's dtype.

\b
A run that is killed or interrupted leaves its finished shards in OUT.partial.
The same command with --resume continues from there and gives the same OUT, byte
for byte. It is refused if the source, the recipe or a version has changed.
--max-shard-size limits how much work can be lost.
"""


class _Size(click.ParamType):
    """``5GB``, ``500MB`` or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().upper()
        for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("", 1)):
            if text.endswith(unit):
                try:
                    size = int(float(text.removesuffix(unit)) * factor)
                except (ValueError, OverflowError):  # of words, NaN and infinity
                    break
                if size > 0:
                    return size
        raise click.BadParameter(f"{value!r} is not a size such as 5GB or 500MB", ctx, param)


@click.command("quantize", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder.  [default: ./<name>-<scheme>]")
@scheme_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for stochastic rounding.")
@click.option(
    "--include", multiple=True, metavar="REGEX", help="Quantize only matching modules; may name the output head."
)
@click.option("--exclude", multiple=True, metavar="REGEX", help="Keep matching modules dense.")
@click.option("--activations", metavar="same|SCHEME|none", help="Simulate quantized activations at run time.")
@click.option("--kv-cache", metavar="SCHEME|none", help="Simulate a quantized KV cache at run time.")
@click.option("--recipe", type=click.Path(path_type=Path), help="YAML file with ordered `pattern: scheme` rules.")
@click.option("--device", default="cpu", show_default=True, help="Device to compute on, e.g. cuda.")
@click.option(
    "--max-shard-size", type=_Size(), default="5GB", show_default=True, help="Maximum size of an output file."
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Allow running code that comes with the checkpoint.")
@click.option("--allow-dense", is_flag=True, help="Allow large unquantized layers.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--overwrite", is_flag=True, help="Replace an existing model or an interrupted run.")
@click.option("--resume", is_flag=True, help="Resume an interrupted run, if there is one; see below.")
@click.option("--push-to-hub", "repo", metavar="REPO", help="Upload the output when done; a new repository is private.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or plan) as JSON.")
@handle_errors
def quantize_command(**options: Any) -> None:
    """Quantize the weights of SOURCE, a folder of safetensors or pytorch_model.bin, a .gguf file or a Hugging Face
    hub id.

    Prints the plan, streams the weights into OUT and ends with a report of what it cost, which is
    also kept as OUT/quantization_report.json. OUT loads with AutoModelForCausalLM.from_pretrained.
    """
    from rich.markup import escape

    from mxquant.cli import quantize_tables
    from mxquant.convert import pipeline
    from mxquant.convert.output import check_output

    recipe, label = _recipe(options)
    source = options["source"]
    out = options["out"] or default_out(str(source), label)
    quiet = options["as_json"]
    checkpoint, plan = pipeline.plan_model(
        source,
        recipe,
        max_shard_bytes=options["max_shard_size"],
        allow_dense=options["allow_dense"],
        trust_remote_code=options["trust_remote_code"],
        revision=options["revision"],
    )
    _check_device(options["device"])
    if options["repo"] is not None:
        from mxquant.checkpoint.upload import check_can_push

        check_can_push(options["repo"])
    if options["dry_run"]:
        if quiet:
            write_json({"out": str(out), **plan.to_dict()})
        else:
            quantize_tables.print_plan(plan, out)
        return
    if not options["resume"]:  # what it makes of an output that is there, the pipeline knows
        check_output(out, checkpoint, options["overwrite"])
    if not quiet:
        quantize_tables.print_plan_summary(plan, out)
    for warning in plan.warnings:
        console().print(f"[yellow]Warning:[/] {escape(printable(warning))}")
    report = _run(checkpoint, plan, out, options)
    if quiet:
        write_json(report.to_dict())
    elif report.resumed_parameters < plan.parameters:
        quantize_tables.print_report(report)
    if options["repo"] is not None:
        _push(out, options["repo"])


def _run(checkpoint: Checkpoint, plan: QuantPlan, out: Path, options: dict[str, Any]) -> QuantReport:
    from mxquant.convert.manifest import finished_shards
    from mxquant.convert.pipeline import run_plan
    from mxquant.convert.work_folder import WorkFolder

    with progress(enabled=not options["as_json"]) as display:
        task = display.add_task("Quantizing", total=plan.parameters)
        try:
            return run_plan(
                checkpoint,
                plan,
                out,
                device=options["device"],
                seed=options["seed"],
                overwrite=options["overwrite"],
                resume=options["resume"],
                progress=lambda name, count: display.advance(task, count),
                notify=lambda text: console().print(text, markup=False),
            )
        except KeyboardInterrupt:
            work = WorkFolder(out).path
            if count := finished_shards(work):
                left = f"{count} of {len(plan.shards)} shards are kept in {work}; --resume continues from there."
                console().print(left, markup=False)
            raise


def _push(out: Path, repo: str) -> None:
    from mxquant.checkpoint.upload import push_folder
    from mxquant.convert.card.files import read_report, write_card

    write_card(out, read_report(out), path=repo)
    click.echo(f"Pushed to {push_folder(out, repo)}", err=True)


def _recipe(options: dict[str, Any]) -> tuple[QuantRecipe, str]:
    """The recipe that the options ask for, and a label for the output's name."""
    given = scheme_from(options)
    patterns: dict[str, Any] = {"include": tuple(options["include"]), "exclude": tuple(options["exclude"])}
    dynamic: dict[str, Any] = {name: options[name] for name in ("activations", "kv_cache") if options[name] is not None}
    if options["recipe"] is not None:
        recipe = QuantRecipe.from_file(options["recipe"])
        if given is not None:
            if recipe.default is not None:
                raise SchemeError(f"{options['recipe']} has a default scheme; remove it, or omit the scheme options")
            recipe = replace(recipe, default=given)
        merged = {k: getattr(recipe, k) + v for k, v in patterns.items()}
        return replace(recipe, **merged, **dynamic), Path(options["recipe"]).stem
    scheme = given or QuantScheme()
    recipe = QuantRecipe(default=scheme, **patterns, **dynamic)
    parts = [scheme.name, *(["a4"] if recipe.activations else []), *(["kv"] if recipe.kv_cache else [])]
    return recipe, "-".join(parts)


def _check_device(name: str) -> None:
    import torch

    from mxquant.errors import MXQuantError

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise MXQuantError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if torch.device(name).type == "meta":
        raise MXQuantError(f"device {name!r} cannot be used: it holds no numbers")
