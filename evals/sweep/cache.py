"""Finished cells on disk, one JSON file each, so that a sweep that is interrupted or extended continues.

A file's name is a hash of everything its figures were computed from: the model's parameters and
config, which of its layers are quantized, the very tokens, the formats, the dtype and kind of
device. What computed them, versions of mxquant and of its code, is inside: a cell made by another
one is measured again, and the sweep says so.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mxquant import __version__
from mxquant.errors import MXQuantError
from mxquant.evals.cache import code_hash, file_name, user_folder, write
from mxquant.evals.sweep.cells import Bench, Cell
from mxquant.evals.sweep.grid import CellSpec

# Raised when a figure changes its meaning.
_VERSION = 1
# Of a config: where it came from and what wrote it say nothing about the model.
_ORIGIN = ("_name_or_path", "transformers_version")


def default_folder() -> Path:
    """The user's cache: ``$XDG_CACHE_HOME/mxquant/sweep``, or ``~/.cache/mxquant/sweep``."""
    return user_folder("sweep")


def made_by() -> dict[str, str]:
    """What the figures of a cell depend on besides its inputs."""
    return {"mxquant": __version__, "code": code_hash(), "figures": str(_VERSION)}


def fingerprint(model: Any) -> str:
    """A hash of a model's config and parameters."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


@dataclass
class CellCache:
    """The finished cells of one bench in ``folder``; ``stale`` counts those that cannot be used, by reason.

    Raises ``MXQuantError`` if the folder cannot be written to.
    """

    folder: Path
    bench: Bench
    stale: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MXQuantError(f"cannot keep cells in {self.folder}: {error.strerror}") from error
        dense = self.bench.dense
        self._inputs = {
            "model": fingerprint(dense.model),
            "layers": [linear.name for linear in self.bench.linears],
            "windows": hashlib.sha256(self.bench.windows.numpy().tobytes()).hexdigest(),
            "shape": list(self.bench.windows.shape),
            "dtype": str(dense.model.dtype),
            "device": dense.device.type,
            "tasks": self._task_hashes(),
            "limit": self.bench.limit,
            "num_fewshot": self.bench.num_fewshot,
        }

    def _task_hashes(self) -> list[str] | None:
        tasks = self.bench.tasks
        return None if tasks is None else [tasks.hash(name, self.bench.num_fewshot) for name in tasks.names]

    def path(self, spec: CellSpec | None) -> Path:
        """The file of a cell, there or not."""
        fields: dict[str, Any] = dict(self._inputs)
        if spec is not None:
            activations = spec.activations
            fields["weights"] = spec.weights.to_dict()
            fields["activations"] = None if activations is None else activations.to_dict()
            if activations is not None and activations.scheme.global_scale and not activations.per_token:
                # One global scale for all that runs at once.
                fields["batch_size"] = self.bench.batch_size
        return self.folder / file_name(fields)

    def load(self, spec: CellSpec | None) -> Cell | None:
        """A finished cell, if there is one that this mxquant would measure the same."""
        path = self.path(spec)
        try:
            content = json.loads(path.read_text())
            maker = content["made_by"]
            cell = Cell.from_dict(content["cell"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._skip("cannot be read")
            return None
        if maker != made_by():
            release = maker.get("mxquant", "unknown") if isinstance(maker, dict) else "unknown"
            self._skip(f"made by mxquant {release}" + (" with other code" if release == __version__ else ""))
            return None
        # The same cell may be asked for by another name: "same" and the scheme itself.
        cell.spec = spec
        return cell

    def store(self, cell: Cell) -> None:
        """Write a cell atomically: an interruption leaves no partial file."""
        write(self.path(cell.spec), {"made_by": made_by(), "cell": cell.to_dict()})

    def notes(self) -> list[str]:
        """A sentence for each reason why cells that were there are measured again."""
        return [f"{count} cached cell{'s' * (count > 1)} {why}: measured again" for why, count in self.stale.items()]

    def _skip(self, why: str) -> None:
        self.stale[why] = self.stale.get(why, 0) + 1
