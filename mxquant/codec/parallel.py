"""Row chunks of tensors on several CPU threads, each of which runs PyTorch on one thread.

PyTorch splits single operations over its threads and waits at the end of each. For chains of short
operations, a thread to a chunk is faster, and far faster where the cores are shared with others:
no thread ever waits for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Results computed ahead of the one being consumed, per worker.
_LOOK_AHEAD = 2


class Workers:
    """A pool of ``torch.get_num_threads()`` threads for work on ``device``; use as a context manager.

    On anything but a CPU, where one stream orders the work anyway, everything runs in the caller.
    """

    def __init__(self, device: torch.device):
        self._count = torch.get_num_threads() if device.type == "cpu" else 0
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._count:
            count = self._count
            self._pool = ThreadPoolExecutor(
                count, thread_name_prefix="mxquant", initializer=torch.set_num_threads, initargs=(1,)
            )
            # The thread count belongs to a thread, but new threads start from the last one set anywhere.
            list(self._pool.map(lambda _: None, range(count)))
            torch.set_num_threads(count)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results in the order of ``items``, which are taken a bounded number ahead."""
        if self._pool is None:
            yield from map(function, items)
            return
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(self._pool.submit(function, item))
                if len(pending) > _LOOK_AHEAD * self._count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
