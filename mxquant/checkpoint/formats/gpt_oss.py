"""gpt-oss's own checkpoints, whose experts are MXFP4 (``quant_method: mxfp4``), and a reader that decodes them.

Of a parameter ``p``, dense ``[experts, in, out]``, the files hold ``p_blocks``, uint8
``[experts, out, in/32, 16]`` (two codes a byte, the even index in the low nibble), and ``p_scales``,
uint8 E8M0 ``[experts, out, in/32]``: each expert's transpose, in exactly the preset ``mxfp4``. Every
value is a bfloat16 number, so decoding loses nothing; one expert is decoded at a time.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from mxquant.checkpoint.formats.base import Layout, PackedFormat
from mxquant.checkpoint.formats.packed import PACKED, SCALE, Matrix, PackedWeight
from mxquant.checkpoint.headers import TensorInfo, Tensors
from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec.qtensor import QTensor
from mxquant.errors import CheckpointError
from mxquant.schemes.formats import QuantScheme

if TYPE_CHECKING:
    from mxquant.checkpoint.formats.base import Decode

_BLOCK_BYTES = 16


class GptOssFormat(PackedFormat):
    """The experts of gpt-oss. The model is published so, and is quantized anew as if it were dense."""

    method = "mxfp4"
    suffixes = MappingProxyType({PACKED: "_blocks", SCALE: "_scales"})
    readers = ("vLLM", "SGLang", "transformers")

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        layout = Layout(self)
        kept = [str(name) for name in config.get("modules_to_not_convert") or ()]
        layout.must_be_dense = lambda module: any(_names_part(module, name) for name in kept)
        for info in tensors.values():
            name = info.name.removesuffix(self.suffixes[PACKED])
            if name == info.name:
                continue
            if len(info.shape) != 4:
                raise CheckpointError(f"{info.name} {list(info.shape)} is not [experts, out, blocks, {_BLOCK_BYTES}]")
            experts, rows, count, half = info.shape
            scheme, shape = QuantScheme.preset("mxfp4"), (rows, 2 * count * half)
            weight = self.weight(name, scheme, shape, experts=experts, transposed=True)
            parts = {
                PACKED: replace(weight.parts[PACKED], shape=(experts, rows, count, _BLOCK_BYTES)),
                SCALE: replace(weight.parts[SCALE], shape=(experts, rows, count)),
            }
            layout.weights.append(replace(weight, parts=parts))
        return layout

    def open_dense(self, folder: Path, decode: Decode) -> Checkpoint | None:
        return GptOssCheckpoint(folder, decode)


def _names_part(module: str, name: str) -> bool:
    """Whether ``name`` is the module or one that holds it; ``*`` stands for anything."""
    return fnmatch(module, name) or fnmatch(module, f"{name}.*") or module.endswith(f".{name}")


class GptOssCheckpoint(Checkpoint):
    """``tensors`` and ``read`` give the dense bfloat16 tensors that the packed ones stand for.

    ``decode(q, dtype)``: makes the dense matrix of an expert. Raises ``CheckpointError`` for blocks
    without scales and for shapes that do not fit each other.
    """

    decoded = True

    def __init__(self, folder: Path, decode: Decode = QTensor.dequantize):
        super().__init__(folder)
        self._decode = decode
        self._stored = self.tensors
        layout = GptOssFormat().read(self.config.get("quantization_config") or {}, self._stored)
        self._packed = {weight.name: weight for weight in layout.weights}
        dense = {weight.parts[PACKED].name: self._dense_info(weight) for weight in layout.weights}
        parts = layout.part_names
        found = [dense.get(name) or info for name, info in self._stored.items() if name in dense or name not in parts]
        self.tensors = {info.name: info for info in found}

    @property
    def weight_files(self) -> list[Path]:
        return list(dict.fromkeys(self._files.values()))

    def read(self, name: str) -> torch.Tensor:
        if name not in self._packed:
            return super().read(name)
        return torch.stack([self.read_part(name, expert) for expert in range(self.tensors[name].shape[0])])

    def read_part(self, name: str, index: int) -> torch.Tensor:
        weight = self._packed.get(name)
        if weight is None:
            return super().read_part(name, index)
        packed, scale = (self._get(weight.parts[role].name)[index] for role in (PACKED, SCALE))
        matrix = Matrix(weight, packed.reshape(weight.scheme.packed_shape(weight.shape)), scale, None)
        return self._decode(matrix.qtensor(), torch.bfloat16).t()

    def _dense_info(self, weight: PackedWeight) -> TensorInfo:
        """The dense tensor that a packed weight stands for."""
        packed, scales = (weight.parts[role].name for role in (PACKED, SCALE))
        for kind, message in weight.problems(self._stored):
            if kind == "missing":
                raise CheckpointError(f"tensor {packed} has no {scales.rpartition('.')[2]} beside it")
            raise CheckpointError(f"tensor {packed} is not MXFP4: {message}")
        nbytes = sum(self._stored[part].nbytes for part in (packed, scales))
        return TensorInfo(weight.name, "BF16", weight.dense_shape, nbytes, self._stored[packed].file)
