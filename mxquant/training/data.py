"""Token ids as windows, in an order that depends on the seed and on nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import Dataset

from mxquant.errors import MXQuantError


def pack(documents: Iterable[list[int]], seq_len: int) -> torch.Tensor:
    """Token ids of documents, one after the other, cut into windows: int64 ``[windows, seq_len]``.

    What is left at the end is dropped. Raises ``MXQuantError`` if there is not a single window.
    """
    stream = torch.tensor([token for document in documents for token in document], dtype=torch.int64)
    if len(stream) < seq_len:
        raise MXQuantError(
            f"the text has {len(stream)} tokens, fewer than one window of {seq_len}; "
            "give more text or a smaller --seq-len"
        )
    return stream[: len(stream) // seq_len * seq_len].view(-1, seq_len)


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows as the Trainer takes them, ``input_ids`` and ``labels``; with a ``seed`` in random order.

    ``count``: how many there are, by default each once. Beyond that the windows come again, every time
    in a new order, so that a run of any length is one pass over this data set.
    """

    def __init__(self, windows: torch.Tensor, *, seed: int | None = None, count: int | None = None):
        self._windows, self._seed = windows, seed
        self._count = len(windows) if count is None else count
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        epoch, place = divmod(index, len(self._windows))
        ids = self._windows[place if self._seed is None else self._shuffled(epoch)[place]]
        return {"input_ids": ids, "labels": ids}

    def _shuffled(self, epoch: int) -> torch.Tensor:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(1_000_003 * int(self._seed or 0) + epoch)
            self._order = (epoch, torch.randperm(len(self._windows), generator=generator))
        return self._order[1]
