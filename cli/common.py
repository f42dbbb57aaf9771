"""What subcommands share: error handling, consoles, progress and formatting."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Exit codes: 1 the work failed, 2 the request was wrong (click's own), 3 a model failed the gate of `eval`,
# 10 and more the faults that `verify` finds, 130 interrupted.
EXIT_FAILED = 1
EXIT_GATE = 3

# Wide enough for a line of almost every table where nobody's terminal sets the width.
_PIPE_WIDTH = 160


def console() -> Console:
    """A console on standard error; standard output is left to results such as ``--json``."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def output_console() -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough for most lines where it is none."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def handle_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors that are meant for users into one line of text and an exit code.

    Anything else is a bug and keeps its traceback. ``MXQUANT_DEBUG=1`` keeps all tracebacks.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from mxquant.errors import MXQuantError

        try:
            return function(*args, **kwargs)
        except (MXQuantError, OSError) as error:
            if os.environ.get("MXQUANT_DEBUG"):
                raise
            for line in error_lines(error):
                click.echo(f"Error: {line}", err=True)
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(130)

    return wrapper


def error_lines(error: Exception) -> list[str]:
    """What to print of an error: one line for each problem, whatever characters a name in it has."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return [printable(f"{error.filename}: {error.strerror}")]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # while writing, no name is told
        return [f"cannot write the output: {error.strerror}"]
    problems = getattr(error, "problems", None) or [str(error)]
    return [printable(problem) or type(error).__name__ for problem in problems]


def printable(text: str) -> str:
    """The text on one line, with escapes for what would move a terminal's cursor or cannot be encoded."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.splitlines()))


@contextlib.contextmanager
def progress(enabled: bool = True) -> Iterator[Progress]:
    """A progress display with an estimate, on standard error; silent when not ``enabled``."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    screen = console()
    # Where nobody watches, all that is left of a display is an empty line.
    with Progress(*columns, console=screen, disable=not (enabled and screen.is_terminal), transient=True) as display:
        yield display


def write_json(data: Any, path: str | Path | None = None) -> None:
    """JSON to a file, or to standard output where no path is given."""
    text = json.dumps(data, indent=2, default=str)
    if path is None:
        click.echo(text)
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:  # of a full disk it does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error


def human_bytes(count: float) -> str:
    """``123.4 MB``, decimal units as file systems print them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
