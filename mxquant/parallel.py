"""Row chunks of a tensor on several CPU threads, each of which runs PyTorch on one thread.

PyTorch splits single operations over its threads and waits at the end of each. For chains of short
operations, a thread to a chunk is faster, and far faster where the cores are shared with others:
no thread ever waits for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Results computed ahead of the one being consumed, per worker.
_LOOK_AHEAD = 2


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` on ``workers`` threads, results in order, a bounded number ahead."""
    if workers <= 1:
        yield from map(function, items)
        return
    with _single_threaded_pool(workers) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > _LOOK_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _single_threaded_pool(workers: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="mxquant", initializer=torch.set_num_threads, initargs=(1,))
    # The thread count belongs to a thread, but new threads start from the last one set anywhere.
    list(pool.map(lambda _: None, range(workers)))
    torch.set_num_threads(threads)
    return pool
