"""Where an output goes if no ``--out`` is given."""

from __future__ import annotations

import os
from pathlib import Path

from mxquant.errors import MXQuantError

# How the hub's cache calls the folder of a repository, and the one in it whose folders are named by commits.
_CACHED, _SNAPSHOTS = "models--", "snapshots"


def default_out(source: str, label: str) -> Path:
    """``<name of the source>-<label>`` in the working folder, or beside the source where that is the source itself.

    Raises ``MXQuantError`` that asks for ``--out`` where there is no such place.
    """
    path = Path(os.path.expanduser(source))
    if source.lower().endswith(".gguf") and not path.is_dir():
        return Path(f"{path.stem}-{label}")
    if not path.is_dir():
        return Path(f"{path.name}-{label}")  # of a repository on the hub, or of a folder that is not there
    real = path.resolve()
    named = real if path.name in ("", "..") else path
    name = _repository(named) or named.name
    here = Path.cwd()
    if not here.is_relative_to(real):
        return Path(f"{name}-{label}")
    if not name or _repository(real):
        raise MXQuantError(f"{source} leaves no place for the output; name one with --out")
    return Path(os.path.relpath(real.parent / f"{name}-{label}", here))


def _repository(folder: Path) -> str | None:
    """The name of the repository that a folder of the hub's cache is a snapshot of; its own is a commit's."""
    repository = folder.parent.parent.name
    if folder.parent.name != _SNAPSHOTS or not repository.startswith(_CACHED):
        return None
    return repository.split("--")[-1]
