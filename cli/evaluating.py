"""What the commands that run models share: a quiet start, progress, the tables of a report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from mxquant.cli.common import console, output_console, progress

if TYPE_CHECKING:
    from mxquant.evals.report import Report


def prepare_libraries() -> None:
    """Import the slow ones while something moves, and keep transformers' bars out of log files."""
    with console().status("starting"):
        from mxquant.evals.models import quiet_transformers

        quiet_transformers(progress_bars=sys.stderr.isatty())


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
    from mxquant.evals.quiet import SECONDS_BETWEEN_LINES

    began = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - began) / done * (total - done)
            click.echo(f"{what}: {done} of {total}, about {left:.0f} s left", err=True)

    return report


def print_tables(report: Report) -> None:
    """The tables and what they were measured on, to standard output."""
    from mxquant.evals.tables import all_of

    output_console().print(*all_of(report.results, report.gate))
    if note := report.footnote():
        click.echo(note)
