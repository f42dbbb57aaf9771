"""Reading checkpoints: a folder (or hub id) of safetensors, memory-mapped.

Tensors come as views of the mapped files, so reading costs page cache, not memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.checkpoint import damage
from mxquant.checkpoint.headers import HeaderError, TensorInfo, read_header
from mxquant.checkpoint.side_files import WEIGHT_SUFFIXES, SideFiles, module_folders, side_files
from mxquant.checkpoint.weight_files import CONFIG_KEY, first_file, is_index, is_pytorch, precedence
from mxquant.errors import CheckpointError

if TYPE_CHECKING:
    import torch

PYTORCH_FILES = "pytorch_model*.bin"


def resolve_source(source: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: the folder itself, or a snapshot of a hub id.

    Raises ``CheckpointError`` if it is neither.
    """
    path = Path(os.path.expanduser(source))  # which leaves a user alone that there is not
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a folder, which has no revisions; drop --revision {revision}")
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
        folder = Path(snapshot_download(repo, revision=revision, ignore_patterns=ignore))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(repo, revision=revision, allow_patterns=[PYTORCH_FILES])
        if modules := module_folders(folder):  # whose weights may be of any kind
            snapshot_download(repo, revision=revision, allow_patterns=[f"{path.as_posix()}/*" for path in modules])
        return folder
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

    ``tensors``: name -> :class:`TensorInfo`, in file order. ``source``: the folder or file that was
    opened; ``folder``: where config.json and the side files are. ``held_bytes``: how much of the
    weights is held in memory, because the files cannot be mapped. ``warnings``: what a user should
    know of the source. Raises ``CheckpointError`` naming the file for anything missing, truncated
    or inconsistent.
    """

    pattern = "*.safetensors"
    _pytorch = False
    # Whether `tensors` and `read` give dense tensors where the files hold packed ones.
    decoded = False

    def __init__(self, folder: Path):
        self.source = self.folder = folder
        self.config: dict[str, Any] = read_config(folder)
        self.held_bytes = 0
        self.warnings: list[str] = []
        self._handles: dict[Path, Any] = {}
        first = first_file(folder, self.config)
        self.config.pop(CONFIG_KEY, None)  # of the source's files, and no others
        self._first = first if first is not None and is_pytorch(first) == self._pytorch else None
        if self._first is not None and (sentence := precedence(folder, self._first)):
            self.warnings.append(sentence)
        index = self._weight_map(self._first) if self._first is not None and is_index(self._first) else None
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
        if index is not None:
            self._check_index(index)
        self._files = {name: info.file for name, info in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold tensors."""
        return list(dict.fromkeys(info.file for info in self.tensors.values()))

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

    def side_files(self) -> SideFiles:
        """Every file to carry along, and what is left out."""
        return side_files(self.folder, self.weight_files)

    def files(self) -> list[Path]:
        """Every file that an output is made from."""
        first = [] if self._first is None else [self.folder / self._first]
        carried = [self.folder / relative for relative in self.side_files().carried]
        return [self.folder / "config.json", *first, *self.weight_files, *carried]

    def _find_shards(self, index: dict[str, str] | None) -> list[Path]:
        if index is not None:
            files = [self.folder / name for name in dict.fromkeys(index.values())]
            missing = [f.name for f in files if not os.path.exists(f)]  # False for a name that is too long, too
            if missing:
                raise CheckpointError(
                    f"{self.folder}: {self._first} names {', '.join(missing[:3])}, which is not in the folder; "
                    "download it again"
                )
            return files
        if self._first is not None:
            return [self.folder / self._first]
        files = sorted(f for f in self.folder.glob(self.pattern) if f.name != damage.ADAPTER_WEIGHTS)
        if files:
            lost = damage.incomplete_set(files)
            if lost is not None:
                raise CheckpointError(f"{self.folder}: {lost} is missing; download it again")
            return files
        others = sorted(p.name for p in self.folder.iterdir() if p.suffix in WEIGHT_SUFFIXES)
        hint = damage.what_instead(self.folder)
        if hint is None and others:
            hint = f"{others[0]} cannot be read: convert it with save_pretrained first"
        raise CheckpointError(f"{self.folder}: no safetensors files" + (f"; {hint}" if hint else ""))

    def _weight_map(self, name: str) -> dict[str, str]:
        index = self.folder / name
        mapping = damage.read_json_object(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise CheckpointError(f"{index}: not a valid index, its weight_map names no tensors")
        for name, file in mapping.items():
            if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
                raise CheckpointError(f"{index}: the file of tensor {name}, {file!r}, is not a plain file name")
        return mapping

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            info = self.tensors.get(name)
            if info is None or info.file.name != file:
                raise CheckpointError(f"{self._first}: tensor {name} is not in {file}")
        for name, info in self.tensors.items():
            if name not in index:
                raise CheckpointError(
                    f"{self._first} does not list tensor {name}, which is in {info.file.name}; "
                    "without the index, all files are read as they are"
                )

    def _read_header(self, file: Path) -> Iterator[TensorInfo]:
        from safetensors import safe_open

        found = read_safetensors(file)
        try:
            self._handles[file] = safe_open(file, framework="pt")
        except Exception as error:  # SafetensorError and OSError, by version
            why = damage.why_not_whole(file, error)
            raise CheckpointError(f"{file}: not a complete safetensors file: {why}") from error
        yield from found.values()


def read_safetensors(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file. Raises ``CheckpointError`` that names the file, if it is not whole."""
    try:
        return read_header(file)
    except HeaderError as error:
        why = damage.what_file(file) or f"it {error}"
        raise CheckpointError(f"{file}: not a complete safetensors file: {why}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    path = folder / "config.json"
    try:
        config = damage.read_json_object(path)
    except FileNotFoundError as error:
        what = damage.what_instead(folder) or "is it a model folder?"
        raise CheckpointError(f"{folder}: no config.json; {what}") from error
    if not isinstance(config.get("quantization_config") or {}, dict):
        raise CheckpointError(f"{path}: quantization_config is not a JSON object")
    return config
