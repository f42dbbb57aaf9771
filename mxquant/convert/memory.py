"""How much memory of its own this process holds."""

from __future__ import annotations

import threading
from types import TracebackType

_STATUS = "/proc/self/status"


def anonymous_bytes() -> int | None:
    """Resident anonymous memory (mapped files not counted); None where the system does not tell."""
    try:
        with open(_STATUS) as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class PeakMemory:
    """Samples anonymous memory while the ``with`` block runs.

    ``peak``: the largest seen; ``start``: at entry. Both None where the system does not tell.
    """

    def __init__(self, interval: float = 0.02):
        self._interval = interval
        self._stop = threading.Event()
        self.start = self.peak = anonymous_bytes()

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.peak = max(self.peak or 0, now)
