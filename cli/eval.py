"""``mxquant eval``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import EXIT_FAILED, EXIT_GATE, console, handle_errors, write_json
from mxquant.cli.eval_options import cache_option, check_outputs, gate_options, limits_of, memory_of, output_options
from mxquant.cli.evaluating import prepare_libraries, print_tables, stage
from mxquant.cli.options import batch_size_option, check_task_options, loading_options, seq_len_option, task_options
from mxquant.extras import needs

if TYPE_CHECKING:
    from mxquant.evals.find_model import Source
    from mxquant.evals.gate import Limits
    from mxquant.evals.report import Report
    from mxquant.evals.tasks import TaskSet

_EPILOG = """\b
Examples:
  mxquant eval ./Llama-3-8B-fp4-ue5m3-b16 --baseline meta-llama/Llama-3-8B
  mxquant eval ./a --baseline ./dense --text notes.txt --max-ppl-increase 5% --max-kl 0.1
  mxquant eval ./a ./b --baseline ./dense --text notes.txt --text code.txt --cache ./results --report ab.md
  mxquant eval ./a --tasks hellaswag=hellaswag_val.jsonl,lambada=lambada_test.jsonl --no-perplexity
  mxquant eval ./a --tasks my_task --include-path ./my_tasks --limit 200 --json

\b
Exit codes:
  0  everything was measured, and every model is within the limits
  1  something could not be measured
  2  usage error
  3  a model is beyond a limit of --max-..., or has no figure to compare with it
"""


@click.command("eval", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--baseline", metavar="MODEL", help="Dense model to compare with: KL, top-1 agreement, perplexity ratio.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("wikitext2",),
    metavar="wikitext2|builtin|FILE",
    help="Text for perplexity: WikiText-2's test split from the hub, Python's documentation, or a UTF-8 file. "
    "May be given several times.  [default: wikitext2]",
)
@seq_len_option
@click.option("--windows", type=click.IntRange(min=1), help="Use only the first N windows.  [default: the whole text]")
@batch_size_option
@click.option("--no-perplexity", is_flag=True, help="Skip perplexity and only run tasks.")
@task_options
@gate_options
@loading_options
@cache_option
@output_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def eval_command(models: tuple[str, ...], **options: Any) -> None:
    """Measure models: perplexity, divergence from a baseline, downstream tasks.

    MODEL is a folder or a hub id, quantized (its weights stay packed) or dense. Perplexity is over
    non-overlapping windows, each after a BOS token where the tokenizer adds one. With --baseline, all
    models are held in memory at once, so that the baseline's logits are computed once.
    """
    limits = _check(options)
    # The slow imports come last: names are mistyped often.
    from mxquant.evals.text import load_texts

    with console().status("reading the text"):
        texts = [] if options["no_perplexity"] else load_texts(options["texts"])
    sources, baseline = _find_models(models, options)
    prepare_libraries()
    from mxquant.errors import MXQuantError
    from mxquant.evals import gate
    from mxquant.evals.report import Report
    from mxquant.evals.run import run
    from mxquant.evals.settings import EvalSettings

    tasks = _find_tasks(options)
    settings = EvalSettings(**{name: options[name] for name in EvalSettings.__dataclass_fields__})
    report, memory = Report([], texts), memory_of(options, settings, tasks)
    try:
        run(report, sources, settings, baseline=baseline, tasks=tasks, memory=memory, stage=stage)
    except MXQuantError:
        if report.results:  # hours may have gone into what was found before
            publish(report, options)
        raise
    if limits is not None:
        report.gate = gate.check(limits, report.results, [text.name for text in texts])
    publish(report, options)
    _fail(report)


def _fail(report: Report) -> None:
    """Say what is wrong, and end with its exit code."""
    failures = [] if report.gate is None else report.gate.failures
    for line in [*report.problems, *failures]:
        click.echo(f"Error: {line}", err=True)
    if failures:
        sys.exit(EXIT_GATE)
    if report.problems:
        sys.exit(EXIT_FAILED)


def publish(report: Report, options: dict[str, Any]) -> None:
    """Write what was asked for, and print the tables or JSON to standard output."""
    if options["output"] is not None:
        write_json(report.to_dict(), options["output"])
    if options["plot"] is not None:
        from mxquant.evals.plots import plot_comparison

        plot_comparison(report.results, options["plot"], report.measured_on())
    if options["report"] is not None:
        from mxquant.evals.markdown import write_report

        write_report(report, options["report"], options["report"].with_suffix(".png"))
    if options["as_json"]:
        write_json(report.to_dict())
        return
    print_tables(report)
    for key in ("output", "plot", "report"):
        if options[key] is not None:
            click.echo(f"Wrote {options[key]}.")


def _check(options: dict[str, Any]) -> Limits | None:
    """What can be known to be wrong before anything is read; returns the limits of the gate."""
    check_task_options(options)
    if options["no_perplexity"] and options["tasks"] is None:
        raise click.UsageError("--no-perplexity requires --tasks")
    if options["baseline"] is not None:
        needs("--baseline", "scipy", extra="eval")
    check_outputs(options)
    return limits_of(options)


def _find_models(models: tuple[str, ...], options: dict[str, Any]) -> tuple[list[Source], Source | None]:
    """The models' configs; one that does not exist is an error now, not after hours."""
    from mxquant.evals.find_model import find_model

    with console().status("locating the models"):
        trust = options["trust_remote_code"]
        sources = [find_model(model, trust_remote_code=trust) for model in models]
        given = options["baseline"]
        return sources, None if given is None else find_model(given, trust_remote_code=trust)


def _find_tasks(options: dict[str, Any]) -> TaskSet | None:
    if options["tasks"] is None:
        return None
    from mxquant.evals.tasks import TaskSet

    with console().status("preparing the tasks"):
        return TaskSet(options["tasks"].split(","), options["include_path"])
