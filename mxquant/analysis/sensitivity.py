"""What an error in a weight costs the model: second moments of a linear layer's inputs and output gradients.

A change ``E`` of a weight moves a token's predicted distribution ``p`` by a KL divergence of, to second
order, ``1/2 E_y~p (g^T E x)^2``: ``x`` is the layer's input, ``g`` the gradient of ``log p(y)`` by its
output. For errors ``E_ij`` that are independent of one another this is

    1/2 sum_ij E_ij^2 F_ij,    F_ij = mean over tokens of g_i^2 x_j^2

(the diagonal of the Fisher information, from labels that the model itself draws). ``F`` is as large as
the weight, so it is kept as the product of its row sums and its column sums over its total, which
has the same sums. Tokens with huge inputs and no influence, such as attention sinks, count for
little here; in the plain mean of ``x_j^2`` they count for most.
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
        """From sums over tokens of ``|x|^2 g_i^2`` and ``|g|^2 x_j^2``; their totals are the same number."""
        total = float(rows.sum(dtype=torch.float64))
        if not total > 0:
            return cls(torch.zeros_like(rows, dtype=torch.float32), torch.zeros_like(columns, dtype=torch.float32))
        # All magnitude on one side: gradients may be too small for products in fp32.
        return cls((rows / total).float(), (columns.double() / (2 * tokens)).float())

    @property
    def is_zero(self) -> bool:
        return not bool(self.columns.any())

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
    """Sensitivities by tensor name, and the text they are from: its name and how many tokens of it were used."""

    text: str
    tokens: int
    sensitivity: Mapping[str, Sensitivity]
