"""What a report says was lost, for weights of any width: fp32 squares would under- and overflow."""

from __future__ import annotations

import math

import pytest
import torch

from mxquant.codec.rounding import QuantStats, RowQuantizer
from mxquant.schemes.formats import QuantScheme

SCHEMES = ("e8m0/32/even", "fp32/16", "mxfp6", "mxfp8", "fp32/8x8")


def stats(weight: torch.Tensor, text: str) -> QuantStats:
    scheme = QuantScheme.parse(text)
    job = RowQuantizer(weight, scheme, seed=0, name="w", global_scale=None, with_stats=True)
    return sum((chunk.stats for chunk in map(job, job.starts) if chunk.stats is not None), QuantStats())


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("exponent", [-100, -76, -60, -30, 0, 30, 60, 100])
@pytest.mark.parametrize("text", SCHEMES)
def test_a_power_of_two_changes_no_relative_error(text, exponent):
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    unit = 2.0**exponent
    one, other = stats(weight, text), stats(weight * unit, text)
    assert other.signal == pytest.approx(one.signal * unit**2, rel=1e-6)
    assert other.error == pytest.approx(one.error * unit**2, rel=1e-5)
    assert other.relative_error == pytest.approx(one.relative_error, rel=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1e-23, 1e-30, 1e-20])
def test_a_tensor_that_is_lost_as_a_whole_has_an_error_of_one(width, dtype):
    weight = (width * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    found = stats(weight, "e4m3/16/absmax")
    assert found.zero_scales == found.blocks
    assert found.relative_error == 1.0
    assert found.signal == pytest.approx(float(weight.double().square().sum()), rel=1e-6)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("width", [1e20, 1e30])
def test_wide_weights_have_finite_figures(width):
    found = stats(width * torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "ue5m3/16/absmax")
    assert math.isfinite(found.relative_error)
    assert math.isfinite(found.sqnr_db)
    assert found.relative_error == pytest.approx(1.0, abs=1e-3)  # all saturated
