"""Reading ``.gguf`` files through transformers, as if they were dense checkpoints.

transformers makes config, tokenizer and weights of the file; it has to load the whole model for
that, so the weights are held in memory, from the first one that is read. Nothing of the folder that
the file lies in is used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from mxquant.checkpoint.damage import why_not_whole
from mxquant.checkpoint.headers import TensorInfo
from mxquant.checkpoint.layout import ITEM_SIZES
from mxquant.checkpoint.pytorch import DTYPE_NAMES
from mxquant.checkpoint.reader import Checkpoint, read_config
from mxquant.checkpoint.side_files import side_files
from mxquant.errors import CheckpointError
from mxquant.extras import needs
from mxquant.transformers.architectures import build_meta_model, kept_in_fp32

_T = TypeVar("_T")
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")


class GgufCheckpoint(Checkpoint):
    """A ``.gguf`` file; for what else it is, see :class:`Checkpoint`.

    ``folder`` is a temporary one, with what transformers makes of the file's metadata: config.json,
    generation_config.json, tokenizer. ``side_folder``: one whose other side files are carried along.
    The dtype is that of the file's matrices, bfloat16 where they are quantized. Raises
    ``CheckpointError`` for files that transformers cannot read, and without the package ``gguf``.
    """

    def __init__(self, file: Path, *, side_folder: Path | None = None):
        _check_can_read(file)
        self.source, self._file = side_folder or file, file
        self._temporary = TemporaryDirectory(prefix="mxquant-gguf-")
        self.folder = Path(self._temporary.name)
        self.warnings = []
        self._origins = [file]
        self._dtype, quantized = _formats(file)
        if quantized:
            self.warnings.append(
                f"{file.name} holds {', '.join(quantized)} weights: their error stays, and that of quantizing is added"
            )
        if side_folder is not None:
            self._copy_side_files(side_folder)
        meta = self._write_config()
        self._write_tokenizer()
        self._set_times()
        self.config = read_config(self.folder)
        self.tensors = {}
        for name, tensor in _as_saved(meta, self._dtype).items():
            dtype = DTYPE_NAMES[tensor.dtype]
            nbytes = ITEM_SIZES[dtype] * tensor.numel()
            self.tensors[name] = TensorInfo(name, dtype, tuple(tensor.shape), nbytes, file)
        self.held_bytes = self.nbytes

    def files(self) -> list[Path]:
        """The file, and those of its folder that are carried along."""
        return self._origins

    def _get(self, name: str) -> torch.Tensor:
        return self._weights[name]

    @cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the model, under the names that ``save_pretrained`` gives them."""
        from transformers import AutoModelForCausalLM, GgufConfig

        loaded: Any = self._ask(
            AutoModelForCausalLM.from_pretrained,
            dtype=self._dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{self._file.name}: lacks {missing[0]}, which {type(model).__name__} needs")
        weights = _as_saved(model, self._dtype)
        for name, expected in self.tensors.items():
            found = weights.get(name)
            if found is None or (DTYPE_NAMES[found.dtype], tuple(found.shape)) != (expected.dtype, expected.shape):
                what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise CheckpointError(f"{self._file.name}: transformers makes {what} of {name}")
        return weights

    def _write_config(self) -> Any:
        """Write config.json and generation_config.json; returns the model on the meta device."""
        from transformers import AutoConfig

        config = self._ask(AutoConfig.from_pretrained)
        config.dtype = self._dtype
        config.save_pretrained(self.folder)
        model = build_meta_model(self.folder)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(self.folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(self.folder)
        return model

    def _write_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        try:
            self._ask(AutoTokenizer.from_pretrained).save_pretrained(self.folder)
        except CheckpointError as error:
            self.warnings.append(f"the output will have no tokenizer: {error}")

    def _set_times(self) -> None:
        """Give the files that were made the time of the one they were made from: they are as old as that."""
        time = self._file.stat().st_mtime_ns
        for path in self.folder.rglob("*"):
            os.utime(path, ns=(time, time))

    def _copy_side_files(self, folder: Path) -> None:
        found = side_files(folder, [self._file])
        self.warnings += found.warnings()
        for relative in found.carried:
            self._origins.append(folder / relative)
            (self.folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / relative, self.folder / relative)

    def _ask(self, loader: Callable[..., _T], **options: Any) -> _T:
        try:
            return loader(self._file.parent, gguf_file=self._file.name, local_files_only=True, **options)
        except Exception as error:  # a loader's boundary: ValueError, KeyError, NotImplementedError and more
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(f"{self._file.name}: transformers cannot read it: {why}") from error


def _check_can_read(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    needs(f"reading {file.name}", "gguf", extra="gguf", error=CheckpointError)
    if _PART.search(file.name):
        raise CheckpointError(f"{file.name} is one part of a model; join them with llama-gguf-split --merge first")


def _formats(file: Path) -> tuple[torch.dtype, list[str]]:
    """The dtype to decode the file's weights to, and the quantized formats among its matrices."""
    from gguf import GGUFReader

    try:
        kinds = {t.tensor_type.name for t in GGUFReader(file).tensors if len(t.shape) > 1}
    except Exception as error:  # ValueError for a wrong head; numpy's and struct's for a short file
        raise CheckpointError(f"{file.name}: not a complete GGUF file: {why_not_whole(file, error)}") from error
    if kinds <= {"F32"}:
        return torch.float32, []
    return (torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16), sorted(kinds - {"F32", "F16", "BF16"})


def _as_saved(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's tensors as ``save_pretrained`` writes them: names of the hub, tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    kept, tied = kept_in_fp32(model), model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(torch.float32 if kept(name) else dtype)
    model._weight_conversions = None  # those of saving, not of reading the file
    return revert_weight_conversion(model, tensors)
