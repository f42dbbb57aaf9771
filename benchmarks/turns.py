# SPDX-License-Identifier: Apache-2.0
"""Timing contenders in turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Turns:
    """Medians over turns; before each call more memory is written than any cache holds."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self._junk = torch.zeros(96 << 20, dtype=torch.uint8)

    def __call__(
        self,
        contenders: dict[str, Callable[[], Any]],
        repeats: int | None = None,
        code: dict[str, Callable[[], Any]] | None = None,
    ) -> dict[str, float]:
        """Median seconds of each. The first turn, which warms up, does not count.

        ``code``: a small call of the same kind that comes right before the timed one. The layers of a
        model share their code, which is in the caches when a layer is called; its weight is not.
        """
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range((repeats or self.repeats) + 1):
            for name, call in contenders.items():
                self._junk.add_(1)
                if code is not None:
                    code[name]()
                start = time.perf_counter()
                call()
                if turn:
                    times[name].append(time.perf_counter() - start)
        return {name: statistics.median(taken) for name, taken in times.items()}
