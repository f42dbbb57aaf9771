"""Broken ``pytorch_model.bin`` and GGUF files: cut short, something else, and with more in them than tensors."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broken_inputs import BIN, BIN_INDEX, NORM, UP, Fault, cut, only, read_all, writes

OTHERS: list[Fault] = []


def add(name: str, breaks: Callable[[Path], object], *says: str) -> None:
    OTHERS.append(Fault(name, breaks, says))


def saved(change: Callable[[dict[str, Any]], object] = dict, **options: Any) -> Callable[[Path], object]:
    """Puts a ``pytorch_model.bin`` in the place of the safetensors; ``change`` returns what is saved, if not None."""

    def breaks(folder: Path) -> None:
        import torch

        tensors = read_all(folder)
        only(folder)
        changed = change(tensors)
        torch.save(tensors if changed is None else changed, folder / BIN, **options)

    return breaks


def then(*steps: Callable[[Path], object]) -> Callable[[Path], object]:
    def breaks(folder: Path) -> None:
        for step in steps:
            step(folder)

    return breaks


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.folder / "run-by-the-pickle",)


def harmful(**options: Any) -> Callable[[Path], object]:
    return lambda folder: saved(lambda tensors: {**tensors, "more": Payload(folder)}, **options)(folder)


def bare_pickle(folder: Path) -> None:
    only(folder)
    (folder / BIN).write_bytes(pickle.dumps(Payload(folder)))


def archive_of_something_else(folder: Path) -> None:
    only(folder)
    with zipfile.ZipFile(folder / BIN, "w") as archive:
        archive.writestr("readme.txt", "no weights here")


def index_of_bins(weight_map: Any) -> Callable[[Path], object]:
    shard = "pytorch_model-00001-of-00002.bin"  # a single file would come before the index
    return then(
        saved(),
        lambda folder: (folder / BIN).rename(folder / shard),
        lambda folder: (folder / BIN_INDEX).write_text(json.dumps({"weight_map": weight_map})),
    )


add("bin with code in it", harmful(), BIN, "safetensors")
add("bin with code in it, in the old format", harmful(_use_new_zipfile_serialization=False), BIN, "safetensors")
add("bin that is nothing but code", bare_pickle, BIN)
add("bin cut off", then(saved(), cut(BIN, -1000)), BIN)
add("bin cut off in the middle", then(saved(), cut(BIN, 5000)), BIN)
add("bin in the old format cut off", then(saved(_use_new_zipfile_serialization=False), cut(BIN, -1000)), BIN)
add("bin empty", then(saved(), writes(BIN, b"")), BIN)
add("bin that is a git-lfs pointer", then(saved(), writes(BIN, "version https://git-lfs.github.com/spec/v1\n")), BIN,
    "git lfs pull")  # fmt: skip
add("bin that is a web page", then(saved(), writes(BIN, "<html><title>404</title></html>")), BIN, "web page")
add("bin that is an archive of something else", archive_of_something_else, BIN)
add("bin that holds a list", saved(lambda tensors: list(tensors.values())), BIN, "list")
add("bin that holds a tensor", saved(lambda tensors: tensors[UP]), BIN, "Tensor")
add("bin that holds a training state", saved(lambda tensors: {"model": tensors, "step": 7}), BIN, "model")
add("bin that holds nothing", saved(lambda tensors: tensors.clear()), "tensors")
add("bin that lacks a tensor", saved(lambda tensors: {n: t for n, t in tensors.items() if n != UP}), "lacks", UP)
add("bin with a tensor of another shape", saved(lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()})), UP,
    "[32, 48]")  # fmt: skip
add("bin with a sparse tensor", saved(lambda tensors: tensors.update({UP: tensors[UP].float().to_sparse()})), BIN, UP)
add("bin with a NaN", saved(lambda tensors: {**tensors, NORM: tensors[NORM] * float("nan")}), NORM, "nan")
add("bin whose index is a list", index_of_bins([BIN]), BIN_INDEX)
add("bin whose index names a file that is not there", index_of_bins({UP: "pytorch_model-00002-of-00002.bin"}),
    "pytorch_model-00002-of-00002.bin")  # fmt: skip
add("bin whose index leads out of the folder", index_of_bins({UP: "../pytorch_model.bin"}), BIN_INDEX, UP)

add("gguf empty", lambda folder: only(folder, model__gguf=b""), "model.gguf")
add("gguf of another kind", lambda folder: only(folder, model__gguf=b"GGML" + bytes(100)), "model.gguf")
add("gguf cut off", lambda folder: only(folder, model__gguf=b"GGUF\3\0\0\0" + bytes(4)), "model.gguf")
add("two gguf files", lambda folder: only(folder, a__gguf=b"GGUF", b__gguf=b"GGUF"), "a.gguf", "b.gguf")
