"""Reading ``pytorch_model.bin``, whole or in shards, as if it were safetensors.

Files are unpickled with ``weights_only``, which builds tensors and nothing else: no code of the file
runs. Those of PyTorch 1.6 and newer are archives whose tensors are mapped, like safetensors; older
ones have to be held in memory.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mxquant.checkpoint.damage import why_not_whole
from mxquant.checkpoint.headers import TensorInfo
from mxquant.checkpoint.layout import ITEM_SIZES
from mxquant.checkpoint.reader import PYTORCH_FILES, Checkpoint
from mxquant.errors import CheckpointError

DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32",
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


class PytorchCheckpoint(Checkpoint):
    """A folder of ``pytorch_model.bin``; for what else it is, see :class:`Checkpoint`."""

    pattern = PYTORCH_FILES
    _pytorch = True

    def _get(self, name: str) -> torch.Tensor:
        return self._handles[self._files[name]][name]

    def _read_header(self, file: Path) -> Iterator[TensorInfo]:
        mapped, tensors = zipfile.is_zipfile(file), read_file(file)
        self._handles[file] = tensors
        for name, tensor in tensors.items():
            dtype = DTYPE_NAMES.get(tensor.dtype)
            if dtype is None or tensor.layout != torch.strided:
                raise CheckpointError(f"{file.name}: tensor {name}: {tensor.dtype} ({tensor.layout}) is not supported")
            info = TensorInfo(name, dtype, tuple(tensor.shape), ITEM_SIZES[dtype] * tensor.numel(), file)
            self.held_bytes += 0 if mapped else info.nbytes
            yield info


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, mapped unless it is an old one. Raises ``CheckpointError`` for any other content."""
    try:
        with warnings.catch_warnings():  # of protocols that it may not know: it says so if it does not
            warnings.simplefilter("ignore")
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # UnpicklingError, EOFError, RuntimeError, OSError and more, by version and damage
        refused = re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", str(error))
        if refused:
            raise CheckpointError(
                f"{file.name}: holds more than tensors ({refused[1]}), and reading that could run code of the file; "
                "if you trust it, load it elsewhere and save it as safetensors"
            ) from error
        strange = isinstance(error, KeyError | pickle.UnpicklingError)
        told = ValueError("torch.save did not write it" if strange else _sentence(error))
        raise CheckpointError(f"{file.name}: not a complete PyTorch file: {why_not_whole(file, told)}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file.name}: holds a {type(found).__name__}, not tensors by name")
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{file.name}: {name} is a {kind}, not a tensor; is it a model's state dict?")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def _sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0] or type(error).__name__
