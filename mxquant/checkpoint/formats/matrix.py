"""``Matrix``: one packed matrix as it was read from the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import mxquant.ops.operators  # noqa: F401  (QTensor.dequantize calls an operator)
from mxquant.checkpoint.formats.base import PackedWeight
from mxquant.codec.numerics import effective_scale
from mxquant.codec.qtensor import CHUNK_ELEMENTS, QTensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """One packed matrix: uint8 ``[rows, bytes]``, its scales as stored, fp32 ``[1]`` global scale or None."""

    weight: PackedWeight
    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None

    def qtensor(self) -> QTensor:
        """The matrix as the codec knows it."""
        return self.weight.format.qtensor(self)

    def effective(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """What elements are multiplied by, fp32, for rows ``first .. last`` of blocks."""
        height = self.weight.scheme.block_shape[0]
        q = self._rows(first * height, None if last is None else last * height).qtensor()
        return effective_scale(q.scale, q.scheme.scale_format, q.global_scale)

    def chunks(self, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
        """Ranges of rows, whole blocks in each, of about so many elements."""
        rows, columns = self.weight.shape
        height = self.weight.scheme.block_shape[0]
        step = max(1, elements // columns // height) * height
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def dequantize(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows ``start .. stop``, ``start`` at the edge of a block."""
        return self._rows(start, stop).qtensor().dequantize(dtype)

    def _rows(self, start: int, stop: int | None) -> Matrix:
        rows, columns = self.weight.shape
        height = self.weight.scheme.block_shape[0]
        stop = rows if stop is None else min(stop, rows)
        weight = replace(self.weight, shape=(stop - start, columns))
        scale = self.scale[start // height : -(-stop // height)]
        return Matrix(weight, self.packed[start:stop].contiguous(), scale.contiguous(), self.global_scale)
