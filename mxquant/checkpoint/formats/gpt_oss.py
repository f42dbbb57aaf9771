"""gpt-oss's own checkpoints, whose experts are MXFP4 (``quant_method: mxfp4``), read as if they were dense.

Of a parameter ``p``, dense ``[experts, in, out]``, the files hold ``p_blocks``, uint8
``[experts, out, in/32, 16]`` (two codes a byte, the even index in the low nibble), and ``p_scales``,
uint8 E8M0 ``[experts, out, in/32]``: each expert's transpose, in exactly the preset ``mxfp4``. Every
value is a bfloat16 number, so decoding loses nothing; one expert is decoded at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.reader import Checkpoint, TensorInfo
from mxquant.codec.qtensor import QTensor
from mxquant.errors import CheckpointError
from mxquant.schemes.formats import QuantScheme

QUANT_METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_SCHEME = QuantScheme.preset("mxfp4")


def is_gpt_oss(config: dict[str, Any]) -> bool:
    """Whether a model's config says that its experts are in this format."""
    found = config.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == QUANT_METHOD


class GptOssCheckpoint(Checkpoint):
    """``tensors`` and ``read`` give the dense bfloat16 tensors that the packed ones stand for.

    ``decode(q, dtype)``: makes the dense weight. Raises ``CheckpointError`` for blocks without scales
    and for shapes that do not fit each other.
    """

    def __init__(self, folder: Path, decode: Callable[[QTensor, torch.dtype], torch.Tensor] = QTensor.dequantize):
        super().__init__(folder)
        self._decode = decode
        self._packed: dict[str, tuple[int, int]] = {}
        tensors = {}
        for name, info in self.tensors.items():
            dense = self._decoded(info)
            if dense is not None:
                tensors[dense.name] = dense
            elif not (name.endswith(_SCALES) and f"{name.removesuffix(_SCALES)}{_BLOCKS}" in self.tensors):
                tensors[name] = info
        self.tensors = tensors

    @property
    def weight_files(self) -> list[Path]:
        return list(dict.fromkeys(self._files.values()))

    def read(self, name: str) -> torch.Tensor:
        if name not in self._packed:
            return super().read(name)
        return torch.stack([self.read_part(name, expert) for expert in range(self.tensors[name].shape[0])])

    def read_part(self, name: str, index: int) -> torch.Tensor:
        if name not in self._packed:
            return super().read_part(name, index)
        rows, columns = self._packed[name]
        packed = self._get(f"{name}{_BLOCKS}")[index].reshape(rows, columns // 2)
        q = QTensor(packed, self._get(f"{name}{_SCALES}")[index], None, (rows, columns), _SCHEME)
        return self._decode(q, torch.bfloat16).t()

    def _decoded(self, info: TensorInfo) -> TensorInfo | None:
        """The dense tensor that the blocks ``info`` stand for; None if they are no blocks."""
        if not info.name.endswith(_BLOCKS):
            return None
        name = info.name.removesuffix(_BLOCKS)
        scales = self.tensors.get(f"{name}{_SCALES}")
        if scales is None:
            raise CheckpointError(f"tensor {info.name} has no {name.rpartition('.')[2]}{_SCALES} beside it")
        shapes = f"{info.dtype} {list(info.shape)}, scales {scales.dtype} {list(scales.shape)}"
        if {info.dtype, scales.dtype} != {"U8"} or len(info.shape) != 4 or info.shape != (*scales.shape, 16):
            raise CheckpointError(f"tensor {info.name} ({shapes}) is not MXFP4")
        experts, rows, blocks = scales.shape
        self._packed[name] = (rows, 32 * blocks)
        return TensorInfo(name, "BF16", (experts, 32 * blocks, rows), info.nbytes + scales.nbytes, info.file)
