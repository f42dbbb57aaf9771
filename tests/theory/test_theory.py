"""The theory of quantization errors lands on known figures, on brute force and on the codec itself."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import mxquant
from mxquant import theory
from mxquant.codec.numerics import effective_scale, nearest_values
from mxquant.codec.scaling import block_scales, global_scale_for
from mxquant.errors import MXQuantError, SchemeError, TheoryError
from mxquant.ops.operators import fake_quantize, quantize
from mxquant.schemes.formats import ELEMENTS, SCALES, QuantScheme
from mxquant.theory.distributions import maximum_quantiles
from mxquant.theory.elements import element_error
from mxquant.theory.levels import TABLED_RULES, is_sampled, scale_levels
from mxquant.theory.sampled import sampled_error

DISTRIBUTIONS = ("gaussian", "laplace", "uniform", "student-t:5")


def scheme(text: str) -> QuantScheme:
    return QuantScheme.parse(text)


# Figures of arXiv 2601.19026's setting, by Monte Carlo with four million samples.


@pytest.mark.parametrize(("block", "expected"), [(8, 0.00701), (16, 0.00886), (32, 0.01022)])
def test_exact_scales_land_on_the_published_setting(block, expected):
    assert mxquant.theory.mse("fp32", block=block, sigma=0.3) == pytest.approx(expected, rel=2e-3)


E4M3 = [
    (0.02, 8, 0.01054),
    (0.02, 16, 0.01064),
    (0.02, 32, 0.01107),
    (0.01, 8, 0.0192),
    (0.01, 16, 0.0158),
    (0.01, 32, 0.0134),
]


@pytest.mark.parametrize(("sigma", "block", "expected"), E4M3)
def test_e4m3_lands_on_the_published_setting_and_ue5m3_eight_binades_lower(sigma, block, expected):
    found = theory.mse("e4m3", block=block, sigma=sigma)
    assert found == pytest.approx(expected, rel=5e-3)
    lower = theory.error(scheme(f"ue5m3/{block}/absmax"), sigma / 256)
    assert lower.total == pytest.approx(found, rel=1e-12)
    assert lower.subnormal_scales == theory.error(scheme(f"e4m3/{block}/absmax"), sigma).subnormal_scales


E8M0 = {
    "floor": (0.01335, 0.0145),
    "ceil": (0.0199, 0.0350),
    "even": (0.0126, 0.0161),
    "rceil": (0.0137, 0.0188),
    "oas": (0.0126, 0.0161),
}


@pytest.mark.parametrize("rule", E8M0)
def test_power_of_two_scales_land_on_their_figures_averaged_over_the_octave(rule):
    found = [theory.octave_mean(scheme(f"e8m0/{block}/{rule}")) for block in (32, 1024)]
    assert found == pytest.approx(E8M0[rule], rel=1e-2)
    clipped = np.mean([theory.error(scheme(f"e8m0/32/{rule}"), 2 ** (i / 32)).clipped for i in range(32)])
    assert clipped == pytest.approx({"floor": 0.41, "even": 0.22, "oas": 0.22}.get(rule, 0.0), abs=0.01)


def test_power_of_two_scales_repeat_in_every_octave():
    one = scheme("e8m0/32")
    for sigma in (0.013, 0.7):
        assert theory.error(one, sigma).total == pytest.approx(theory.error(one, 2 * sigma).total, rel=1e-12)
    assert theory.is_periodic(one)
    assert not theory.is_periodic(scheme("e4m3/32"))


# Crossovers


def test_blocks_of_8_and_16_change_order_once_and_for_ue5m3_exactly_eight_binades_lower():
    (e4m3,) = theory.crossovers(scheme("e4m3/8/absmax"))
    assert e4m3.sigma == pytest.approx(0.0194, abs=5e-5)
    assert (e4m3.better_above.block, e4m3.better_below.block) == (8, 16)
    (ue5m3,) = theory.crossovers(scheme("ue5m3/8/absmax"), scheme("ue5m3/16/absmax"), low=1e-5 / 256)
    assert ue5m3.sigma == pytest.approx(e4m3.sigma / 256, rel=1e-6)


def test_every_crossover_is_one_and_none_is_missed():
    pair = scheme("e4m3/32/absmax"), scheme("e4m3/64/absmax")
    found = theory.crossovers(*pair, low=1e-3, high=1)
    for crossing in found:
        above, below = (
            [theory.total_error(s, crossing.sigma * factor) for s in (crossing.better_above, crossing.better_below)]
            for factor in (1.01, 0.99)
        )
        assert above[0] < above[1]
        assert below[0] > below[1]
    sigmas = np.geomspace(1e-3, 1, 1777)
    worse = [theory.total_error(pair[0], s) > theory.total_error(pair[1], s) for s in sigmas]
    assert len(found) == np.count_nonzero(np.diff(worse)) == 3


def test_crossovers_of_power_of_two_scales_repeat_in_every_octave():
    first, second = (theory.crossovers(scheme("e8m0/32/floor"), low=low, high=2 * low) for low in (1.0, 2.0))
    assert len(first) == 2
    assert [c.sigma for c in second] == pytest.approx([2 * c.sigma for c in first], rel=1e-6)
    assert [c.better_above.block for c in first] == [32, 64] == [c.better_above.block for c in second]


def test_schemes_that_do_not_differ_do_not_cross():
    one = scheme("e4m3/16/absmax")
    assert theory.crossovers(one, one) == []
    assert theory.crossovers(scheme("e4m3+global/8/absmax")) == []
    assert theory.doubled(scheme("ue5m3/4x8")).block == (4, 16)


# Brute force: the definition, on fine grids


def brute_force(values: np.ndarray, size: int, sigma: float, of, largest: float = 6.0) -> dict[str, float]:
    """Integrals over the maximum of what the definition says, by trapezoids; scale = nearest of ``values``."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def error(x, s):
        """Squared error of x under scale s, both in units of sigma."""
        return (x - s * magnitudes[np.abs(x[:, None] / s - magnitudes).argmin(1)]) ** 2

    x = np.linspace(0, 12, 60001)
    density = 2 * of.pdf(x)
    below = 2 * of.cdf(x) - 1
    maximum_density = size * density * below ** (size - 1)
    level = np.abs(x[:, None] * sigma / largest - values).argmin(1)
    parts = dict.fromkeys(("others", "maximum", "zero"), 0.0)
    for k in np.unique(level):
        here, s = np.flatnonzero(level == k), values[k] / sigma
        here = here[x[here] > 0]
        e = error(x, s) if s else x**2
        conditional = integrate.cumulative_trapezoid(e * density, x, initial=0)[here] / below[here]
        weight = maximum_density[here]
        step = x[1] - x[0]
        others = (size - 1) / size * (weight * conditional).sum() * step
        maximum = (weight * e[here]).sum() / size * step
        if s:
            parts["others"] += others
            parts["maximum"] += maximum
        else:
            parts["zero"] += others + maximum
    return parts


@pytest.mark.parametrize("sigma", [0.004, 0.011, 0.05])
@pytest.mark.parametrize(("name", "of"), [("gaussian", stats.norm()), ("laplace", stats.laplace(scale=0.5**0.5))])
def test_each_part_is_what_the_definition_says(name, of, sigma):
    values = np.array([SCALES["e4m3"].value(code) for code in range(0x50)])
    expected = brute_force(values, 8, sigma, of)
    found = theory.error(scheme("e4m3/8/absmax"), sigma, distribution=name)
    for part, value in expected.items():
        assert getattr(found, part) == pytest.approx(value, rel=2e-3, abs=2e-5), part
    assert found.total == pytest.approx(sum(expected.values()), rel=1e-3)


def test_parts_add_up_and_the_fast_total_is_their_sum():
    for text in ("e4m3/8/absmax", "ue5m3/16/ceil", "e8m0/32/floor", "bf16/16", "fp32/8", "e4m3+global/16/absmax"):
        for sigma in (1e-5, 1e-3, 0.02, 10.0):
            parts = theory.error(scheme(text), sigma)
            assert parts.others + parts.maximum + parts.zero == parts.total
            assert theory.total_error(scheme(text), sigma) == pytest.approx(parts.total, rel=1e-9)
            assert min(parts.others, parts.maximum, parts.zero) >= 0


# Monte Carlo, through the codec

ELEMENTS_DRAWN = 1 << 20


def draw(name: str, count: int = ELEMENTS_DRAWN) -> torch.Tensor:
    rng = np.random.default_rng(7)
    samples = {
        "gaussian": lambda: rng.standard_normal(count),
        "laplace": lambda: rng.laplace(scale=0.5**0.5, size=count),
        "uniform": lambda: rng.uniform(-(3**0.5), 3**0.5, count),
        "student-t:5": lambda: rng.standard_t(5, count) * 0.6**0.5,
    }[name]()
    return torch.from_numpy(samples).float().view(-1, 1024)


@pytest.fixture(scope="module")
def drawn() -> dict[str, torch.Tensor]:
    return {name: draw(name) for name in DISTRIBUTIONS}


CODEC_CASES = [
    ("e4m3/8/absmax", "gaussian", "squared"),
    ("e4m3/16/absmax", "student-t:5", "absolute"),
    ("e4m3/32/ceil", "laplace", "squared"),
    ("e4m3/4/absmax-nonzero", "uniform", "squared"),
    ("ue5m3/16/absmax", "gaussian", "absolute"),
    ("ue5m3-61440/2/absmax", "gaussian", "squared"),
    ("e8m0/32/floor", "gaussian", "squared"),
    ("e8m0/64/even", "laplace", "absolute"),
    ("e8m0/16/rceil/stochastic", "gaussian", "squared"),
    ("e8m0/32/oas/stochastic", "uniform", "absolute"),
    ("bf16/16", "student-t:5", "squared"),
    ("fp32/8", "uniform", "absolute"),
    ("e4m3/4x8/absmax", "gaussian", "squared"),
    ("ue5m3/16/absmax/fp6_e2m3", "gaussian", "squared"),
    ("ue5m3/32/ceil/fp6_e3m2", "gaussian", "squared"),
    ("e8m0/32/fp8_e4m3", "laplace", "squared"),
    ("e8m0/32/fp8_e5m2/rceil", "gaussian", "absolute"),
]


@pytest.mark.parametrize(("text", "name", "metric"), CODEC_CASES)
def test_theory_agrees_with_the_codec_within_one_percent(drawn, text, name, metric):
    power = 2 if metric == "squared" else 1
    for sigma in (1e-5, 1e-3, 0.004, 0.02, 0.3, 10.0):
        x = drawn[name] * sigma
        error = (fake_quantize(x, scheme(text)) - x).double().abs().pow(power).mean() / sigma**power
        found = theory.error(scheme(text), sigma, distribution=name, metric=metric).total
        assert found > 1e-4
        assert found == pytest.approx(float(error), rel=0.01), sigma


@pytest.mark.parametrize("text", ["e4m3/8/absmax", "ue5m3/8/absmax", "e8m0/32/floor", "e8m0/32/rceil"])
def test_shares_of_blocks_are_those_that_the_codec_counts(drawn, text):
    for sigma in (2e-5, 0.003, 0.02, 10.0):
        x = drawn["gaussian"] * sigma
        q, n = quantize(x, scheme(text)), scheme(text).block
        scale = effective_scale(q.scale, q.scheme.scale_format, None)
        counted = (
            (scale == 0).double().mean(),
            ((scale > 0) & (scale < q.scheme.scale_format.min_normal)).double().mean(),
            ((scale > 0) & (x.abs().view(*scale.shape, n).amax(-1) > 6 * scale)).double().mean(),
        )
        parts = theory.error(scheme(text), sigma)
        found = parts.zero_scales, parts.subnormal_scales, parts.clipped
        assert found == pytest.approx([float(c) for c in counted], abs=0.006)


@pytest.mark.parametrize("text", ["e4m3/8", "ue5m3/16/four-over-six", "e8m0/32/search", "e4m3+global/16"])
def test_sampled_rules_agree_with_blocks_drawn_otherwise(drawn, text):
    assert is_sampled(scheme(text))
    for sigma in (0.002, 0.02):
        x = drawn["gaussian"] * sigma
        g = global_scale_for(x.abs().max(), scheme(text)) if scheme(text).global_scale else None
        error = (fake_quantize(x, scheme(text), global_scale=g) - x).double().square().mean() / sigma**2
        parts = theory.error(scheme(text), sigma, global_scale=None if g is None else float(g))
        assert parts.total == pytest.approx(float(error), rel=0.01)
        assert 0 < parts.standard_error < 0.005 * parts.total
        assert parts == theory.error(scheme(text), sigma, global_scale=None if g is None else float(g))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("metric", ["squared", "absolute"])
def test_sampling_a_rule_that_has_a_formula_gives_the_formula(name, metric):
    for text, sigma in (("e4m3/8/absmax", 0.005), ("e4m3/100/absmax", 0.02), ("e8m0/8/floor", 0.3)):
        exact = theory.error(scheme(text), sigma, distribution=name, metric=metric)
        sampled = sampled_error(scheme(text), sigma, theory.distribution_of(name), metric, None)
        assert sampled.total == pytest.approx(exact.total, abs=4 * sampled.standard_error)
        for part in ("others", "maximum", "zero"):
            assert getattr(sampled, part) == pytest.approx(getattr(exact, part), rel=0.02, abs=2e-5), part
        shares = ("zero_scales", "subnormal_scales", "saturated_scales", "clipped")
        assert [getattr(sampled, s) for s in shares] == pytest.approx([getattr(exact, s) for s in shares], abs=0.01)


def test_searching_never_costs_more_than_absmax():
    for block in (8, 32):
        assert theory.mse("e4m3", block, rule="search", sigma=0.02) < 0.9 * theory.mse("e4m3", block, sigma=0.02)


# The global scale


def test_a_global_scale_is_a_change_of_width():
    """Block scales are Q(g amax/6)/g: the same as without one, on weights g times as wide."""
    for g in (1.0, 37.5):
        with_one = theory.error(scheme("e4m3+global/8/absmax"), 0.01, global_scale=g)
        assert with_one.total == pytest.approx(theory.mse("e4m3", 8, sigma=0.01 * g), rel=1e-12)


def test_the_global_scale_of_a_tensor_is_the_codecs_at_its_median(drawn):
    one = scheme("nvfp4")
    x = drawn["gaussian"] * 0.02
    error = (fake_quantize(x, one) - x).double().square().mean() / 0.02**2
    assert theory.error(one, 0.02, tensor_elements=x.numel()).total == pytest.approx(float(error), rel=0.01)
    largest = maximum_quantiles(np.array(0.0), 1 << 10, theory.Gaussian())
    exceeded = (draw("gaussian", 1 << 22).abs().amax(1) > largest).double().mean()
    assert float(exceeded) == pytest.approx(0.5, abs=0.03)


def test_nvfp4_does_not_depend_on_the_width_of_the_weights():
    errors = [theory.mse("nvfp4/absmax", sigma=sigma) for sigma in (1e-5, 1e-2, 10)]
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-9)


# Limits


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_all_is_lost_where_weights_are_too_small_or_too_large_for_the_scale(scale):
    fmt = SCALES[scale]
    small = theory.error(scheme(f"{scale}/16/absmax"), fmt.min_positive * 1e-2)
    assert small.total == small.zero == pytest.approx(1)
    assert small.zero_scales == pytest.approx(1)
    nonzero = theory.error(scheme(f"{scale}/16/absmax-nonzero"), fmt.min_positive * 1e-2)
    assert nonzero.zero == 0
    assert nonzero.total == pytest.approx(1, abs=1e-6)
    large = theory.error(scheme(f"{scale}/16/absmax"), fmt.max * 1e6)
    assert large.saturated_scales == pytest.approx(1, abs=1e-3)
    assert large.total == pytest.approx(1, rel=1e-3)


def test_uniform_weights_in_huge_blocks_fill_the_grid():
    """The maximum is that of the distribution: error of a uniform number on 0 .. 6, over the variance 12."""
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = sum((b - a) ** 3 / 12 for a, b in pairwise(grid)) / 6 / 12
    assert theory.mse("fp32", 1 << 20, sigma=1, distribution="uniform") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_larger_blocks_and_coarser_elements_are_worse_where_scales_are_exact(name):
    errors = [theory.mse("fp32", n, sigma=1, distribution=name) for n in (2, 4, 8, 16, 64, 256)]
    assert errors == sorted(errors)
    for finer, coarser in (("fp6_e2m3", "fp4_e2m1"), ("fp8_e4m3", "fp8_e5m2")):
        finer, coarser = (theory.mse("fp32", 16, sigma=1, distribution=name, element=e) for e in (finer, coarser))
        assert finer < 0.5 * coarser


def test_finer_scales_approach_exact_ones():
    exact, bf16, ue5m3 = (theory.mse(scale, 16, sigma=1) for scale in ("fp32", "bf16", "ue5m3"))
    assert exact < bf16 < exact * 1.001
    assert bf16 < ue5m3 < exact * 1.05


def test_heavy_tails_approach_the_gaussian_as_degrees_of_freedom_grow():
    gaussian = theory.error(scheme("e4m3/16/absmax"), 0.01)
    heavy = theory.error(scheme("e4m3/16/absmax"), 0.01, distribution=theory.StudentT(1e5))
    assert heavy.total == pytest.approx(gaussian.total, rel=1e-3)
    assert heavy.maximum == pytest.approx(gaussian.maximum, rel=1e-3)


# The pieces


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "student-t:2.5"])
def test_distributions_have_variance_one_and_their_moments(name):
    of = theory.distribution_of(name)
    assert theory.distribution_of(of.text) == of
    x = np.array([0.3, 1.2, 1.7])
    for k, moment in enumerate(of.moments(x)):
        for value, top in zip(moment, x, strict=True):
            integral = integrate.quad(lambda y, k=k: y**k * of.density(np.array(y)), 0, top)[0]
            assert value == pytest.approx(integral, rel=1e-7)
    everything = of.moments(np.array(np.inf))
    assert everything[0] == pytest.approx(1)
    assert everything[2] == pytest.approx(1, abs=1e-9)
    assert of.moments(of.exceeded_by(np.array([0.7, 0.1])))[0] == pytest.approx([0.3, 0.9])
    if of.reach < np.inf:
        assert 1 - of.moments(np.array(of.reach))[2] < 2e-10


@pytest.mark.parametrize("element", list(ELEMENTS))
def test_the_error_of_one_element_is_the_codecs(element):
    x = np.abs(np.random.default_rng(0).standard_normal(4000)) * ELEMENTS[element].max / 2
    values = nearest_values(torch.from_numpy(x).float(), ELEMENTS[element]).double().numpy()
    for metric, power in (("squared", 2), ("absolute", 1)):
        found = element_error(element, "nearest", metric).at(3 * x, np.array(3.0))
        assert found == pytest.approx(np.abs(3 * (x - values)) ** power, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("element", ["fp4_e2m1", "fp6_e3m2"])
def test_stochastic_rounding_is_the_mean_over_both_neighbours(element):
    fmt = ELEMENTS[element]
    values = np.array([fmt.magnitude(code) for code in range(fmt.max_code + 1)])
    x = np.random.default_rng(0).random(2000) * fmt.max
    above = np.searchsorted(values, x)
    low, high = values[above - 1], values[above]
    up = (x - low) / (high - low)
    for metric, power in (("squared", 2), ("absolute", 1)):
        expected = up * (high - x) ** power + (1 - up) * (x - low) ** power
        found = element_error(element, "stochastic", metric).at(x, np.array(1.0))
        assert found == pytest.approx(expected, abs=1e-9)
        saturated = element_error(element, "stochastic", metric).at(np.array([fmt.max + 3]), np.array(1.0))
        assert saturated == pytest.approx(3**power)


RULES = [(s, rule) for s in SCALES if s != "fp32" for rule in SCALES[s].rules if rule in TABLED_RULES]


@pytest.mark.parametrize("element", ["fp4_e2m1", "fp8_e4m3"])
@pytest.mark.parametrize(("scale", "rule"), RULES)
def test_the_table_of_scales_is_the_codecs(scale, rule, element):
    one = QuantScheme(element, scale, 2, scale_rule=rule)
    amax = torch.from_numpy(np.exp2(np.random.default_rng(1).uniform(-30, 25, 20000))).float().view(-1, 1)
    blocks = torch.stack((amax, amax * 0.3), -1).view(-1, 1, 1, 2)
    codec = effective_scale(block_scales(blocks, amax, one, None), one.scale_format, None).flatten().numpy()
    levels, x = scale_levels(one), amax.double().numpy().ravel()
    table, *beside = (levels.scales[np.searchsorted(levels.bounds[1:-1], x * (1 + d))] for d in (0, 1e-6, -1e-6))
    assert ((codec == table) | (codec == beside[0]) | (codec == beside[1])).all()  # fp32 may round across a bound
    assert (codec == table).mean() > 0.9999
    assert (codec > 0).sum() > 5000
    subnormal = (codec > 0) & (codec < one.scale_format.min_normal)
    assert set(codec[subnormal]) <= set(levels.scales[levels.subnormal])
    assert not set(codec[~subnormal]) & set(levels.scales[levels.subnormal])


# Questions, asked well and badly


def test_a_bare_scale_has_the_papers_rule_and_a_scheme_its_own():
    assert theory.scheme_of("e4m3", block=8).scale_rule == "absmax"
    assert theory.scheme_of("e8m0").scale_rule == "even"
    assert theory.scheme_of("e4m3+global") == QuantScheme.preset("nvfp4", scale_rule="absmax")
    assert theory.scheme_of("e4m3/8").scale_rule == "search"
    assert theory.scheme_of("nvfp4", block=8, element="fp6_e2m3").text == "fp6_e2m3/e4m3+global/8"
    assert theory.mse("ue5m3/8/ceil", sigma=0.1) == theory.mse("ue5m3", 8, rule="ceil", sigma=0.1)
    assert theory.mse(scheme("ue5m3/8/absmax"), sigma=0.1) == theory.mse("ue5m3", block=8, sigma=0.1)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_sigma_must_be_a_standard_deviation(sigma):
    for ask in (theory.error, theory.total_error):
        with pytest.raises(TheoryError, match="sigma must be a positive, finite number"):
            ask(scheme("e4m3/16/absmax"), sigma)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: theory.mse("e4m3", 8, sigma=1, distribution="cauchy"), "choose from gaussian, laplace, uniform"),
        (lambda: theory.mse("e4m3", 8, sigma=1, distribution="student-t:2"), "a number above 2"),
        (lambda: theory.mse("e4m3", 8, sigma=1, distribution="student-t:x"), "'x' is not a number"),
        (lambda: theory.mse("e4m3", 8, sigma=1, distribution="gaussian:3"), "unknown distribution"),
        (lambda: theory.error(scheme("e4m3/8/absmax"), 1, metric="cubed"), "choose from squared, absolute"),
        (lambda: theory.error(scheme("e4m3/8/search"), 1, metric="cubed"), "choose from squared, absolute"),
        (lambda: theory.error(scheme("e4m3/8/absmax"), 1, global_scale=2.0), "has no global scale"),
        (lambda: theory.error(scheme("nvfp4"), 1, global_scale=0.0), "must be a positive"),
        (lambda: theory.error(scheme("nvfp4"), 1, tensor_elements=1), "at least two elements"),
        (lambda: theory.crossovers(scheme("e4m3/8/absmax"), low=1, high=0.1), "must ascend"),
        (lambda: theory.crossovers(scheme("e4m3/8/absmax"), low=0), "sigma must be"),
    ],
)
def test_questions_that_make_no_sense_are_refused(ask, message):
    with pytest.raises(TheoryError, match=message) as caught:
        ask()
    assert isinstance(caught.value, MXQuantError)


def test_schemes_that_do_not_exist_are_refused():
    with pytest.raises(SchemeError, match="scale rule 'floor' does not exist for e4m3"):
        theory.mse("e4m3", 8, sigma=1, rule="floor")
    with pytest.raises(SchemeError, match="'e5m9' is not a preset"):
        theory.mse("e5m9", 8, sigma=1)


def test_theory_is_there_after_import_mxquant_and_needs_no_torch():
    code = (
        "import sys, mxquant; assert 'scipy' not in sys.modules; mxquant.theory.mse('ue5m3', block=16, sigma=.02); "
        "assert 'theory' in dir(mxquant); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
