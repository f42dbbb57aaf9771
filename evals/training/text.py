"""The text that models train on, and the part of it that is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mxquant.errors import MXQuantError
from mxquant.evals.find_model import first_line
from mxquant.evals.hub import ensure_quick_failure
from mxquant.evals.text import BUILTIN, EvalText, load_text
from mxquant.evals.windows import cut_windows
from mxquant.extras import needs
from mxquant.training.data import pack

# Of a file or data set of one's own, where no other text is given to evaluate on.
_HELDOUT_SHARE = 0.05
_HELDOUT_DOCUMENTS = 200


@dataclass(frozen=True)
class TrainingText:
    """Documents to train on, and a text that they do not contain."""

    name: str
    documents: tuple[str, ...]
    heldout: EvalText

    def to_dict(self) -> dict[str, Any]:
        digest = hashlib.sha256("\x1f".join(self.documents).encode("utf-8")).hexdigest()
        characters = sum(map(len, self.documents))
        return {
            "name": self.name,
            "documents": len(self.documents),
            "characters": characters,
            "sha256": digest,
            "heldout": self.heldout.to_dict(),
        }


def load_training_text(
    name: str, *, eval_text: str | None = None, column: str = "text", characters: int | None = None
) -> TrainingText:
    """The text called ``name``: ``"builtin"``, a UTF-8 file, or a data set (a folder or hub id).

    ``builtin`` is documentation that the running Python ships, without the part that is held out. A hub id
    may have a configuration, ``owner/name:config``; its ``column`` is read, split ``train``, up to
    ``characters``. ``eval_text``: what to evaluate on instead of a held-out part, as ``mxquant eval``
    takes it. Raises ``MXQuantError`` if there is no such text or nothing in it.
    """
    if name == BUILTIN:
        from mxquant.bundled.text import documents

        found = list(documents("train"))
        heldout = load_text(BUILTIN) if eval_text is None else None
    elif Path(name).expanduser().is_file():
        found, heldout = _split_file(name, hold_out=eval_text is None)
    else:
        found = list(_dataset(name, column, characters))
        heldout = None
        if eval_text is None:
            count = min(_HELDOUT_DOCUMENTS, max(1, round(_HELDOUT_SHARE * len(found))))
            found, heldout = found[count:], EvalText(f"{name}, held out", "\n\n".join(found[:count]))
    if not any(document.strip() for document in found):
        raise MXQuantError(f"text {name} is empty; give one with text in it by --text")
    if heldout is None:
        heldout = load_text(str(eval_text))
    return TrainingText(name, tuple(found), heldout)


def training_windows(text: TrainingText, tokenizer: Any, seq_len: int) -> torch.Tensor:
    """The documents as windows, int64 ``[windows, seq_len]``; an EOS token ends each document."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(list(text.documents), verbose=False)["input_ids"]
    return pack(([*ids, *ends] for ids in encoded), seq_len)


def heldout_windows(text: TrainingText, tokenizer: Any, seq_len: int, limit: int | None) -> torch.Tensor:
    """The held-out text as the windows of ``mxquant eval``: int64 ``[windows, seq_len]``."""
    return cut_windows(tokenizer, text.heldout, seq_len, limit)


def _split_file(name: str, *, hold_out: bool) -> tuple[list[str], EvalText | None]:
    """A file as one document, and the end of it."""
    content = load_text(name).text
    if not hold_out:
        return [content], None
    cut = content.rfind("\n", 0, round(len(content) * (1 - _HELDOUT_SHARE))) + 1
    if not cut:
        raise MXQuantError(f"text {name} is one line, of which no end can be held out; give a text by --eval-text")
    return [content[:cut]], EvalText(f"the end of {name}", content[cut:], f"from character {cut} on")


def _dataset(name: str, column: str, characters: int | None) -> Iterator[str]:
    folder, (place, _, config) = Path(name).expanduser().is_dir(), name.partition(":")
    if not folder and ("/" not in name or name.startswith((".", "/", "~"))):
        raise MXQuantError(f"no text file {name}; --text takes {BUILTIN}, a file, or a data set's folder or hub id")
    if not folder:
        ensure_quick_failure()
    needs(f"data set {name}", "datasets", extra="eval")
    try:
        import datasets

        rows = datasets.load_dataset(name if folder else place, config or None, split="train", streaming=True)
        seen = 0
        for row in islice(rows, None):
            if column not in row:
                raise MXQuantError(f"data set {name} has no column {column!r} but {', '.join(row)}; see --text-column")
            yield row[column]
            seen += len(row[column])
            if characters is not None and seen >= characters:
                return
    except MXQuantError:
        raise
    except Exception as error:  # the hub's client and readers of files raise dozens of types
        raise MXQuantError(f"cannot read data set {name}: {first_line(error)}") from error
