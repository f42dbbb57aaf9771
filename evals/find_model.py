"""Models before they are loaded: whether they exist, and what their config says."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxquant.errors import CheckpointError
from mxquant.evals.hub import ensure_quick_failure
from mxquant.transformers.classes import predicts_tokens

_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Source:
    """A model that exists: ``given`` by the user, its ``config`` read, its weights not.

    ``folder`` is None for a hub id; ``label`` replaces the short name in tables.
    """

    given: str
    folder: Path | None
    config: Any
    label: str | None = None

    @property
    def name(self) -> str:
        """A short name: the label, the folder's name or the hub id."""
        return self.label or (self.folder.resolve().name if self.folder else self.given)

    @property
    def quant_method(self) -> str | None:
        """``quant_method`` of its config, e.g. ``"mxquant"``; None for a dense model."""
        quantization = getattr(self.config, "quantization_config", None) or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        return None if method is None else str(getattr(method, "value", method))

    @property
    def disk_bytes(self) -> int | None:
        """Size of the weight files; None where they are not on this machine yet."""
        folder = self.folder
        if folder is None:
            from transformers.utils import cached_file

            with contextlib.suppress(Exception):  # only a figure in a table
                folder = Path(str(cached_file(self.given, "config.json", local_files_only=True))).parent
        if folder is None:
            return None
        for pattern in _WEIGHT_FILES:
            if files := list(folder.glob(pattern)):
                return sum(file.stat().st_size for file in files)
        return None

    @property
    def vocab_size(self) -> int | None:
        """Number of logits a position gets."""
        return getattr(self.config.get_text_config(), "vocab_size", None)

    @property
    def max_positions(self) -> int | None:
        """The longest window the model was made for, in tokens; None where it has no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


def find_model(source: str | Path, *, label: str | None = None, trust_remote_code: bool = False) -> Source:
    """Read the config of a folder or hub id, without loading weights.

    Raises ``CheckpointError`` if there is no such model or it is of no known architecture.
    """
    given = str(source)
    folder = Path(os.path.expanduser(given))
    is_folder = folder.is_dir()
    if folder.is_file():
        raise CheckpointError(f"{given} is a file; give the folder that holds config.json and the weights")
    if is_folder and not (folder / "config.json").is_file():
        raise CheckpointError(f"folder {given} has no config.json, so it is not a checkpoint")
    if not is_folder and not _may_be_hub_id(given):
        raise CheckpointError(f"no such folder or hub id: {given}")
    online = True if is_folder else ensure_quick_failure()
    from transformers import AutoConfig

    try:
        place = folder if is_folder else given
        config = AutoConfig.from_pretrained(place, local_files_only=is_folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and the hub's own
        if is_folder:
            raise CheckpointError(f"cannot read the config of {given}: {first_line(error)}") from error
        why = "not on the hub, or no access to it" if online else "no such folder, not cached, hub unreachable"
        raise CheckpointError(f"no such folder or hub id: {given} ({why})") from error
    if not predicts_tokens(config.to_dict()):
        raise CheckpointError(
            f"{given} is a {config.architectures[0]}, which predicts no tokens; give a language model"
        )
    return Source(given, folder if is_folder else None, config, label)


def _may_be_hub_id(text: str) -> bool:
    """``name`` or ``owner/name`` in the characters that the hub allows."""
    return re.fullmatch(r"(?:\w[\w.-]*/)?\w[\w.-]*", text, re.ASCII) is not None


def first_line(error: BaseException) -> str:
    """The first line of a message, and what that announces where it ends in a colon."""
    text, *others = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    for line in others:
        if not text.endswith(":"):
            break
        text = f"{text} {line}"
    return text
