"""Quantizing activations: scales from the tensor at hand, values out in place of codes.

What is not finite stays visible: a token with a NaN or an infinity becomes NaN, as it would in the
matrix product, and where one global scale ties all tokens together, so do they.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mxquant.codec import blocks as B
from mxquant.codec.amax import tensor_amax
from mxquant.codec.numerics import effective_scale, nearest_values
from mxquant.codec.qtensor import CHUNK_ELEMENTS
from mxquant.codec.rounding import quantize_tensor
from mxquant.codec.scaling import block_scales, global_scales
from mxquant.schemes.formats import QuantScheme


def round_trip(tokens: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """What finite ``tokens`` ``[tokens, features]`` decode to after quantization, in their dtype."""
    return quantize_tensor(tokens, scheme, name="activations").dequantize(tokens.dtype)


def quantize_dynamically(
    x: torch.Tensor,
    scheme: QuantScheme,
    per_token: bool,
    round_trip: Callable[[torch.Tensor, QuantScheme], torch.Tensor] = round_trip,
) -> torch.Tensor:
    """Activations ``[..., features]`` quantized, in their shape and dtype.

    ``scheme``: 1 x n blocks, rounding to nearest. ``per_token``: a global scale for each row in
    place of one for all. ``round_trip``: the function of that name, or one that does the same faster.
    """
    tokens = x.reshape(-1, x.shape[-1])
    if x.numel() == 0:
        return x.clone()
    finite = None
    # Elsewhere than on a CPU, looking first would wait for the device.
    if not tokens.is_cpu or not bool(tensor_amax(tokens).isfinite()):
        finite = tokens.isfinite().all(1, keepdim=True)
        if scheme.global_scale and not per_token:
            finite = finite & finite.all()
        tokens = torch.where(finite, tokens, 0)
    values = _each_row(tokens, scheme).to(x.dtype) if per_token else round_trip(tokens, scheme)
    if finite is not None:
        values = torch.where(finite, values, torch.nan)
    return values.view(x.shape)


def _each_row(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Values (fp32) of ``x`` with a global scale for each row, a few rows at a time."""
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for row in range(0, x.shape[0], step):
        out[row : row + step] = _rows(x[row : row + step].to(torch.float32).contiguous(), scheme)
    return out


def _rows(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    blocks = B.split(x, scheme.block_shape)
    amax = B.amax(blocks)
    divisors = global_scales(amax.amax(1, keepdim=True), scheme)
    scale = block_scales(blocks, amax, scheme, divisors)
    effective = effective_scale(scale, scheme.scale_format, divisors)[:, None, :, None]
    # A block whose scale is zero is lost; dividing by infinity says so without a branch.
    quotient = blocks.abs().div_(torch.where(effective > 0, effective, torch.inf))
    values = nearest_values(quotient, scheme.element_format).mul_(effective).copysign_(blocks)
    return values.view(x.shape[0], -1)[:, : x.shape[1]]
