"""Reading checkpoints: a folder (or hub id) of safetensors, memory-mapped.

Tensors come as views of the mapped files, so reading costs page cache, not memory of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.checkpoint.layout import INDEX_NAME, ITEM_SIZES, REPORT_NAME, SINGLE_NAME
from mxquant.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# Weight files of any framework: never carried along as side files.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".ot", ".tflite", ".npz", ".mlmodel",
)  # fmt: skip
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor: safetensors dtype name (``BF16``), shape and file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


def resolve_source(source: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: the folder itself, or a snapshot of a hub id.

    Raises ``CheckpointError`` if it is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{source} is a file; name the folder that holds config.json and the weights")
    text = str(source)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise CheckpointError(f"{source}: no such folder")
    return _download(text, revision)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    ignore = [f"*{s}" for s in WEIGHT_SUFFIXES if s != ".safetensors"] + ["original/*"]
    try:
        return Path(snapshot_download(repo, revision=revision, ignore_patterns=ignore))
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{repo}: no such folder, and no such model on the hub (or no access to it)") from error
    except Exception as error:  # offline, proxy, disk: the library raises many kinds
        kind = type(error).__name__
        raise CheckpointError(
            f"{repo}: no such folder, and the hub could not be asked ({kind}); download the model first"
        ) from error


class Checkpoint:
    """A folder of safetensors, opened and checked.

    ``tensors``: name -> :class:`TensorInfo`, in file order. Raises ``CheckpointError`` naming the
    file for anything missing, truncated or inconsistent.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config: dict[str, Any] = read_config(folder)
        self._handles: dict[Path, Any] = {}
        index = self._weight_map() if (folder / INDEX_NAME).exists() else None
        self.tensors: dict[str, TensorInfo] = {}
        for file in self._find_shards(index):
            for info in self._read_header(file):
                if info.name in self.tensors:
                    raise CheckpointError(
                        f"tensor {info.name} is in {self.tensors[info.name].file.name} and again in {file.name}"
                    )
                self.tensors[info.name] = info
        if not self.tensors:
            raise CheckpointError(f"{folder}: its weight files hold no tensors")
        self._check_index(index or {})
        self._files = {name: info.file for name, info in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """The tensor, as a view of the mapped file."""
        return self._get(name)

    def read_part(self, name: str, index: int) -> torch.Tensor:
        """``read(name)[index]``, without the rest."""
        return self._get(name)[index]

    def _get(self, name: str) -> torch.Tensor:
        file = self._files[name]
        try:
            return self._handles[file].get_tensor(name)
        except Exception as error:  # SafetensorError and OSError, by version
            raise CheckpointError(f"{file.name}: cannot read tensor {name}: {error}") from error

    def side_files(self) -> list[Path]:
        """Every file to carry along, relative to the folder: all but weights, indexes and config.json."""
        files = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(_INDEX_SUFFIXES)
            if path.is_file() and not hidden and not weights and str(relative) not in ("config.json", REPORT_NAME):
                files.append(relative)
        return files

    def _find_shards(self, index: dict[str, str] | None) -> list[Path]:
        if index is not None:
            files = [self.folder / name for name in dict.fromkeys(index.values())]
            missing = [f.name for f in files if not f.exists()]
            if missing:
                raise CheckpointError(
                    f"{self.folder}: shard {', '.join(missing)} is in the index but not in the folder"
                )
            return files
        if (self.folder / SINGLE_NAME).exists():
            return [self.folder / SINGLE_NAME]
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            return files
        others = sorted(p.name for p in self.folder.iterdir() if p.suffix in WEIGHT_SUFFIXES)
        hint = f"; {others[0]} is not safetensors: convert it with save_pretrained first" if others else ""
        raise CheckpointError(f"{self.folder}: no safetensors files{hint}")

    def _weight_map(self) -> dict[str, str]:
        index = self.folder / INDEX_NAME
        try:
            mapping = json.loads(index.read_text())["weight_map"]
            if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
                raise ValueError("weight_map is not a mapping of names")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index.name}: not a valid index ({error})") from error
        outside = [v for v in mapping.values() if Path(v).name != v]
        if outside:
            raise CheckpointError(f"{index.name}: shard {outside[0]!r} is not a plain file name")
        return mapping

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            info = self.tensors.get(name)
            if info is None or info.file.name != file:
                raise CheckpointError(f"{INDEX_NAME}: tensor {name} is not in {file}")

    def _read_header(self, file: Path) -> Iterator[TensorInfo]:
        from safetensors import safe_open

        try:
            handle = safe_open(file, framework="pt")
        except Exception as error:  # SafetensorError and OSError, by version
            raise CheckpointError(f"{file.name}: not a whole safetensors file: {error}") from error
        self._handles[file] = handle
        for name in handle.offset_keys():
            part = handle.get_slice(name)
            dtype, shape = part.get_dtype(), tuple(part.get_shape())
            yield TensorInfo(name, dtype, shape, _nbytes(name, dtype, shape), file)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no config.json; is it a model folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a model configuration")
    return config


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"tensor {name}: dtype {dtype} is not supported")
    return prod(shape) * ITEM_SIZES[dtype]
