"""Which files a model is loaded from, where a folder holds several sets of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxquant.checkpoint.layout import INDEX_NAME, SINGLE_NAME
from mxquant.errors import CheckpointError

PYTORCH_INDEX_NAME = "pytorch_model.bin.index.json"
PYTORCH_SINGLE_NAME = "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"
# What transformers looks for, in this order.
_SAFETENSORS = (SINGLE_NAME, INDEX_NAME)
_PYTORCH = (PYTORCH_SINGLE_NAME, PYTORCH_INDEX_NAME)
# The field of config.json that names the file to load, before all others.
CONFIG_KEY = "transformers_weights"


def first_file(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The file that transformers starts from: one with all the tensors, or an index of several; None without any.

    A link to nothing, or a folder of such a name, counts only where no other safetensors are there: it is then a
    broken source, for which ``pytorch_model.bin`` does not stand in. Raises ``CheckpointError`` if the config names
    a file that transformers would not load.
    """
    named = config.get(CONFIG_KEY)
    if named is not None:
        _check_named(folder, named)
        return str(named)
    return (
        next((name for name in _SAFETENSORS if (folder / name).is_file()), None)
        or next((name for name in _SAFETENSORS if os.path.lexists(folder / name)), None)
        or next((name for name in _PYTORCH if (folder / name).is_file()), None)
        or next((name for name in _PYTORCH if os.path.lexists(folder / name)), None)
    )


def is_index(name: str) -> bool:
    return name.endswith(_INDEX_SUFFIX)


def is_pytorch(name: str) -> bool:
    return name in _PYTORCH


def precedence(folder: Path, chosen: str) -> str | None:
    """A sentence on which file is read, where the folder holds another that loaders might be thought to read."""
    others = [name for name in (*_SAFETENSORS, *_PYTORCH) if name != chosen and os.path.lexists(folder / name)]
    if not others:
        return None
    return f"{chosen} is read, as transformers does, and not {' or '.join(others)}"


def _check_named(folder: Path, named: object) -> None:
    if not isinstance(named, str) or not named.endswith((".safetensors", f".safetensors{_INDEX_SUFFIX}")):
        raise CheckpointError(f"{folder}: config.json names {named!r} as {CONFIG_KEY}, which is no safetensors file")
    if Path(named).is_absolute() or ".." in Path(named).parts:
        raise CheckpointError(f"{folder}: config.json names {named!r} as {CONFIG_KEY}, which is outside the folder")
    if not (folder / named).is_file():
        raise CheckpointError(f"{folder}: config.json names {named!r} as {CONFIG_KEY}, which is not in the folder")
