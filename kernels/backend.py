"""``Backend``: what the kernels for one kind of device offer, and what they do not.

:mod:`mxquant.ops.backends` chooses among the backends; nothing else asks one before it calls it.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from mxquant.codec.rounding import QuantizedRows
from mxquant.schemes.formats import QuantScheme

Operation = Literal[
    "quantize", "quantize_rows", "dequantize", "linear", "linear_grad", "grouped_linear", "quantized_linear"
]


class PreparedLinear(Protocol):
    """``x @ W.T + bias`` for one packed weight, many times, without PyTorch's dispatcher."""

    def holds(
        self, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> bool:
        """Whether these are the tensors it was made from, and still where they were."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The product; None for activations that the kernel does not take."""


class Backend:
    """Kernels that compute operations of :mod:`mxquant.ops.operators` on one kind of device.

    A backend is a subclass that overrides the operations it has; its :meth:`why_not` refuses the
    others. Results are those of the reference: bit for bit where codes or decoded weights are made.

    In all operations ``packed``, ``scale`` and ``global_scale`` are the parts of a
    :class:`mxquant.QTensor` of ``shape`` (``[out_features, in_features]``) and ``scheme``.
    """

    name: str

    def unavailable(self) -> str | None:
        """Why none of the kernels can run in this environment, as a sentence; None if they can."""
        return None

    def why_not(
        self,
        operation: Operation,
        x: torch.Tensor,
        shape: tuple[int, int],
        scheme: QuantScheme,
        *,
        dtype: torch.dtype | None = None,
        activations: QuantScheme | None = None,
        per_token: bool = False,
    ) -> str | None:
        """Why an operation is left to the reference, as a sentence; None if it is served.

        ``x``: its first tensor: a weight, packed elements, activations or a gradient, perhaps on the
        meta device. ``dtype``: the result's (dequantize). ``activations``, ``per_token``: the format
        of the activations (quantized_linear).
        """
        raise NotImplementedError

    def describe(self, operation: Operation, x: torch.Tensor | None = None, scheme: QuantScheme | None = None) -> str:
        """Which kernel serves a call that :meth:`why_not` has no objection to, as far as ``x`` and scheme say."""
        return f"{operation} kernel"

    def quantize(
        self, weight: torch.Tensor, scheme: QuantScheme, key: int, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Packed elements and stored scales of a whole weight; None if something is not finite."""
        raise NotImplementedError

    def quantize_rows(
        self,
        rows: torch.Tensor,
        scheme: QuantScheme,
        key: int,
        global_scale: torch.Tensor | None,
        first_row: int,
        with_stats: bool,
    ) -> QuantizedRows | None:
        """:func:`mxquant.codec.rounding.quantize_rows`."""
        raise NotImplementedError

    def dequantize(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The dense weight."""
        raise NotImplementedError

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> torch.Tensor:
        """``x @ W.T + bias``; ``x`` ``[..., in_features]``."""
        raise NotImplementedError

    def prepare_linear(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> PreparedLinear | None:
        """:meth:`linear` with these parts, prepared; None if there is no such thing for them."""
        return None

    def linear_grad(
        self,
        grad: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> torch.Tensor:
        """``grad @ W``; ``grad`` ``[..., out_features]``."""
        raise NotImplementedError

    def grouped_linear(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> torch.Tensor:
        """Rows of ``x``, sorted by expert, by stacked weights; see :mod:`mxquant.ops.grouped`."""
        raise NotImplementedError

    def quantized_linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
        activations: QuantScheme,
    ) -> torch.Tensor:
        """``Q(x) @ W.T + bias`` with a product of both formats."""
        raise NotImplementedError
