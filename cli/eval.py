"""``mxquant eval``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import EXIT_FAILED, console, handle_errors, progress, write_json
from mxquant.cli.options import batch_size_option, check_task_options, loading_options, seq_len_option, task_options

if TYPE_CHECKING:
    from mxquant.evals.report import Report
    from mxquant.evals.sources import Source
    from mxquant.evals.tasks import TaskSet

_EPILOG = """\b
Examples:
  mxquant eval ./Llama-3-8B-fp4-ue5m3-b16 --baseline meta-llama/Llama-3-8B
  mxquant eval ./a ./b --baseline ./dense --text notes.txt --seq-len 512 --windows 20 --plot ab.png
  mxquant eval ./a --tasks piqa,hellaswag --limit 200 --no-perplexity
  mxquant eval ./a --tasks hellaswag=hellaswag_val.jsonl,lambada=lambada_test.jsonl --no-perplexity
  mxquant eval ./a --tasks my_task --include-path ./my_tasks --json
"""

# Wide enough for a line of every table where nobody's terminal sets the width.
_PIPE_WIDTH = 160

_SECONDS_BETWEEN_LINES = 10


@click.command("eval", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--baseline", metavar="MODEL", help="Dense model to compare with: KL, top-1 agreement, perplexity ratio.")
@click.option(
    "--text",
    default="wikitext2",
    show_default=True,
    metavar="wikitext2|builtin|FILE",
    help="Text for perplexity: WikiText-2's test split from the hub, Python's documentation, or a UTF-8 file.",
)
@seq_len_option
@click.option("--windows", type=click.IntRange(min=1), help="Use only the first windows.  [default: the whole text]")
@batch_size_option
@click.option("--no-perplexity", is_flag=True, help="Only run tasks.")
@task_options
@loading_options
@click.option("--output", type=click.Path(path_type=Path), help="Write the results to this file as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the comparison: .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def eval_command(models: tuple[str, ...], **options: Any) -> None:
    """Measure models: perplexity, divergence from a baseline, downstream tasks.

    MODEL is a folder or a hub id, quantized (its weights stay packed) or dense. Perplexity is over
    non-overlapping windows, each after a BOS token where the tokenizer adds one. With --baseline all
    models are held in memory together, so that each of its logits is computed once.
    """
    _check(options)
    # The slow imports come last: names are mistyped often.
    from mxquant.evals.text import load_text

    with console().status("reading the text"):
        text = None if options["no_perplexity"] else load_text(options["text"])
    sources, baseline = _find_models(models, options)
    prepare_libraries()
    from mxquant.errors import MXQuantError
    from mxquant.evals.report import Report
    from mxquant.evals.run import EvalSettings, run

    tasks = _find_tasks(options)
    fields = {name: options[name] for name in EvalSettings.__dataclass_fields__}
    report = Report([], text)
    try:
        run(report, sources, EvalSettings(**fields), baseline=baseline, tasks=tasks, stage=stage)
    except MXQuantError:
        if report.results:  # hours may have gone into what was found before
            publish(report, options)
        raise
    publish(report, options)
    for problem in report.problems:
        click.echo(f"Error: {problem}", err=True)
    if report.problems:
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def stage(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on standard error while ``what`` lasts: a bar, which pulses until a total is known.

    Where nobody watches, in a log file, it is a line with an estimate every now and then.
    """
    if not sys.stderr.isatty():
        yield _progress_lines(what)
        return
    with progress() as display:
        bar = display.add_task(what, total=None)
        yield lambda done, total: display.update(bar, completed=done, total=total)


def _progress_lines(what: str) -> Callable[[int, int], None]:
    began = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            left = (now - began) / done * (total - done)
            click.echo(f"{what}: {done} of {total}, about {left:.0f} s left", err=True)

    return report


def publish(report: Report, options: dict[str, Any]) -> None:
    """Write what was asked for, and print the tables or JSON to standard output."""
    if options["output"] is not None:
        write_json(report.to_dict(), options["output"])
    if options["plot"] is not None:
        from mxquant.evals.plots import plot_comparison

        plot_comparison(report.results, options["plot"], report.measured_on())
    if options["as_json"]:
        write_json(report.to_dict())
        return
    print_tables(report)
    for key in ("output", "plot"):
        if options[key] is not None:
            click.echo(f"Wrote {options[key]}.")


def print_tables(report: Report) -> None:
    """The tables and what they were measured on, to standard output."""
    from mxquant.cli.tables import new_console

    out = new_console(_PIPE_WIDTH)
    for table in report.tables(out.width):
        out.print(table)
    if note := report.footnote():
        click.echo(note)


def prepare_libraries() -> None:
    """Import the slow ones while something moves, and keep transformers' bars out of log files."""
    with console().status("starting"):
        from mxquant.evals.models import quiet_transformers

        quiet_transformers(progress_bars=sys.stderr.isatty())


def _check(options: dict[str, Any]) -> None:
    """What can be known to be wrong before anything is read."""
    check_task_options(options)
    if options["no_perplexity"] and options["tasks"] is None:
        raise click.UsageError("--no-perplexity leaves nothing to do without --tasks")
    if options["no_perplexity"] and options["plot"] is not None:
        raise click.UsageError("--plot draws perplexity, which --no-perplexity leaves out")
    for name in ("output", "plot"):
        path = options[name]
        if path is not None and path.is_dir():
            raise click.UsageError(f"--{name} {path} is a folder; give a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"--{name} {path}: there is no folder {path.parent}")
    if options["plot"] is not None:
        from mxquant.evals.plots import check_format

        check_format(options["plot"])


def _find_models(models: tuple[str, ...], options: dict[str, Any]) -> tuple[list[Source], Source | None]:
    """The models' configs; one that does not exist is an error now, not after hours."""
    from mxquant.evals.sources import find_model

    with console().status("looking for the models"):
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
