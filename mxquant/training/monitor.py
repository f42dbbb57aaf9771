"""What quantization does to a training step: saturated and lost blocks, and values that differ.

With 1-D blocks an operand is quantized along another axis in each of its two products, so that one
number has two values, and the gradient is that of another function than the one that ran. The
*mismatch* is the norm of their difference over the norm of the first, as a root mean square over
operands. Where one quantization serves both products there is nothing to differ: it is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from mxquant.codec import blocks as B
from mxquant.codec.numerics import effective_scale
from mxquant.codec.qtensor import QTensor
from mxquant.ops.operators import dequantize
from mxquant.training.recipes import ROLES

# Ends the name of an operand that a Hadamard transform has turned into other numbers.
ROTATED = ".rotated"

# The monitor that operands report to; one at a time.
ACTIVE: Monitor | None = None


@dataclass
class OperandStats:
    """Counts of blocks, and over ``compared`` operands the sum of squared mismatches."""

    operands: int = 0
    blocks: int = 0
    saturated: int = 0
    zero_scale: int = 0
    compared: int = 0
    mismatch: float = 0.0

    def __add__(self, other: OperandStats) -> OperandStats:
        return OperandStats(**{f: getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__})

    def to_dict(self) -> dict[str, float]:
        return {
            "saturated": self.saturated / max(1, self.blocks),
            "zero_scale": self.zero_scale / max(1, self.blocks),
            "mismatch": math.sqrt(self.mismatch / max(1, self.compared)),
        }


@dataclass
class Monitor:
    """Collects what layers do while it is active: ``with Monitor() as monitor: <training step>``.

    ``stats``: role -> :class:`OperandStats` over all layers. Counting costs about as much as quantizing,
    and where a mismatch is to be measured, codes are kept from forward until backward.
    """

    stats: dict[str, OperandStats] = field(default_factory=lambda: {role: OperandStats() for role in ROLES})
    _first: dict[str, QTensor] = field(default_factory=dict)

    def __enter__(self) -> Monitor:
        global ACTIVE
        if ACTIVE is not None:
            raise RuntimeError("another monitor is active; there can be one at a time")
        ACTIVE = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global ACTIVE
        ACTIVE = None
        self._first.clear()

    def record(self, operand: str, x: torch.Tensor, q: QTensor) -> None:
        """Note the operand ``layer/role`` or ``layer/role.product``: the matrix before, and its codes."""
        layer, _, use = operand.rpartition("/")
        role, _, product = use.removesuffix(ROTATED).partition(".")
        seen = _count(x, q)
        if product in ("", ROLES[role][0]):
            self._first[f"{layer}/{role}"] = q
            # Until a second quantization tells otherwise, this one serves both products.
            seen.compared = 1
        elif (before := self._first.pop(f"{layer}/{role}", None)) is not None:
            if use.endswith(ROTATED):  # other numbers, which do not compare
                seen.compared = -1
            else:
                seen.mismatch = _mismatch(before, q)
        self.stats[role] += seen

    def summary(self) -> dict[str, Any]:
        """``saturated`` and ``zero_scale`` (shares of all blocks) and ``mismatch``, in all and by role."""
        roles = {role: stats.to_dict() for role, stats in self.stats.items() if stats.operands}
        return sum(self.stats.values(), OperandStats()).to_dict() | {"roles": roles}


def _count(x: torch.Tensor, q: QTensor) -> OperandStats:
    """Saturated: the largest magnitude of a block is beyond what its scale can hold."""
    scheme = q.scheme
    amax = B.amax(B.split(x.to(torch.float32).contiguous(), scheme.block_shape))
    scale = effective_scale(q.scale, scheme.scale_format, q.global_scale)
    lost = (amax > 0) & (scale == 0)
    saturated = (amax / scale > scheme.element_format.max) & ~lost
    return OperandStats(1, amax.numel(), int(saturated.sum()), int(lost.sum()))


def _mismatch(first: QTensor, second: QTensor) -> float:
    """Squared relative difference of an operand's two values; the second one is stored transposed."""
    before, after = dequantize(first), dequantize(second).t()
    return float((before - after).square().sum() / before.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
