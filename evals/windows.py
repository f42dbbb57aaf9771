"""Cutting a text into the windows that perplexity is measured on.

The protocol is that of the paper (arXiv 2601.19026) and of most work on quantization since GPTQ:

- the text is tokenized once, whole, without special tokens, and cut into windows of ``seq_len``
  tokens that do not overlap; what is left over at the end is dropped;
- where the tokenizer starts its sequences with a BOS token, each window does too. The window stays
  ``seq_len`` long, so its last token gives way. Windows begin at the same places either way, and
  either way ``seq_len - 1`` tokens of each are predicted: one token a window goes unscored.
"""

from __future__ import annotations

from typing import Any

import torch

from mxquant.errors import MXQuantError
from mxquant.evals.text import EvalText

DEFAULT_SEQ_LEN = 2048


def bos_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts in front of every sequence, or None if it does not."""
    with_special = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    adds = bool(with_special) and with_special[0] == tokenizer.bos_token_id and with_special != bare
    return tokenizer.bos_token_id if adds else None


def cut_windows(tokenizer: Any, text: EvalText | str, seq_len: int, limit: int | None = None) -> torch.Tensor:
    """The first ``limit`` windows of a text (all by default): int64 ``[windows, seq_len]``.

    See the module docstring for the protocol. Raises ``MXQuantError`` if the text is shorter than
    one window or the numbers make no sense.
    """
    if seq_len < 2:
        raise MXQuantError(f"windows of {seq_len} tokens predict nothing; use --seq-len 2 or more")
    if limit is not None and limit < 1:
        raise MXQuantError(f"cannot evaluate {limit} windows; use --windows 1 or more")
    content = text.text if isinstance(text, EvalText) else text
    name = text.name if isinstance(text, EvalText) else "text"
    # verbose=False: the text is longer than the model's limit on purpose.
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(ids) // seq_len
    if count == 0:
        raise MXQuantError(
            f"{name} has {len(ids)} tokens, fewer than one window of {seq_len}; "
            "use a longer text or a smaller --seq-len"
        )
    count = count if limit is None else min(count, limit)
    windows = torch.tensor(ids[: count * seq_len], dtype=torch.int64).view(count, seq_len)
    bos = bos_token(tokenizer)
    if bos is not None:
        windows = torch.cat([torch.full((count, 1), bos), windows[:, :-1]], dim=1)
    return windows


def window_length(seq_len: int | None, limits: dict[str, int | None]) -> int:
    """The window length for models of these position limits (name -> tokens or None).

    ``seq_len`` if given, else 2048 or the smallest limit. Raises ``MXQuantError`` if a model's
    limit is smaller than the ``seq_len`` asked for.
    """
    known = {name: limit for name, limit in limits.items() if limit}
    if seq_len is None:
        return min([DEFAULT_SEQ_LEN, *known.values()])
    for name, limit in known.items():
        if seq_len > limit:
            raise MXQuantError(f"--seq-len {seq_len} is more than the {limit} positions of {name}")
    return seq_len
