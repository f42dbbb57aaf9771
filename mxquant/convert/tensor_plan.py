"""``TensorPlan``: what becomes of one tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from mxquant.checkpoint.layout import ITEM_SIZES, OutputTensor
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Place

if TYPE_CHECKING:
    import torch

    from mxquant.checkpoint.reader import Checkpoint


@dataclass
class TensorPlan:
    """What becomes of one tensor of the source.

    ``shape``: as stored; ``matrix``: ``(out_features, in_features)`` where it is quantized.
    ``scheme`` None: copied as it is, because of ``reason``. ``experts``: how many such matrices the
    tensor holds, if not one. ``place``: which part of the model's parameter it is, for those of
    experts. ``group``: tensors of one group share their global scale. ``outputs``: what is written
    for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    scheme: QuantScheme | None
    reason: str
    transposed: bool = False
    group: str | None = None
    experts: int | None = None
    place: Place | None = None
    outputs: list[OutputTensor] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def matrix(self) -> tuple[int, int]:
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix_names(self) -> list[str]:
        """The name of each matrix in the tensor, which seeds its random bits."""
        return [self.name] if self.experts is None else [f"{self.name}.{expert}" for expert in range(self.experts)]

    def matrices(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices ``[out_features, in_features]`` in the tensor, and their names."""
        for name, matrix in zip(self.matrix_names, [tensor] if self.experts is None else tensor, strict=True):
            yield name, matrix.t() if self.transposed else matrix

    def read_matrices(self, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, read one by one."""
        for index, name in enumerate(self.matrix_names):
            yield name, self.read_matrix(checkpoint, index)

    def read_matrix(self, checkpoint: Checkpoint, index: int) -> torch.Tensor:
        """One of the matrices, as a view of the mapped file if that is dense."""
        matrix = checkpoint.read(self.name) if self.experts is None else checkpoint.read_part(self.name, index)
        return matrix.t() if self.transposed else matrix

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    @property
    def bytes_before(self) -> int:
        return self.parameters * ITEM_SIZES[self.dtype]

    @property
    def bytes_after(self) -> int:
        return sum(o.nbytes for o in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "kind": self.kind,
            "scheme": self.scheme.name if self.scheme else None,
            "reason": self.reason,
            "bytes_after": self.bytes_after,
        }
