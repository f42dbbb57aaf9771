"""What square tiles, truncation-free scales and stochastic rounding promise to training."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mxquant.ops.operators import fake_quantize, quantize
from mxquant.schemes.formats import SCALES, QuantScheme

pytestmark = pytest.mark.usefixtures("one_thread")

# Rules that look at a block's largest magnitude only. Those that compare errors (search, four-over-six)
# sum them in the order of a block's rows, and may decide near-ties otherwise when it is transposed.
AMAX_RULES = [(f.name, rule) for f in SCALES.values() for rule in f.rules if rule not in ("search", "four-over-six")]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers over many binades, so that blocks have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).mul(2).exp2()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize(("element", "side"), product(["fp4_e2m1", "fp8_e4m3", "fp6_e2m3"], [8, 32]))
@pytest.mark.parametrize(("scale", "rule"), AMAX_RULES)
@pytest.mark.parametrize("shape", [(64, 96), (40, 72)], ids=["whole", "partial"])
def test_square_tiles_do_not_know_which_way_they_are_read(scale, rule, element, side, shape):
    scheme = QuantScheme(element, scale, (side, side), scale_rule=rule)
    x = heavy_tailed(*shape)
    q, of_transposed = quantize(x, scheme), quantize(x.t().contiguous(), scheme)
    assert torch.equal(bits(q.dequantize().t()), bits(of_transposed.dequantize()))
    assert torch.equal(q.scale.float().t(), of_transposed.scale.float())


@pytest.mark.parametrize(("scale", "rule"), AMAX_RULES)
def test_one_dimensional_blocks_do(scale, rule):
    scheme = QuantScheme(scale=scale, block=32, scale_rule=rule)
    x = heavy_tailed(64, 96)
    assert not torch.equal(fake_quantize(x, scheme).t(), fake_quantize(x.t().contiguous(), scheme))


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_a_global_scale_does_not_change_that(scale):
    scheme = QuantScheme(scale=scale, block=(16, 16), global_scale=True, scale_rule="absmax")
    x = heavy_tailed(64, 96)
    assert torch.equal(bits(fake_quantize(x, scheme).t()), bits(fake_quantize(x.t().contiguous(), scheme)))


@pytest.mark.parametrize("block", [32, (32, 32)])
def test_truncation_free_scales_never_saturate_and_half_of_them_always_would(block):
    scheme = QuantScheme(scale="e8m0", block=block, scale_rule="rceil")
    x = torch.cat([heavy_tailed(64, 64), heavy_tailed(64, 64, seed=1) * 1e-6, torch.full((64, 64), 6.0)])
    q = quantize(x, scheme)
    rows, columns = scheme.block_shape
    amax = x.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3)).double()
    scale = torch.exp2(q.scale.double() - 127)
    assert (amax <= 6 * scale).all()
    assert (amax > 6 * scale / 2).all()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("block", [32, (32, 32)])
def test_stochastic_rounding_is_unbiased_up_to_the_largest_element(block):
    """On known grids with scale 1: the mean of many draws is within 4 standard errors of each value."""
    scheme = QuantScheme(scale="e8m0", block=block, scale_rule="rceil", rounding="stochastic")
    x = torch.linspace(-6, 6, 32 * 32).view(32, 32)
    x[:, 0] = 6.0  # every block has its largest magnitude at 6, so that its scale is 1
    draws = 1000  # of copies below each other, whose elements have noise of their own
    mean = fake_quantize(x.repeat(draws, 1), scheme, seed=3).view(draws, 32, 32).double().mean(0)
    # Between neighbours lo and hi, a draw is Bernoulli: its variance is (x - lo)(hi - x).
    magnitude = x.abs().double()
    hi = GRID.double()[torch.bucketize(magnitude, GRID.double()).clamp(max=7)]
    lo = GRID.double()[(torch.bucketize(magnitude, GRID.double(), right=True) - 1).clamp(max=7)]
    deviation = ((magnitude - lo) * (hi - magnitude)).clamp(min=0).sqrt() / draws**0.5
    error = (mean - x.double()).abs()
    # 1024 values: at 4 standard errors 0.06 of them lie outside by chance; draws are resolved to 2^-24.
    assert (error > 4 * deviation + 1e-6).sum() <= 2
    assert torch.equal(mean[x.abs() == 6], x[x.abs() == 6].double())
    total = (mean - x.double()).sum() / deviation.square().sum().sqrt()
    assert abs(float(total)) < 4


def test_stochastic_rounding_under_saturating_scales_is_biased():
    """The check above can fail: floor puts amax up to twice above the largest element."""
    floor = QuantScheme(scale="e8m0", block=32, scale_rule="floor", rounding="stochastic")
    x = torch.full((1, 32), 7.5)
    mean = sum(fake_quantize(x, floor, seed=seed) for seed in range(50)) / 50
    assert torch.equal(mean, torch.full((1, 32), 6.0))
