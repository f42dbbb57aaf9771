"""What errors in a weight cost the model, learned from a text: the Fisher information of each element, as a product.

A change ``E`` of a weight moves the predictions ``p`` for a window of ``T`` tokens by a KL divergence that is, to
second order and per token, ``1/(2T) E_y~p (sum_ij G_ij E_ij)^2``. ``G = sum_t g_t x_t^T`` is the gradient of
``log p(y)`` by the weight: ``x_t`` are the layer's inputs, ``g_t`` the gradients by its outputs, ``y`` labels that
the model itself draws. Errors of rounding are independent of one another, so what counts is

    1/2 sum_ij E_ij^2 F_ij,    F_ij = E_y G_ij^2 / T

``F`` is as large as the weight; it is kept as the product of its row sums and its column sums over its total, which
has the same sums. Were tokens independent, it would be ``mean g_i^2 x_j^2``. Second moments of activations alone,
``mean x_j^2``, say nothing about which layer matters, and are mostly those of attention sinks: tokens with huge
activations that influence little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sensitivity:
    """``rows``: fp32 ``[out_features]``, ``columns``: fp32 ``[in_features]``; their product is ``F_ij / 2``."""

    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def from_sums(cls, rows: torch.Tensor, columns: torch.Tensor, tokens: int) -> Sensitivity:
        """From the sums of ``G_ij^2`` over columns and over rows, of windows with so many ``tokens`` in all."""
        total = float(rows.sum(dtype=torch.float64))
        if not total > 0:
            return cls(torch.zeros_like(rows, dtype=torch.float32), torch.zeros_like(columns, dtype=torch.float32))
        # All magnitude on one side: gradients may be too small for products in fp32.
        return cls((rows / total).float(), (columns.double() / (2 * tokens)).float())

    def part(self, number: int, count: int) -> Sensitivity:
        """Of the rows in part ``number`` of ``count`` equal ones."""
        rows = len(self.rows) // count
        return Sensitivity(self.rows[number * rows : (number + 1) * rows], self.columns)

    @property
    def is_zero(self) -> bool:
        return not bool(self.columns.any() and self.rows.any())

    def cost(self, error: torch.Tensor, first_row: int) -> float:
        """Nats per token that an ``error`` (fp32 ``[rows, in_features]``, from ``first_row`` on) costs, about."""
        squares = error.square()
        rows = self.rows[first_row : first_row + len(error)]
        return float(torch.dot((rows @ squares).double(), self.columns.double()))

    @classmethod
    def mean(cls, others: Sequence[Sensitivity]) -> Sensitivity:
        """The average of several of one shape."""
        return cls(torch.stack([o.rows for o in others]).mean(0), torch.stack([o.columns for o in others]).mean(0))


@dataclass(frozen=True)
class Calibration:
    """Sensitivities by the name of the matrix; the name of the text they are from, and how many of its tokens."""

    text: str
    tokens: int
    sensitivity: Mapping[str, Sensitivity]
