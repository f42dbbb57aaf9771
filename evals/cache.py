"""Results on disk, one JSON file each, in a name that is a hash of all they were computed from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.errors import CheckpointError, MXQuantError

if TYPE_CHECKING:
    from mxquant.evals.find_model import Source

# Modules and packages whose code a figure may depend on: loading, quantizing, products, and the measuring itself.
# A change to any of them makes what was kept before invalid.
_DECIDING = (
    *("mxquant.schemes", "mxquant.codec", "mxquant.ops", "mxquant.kernels", "mxquant.nn", "mxquant.checkpoint"),
    *("mxquant.transformers", "mxquant.evals.models", "mxquant.evals.windows", "mxquant.evals.inplace"),
    *("mxquant.evals.perplexity", "mxquant.evals.divergence", "mxquant.evals.intervals", "mxquant.evals.experts"),
    *("mxquant.evals.tasks", "mxquant.evals.local_tasks", "mxquant.evals.sweep.cells"),
)
_RUN_OR_READ = (".py", ".so", ".yaml")


def user_folder(kind: str) -> Path:
    """A folder in the user's cache: ``$XDG_CACHE_HOME/mxquant/<kind>``, or ``~/.cache/mxquant/<kind>``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxquant" / kind


def file_name(fields: Mapping[str, Any]) -> str:
    """The name of the file that holds what was computed from ``fields``."""
    return f"{hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]}.json"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: an interruption leaves no partial file."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


@dataclass(frozen=True)
class ResultCache:
    """Results in ``folder`` by the fields they follow from. Raises ``MXQuantError`` if it cannot be written to."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / "writable.json", {})
            (self.folder / "writable.json").unlink(missing_ok=True)  # another evaluation may try the same
        except OSError as error:
            raise MXQuantError(f"cannot keep results in {self.folder}: {error.strerror}") from error

    def load(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was computed from ``fields``; None if it never was, or its file is damaged."""
        try:
            content = json.loads((self.folder / file_name(fields)).read_text())
        except (OSError, ValueError):
            return None
        # The fields are stored as well: for people, and against a file that got another one's name.
        known = isinstance(content, dict) and content.get("from") == json.loads(json.dumps(fields))
        return content.get("result") if known else None

    def store(self, fields: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep what was computed from ``fields``. Raises ``MXQuantError`` if the disk is full, for example."""
        try:
            write(self.folder / file_name(fields), {"from": fields, "result": result})
        except OSError as error:
            raise MXQuantError(f"cannot keep results in {self.folder}: {error.strerror}") from error


def model_hash(source: Source) -> str | None:
    """A hash of all files of a model, or its commit on the hub; None where that is not known.

    What is hidden or Markdown says nothing to a loader. Raises ``CheckpointError`` for a file that
    cannot be read.
    """
    if source.folder is None:
        commit = getattr(source.config, "_commit_hash", None)
        return None if commit is None else f"{source.given}@{commit}"
    folder = source.folder
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _matters(path.relative_to(folder))]
    return hash_files(folder, files)


def _matters(path: Path) -> bool:
    return path.suffix != ".md" and not any(part.startswith(".") for part in path.parts)


def hash_files(folder: Path, files: Iterable[Path]) -> str:
    """One hash of names and contents."""
    whole = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        whole.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return whole.hexdigest()


@cache
def code_hash() -> str:
    """A hash of the code that results depend on: modules, and all that is in packages."""
    whole = hashlib.sha256()
    for name in _DECIDING:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        place = Path(spec.origin)
        files = sorted(place.parent.rglob("*")) if place.name == "__init__.py" else [place]
        whole.update(hash_files(place.parent, [f for f in files if f.suffix in _RUN_OR_READ]).encode())
    return whole.hexdigest()[:32]
