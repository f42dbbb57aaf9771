"""``PackedWeight``: one packed weight of a checkpoint, whatever format and names the files have.

This module does not import torch before numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from mxquant.checkpoint.headers import Tensors
from mxquant.checkpoint.layout import OutputTensor
from mxquant.errors import CheckpointError
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

if TYPE_CHECKING:
    import torch

    from mxquant.checkpoint.reader import Checkpoint
    from mxquant.codec.qtensor import QTensor

# The tensors of a packed weight by what they are.
PACKED, SCALE, GLOBAL_SCALE = "packed", "scale", "global_scale"


@dataclass(frozen=True)
class Part(OutputTensor):
    """One tensor of a packed weight in the files. ``also``: other shapes that it may have."""

    also: tuple[tuple[int, ...], ...] = ()

    def problem(self, tensors: Tensors) -> tuple[str, str] | None:
        """What is wrong with it among ``tensors``: ``missing`` or ``shapes``, and a sentence."""
        info = tensors.get(self.name)
        if info is None:
            return "missing", f"tensor {self.name} is missing"
        if info.dtype == self.dtype and info.shape in (self.shape, *self.also):
            return None
        want = " or ".join(str(list(shape)) for shape in (self.shape, *self.also))
        return "shapes", f"{self.name} is {info.dtype} {list(info.shape)}; it must be {self.dtype} {want}"


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
    activations : what the layer's inputs are quantized to as it runs.
    format : how the parts are encoded; the on-disk format.
    """

    name: str
    scheme: QuantScheme
    shape: tuple[int, int]
    parts: dict[str, Part]
    experts: int | None = None
    transposed: bool = False
    activations: ActivationScheme | None = None
    format: Encoding = field(default_factory=lambda: Encoding())

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
    def multiplied(self) -> bool:
        """Whether the stored global scale is a factor of the block scales, not their divisor."""
        return self.format.multiplies

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense tensor."""
        matrix = self.shape[::-1] if self.transposed else self.shape
        return matrix if self.experts is None else (self.experts, *matrix)

    def problems(self, tensors: Tensors) -> list[tuple[str, str]]:
        """What of its parts is ``missing`` among the tensors of the files, or of other ``shapes``: a sentence each."""
        return [found for part in self.parts.values() if (found := part.problem(tensors)) is not None]

    def read(self, checkpoint: Checkpoint) -> Iterator[Matrix]:
        """Its matrices, as views of the mapped files. Raises ``CheckpointError`` where :meth:`problems` finds any."""
        problems = self.problems(checkpoint.tensors)
        if problems:
            raise CheckpointError(problems[0][1])
        found = {role: self.format.convert(role, checkpoint.read(part.name)) for role, part in self.parts.items()}
        packed = found[PACKED].reshape(self.matrices, *self.scheme.packed_shape(self.shape))
        scale = found[SCALE].reshape(self.matrices, *self.scheme.scale_shape(self.shape))
        one = found[GLOBAL_SCALE].reshape(self.matrices) if GLOBAL_SCALE in found else None
        for i in range(self.matrices):
            yield Matrix(self, packed[i], scale[i], None if one is None else one[i : i + 1])


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
        from mxquant.codec.numerics import effective_scale

        height = self.weight.scheme.block_shape[0]
        q = self._rows(first * height, None if last is None else last * height).qtensor()
        return effective_scale(q.scale, q.scheme.scale_format, q.global_scale)

    def chunks(self, elements: int = 1 << 18) -> Iterator[tuple[int, int]]:
        """Ranges of rows, whole blocks in each, of about so many elements."""
        rows, columns = self.weight.shape
        height = self.weight.scheme.block_shape[0]
        step = max(1, elements // columns // height) * height
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start .. stop`` as fp32, ``start`` at the edge of a block."""
        import torch

        from mxquant.codec.qtensor import dequantize_parts

        q = self._rows(start, stop).qtensor()
        return dequantize_parts(q.packed, q.scale, q.global_scale, q.shape, q.scheme, torch.float32)

    def _rows(self, start: int, stop: int | None) -> Matrix:
        rows, columns = self.weight.shape
        height = self.weight.scheme.block_shape[0]
        stop = rows if stop is None else min(stop, rows)
        weight = replace(self.weight, shape=(stop - start, columns))
        scale = self.scale[start // height : -(-stop // height)]
        return Matrix(weight, self.packed[start:stop].contiguous(), scale.contiguous(), self.global_scale)


class Encoding:
    """How a format encodes a packed weight in its tensors.

    Attributes
    ----------
    multiplies : whether a stored global scale is a factor of the block scales, not their divisor.
    says_rules : whether the config says how scales were chosen and elements rounded.
    converts : roles of the tensors whose bits :meth:`convert` changes.
    """

    multiplies: bool = False
    says_rules: bool = False
    converts: tuple[str, ...] = ()

    def convert(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """A stored tensor with its bits where the codec has them. A format that changes any says so in
        :attr:`converts`."""
        return tensor

    def qtensor(self, matrix: Matrix) -> QTensor:
        """One matrix as the codec knows it: the global scale divides."""
        from mxquant.codec.qtensor import QTensor

        return QTensor(matrix.packed, matrix.scale, matrix.global_scale, matrix.weight.shape, matrix.weight.scheme)

    def stored_scale(self, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        """Block scales as the format's own writer stores them."""
        return scale
