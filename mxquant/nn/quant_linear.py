"""``QuantLinear``: a linear layer whose weight stays packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mxquant.checkpoint.formats import native
from mxquant.checkpoint.formats.packed import GLOBAL_SCALE
from mxquant.codec.numerics import scale_dtype
from mxquant.codec.qtensor import QTensor
from mxquant.kernels.backend import PreparedLinear
from mxquant.ops import operators as ops
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

# Buffers are called what tensors are in our own files.
_GLOBAL_SCALE = f"weight{native.FORMAT.suffixes[GLOBAL_SCALE]}"


def restore_encodings(module: nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
    """Give buffers the dtype and the bits of ``before`` again, on the device where they are now.

    Casting a module casts its buffers too; encodings must only change device.
    """
    for name, buffer in before.items():
        after = module._buffers[name]
        if buffer is not None and after is not None and after.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(after.device)


class QuantLinear(nn.Module):
    """``y = x @ W.T + bias`` with ``W`` in a block-scaled format.

    Buffers carry the names of the files: ``weight`` (uint8, packed), ``weight_scale`` and, where
    the scheme has one, ``weight_global_scale`` (fp32). They are numbers' encodings, not numbers, so
    ``.to(dtype)``, ``.half()`` and ``.bfloat16()`` leave them alone; ``bias`` is an ordinary
    parameter of the model's dtype.

    ``activations``: the format that inputs are rounded to first; None leaves them as they are.

    ``shape`` is ``(out_features, in_features)``. ``stored_shape``: the shape of the ``weight``
    buffer where a file format flattens it; ``scheme.packed_shape(shape)`` otherwise. The buffers
    start uninitialized.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        scheme: QuantScheme,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stored_shape: tuple[int, ...] | None = None,
        activations: ActivationScheme | None = None,
    ):
        super().__init__()
        self.activations = activations
        self.scheme = scheme
        self.out_features, self.in_features = shape
        empty = torch.empty
        self._packed_shape = scheme.packed_shape(shape)
        self.register_buffer("weight", empty(stored_shape or self._packed_shape, dtype=torch.uint8, device=device))
        kind = scale_dtype(scheme.scale_format)
        self.register_buffer("weight_scale", empty(scheme.scale_shape(shape), dtype=kind, device=device))
        fp32 = empty(1, dtype=torch.float32, device=device) if scheme.global_scale else None
        self.register_buffer(_GLOBAL_SCALE, fp32)
        self.register_parameter("bias", nn.Parameter(empty(shape[0], dtype=dtype, device=device)) if bias else None)
        self._scheme_text = scheme.text
        self._scale_dtype, self._shape = kind, (self.out_features, self.in_features)
        self._sizes = (self._packed_shape[0] * self._packed_shape[1], self.weight_scale.numel())
        self._call: PreparedLinear | None = None  # the product as a prepared call of a kernel

    @property
    def activations(self) -> ActivationScheme | None:
        """The format that inputs are rounded to first; None leaves them as they are."""
        return self._activations

    @activations.setter
    def activations(self, scheme: ActivationScheme | None) -> None:
        self._activations = scheme
        self._dynamic = None if scheme is None else (scheme.scheme.text, scheme.per_token)

    @classmethod
    def from_qtensor(cls, q: QTensor, bias: torch.Tensor | None = None) -> QuantLinear:
        """A layer that holds the tensors of ``q`` (not copies of them)."""
        layer = cls(q.shape, q.scheme, bias=bias is not None, device="meta")
        layer.weight, layer.weight_scale, layer.weight_global_scale = q.packed, q.scale, q.global_scale
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        return layer

    @property
    def packed(self) -> torch.Tensor:
        """The packed elements as a matrix, whatever shape they are stored in."""
        return self.weight if self.weight.ndim == 2 else self.weight.view(self._packed_shape)

    @property
    def qweight(self) -> QTensor:
        """The weight as a :class:`QTensor` that shares this layer's memory."""
        shape = (self.out_features, self.in_features)
        return QTensor(self.packed, self.weight_scale, self.weight_global_scale, shape, self.scheme)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight ``[out_features, in_features]``."""
        return ops.dequantize(self.qweight, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._dynamic is not None:
            return torch.ops.mxquant.quantized_linear(x, *self._operands(), *self._dynamic)
        if ops.needs_no_dispatcher(x, self._parameters.get("bias")):
            call = self._prepared()
            y = None if call is None else call(x)
            if y is not None:
                return y
        return torch.ops.mxquant.linear(x, *self._operands())

    def _prepared(self) -> PreparedLinear | None:
        """The layer's product as a prepared call of a kernel; None if there is none for it."""
        # Looking up a buffer as an attribute takes as long as a small kernel.
        buffers: dict[str, Any] = self._buffers
        call = self._call
        weight, scale, divisor = buffers["weight"], buffers["weight_scale"], buffers[_GLOBAL_SCALE]
        bias = self._parameters.get("bias")
        if call is None or not call.holds(weight, scale, divisor, bias):
            fits = self._fit(weight, scale, divisor, bias)
            call = ops.linear_call(weight, scale, divisor, bias, self._shape, self.scheme) if fits else None
            self._call = call
        return call

    def _operands(self) -> tuple:  # type: ignore[type-arg]
        return self.packed, self.weight_scale, self.weight_global_scale, self.bias, list(self._shape), self._scheme_text

    def _fit(self, weight, scale, divisor, bias) -> bool:  # type: ignore[no-untyped-def]
        """Whether a kernel may trust its arguments; if not, the operator says what is wrong with them."""
        return (
            weight.dtype is torch.uint8
            and scale.dtype is self._scale_dtype
            and weight.numel() == self._sizes[0]
            and scale.numel() == self._sizes[1]
            and (divisor is not None) == self.scheme.global_scale
            and (divisor is None or (divisor.dtype is torch.float32 and divisor.numel() == 1))
            and (bias is None or bias.numel() == self._shape[0])
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme.text}"
            f"{f', activations={self.activations.text}' if self.activations else ''}"
        )

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = dict(self._buffers)
        self._call = None  # refers to the tensors that are about to be replaced
        super()._apply(fn, recurse)
        restore_encodings(self, before)
        return self
