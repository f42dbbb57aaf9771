"""Errors of scale rules that look at the whole block: measured on drawn blocks, by the codec itself."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from mxquant.codec.numerics import effective_scale
from mxquant.ops.operators import dequantize, quantize
from mxquant.schemes.formats import QuantScheme
from mxquant.theory.distributions import Distribution, maximum_quantiles
from mxquant.theory.elements import check_metric
from mxquant.theory.parts import ErrorParts

# Large enough for a standard error of a fifth of a percent.
_ELEMENTS = 1 << 20
_MIN_BLOCKS = 1 << 10
_BLOCKS_PER_ROW = 64


def sampled_error(
    scheme: QuantScheme, sigma: float, of: Distribution, metric: str, global_scale: float | None
) -> ErrorParts:
    """What :func:`mxquant.theory.error` returns, by averaging over the same drawn blocks at every call.

    Any scheme will do. The standard error is that of blocks drawn at random, hence an upper limit:
    the maxima are stratified.
    """
    check_metric(metric)
    unit = _unit_blocks(of, math.prod(scheme.block_shape))
    blocks, size = unit.shape
    x = unit * sigma
    divisor = None if global_scale is None else torch.tensor([global_scale], dtype=torch.float32)
    # Relative to what the drawn blocks hold, so that losing everything is an error of exactly that.
    power = 2 if metric == "squared" else 1
    held = float(unit.double().pow(power).mean()) / float(of.moments(np.array(np.inf))[power])
    rows = x.view(-1, _BLOCKS_PER_ROW * size)  # kernels like long rows
    q = quantize(rows, replace(scheme, block=size), global_scale=divisor)
    error = (dequantize(q) - rows).view_as(x).double().abs_().div_(sigma).pow_(power).div_(held)
    stored = effective_scale(q.scale, scheme.scale_format, None).flatten()
    scale = effective_scale(q.scale, scheme.scale_format, divisor).flatten()
    lost, maxima = scale == 0, error[:, 0]  # the first of each block is its largest
    total = error.sum(1)
    live = torch.where(lost, 0.0, total).sum()
    maximum = torch.where(lost, 0.0, maxima).sum()
    fmt, largest = scheme.scale_format, scheme.element_format.max
    clipped = ~lost & (x[:, 0] > largest * scale)
    return ErrorParts(
        others=float(live - maximum) / x.numel(),
        maximum=float(maximum) / x.numel(),
        zero=float(total[lost].sum()) / x.numel(),
        zero_scales=float(lost.double().mean()),
        subnormal_scales=float(((stored > 0) & (stored < fmt.min_normal)).double().mean()),
        saturated_scales=float((clipped & (stored == fmt.max)).double().mean()),
        clipped=float(clipped.double().mean()),
        standard_error=float(total.std() / size / math.sqrt(blocks)),
    )


@lru_cache(maxsize=8)
def _unit_blocks(of: Distribution, size: int) -> torch.Tensor:
    """Blocks ``[blocks, size]`` of magnitudes, fp32, the largest first; one maximum in each of equal strata."""
    blocks = max(_ELEMENTS // size, _MIN_BLOCKS) // _BLOCKS_PER_ROW * _BLOCKS_PER_ROW
    random = np.random.default_rng(0)
    p = (np.arange(blocks) + random.random(blocks)) / blocks
    maxima = maximum_quantiles(np.log(p) - np.log1p(-p), size, of)
    # The others are independent below it: their place in the distribution is uniform up to its place.
    places = random.random((blocks, size - 1)) * of.moments(maxima)[0][:, None]
    drawn = np.concatenate((maxima[:, None], of.exceeded_by(1 - places)), 1)
    return torch.from_numpy(drawn).to(torch.float32)
