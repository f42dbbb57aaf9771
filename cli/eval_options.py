"""Options of ``mxquant eval`` for its gate and for the files it writes, and what can be wrong with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.options import all_of
from mxquant.errors import MXQuantError
from mxquant.evals.gate import Limits, parse_share

if TYPE_CHECKING:
    from mxquant.evals.result_store import Memory
    from mxquant.evals.settings import EvalSettings
    from mxquant.evals.tasks import TaskSet


class _Share(click.ParamType):
    """``5%`` or ``0.05``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_share(str(value))
        except MXQuantError as error:
            raise click.BadParameter(str(error), ctx, param) from error


gate_options = all_of(
    click.option(
        "--max-ppl-increase",
        type=_Share(),
        metavar="5%",
        help="Fail (exit code 3) if a perplexity exceeds the baseline's by more than this; 5% or 0.05.",
    ),
    click.option(
        "--max-kl",
        type=click.FloatRange(min=0),
        metavar="NATS",
        help="Fail if the mean KL divergence from the baseline is larger, in nats per token.",
    ),
    click.option(
        "--max-accuracy-drop",
        type=_Share(),
        metavar="1%",
        help="Fail if a task's accuracy drops by more than this from the baseline's; 1% is one point. "
        "Limits are compared with the estimates, not with their intervals.",
    ),
)
output_options = all_of(
    click.option("--output", type=click.Path(path_type=Path), help="Write the results to this file as JSON."),
    click.option("--plot", type=click.Path(path_type=Path), help="Plot the comparison: .png, .pdf or .svg."),
    click.option(
        "--report",
        type=click.Path(path_type=Path),
        metavar="FILE.md",
        help="Write a Markdown report with tables, settings and versions, and its plot to FILE.png.",
    ),
)
cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache results in this folder and reuse them.  [default: no cache]",
)


def limits_of(options: dict[str, Any]) -> Limits | None:
    """The limits asked for, None without any. Raises ``UsageError`` where there is nothing to compare."""
    names = ("max_ppl_increase", "max_kl", "max_accuracy_drop")
    given = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    if not given:
        return None
    if options["baseline"] is None:
        raise click.UsageError(f"{given[0]} requires --baseline MODEL")
    if options["no_perplexity"] and given[0] != "--max-accuracy-drop":
        raise click.UsageError(f"{given[0]} cannot be combined with --no-perplexity")
    if options["max_accuracy_drop"] is not None and options["tasks"] is None:
        raise click.UsageError("--max-accuracy-drop requires --tasks")
    if options["max_kl"] is not None and not math.isfinite(options["max_kl"]):
        raise click.UsageError(f"--max-kl {options['max_kl']} is not a finite number")
    return Limits(options["max_ppl_increase"], options["max_kl"], options["max_accuracy_drop"])


def check_outputs(options: dict[str, Any]) -> None:
    """Raise ``UsageError`` or ``MXQuantError`` for a file that could not be written in the end."""
    for name in ("output", "plot", "report"):
        path = options[name]
        if path is not None and path.is_dir():
            raise click.UsageError(f"--{name} {path} is a folder; give a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"--{name} {path}: there is no folder {path.parent}")
    if options["report"] is not None and options["report"].suffix.lower() not in (".md", ".markdown"):
        raise click.UsageError(f"--report {options['report']}: the name of a Markdown report must end in .md")
    pictures = [options["plot"], options["report"] and options["report"].with_suffix(".png")]
    if any(pictures):
        from mxquant.presentation.picture import check_format

        for picture in filter(None, pictures):
            check_format(picture)


def memory_of(options: dict[str, Any], settings: EvalSettings, tasks: TaskSet | None) -> Memory | None:
    """What earlier evaluations left in ``--cache``, None without one."""
    if options["cache"] is None:
        return None
    from mxquant.evals.cache import ResultCache
    from mxquant.evals.result_store import Memory

    return Memory(ResultCache(options["cache"]), settings, tasks)
