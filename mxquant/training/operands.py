"""Operands of the products of a linear layer: quantized, kept as codes, decoded when multiplied.

``mxquant::training_quantize`` is an operator, so that compilers and tracers take it as it is: it reads
the pass of the noise when it runs, and tells an active :class:`mxquant.training.Monitor` what it did.
"""

from __future__ import annotations

import torch

from mxquant.codec.numerics import scale_dtype
from mxquant.codec.qtensor import QTensor
from mxquant.errors import WeightError
from mxquant.ops import operators as ops
from mxquant.schemes.formats import QuantScheme
from mxquant.training import monitor
from mxquant.training.noise import noise_name

# Packed elements, block scales and global scale, as :class:`mxquant.QTensor` has them.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

_LIBRARY = torch.library.Library("mxquant", "FRAGMENT")
_LIBRARY.define("training_quantize(Tensor x, str scheme, str operand, Tensor noise) -> (Tensor, Tensor, Tensor?)")


def encode(x: torch.Tensor, scheme: QuantScheme, operand: str, noise: torch.Tensor) -> Parts:
    """Quantize a matrix ``[rows, columns]``, blocks along its columns or in tiles.

    ``operand``: ``layer/role`` or ``layer/role.product``, which names its noise; ``noise``: the state of a
    :class:`mxquant.training.Noise`. A matrix with NaN or infinities becomes all NaN: it reaches the
    loss or the gradient norm, as in high precision, where loops and gradient scalers look for it.
    """
    return torch.ops.mxquant.training_quantize(x, scheme.text, operand, noise)


def decode(parts: Parts, scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix that the codes stand for: fp32 values of the codec, rounded once to ``dtype``."""
    packed, scale, global_scale = parts
    return torch.ops.mxquant.dequantize(packed, scale, global_scale, list(shape), scheme.text, dtype)


def _quantize(x, scheme, operand, noise):  # type: ignore[no-untyped-def]
    s = QuantScheme.parse(scheme)
    name = noise_name(operand, noise) if s.rounding == "stochastic" else operand
    try:
        q = ops.quantize_tensor(x, s, seed=int(noise[0]), name=name)
    except WeightError:
        if bool(x.isfinite().all()):
            raise
        q = _all_nan(x, s)
    if monitor.ACTIVE is not None:
        monitor.ACTIVE.record(operand, x, q)
    return q.packed, q.scale, q.global_scale


def _all_nan(x: torch.Tensor, scheme: QuantScheme) -> QTensor:
    shape, fmt = (x.shape[0], x.shape[1]), scheme.scale_format
    packed = torch.zeros(scheme.packed_shape(shape), dtype=torch.uint8, device=x.device)
    scale = torch.full(scheme.scale_shape(shape), 0xFF, dtype=torch.uint8, device=x.device)
    if not fmt.coded:
        scale = torch.full_like(scale, torch.nan, dtype=scale_dtype(fmt))
    made = torch.ones(1, device=x.device) if scheme.global_scale else None
    return QTensor(packed, scale.view(scale_dtype(fmt)), made, shape, scheme)


def _quantize_fake(x, scheme, operand, noise):  # type: ignore[no-untyped-def]
    s = QuantScheme.parse(scheme)
    packed = x.new_empty(s.packed_shape(x.shape), dtype=torch.uint8)
    scale = x.new_empty(s.scale_shape(x.shape), dtype=scale_dtype(s.scale_format))
    return packed, scale, x.new_empty(1, dtype=torch.float32) if s.global_scale else None


_LIBRARY.impl("training_quantize", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("mxquant::training_quantize", _quantize_fake, lib=_LIBRARY)
