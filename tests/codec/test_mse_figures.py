"""Mean squared errors on Gaussian weights, by Monte Carlo with four million samples.

The figures are relative to the variance. They come from a simulation that shares no code with this
library, following the setting of arXiv 2601.19026 (scales with a mantissa) and the rules of OCP MX
and arXiv 2607.24953 (powers of two).
"""

from __future__ import annotations

import pytest
import torch

import mxquant
from mxquant.schemes.formats import QuantScheme

SAMPLES = 1 << 22
# Phases of sigma within a binade, over which the figures of power-of-two scales are averaged.
PHASES = 32


@pytest.fixture(scope="module")
def normal() -> torch.Tensor:
    return torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))


def mse(x: torch.Tensor, scheme: QuantScheme) -> float:
    """Mean squared error over mean square of samples cut into blocks; rows of 1024."""
    w = x.view(-1, 1024)
    error = mxquant.quantize(w, scheme).dequantize().sub_(w)
    return float(error.double().square().mean() / w.double().square().mean())


@pytest.mark.parametrize(("block", "expected"), [(8, 0.00701), (16, 0.00886), (32, 0.01022)])
def test_error_with_exact_scales(normal, block, expected):
    assert mse(normal, QuantScheme("fp4_e2m1", "fp32", block)) == pytest.approx(expected, rel=0.01)


E4M3_FIGURES = [
    (0.02, 8, 0.01054),
    (0.02, 16, 0.01064),
    (0.02, 32, 0.01107),
    (0.01, 8, 0.0192),
    (0.01, 16, 0.0158),
    (0.01, 32, 0.0134),
]


@pytest.mark.parametrize(("sigma", "block", "expected"), E4M3_FIGURES)
def test_error_with_e4m3_scales_and_the_same_for_ue5m3_eight_binades_lower(normal, sigma, block, expected):
    w = (normal * sigma).view(-1, 1024)
    e4m3 = mxquant.quantize(w, QuantScheme("fp4_e2m1", "e4m3", block, scale_rule="absmax"))
    error = e4m3.dequantize().sub_(w)
    assert float(error.double().square().mean()) / sigma**2 == pytest.approx(expected, rel=0.01)
    ue5m3 = mxquant.quantize(w * 2.0**-8, QuantScheme("fp4_e2m1", "ue5m3", block, scale_rule="absmax"))
    assert torch.equal(ue5m3.packed, e4m3.packed)
    assert torch.equal(ue5m3.scale, e4m3.scale.view(torch.uint8))


def test_smaller_blocks_are_worse_below_the_crossover_and_only_with_e4m3(normal):
    """arXiv 2601.19026: the inversion, its place, and that UE5M3 moves it out of the way."""

    def ratio(scale: str, sigma: float) -> float:
        errors = [
            mse(normal[: SAMPLES // 4] * sigma, QuantScheme("fp4_e2m1", scale, b, scale_rule="absmax")) for b in (8, 16)
        ]
        return errors[0] / errors[1]

    assert ratio("e4m3", 0.017) > 1.02
    assert ratio("e4m3", 0.021) < 0.98
    assert ratio("ue5m3", 0.017) < 0.9
    assert ratio("ue5m3", 0.017 / 256) > 1.02


E8M0_FIGURES = {
    "floor": (0.01335, 0.0145),
    "ceil": (0.0199, 0.0350),
    "even": (0.0126, 0.0161),
    "rceil": (0.0137, 0.0188),
    "oas": (0.0126, 0.0161),
}


@pytest.mark.parametrize("rule", E8M0_FIGURES)
@pytest.mark.parametrize("block", [32, 1024])
def test_error_with_power_of_two_scales_averaged_over_the_phase(normal, rule, block):
    sigma = torch.exp2(torch.arange(PHASES) / PHASES).view(-1, 1, 1)
    w = (normal.view(PHASES, -1, 1024) * sigma).view(-1, 1024)
    d = mxquant.quantize(w, QuantScheme("fp4_e2m1", "e8m0", block, scale_rule=rule)).dequantize()
    relative = (d.sub_(w).view(PHASES, -1).double().square().mean(1) / sigma.flatten().double() ** 2).mean()
    assert float(relative) == pytest.approx(E8M0_FIGURES[rule][block == 1024], rel=0.01)
