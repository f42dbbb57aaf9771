"""What tells whether the files of a source are still the same, without reading all of them.

A file of up to 16 MiB is hashed whole. Of a larger one, which is hardly ever anything but weights, the
first MiB and 64 pieces of 16 KiB spread evenly to its end are: training changes every piece of a file.
A change that misses them all shows in the time of the file's last change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxquant.checkpoint.reader import Checkpoint
from mxquant.errors import CheckpointError

_WHOLE = 1 << 24
_HEAD = 1 << 20
_PIECE, _PIECES = 1 << 14, 64


def fingerprint(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Of each file that an output depends on: ``bytes``, ``sha256``, and ``mtime_ns`` if it is not hashed whole."""
    found: dict[str, dict[str, Any]] = {}
    for name, path in _files(checkpoint):
        status = path.stat()
        found[name] = {"bytes": status.st_size, "sha256": _sha256(path, status.st_size)}
        if status.st_size > _WHOLE:
            found[name]["mtime_ns"] = status.st_mtime_ns
    return found


def without_times(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The part of a fingerprint that copies of a file share."""
    return {name: {k: v for k, v in fields.items() if k != "mtime_ns"} for name, fields in found.items()}


def _files(checkpoint: Checkpoint) -> Iterator[tuple[str, Path]]:
    weights = checkpoint.weight_files
    yield from ((file.name, file) for file in weights)
    indexes = [path.name for path in sorted(checkpoint.folder.glob("*.index.json")) if path.is_file()]
    for name in ("config.json", *indexes, *map(Path.as_posix, checkpoint.side_files().carried)):
        yield name, checkpoint.folder / name


def _sha256(path: Path, size: int) -> str:
    try:
        with open(path, "rb") as file:
            if size <= _WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256(file.read(_HEAD))
            for piece in range(1, _PIECES + 1):
                file.seek((size - _PIECE) * piece // _PIECES)
                digest.update(file.read(_PIECE))
            return digest.hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
