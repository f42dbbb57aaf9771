"""A look at the weights before the work: would their block scales fit the scale format?

Maxima of whole tensors are exact where the format depends on them: one large weight sets the global scale of all that
it shares one with, and one weight too large for the format is clipped. Blocks are sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec import blocks as B
from mxquant.codec.amax import tensor_amax
from mxquant.codec.numerics import encode_scale
from mxquant.codec.scaling import count_small_scales, global_scale_for
from mxquant.convert.plan import QuantPlan
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.schemes.formats import QuantScheme

# Weights looked at in the whole model, evenly spread over it.
_SAMPLE = 1 << 22
WARN_SHARE = 0.01
# The largest number of each dtype: what it cannot hold is not looked for.
_LARGEST = {"F16": 65504.0, "BF16": 3.4e38, "F32": 3.4e38}


@dataclass
class Fit:
    """How the block scales of one tensor, or of several by ``+``, fit their format, by a sample of its blocks.

    Of blocks that are not all zero, ``zero`` and ``subnormal`` would have such a scale. ``largest``: of all weights
    of the tensor, or of all that it shares a global scale with. ``clipped``: whether the format cannot hold that.
    """

    blocks: int = 0
    zero: int = 0
    subnormal: int = 0
    largest: float = 0.0
    clipped: bool = False

    def __add__(self, other: Fit) -> Fit:
        return Fit(
            self.blocks + other.blocks,
            self.zero + other.zero,
            self.subnormal + other.subnormal,
            max(self.largest, other.largest),
            self.clipped or other.clipped,
        )

    @property
    def small(self) -> float:
        """The share of blocks whose scale would be zero or subnormal."""
        return (self.zero + self.subnormal) / self.blocks if self.blocks else 0.0


def scan(checkpoint: Checkpoint, plan: QuantPlan) -> dict[str, Fit]:
    """The fit of each quantized tensor whose scale format may not hold it, by name."""
    stride = max(1, sum(t.parameters for t in plan.quantized) // _SAMPLE)
    looked_at = [t for t in plan.quantized if t.scheme is not None and _may_not_fit(t, t.scheme)]
    needed = [t for t in looked_at if t.scheme is not None and (t.scheme.global_scale or _can_be_clipped(t, t.scheme))]
    amax = {(t.name, i): tensor_amax(w) for t in needed for i, (_, w) in enumerate(t.read_matrices(checkpoint))}
    shared: dict[tuple[str, int], torch.Tensor] = {}
    for t in needed:
        for index in range(len(t.matrix_names)):
            key = (t.group or t.name, index)
            shared[key] = torch.maximum(shared.get(key, amax[t.name, index]), amax[t.name, index])
    found: dict[str, Fit] = {}
    for t in looked_at:
        for index, (_, weight) in enumerate(t.read_matrices(checkpoint)):
            largest = amax.get((t.name, index), torch.zeros(()))
            largest_shared = shared.get((t.group or t.name, index), largest)
            if not bool(largest_shared.isfinite()):
                continue  # an error of its own, which names the place
            fit = _fit(weight, t, largest, largest_shared, stride)
            found[t.name] = found.get(t.name, Fit()) + fit
    return found


def fit_warnings(checkpoint: Checkpoint, plan: QuantPlan) -> list[str]:
    """Sentences on tensors of which more than 1 % of the blocks, or the largest weight, do not fit the scale format."""
    fits = scan(checkpoint, plan)
    by_scheme: dict[QuantScheme, dict[str, Fit]] = defaultdict(dict)
    for t in plan.quantized:
        if t.name in fits and t.scheme is not None:
            by_scheme[t.scheme][t.name] = fits[t.name]
    return [sentence for scheme, found in by_scheme.items() for sentence in _sentences(scheme, found)]


def _may_not_fit(t: TensorPlan, scheme: QuantScheme) -> bool:
    fmt = scheme.scale_format
    if not fmt.coded:
        return False
    return fmt.has_zero or _can_be_clipped(t, scheme)


def _can_be_clipped(t: TensorPlan, scheme: QuantScheme) -> bool:
    return _LARGEST.get(t.dtype, 0.0) > scheme.scale_format.max * scheme.element_format.max


def _fit(weight: torch.Tensor, t: TensorPlan, amax: torch.Tensor, shared: torch.Tensor, stride: int) -> Fit:
    scheme = t.scheme
    assert scheme is not None
    fmt, largest = scheme.scale_format, scheme.element_format.max
    block = _sampled_amax(weight, scheme, stride)
    scale = block / largest * (global_scale_for(shared, scheme) if scheme.global_scale else 1.0)
    zero, subnormal = count_small_scales(encode_scale(scale, fmt), block, fmt)
    clipped = not scheme.global_scale and float(amax) > fmt.max * largest
    return Fit(block.numel(), zero, subnormal, float(shared if scheme.global_scale else amax), clipped)


def _sentences(scheme: QuantScheme, found: dict[str, Fit]) -> Iterator[str]:
    total = sum(found.values(), Fit())
    limit = scheme.scale_format.max * scheme.element_format.max
    if total.small > WARN_SHARE and not scheme.global_scale:
        cures = ["--scale ue5m3"] * (scheme.scale == "e4m3") + ["--global-scale", "larger blocks"]
        worst = max(found, key=lambda name: found[name].small)
        yield (
            f"by a sample of the weights, about {total.small:.0%} of the {scheme.scale} block scales would be zero "
            f"({total.zero / total.blocks:.1%}) or subnormal ({total.subnormal / total.blocks:.1%}), so their blocks "
            f"lose precision; most in {worst} ({found[worst].small:.0%}). Cures: {', '.join(cures)}"
        )
    elif bad := {name: fit for name, fit in found.items() if fit.small > WARN_SHARE}:
        why, cure = "", "--global-scale"
        if scheme.global_scale:
            largest = max(fit.largest for fit in bad.values())
            why = f": their global scale is that of a weight of {largest:.3g}"
            cure = "--scale ue5m3 without a global scale, or --exclude"
        yield (
            f"{_worst(bad)} would have {scheme.scale} block scales that are zero or subnormal, so their blocks lose "
            f"precision{why}. Cures: {cure}"
        )
    if clipped := {name: fit for name, fit in found.items() if fit.clipped}:
        name = max(clipped, key=lambda n: clipped[n].largest)
        yield (
            f"{name}{_and_more(len(clipped) - 1)} holds {clipped[name].largest:.4g}, and {scheme.scale} scales end at "
            f"{limit:.6g}: larger weights are clipped. Cures: --global-scale, or --exclude"
        )


def _worst(bad: dict[str, Fit]) -> str:
    """``98 % of the blocks of NAME (and of 2 more tensors)``, the worst first."""
    names = sorted(bad, key=lambda name: -bad[name].small)
    shown = ", ".join(f"{bad[name].small:.0%} of {name}" for name in names[:3])
    return f"by a sample of their blocks, {shown}{_and_more(len(names) - 3)}"


def _and_more(count: int) -> str:
    return f" and {count} more tensor{'s' * (count > 1)}" if count > 0 else ""


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
