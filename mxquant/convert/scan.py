"""A look at the weights before the work: would their block scales fit the scale format?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec import blocks as B
from mxquant.codec.numerics import encode_scale
from mxquant.codec.scaling import count_small_scales
from mxquant.convert.plan import QuantPlan
from mxquant.schemes.formats import QuantScheme

# Weights looked at in the whole model, evenly spread over it.
_SAMPLE = 1 << 22
WARN_SHARE = 0.01


@dataclass
class SmallScales:
    """Sampled blocks of one scheme whose exact scale ``amax/M`` is too small for the format."""

    blocks: int = 0
    zero: int = 0
    subnormal: int = 0

    @property
    def share(self) -> float:
        return (self.zero + self.subnormal) / self.blocks if self.blocks else 0.0


def scan_small_scales(checkpoint: Checkpoint, plan: QuantPlan) -> dict[QuantScheme, SmallScales]:
    """Per scheme without a global scale, how many sampled blocks would get a zero or subnormal scale."""
    found: dict[QuantScheme, SmallScales] = {}
    stride = max(1, sum(t.parameters for t in plan.quantized) // _SAMPLE)
    for t in plan.quantized:
        scheme = t.scheme
        assert scheme is not None
        fmt = scheme.scale_format
        if scheme.global_scale or not fmt.coded or not fmt.has_zero:
            continue
        counts = found.setdefault(scheme, SmallScales())
        for _, weight in t.read_matrices(checkpoint):
            amax = _sampled_amax(weight, scheme, stride)
            counts.blocks += amax.numel()
            zero, subnormal = count_small_scales(encode_scale(amax / scheme.element_format.max, fmt), amax, fmt)
            counts.zero += zero
            counts.subnormal += subnormal
    return found


def small_scale_warnings(checkpoint: Checkpoint, plan: QuantPlan) -> list[str]:
    """A sentence for each scheme that more than 1 % of the blocks fall below, naming the cures."""
    return [
        _sentence(scheme, counts)
        for scheme, counts in scan_small_scales(checkpoint, plan).items()
        if counts.share > WARN_SHARE
    ]


def _sentence(scheme: QuantScheme, counts: SmallScales) -> str:
    zero, subnormal = counts.zero / counts.blocks, counts.subnormal / counts.blocks
    cures = ["--scale ue5m3"] * (scheme.scale == "e4m3") + ["--global-scale", "larger blocks"]
    return (
        f"by a sample of the weights, about {counts.share:.0%} of the {scheme.scale} block scales would be zero "
        f"({zero:.1%}) or subnormal ({subnormal:.1%}), so their blocks lose precision. Cures: {', '.join(cures)}"
    )


def _sampled_amax(weight: torch.Tensor, scheme: QuantScheme, stride: int) -> torch.Tensor:
    """Maxima of the blocks, not all zero, in every ``stride``-th row of blocks."""
    height = scheme.block_shape[0]
    if height == 1:
        rows = weight[::stride]
    else:
        rows = torch.cat([weight[r : r + height] for r in range(0, weight.shape[0], stride * height)])
    # Maxima are the same in any dtype, and half as long in half of the bytes.
    amax = B.amax(B.split(rows.contiguous(), scheme.block_shape)).to(torch.float32)
    return amax[amax > 0]
