"""Scale rules: their formulas in exact arithmetic, and their promises by brute force over all codes."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.block import compute_scale_amax

from mxquant.codec import blocks as B
from mxquant.codec.numerics import effective_scale, scale_table
from mxquant.codec.scaling import block_scales, count_small_scales, global_scale_for
from mxquant.schemes.formats import ELEMENTS, SCALES, QuantScheme

FP32_MAX = float(np.finfo(np.float32).max)
FP32_MIN = 2.0**-149
FLOAT_SCALES = ["e4m3", "ue5m3", "ue5m3-61440"]


def scales_of(x: torch.Tensor, scheme: QuantScheme, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Scale codes of the rows of ``x``, each one block."""
    blocks = B.split(x.to(torch.float32), (1, x.shape[1]))
    return block_scales(blocks, B.amax(blocks), scheme, global_scale).view(-1)


def rule_codes(amax: np.ndarray, element: str, scale: str, rule: str, global_scale=None) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Scale codes of blocks of which only the largest magnitude is known (all rules without a search)."""
    scheme = QuantScheme(element, scale, 2, global_scale is not None, rule)
    column = torch.from_numpy(np.ascontiguousarray(amax, np.float32)).view(-1, 1)
    return block_scales(column.view(-1, 1, 1, 1), column, scheme, global_scale).view(-1).numpy().astype(np.int64)


# Blocks


@pytest.mark.parametrize(
    "block", [(1, n) for n in (2, 3, 5, 7, 8, 13, 16, 31)] + [(3, 5), (4, 4), (5, 1), (2, 9)], ids=str
)
def test_blocks_are_cut_reduced_and_summed_as_numpy_does(block):
    r, c = block
    rows, columns = 4 * r + (r > 1), 3 * c + 1  # partial blocks at both edges
    x = torch.randint(-999, 999, (rows, columns), generator=torch.Generator().manual_seed(0)).float()
    padded = np.zeros((-(-rows // r) * r, -(-columns // c) * c), np.float32)
    padded[:rows, :columns] = x.numpy()
    expected = padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c).transpose(0, 2, 1, 3)
    blocks = B.split(x, block)
    assert np.array_equal(B.amax(blocks).numpy(), np.abs(expected).max((2, 3)))
    columns_of = B.as_columns(blocks)
    assert np.array_equal(columns_of.numpy(), expected.reshape(-1, r * c).T)
    assert np.array_equal(B.ordered_sum(columns_of).numpy(), expected.sum((2, 3)).reshape(-1))
    for row, column in ((0, 0), (rows - 1, columns - 1), (0, c - 1), (r - 1, 0)):
        for bad in (math.nan, math.inf, -math.inf):
            y = x.clone()
            y[row, column] = bad
            finite = B.amax(B.split(y, block)).isfinite()
            assert (~finite).sum() == 1
            assert not finite[row // r, column // c]


# Power-of-two scales


def e8m0_oracle(amax: np.ndarray, element: str, rule: str) -> np.ndarray:
    """The formulas in float64, which holds every fp32 number and every quotient that matters exactly."""
    fmt = ELEMENTS[element]
    fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction * 2^exponent, fraction in [1/2, 1)
    big = math.floor(math.log2(fmt.max))

    def smallest_power_above(limit: float) -> np.ndarray:
        """ceil(log2(amax / limit)): the smallest k with amax <= limit * 2^k."""
        limit_fraction, limit_exponent = math.frexp(limit)
        return exponent - limit_exponent + (fraction > limit_fraction)

    power = {
        "floor": lambda: exponent - 1 - big,
        "ceil": lambda: smallest_power_above(2.0**big),
        "rceil": lambda: smallest_power_above(fmt.max),
        "oas": lambda: smallest_power_above(fmt.max + (2.0**big / 2**fmt.mantissa_bits) / 2),
        # np.round ties to even; a mantissa rounded to 2 is the next binade.
        "even": lambda: (
            exponent - 1 - big + (np.round(fraction * 2 * 2**fmt.mantissa_bits) == 2 * 2**fmt.mantissa_bits)
        ),
    }[rule]()
    # The largest scale whose product with the largest element is finite in fp32.
    largest = max(k for k in range(-127, 128) if fmt.max * 2.0**k <= FP32_MAX)
    return np.clip(np.where(amax > 0, power, -127), -127, largest) + 127


def positive_fp32(patterns: np.ndarray) -> np.ndarray:
    x = patterns.astype(np.uint32).view(np.float32)
    return x[np.isfinite(x)]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "oas"])
def test_e8m0_rules_equal_their_formulas_for_every_bf16_amax_and_around_every_threshold(element, rule):
    upper = np.arange(1 << 15, dtype=np.uint32) << 16
    amax = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    # Neighbours of mantissas at which a rule may change its mind, in all binades.
    mantissas = np.arange(32, dtype=np.uint32) << 18
    borders = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissas).reshape(-1)
    amax = positive_fp32(np.concatenate([amax, borders, borders + 1, borders[1:] - 1]))
    assert np.array_equal(rule_codes(amax, element, "e8m0", rule), e8m0_oracle(amax, element, rule))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "oas"])
def test_e8m0_rules_equal_their_formulas_for_every_mantissa(rule):
    amax = positive_fp32(np.arange(1 << 23, dtype=np.uint32) | 127 << 23)
    assert np.array_equal(rule_codes(amax, "fp4_e2m1", "e8m0", rule), e8m0_oracle(amax, "fp4_e2m1", rule))


def test_the_float64_oracle_of_rceil_and_ceil_is_the_smallest_power_in_exact_fractions():
    rng = np.random.default_rng(0)
    amax = np.concatenate([positive_fp32(rng.integers(1, 0x7F000000, 300)), 6 * np.exp2(np.arange(-120.0, 120, 7))])
    for element, fmt in ELEMENTS.items():
        for rule, limit in (("rceil", Fraction(fmt.max)), ("ceil", Fraction(2) ** math.floor(math.log2(fmt.max)))):
            for x, code in zip(
                amax.astype(np.float32), e8m0_oracle(amax.astype(np.float32), element, rule), strict=True
            ):
                k = int(code) - 127
                assert Fraction(float(x)) <= limit * Fraction(2) ** k
                assert k == -127 or Fraction(float(x)) > limit * Fraction(2) ** (k - 1)


def test_e8m0_floor_equals_gfloats_block_scale():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 32)) * np.exp2(rng.integers(-100, 100, (400, 1)))
    x = x.astype(np.float32)
    for element, emax in (("fp4_e2m1", 2), ("fp6_e2m3", 2), ("fp6_e3m2", 4), ("fp8_e4m3", 8), ("fp8_e5m2", 15)):
        expected = np.array([compute_scale_amax(emax, row.astype(np.float64)) for row in x])
        ours = scales_of(torch.from_numpy(x), QuantScheme(element, "e8m0", 32, scale_rule="floor")).numpy()
        assert np.array_equal(ours.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), expected)


@pytest.mark.parametrize("rule", SCALES["e8m0"].rules)
def test_an_all_zero_block_gets_the_smallest_power_of_two(rule):
    assert scales_of(torch.zeros(3, 32), QuantScheme("fp4_e2m1", "e8m0", 32, scale_rule=rule)).tolist() == [0, 0, 0]


# Scales with a mantissa, one block maximum at a time


@pytest.fixture(scope="module")
def maxima() -> np.ndarray:
    """Block maxima: on, between and around the thresholds of all scales, and at random over fp32."""
    rng = np.random.default_rng(2)
    table = scale_table("ue5m3").numpy()[:255].astype(np.float64)
    marks = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    out = [np.zeros(1), positive_fp32(rng.integers(0, 0x7F800000, 50_000)), np.exp2(rng.uniform(-24, 22, 100_000))]
    for m in (4.0, 6.0, 7.5, 28.0, 448.0, 57344.0):
        x = (marks * m).astype(np.float32)
        out += [x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))]
    return np.concatenate(out).astype(np.float32)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", FLOAT_SCALES)
def test_absmax_rounds_the_quotient_to_the_nearest_scale(maxima, element, scale):
    fmt = SCALES[scale]
    quotient = np.minimum(maxima / np.float32(ELEMENTS[element].max), np.float32(fmt.max)).astype(np.float64)
    table = scale_table(scale).numpy()[: fmt.max_code + 1].astype(np.float64)
    upper = np.searchsorted(table, quotient, side="left")
    lower = np.maximum(upper - 1, 0)
    up, down = table[upper] - quotient, quotient - table[lower]
    expected = np.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
    assert np.array_equal(rule_codes(maxima, element, scale, "absmax"), expected)
    nonzero = np.where(maxima > 0, np.maximum(expected, 1), 0)
    assert np.array_equal(rule_codes(maxima, element, scale, "absmax-nonzero"), nonzero)
    assert (expected != nonzero).sum() > 1000


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", FLOAT_SCALES)
def test_ceil_is_the_smallest_scale_that_does_not_saturate_in_exact_arithmetic(maxima, element, scale):
    fmt, largest = SCALES[scale], ELEMENTS[element].max
    table = scale_table(scale).numpy()[: fmt.max_code + 1].astype(np.float64)
    codes = rule_codes(maxima, element, scale, "ceil")
    # float64 holds M * s and amax exactly.
    expected = np.minimum(np.searchsorted(table * largest, maxima.astype(np.float64), side="left"), fmt.max_code)
    assert np.array_equal(codes, expected)
    assert (expected[maxima > 0] > 0).all()


@pytest.mark.parametrize(
    ("element", "scale", "rule"),
    [(e, s, "ceil") for e in ELEMENTS for s in FLOAT_SCALES] + [(e, "e8m0", "rceil") for e in ELEMENTS],
)
def test_truncation_free_scales_with_a_global_scale_are_the_smallest_in_exact_arithmetic(element, scale, rule):
    fmt, largest = SCALES[scale], ELEMENTS[element].max
    limit = fmt.max_code if scale != "e8m0" else 254 - math.floor(math.log2(largest))
    rng = np.random.default_rng(3)
    stored = torch.arange(limit + 1, dtype=torch.uint8)
    moved = 0
    for g in np.exp2(rng.uniform(-8, 16, 40)).astype(np.float32):
        g = torch.tensor([g])
        top = effective_scale(stored, fmt, g).numpy().astype(np.float64) * largest
        marks = top[(top > 1e-30) & (top < 1e30)].astype(np.float32)
        amax = np.concatenate([marks, np.nextafter(marks, np.float32(0)), np.nextafter(marks, np.float32(np.inf))])
        amax = np.concatenate([amax, np.nextafter(amax, np.float32(np.inf)), np.exp2(rng.uniform(-20, 10, 500))])
        amax = amax.astype(np.float32)
        expected = np.minimum(np.searchsorted(top, amax.astype(np.float64), side="left"), limit)
        assert np.array_equal(rule_codes(amax, element, scale, rule, g), expected)
        # What rounding the product g * amax/M upwards would have given: the fp32 error does move codes.
        quotient = g.numpy() * (amax / np.float32(largest))
        naive = np.searchsorted(scale_table(scale).numpy()[: limit + 1], quotient, side="left")
        moved += int((np.minimum(naive, limit) != expected).sum())
    assert moved > 0


@pytest.mark.parametrize("scale", ["e8m0", *FLOAT_SCALES])
def test_scales_grow_with_the_block_maximum(maxima, scale):
    order = np.sort(maxima)
    for rule in set(SCALES[scale].rules) - {"search", "four-over-six"}:
        for g in (None, torch.tensor([3.7])):
            assert (np.diff(rule_codes(order, "fp4_e2m1", scale, rule, g)) >= 0).all()


@pytest.mark.parametrize("rule", ["absmax-nonzero", "ceil", "four-over-six", "search"])
@pytest.mark.parametrize("scale", FLOAT_SCALES)
def test_only_all_zero_blocks_get_a_zero_scale(rule, scale):
    x = torch.zeros(400, 16)
    x[:300, 3] = torch.logspace(-44.8, -2, 300)
    x[300:, 5] = -FP32_MIN
    x[390:] = -0.0
    for g in (None, torch.tensor([1e-3]), torch.tensor([1e6])):
        scheme = QuantScheme("fp4_e2m1", scale, 16, g is not None, rule)
        codes = scales_of(x, scheme, g)
        assert torch.equal(codes > 0, x.abs().amax(1) > 0)
    assert (scales_of(x, QuantScheme("fp4_e2m1", scale, 16, scale_rule="absmax"))[:100] == 0).all()


def test_zero_and_subnormal_scales_are_counted():
    fmt = SCALES["e4m3"]
    amax = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 0.0])
    codes = torch.tensor([0, 0, 7, 8, 3], dtype=torch.uint8)
    assert count_small_scales(codes, amax, fmt) == (1, 1)
    assert count_small_scales(codes, amax, SCALES["e8m0"]) == (0, 0)


# Rules that look at the whole block, against the error of all 256 scales


def brute_force_errors(x: torch.Tensor, scheme: QuantScheme, global_scale: torch.Tensor | None) -> np.ndarray:
    """Squared error, in float64, of each row of ``x`` with each code of the scale: ``[rows, codes]``.

    The elements are rounded by ml_dtypes; only the quotient ``x / (s/g)`` is fp32, as the codec's is.
    """
    fmt, element = scheme.scale_format, scheme.element_format
    dtype = {"fp4_e2m1": ml_dtypes.float4_e2m1fn, "fp6_e2m3": ml_dtypes.float6_e2m3fn}[element.name]
    w = np.abs(x.numpy())
    out = np.empty((len(w), fmt.max_code + 1))
    for code in range(fmt.max_code + 1):
        s = np.float32(fmt.value(code))
        with np.errstate(over="ignore"):
            s = s if global_scale is None else s / global_scale.numpy()[0]
            quotient = np.minimum(w / s, np.float32(element.max)) if s > 0 else np.zeros_like(w)
        value = quotient.astype(dtype).astype(np.float64) * np.float64(s) if np.isfinite(s) else np.inf
        out[:, code] = ((value - w.astype(np.float64)) ** 2).sum(1)
    return out


def weights(seed: int) -> torch.Tensor:
    """Blocks of 16 of many magnitudes: Gaussian, heavy-tailed, one outlier, nearly constant, a few values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 16, generator=g)
    x[1000:1500] = x[1000:1500] ** 3
    x[1500:2000, 7] *= 12
    x[2000:2400] = 1 + x[2000:2400] * 1e-2
    x[2400:2700] = x[2400:2700].round()
    x[2700:, 3:] *= 1e-4
    return x * torch.logspace(-7, 1, 3000)[torch.randperm(3000, generator=g)][:, None]


SEARCHES = [
    ("fp4_e2m1", "e4m3", False, "search"),
    ("fp4_e2m1", "e4m3", True, "search"),
    ("fp4_e2m1", "ue5m3", False, "search"),
    ("fp4_e2m1", "e4m3", False, "four-over-six"),
    ("fp4_e2m1", "e4m3", True, "four-over-six"),
    ("fp4_e2m1", "ue5m3", False, "four-over-six"),
    ("fp6_e2m3", "ue5m3", False, "search"),
    ("fp4_e2m1", "e8m0", False, "search"),
    ("fp4_e2m1", "e8m0", True, "search"),
    ("fp6_e2m3", "e8m0", False, "search"),
]


@pytest.mark.parametrize(("element", "scale", "with_global", "rule"), SEARCHES)
def test_searched_scales_are_the_best_of_their_documented_candidates(element, scale, with_global, rule):
    x = weights(seed=4)
    scheme = QuantScheme(element, scale, 16, with_global, rule)
    fmt, m = scheme.scale_format, scheme.element_format.max
    g = global_scale_for(x.abs().max(), scheme) if with_global else None
    codes = scales_of(x, scheme, g).numpy().astype(np.int64)
    errors = brute_force_errors(x, scheme, g)
    amax = x.abs().amax(1).numpy()
    if scale == "e8m0":
        start = rule_codes(amax, element, scale, "floor", g)
        candidates = [start + offset for offset in (-1, 0, 1, 2)]
    elif rule == "search":
        start = rule_codes(amax, element, scale, "absmax", g)
        candidates = [np.clip(start + offset, 1, fmt.max_code) for offset in range(-1, 7)]
    else:
        table = scale_table(scale).numpy()[: fmt.max_code + 1]
        factor = np.float32(1) if g is None else g.numpy()[0]
        nearest = [np.abs(factor * (amax / np.float32(t)) - table[:, None]).argmin(0) for t in (m, 4)]
        candidates = [np.maximum(c, 1) for c in nearest]
        # A tie between two scales, which argmin gives to the lower code, may go either way here.
        candidates += [np.minimum(c + 1, fmt.max_code) for c in candidates]
    rows = np.arange(len(x))
    window = np.stack([errors[rows, c] for c in candidates])
    chosen = errors[rows, codes]
    inside = np.stack([c == codes for c in candidates]).any(0)
    assert inside.all()
    if rule == "four-over-six":
        window = window[:2]
    scaled = 1e-6 * (x.double() ** 2).sum(1).numpy()
    assert (chosen <= window.min(0) * (1 + 1e-5) + scaled * 1e-3).all()
    # And the rule does something: no single candidate is always the choice.
    assert max((c == codes).mean() for c in candidates) < 0.97


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
@pytest.mark.parametrize("with_global", [False, True])
def test_search_errs_no_more_than_any_other_rule(scale, with_global):
    x = weights(seed=5)
    others = {}
    for rule in SCALES[scale].rules:
        scheme = QuantScheme("fp4_e2m1", scale, 16, with_global, rule)
        # One global scale for all, so that only the rule differs.
        g = torch.tensor([448 * 6 / float(x.abs().max())]) if with_global else None
        codes = scales_of(x, scheme, g).numpy().astype(np.int64)
        others[rule] = brute_force_errors(x, scheme, g)[np.arange(len(x)), codes]
    for rule, error in others.items():
        assert (others["search"] <= error * (1 + 1e-5)).all(), rule
        assert others["search"].sum() <= error.sum(), rule
    assert others["four-over-six"].sum() < others["absmax-nonzero"].sum() <= others["absmax"].sum()


@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("scale", ["ue5m3", "e8m0", "e4m3"])
def test_search_comes_within_one_percent_of_the_best_of_all_codes(block, scale):
    # With e4m3 the scales of most of these blocks are subnormal.
    x = torch.randn(2500, block, generator=torch.Generator().manual_seed(6)) * 0.02
    scheme = QuantScheme("fp4_e2m1", scale, block, scale_rule="search")
    errors = brute_force_errors(x, scheme, None)
    chosen = errors[np.arange(len(x)), scales_of(x, scheme).numpy().astype(np.int64)]
    assert chosen.sum() <= errors.min(1).sum() * 1.01


def test_four_over_six_takes_four_for_a_block_that_six_serves_badly():
    # With 6 at amax, 5 is a coarse step away from 4 and 6; with 4 at amax, .75 * 4 = 3 is exact.
    x = torch.tensor([[8.0, 6.0] + [0.0] * 14, [12.0, 8.0] + [0.0] * 14])
    codes = scales_of(x, QuantScheme("fp4_e2m1", "ue5m3", 16, scale_rule="four-over-six"))
    assert scale_table("ue5m3")[codes.long()].tolist() == [2.0, 2.0]
    assert scales_of(x, QuantScheme("fp4_e2m1", "ue5m3", 16, scale_rule="absmax")).tolist() != codes.tolist()


# Global scale


@pytest.mark.parametrize(
    ("scale", "rule", "target"),
    [
        ("e4m3", "absmax", 448),
        ("e4m3", "search", 448),
        ("e4m3", "four-over-six", 256),
        ("ue5m3", "absmax", 114688),
        ("ue5m3", "four-over-six", 65536),
        ("ue5m3-61440", "absmax", 61440),
        ("ue5m3-61440", "four-over-six", 32768),
        ("e8m0", "even", 1),
        ("bf16", "absmax", 1),
        ("fp32", "absmax", 1),
    ],
)
def test_the_global_scale_maps_the_tensor_maximum_to_the_largest_product(scale, rule, target):
    maxima = np.exp2(np.random.default_rng(6).uniform(-60, 60, 300)).astype(np.float32)
    for element in ["fp4_e2m1"] if rule == "four-over-six" else ELEMENTS:
        scheme = QuantScheme(element, scale, 16, True, rule)
        for amax in maxima:
            g = global_scale_for(torch.tensor(amax), scheme)
            assert g.shape == (1,)
            assert g.dtype == torch.float32
            assert g.item() == np.float32(1) / amax * np.float32(target * ELEMENTS[element].max)
            assert abs(float(g) * float(amax) / (target * ELEMENTS[element].max) - 1) < 2.0**-22


def test_the_global_scale_is_positive_and_finite_whatever_the_tensor():
    for scale, fmt in SCALES.items():
        for rule in fmt.rules:
            scheme = QuantScheme("fp4_e2m1", scale, 16, True, rule)
            for amax in (FP32_MIN, 1e-40, 2.0**-126, 1e-36, 1.0, 3e38, FP32_MAX):
                g = float(global_scale_for(torch.tensor(amax), scheme))
                assert 0 < g <= FP32_MAX
            assert float(global_scale_for(torch.tensor(0.0), scheme)) == 1.0


# Side effects


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", SCALES)
def test_searching_leaves_the_weights_alone_even_when_one_block_is_a_row(element, scale):
    for rule in SCALES[scale].rules:
        if rule == "four-over-six" and element != "fp4_e2m1":
            continue
        for shape in ((5, 16), (1, 16), (1, 48)):
            x = -torch.rand(shape)
            blocks = B.split(x, (1, 16))
            before = x.clone()
            block_scales(blocks, B.amax(blocks), QuantScheme(element, scale, 16, scale_rule=rule), None)
            assert torch.equal(x, before)
