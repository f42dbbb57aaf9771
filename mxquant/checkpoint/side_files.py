"""What lies beside the weights of a model: what is carried along to an output, and what is left out, and why."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mxquant.checkpoint.layout import REPORT_NAME
from mxquant.errors import CheckpointError

# Weight files of any framework.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".onnx.data", ".ot", ".tflite", ".npz", ".mlmodel",
)  # fmt: skip
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
# Other people's copies of the weights, with their own side files.
_ORIGINAL = "original"
_BYTE_CODE = "__pycache__"
# Where sentence-transformers lists the folders of a model's further modules.
_MODULES = "modules.json"

_NOT_READ = "weights that are not read"
_OWN_WEIGHTS = f"weights of their own, and no modules of the model by {_MODULES}"
_LINKED = "links to folders"
_COPIES = "copies of the weights in another form"


@dataclass
class SideFiles:
    """``carried``: relative to the folder, sorted; ``left_out``: files and folders by the reason, in words."""

    carried: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """One sentence for each reason that something is left out."""
        return [f"left out: {', '.join(sorted(names))} ({reason})" for reason, names in self.left_out.items()]

    def leave_out(self, name: str, reason: str) -> None:
        names = self.left_out.setdefault(reason, [])
        if name not in names:
            names.append(name)


def side_files(folder: Path, read: Collection[Path] = ()) -> SideFiles:
    """All of a model folder but weights, indexes, config.json and what begins with a dot. ``read``: its weights.

    A subfolder with weights in it (``onnx/``, ``checkpoint-500/``) is another model, left out as a whole, unless
    ``modules.json`` says that it is a part of this one (``2_Dense/``): then its weights are carried along as they are.
    """
    found, modules = SideFiles(), module_folders(folder)
    candidates: list[Path] = []
    strangers: set[str] = set()
    for path in _walk(folder, modules):
        relative = path.relative_to(folder)
        top, alone = relative.parts[0], len(relative.parts) == 1
        if any(part.startswith(".") or part == _BYTE_CODE for part in relative.parts) or path in read:
            continue
        if _is_in(relative, modules):
            candidates += [relative] if _checked(path, relative) and path.is_file() else []
        elif top == _ORIGINAL and not (alone and path.is_file()):
            found.leave_out(f"{top}/", _COPIES)
        elif path.is_dir():
            if path.is_symlink():
                found.leave_out(f"{relative.as_posix()}/", _LINKED)
        elif path.name.endswith(WEIGHT_SUFFIXES):
            found.leave_out(relative.as_posix() if alone else f"{top}/", _NOT_READ if alone else _OWN_WEIGHTS)
            strangers.add(top)
        elif path.name.endswith(_INDEX_SUFFIXES):
            strangers.add(top)
        elif str(relative) not in ("config.json", REPORT_NAME) and _checked(path, relative) and path.is_file():
            candidates.append(relative)
    found.carried = sorted({f for f in candidates if f.parts[0] not in strangers or _is_in(f, modules)})
    return found


def _walk(folder: Path, modules: list[Path]) -> Iterator[Path]:
    """Everything in the folder, links to folders not followed, but for those of modules."""
    yield from sorted(folder.rglob("*"))
    for module in modules:
        if (folder / module).is_symlink():
            yield from sorted((folder / module).rglob("*"))


def _is_in(relative: Path, modules: list[Path]) -> bool:
    return any(relative.is_relative_to(module) for module in modules)


def _checked(path: Path, relative: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to nothing; download the model again")
    return relative


def module_folders(folder: Path) -> list[Path]:
    """Subfolders, relative to the folder, that hold modules of the model, by its ``modules.json``.

    None where that file is something else.
    """
    try:
        entries = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    inside = [Path(path) for path in paths if isinstance(path, str) and path.strip("./")]
    return [path for path in inside if not path.is_absolute() and ".." not in path.parts and (folder / path).is_dir()]
