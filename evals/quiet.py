"""Keeping libraries that talk off standard output, and their progress bars out of log files."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, cast

# Where a progress bar is not watched, it is a line every so often.
SECONDS_BETWEEN_LINES = 10


@contextlib.contextmanager
def quiet(loggers: Sequence[str]) -> Iterator[None]:
    """No warnings, of ``loggers`` only errors; what is printed goes to standard error.

    Progress bars stay where somebody watches. In a file each is a line every now and then.
    """
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    error = sys.stderr if sys.stderr.isatty() else cast("TextIO", BarsAsLines(sys.stderr))
    try:
        with (
            contextlib.redirect_stderr(error),
            contextlib.redirect_stdout(error),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class BarsAsLines(io.TextIOBase):
    """Passes on text, and of a bar that is drawn over and over one line in ten seconds, from the tenth on."""

    def __init__(self, to: TextIO, clock: Callable[[], float] = time.monotonic):
        self._to, self._clock = to, clock
        self._last = clock()
        self._in_bar = False

    def write(self, text: str) -> int:
        if "\r" in text:
            self._in_bar = True
            now, bar = self._clock(), text.rpartition("\r")[2].strip()
            if bar and now - self._last >= SECONDS_BETWEEN_LINES:
                self._last = now
                self._to.write(f"{bar}\n")
        elif self._in_bar and not text.strip():  # what ends a bar
            self._in_bar = False
        else:
            self._in_bar = False
            self._to.write(text)
        return len(text)

    def flush(self) -> None:
        self._to.flush()
