"""``PackedWeight``: one packed weight of a checkpoint, whatever format and names the files have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec import blocks
from mxquant.codec.numerics import decode_packed, decode_scale
from mxquant.codec.qtensor import CHUNK_ELEMENTS
from mxquant.errors import CheckpointError
from mxquant.schemes.formats import QuantScheme


@dataclass(frozen=True)
class Part:
    """A tensor that a packed weight must have in the files: its dtype, and the shapes it may have."""

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight: what it stands for and which tensors hold it.

    Attributes
    ----------
    name : the dense tensor that it stands for, as a dense checkpoint would call it.
    scheme : its number format. Files of others do not say how scales were chosen.
    shape : ``(out_features, in_features)`` of one matrix.
    parts : the tensors by role: ``packed``, ``scale`` and perhaps ``global_scale``.
    experts : how many matrices are stacked; None for one alone.
    transposed : the dense tensor is ``[..., in, out]``.
    multiplied : the global scale is a factor of the block scales, not their divisor.
    """

    name: str
    scheme: QuantScheme
    shape: tuple[int, int]
    parts: dict[str, Part]
    experts: int | None = None
    transposed: bool = False
    multiplied: bool = False

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def matrices(self) -> int:
        return 1 if self.experts is None else self.experts

    @property
    def parameters(self) -> int:
        return prod(self.shape) * self.matrices

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense tensor."""
        matrix = self.shape[::-1] if self.transposed else self.shape
        return matrix if self.experts is None else (self.experts, *matrix)

    def problems(self, checkpoint: Checkpoint) -> list[tuple[str, str]]:
        """What of its tensors is missing (``config``) or is of another shape or dtype (``shapes``)."""
        found = []
        for role, part in self.parts.items():
            info = checkpoint.tensors.get(part.name)
            if info is None:
                found.append(("config", f"{part.name} is missing: the {role.replace('_', ' ')} of {self.name}"))
            elif info.dtype != part.dtype or info.shape not in part.shapes:
                want = " or ".join(str(list(shape)) for shape in part.shapes)
                found.append(
                    ("shapes", f"{part.name} is {info.dtype} {list(info.shape)}; it must be {part.dtype} {want}")
                )
        return found

    def read(self, checkpoint: Checkpoint) -> Iterator[Matrix]:
        """Its matrices, as views of the mapped files. Raises ``CheckpointError`` where :meth:`problems` finds any."""
        problems = self.problems(checkpoint)
        if problems:
            raise CheckpointError(problems[0][1])
        tensors = {role: checkpoint.read(part.name) for role, part in self.parts.items()}
        packed = tensors["packed"].reshape(self.matrices, *self.scheme.packed_shape(self.shape))
        scale = tensors["scale"].reshape(self.matrices, *self.scheme.scale_shape(self.shape))
        divisor = tensors["global_scale"].reshape(self.matrices) if "global_scale" in tensors else None
        for i in range(self.matrices):
            yield Matrix(self, packed[i], scale[i], None if divisor is None else divisor[i : i + 1])


@dataclass(frozen=True, eq=False)
class Matrix:
    """One packed matrix: uint8 ``[rows, bytes]``, its scales as stored, fp32 ``[1]`` global scale or None."""

    weight: PackedWeight
    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None

    def effective(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """What elements are multiplied by, fp32, for rows ``first .. last`` of blocks."""
        scale = decode_scale(self.scale[first:last].contiguous(), self.weight.scheme.scale_format)
        if self.global_scale is None:
            return scale
        return scale * self.global_scale if self.weight.multiplied else scale / self.global_scale

    def chunks(self, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
        """Ranges of rows, whole blocks in each, of about so many elements."""
        rows, columns = self.weight.shape
        height = self.weight.scheme.block_shape[0]
        step = max(1, elements // columns // height) * height
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start .. stop`` as fp32, ``start`` at the edge of a block."""
        scheme, columns = self.weight.scheme, self.weight.shape[1]
        height, width = scheme.block_shape
        values = decode_packed(self.packed[start:stop].contiguous(), scheme.element_format, columns)
        values = blocks.split(values, (1, width)).view(stop - start, -1, width)
        scale = blocks.spread(self.effective(start // height, -(-stop // height)), scheme.block_shape, stop - start)
        return (values * scale).view(stop - start, -1)[:, :columns]
