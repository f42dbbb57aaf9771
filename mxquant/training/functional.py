"""The linear layer of FP4 training: three products of quantized operands, straight-through.

::

    Y  = Q(X)   Q(W)^T          forward
    dX = Q(dY)  Q(W)            dgrad
    dW = Q(dY)^T Q(X)           wgrad

``Q`` counts as the identity when gradients are taken. Operands are decoded to the dtype that the layer
computes in (autocast's, else the input's) and multiplied by PyTorch, which sums in fp32: element times
block scale is exact in bf16 for all recipes without a global scale, otherwise it is rounded once more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mxquant.codec.rng import derive_key
from mxquant.schemes.formats import QuantScheme
from mxquant.training.monitor import ROTATED
from mxquant.training.operands import Parts, decode, encode
from mxquant.training.recipes import HADAMARD_POINTS, LinearFormats


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    formats: LinearFormats,
    name: str,
    noise: torch.Tensor,
) -> torch.Tensor:
    """``x @ weight.T + bias`` with the operands of its three products quantized.

    ``x``: ``[..., in_features]``; the weight is quantized as it is, whatever autocast makes of ``x``.
    ``name`` and ``noise`` (the state of a :class:`mxquant.training.Noise`) choose the rounding noise.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    if rows.shape[0] == 0:  # an expert without tokens
        y = F.linear(rows, weight.to(dtype))
    else:
        # The pass may be over when backward runs, and `noise` is changed in place.
        y = _Products.apply(rows, weight, formats, name, noise.clone())
    y = y if bias is None else y + bias.to(dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Products(torch.autograd.Function):
    """``x [tokens, in]``, ``weight [out, in]`` -> ``[tokens, out]`` in the dtype of ``x``.

    What backward needs again is kept as codes where one quantization serves both products, else as it
    came in, to be quantized along the other axis.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, formats: LinearFormats, name: str, noise: torch.Tensor
    ) -> torch.Tensor:
        x_codes, x_values = _quantized(x, formats.activation_forward, f"{name}/activation", noise, x.dtype)
        w_codes, w_values = _quantized(weight, formats.weight_forward, f"{name}/weight", noise, x.dtype)
        kept_x = _kept(x, x_codes, formats.shared("activation")) if ctx.needs_input_grad[1] else _NOTHING
        kept_w = _kept(weight, w_codes, formats.shared("weight")) if ctx.needs_input_grad[0] else _NOTHING
        ctx.save_for_backward(*kept_x, *kept_w, noise)
        ctx.formats, ctx.name = formats, name
        ctx.x_shape, ctx.weight_shape, ctx.weight_dtype = x.shape, weight.shape, weight.dtype
        return x_values @ w_values.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        formats, name, saved = ctx.formats, f"{ctx.name}/gradient", ctx.saved_tensors
        kept_x, kept_w, noise = saved[:3], saved[3:6], saved[6]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        shared, for_dgrad, dx, dw = None, grad, None, None
        if formats.shared("gradient") or needs_x:
            suffix = "" if formats.shared("gradient") else ".dgrad"
            _, for_dgrad = _quantized(grad, formats.gradient_dgrad, name + suffix, noise, grad.dtype)
            shared = for_dgrad if formats.shared("gradient") else None
        if needs_x:
            dx = for_dgrad @ _weight_for_dgrad(ctx, kept_w, noise, grad.dtype)
        if needs_weight:
            transposed = shared.t() if shared is not None else _gradient_for_wgrad(ctx, grad, noise)
            dw = (transposed @ _activation_for_wgrad(ctx, kept_x, noise, grad.dtype)).to(ctx.weight_dtype)
        return dx, dw, None, None, None


_NOTHING: tuple[None, None, None] = (None, None, None)


def _quantized(
    x: torch.Tensor, scheme: QuantScheme | None, operand: str, noise: torch.Tensor, dtype: torch.dtype
) -> tuple[Parts | None, torch.Tensor]:
    """Codes and values of an operand; no codes and the operand itself in high precision."""
    if scheme is None:
        return None, x.to(dtype)
    codes = encode(x.contiguous(), scheme, operand, noise)
    return codes, decode(codes, scheme, (x.shape[0], x.shape[1]), dtype)


def _kept(x: torch.Tensor, codes: Parts | None, shared: bool) -> tuple[torch.Tensor | None, ...]:
    return codes if shared and codes is not None else (x, None, None)


def _weight_for_dgrad(ctx: Any, kept: Any, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Q(W) ``[out, in]`` with blocks along out_features, or the tiles of forward."""
    scheme = ctx.formats.weight_dgrad
    if ctx.formats.shared("weight"):
        return decode(kept, scheme, ctx.weight_shape, dtype)
    return _quantized(kept[0].t(), scheme, f"{ctx.name}/weight.dgrad", noise, dtype)[1].t()


def _activation_for_wgrad(ctx: Any, kept: Any, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Q(X) ``[tokens, in]`` with blocks along the tokens, or the tiles of forward."""
    scheme = ctx.formats.activation_wgrad
    if ctx.formats.shared("activation"):
        return decode(kept, scheme, ctx.x_shape, dtype)
    x, operand = _along_tokens(kept[0].t(), f"{ctx.name}/activation.wgrad", ctx.formats.hadamard, noise)
    return _quantized(x, scheme, operand, noise, dtype)[1].t()


def _gradient_for_wgrad(ctx: Any, grad: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Q(dY)^T ``[out, tokens]`` with blocks along the tokens."""
    dy, operand = _along_tokens(grad.t(), f"{ctx.name}/gradient.wgrad", ctx.formats.hadamard, noise)
    return _quantized(dy, ctx.formats.gradient_wgrad, operand, noise, grad.dtype)[1]


def _along_tokens(x: torch.Tensor, operand: str, hadamard: bool, noise: torch.Tensor) -> tuple[torch.Tensor, str]:
    """``x [rows, tokens]`` and its name, after the Hadamard transform if there is one."""
    return (_rotated(x, noise), operand + ROTATED) if hadamard else (x, operand)


def _rotated(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Rows of ``x [rows, tokens]`` in groups of 16 tokens times a random orthogonal matrix, in fp32.

    The matrix is the 16-point Hadamard matrix over 4 with random signs of its rows, the same for all layers
    of a run. Tokens are padded with zeros to whole groups, which add nothing to a product.
    """
    groups = F.pad(x.to(torch.float32), (0, -x.shape[1] % HADAMARD_POINTS)).unflatten(1, (-1, HADAMARD_POINTS))
    return (groups @ rotation(noise).to(x.device)).flatten(1)


def rotation(noise: torch.Tensor) -> torch.Tensor:
    """The 16 x 16 matrix ``D H / 4``: signs from the seed in ``noise``, Sylvester's Hadamard matrix."""
    return torch.ops.mxquant.training_rotation(noise)


def _rotation(noise: torch.Tensor) -> torch.Tensor:
    index = torch.arange(HADAMARD_POINTS)
    ones_in_common = torch.stack([(index[:, None] & index) >> bit & 1 for bit in range(4)]).sum(0)
    signs = torch.tensor([1.0 - 2.0 * (derive_key(int(noise[0]), "rotation") >> i & 1) for i in range(HADAMARD_POINTS)])
    return signs[:, None] * (1.0 - 2.0 * (ones_in_common & 1)) / 4


_LIBRARY = torch.library.Library("mxquant", "FRAGMENT")
_LIBRARY.define("training_rotation(Tensor noise) -> Tensor")
_LIBRARY.impl("training_rotation", _rotation, "CompositeExplicitAutograd")
torch.library.register_fake(
    "mxquant::training_rotation", lambda noise: torch.empty(HADAMARD_POINTS, HADAMARD_POINTS), lib=_LIBRARY
)
