"""How much memory of its own this process holds, and how much more it may take."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

_STATUS, _SYSTEM = "/proc/self/status", "/proc/meminfo"
# The limit of the container that the process runs in, and what of its memory cannot be given back.
_LIMIT, _USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat"


def anonymous_bytes() -> int | None:
    """Resident anonymous memory (mapped files not counted); None where the system does not tell."""
    return _kibibytes(_STATUS, "RssAnon:")


def available_bytes() -> int | None:
    """Memory that can be had without swapping, within the limit of a container; None where the system does not tell."""
    system = _kibibytes(_SYSTEM, "MemAvailable:")
    try:
        limit, used = Path(_LIMIT).read_text().strip(), Path(_USED).read_text().split()
        left = int(limit) - int(used[used.index("anon") + 1])
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return system
    return max(0, left if system is None else min(left, system))


def _kibibytes(path: str, key: str) -> int | None:
    """The number of bytes that a file of the kernel gives in kB after ``key``."""
    try:
        with open(path) as lines:
            for line in lines:
                if line.startswith(key):
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
