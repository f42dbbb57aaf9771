"""Rounding of elements and scales against ml_dtypes, gfloat, PyTorch's casts and brute force."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo, RoundMode, encode_ndarray, round_ndarray

from mxquant.codec.numerics import (
    decode_scale,
    effective_scale,
    element_table,
    encode_scale,
    magnitude_values,
    round_magnitude,
    round_magnitude_stochastic,
    scale_dtype,
    scale_table,
    sign_bits,
)
from mxquant.schemes.formats import ELEMENTS, SCALES

FP32_MAX = float(np.finfo(np.float32).max)
FLOAT_SCALES = ["e4m3", "ue5m3", "ue5m3-61440"]
ELEMENT_DTYPES = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def gfloat_ue5m3(max_code: int) -> FormatInfo:
    """gfloat's description of UE5M3, with as many NaN codes on top as the variant leaves unused."""
    return FormatInfo(
        "ue5m3",
        8,
        4,
        bias=15,
        is_signed=False,
        domain=Domain.Finite,
        has_nz=False,
        num_high_nans=255 - max_code,
        has_subnormals=True,
        is_twos_complement=False,
    )


def around(values: np.ndarray) -> np.ndarray:
    """fp32 values and their neighbours on both sides."""
    v = values.astype(np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate([v, np.nextafter(v, np.float32(np.inf)), np.nextafter(v, np.float32(-np.inf))])


def hard_values(table: np.ndarray, seed: int) -> np.ndarray:
    """fp32 values >= 0: all codes, all midpoints and their neighbours, limits, 2^21 random ones."""
    table = np.unique(table[table >= 0]).astype(np.float64)
    midpoints = (table[1:] + table[:-1]) / 2
    top = table[-1] + (table[-1] - table[-2]) * np.array([0.25, 0.5, 0.75, 1.0])
    special = np.array([2.0**-149, 2.0**-148, 2.0**-127, 2.0**-126, 1e-30, 1e30, 3e38, FP32_MAX])
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 0x7F800000, 1 << 20).astype(np.int32).view(np.float32)
    low, high = math.log2(table[1]) - 4, math.log2(table[-1]) + 2
    within = np.exp2(rng.uniform(low, high, 1 << 20)).astype(np.float32)
    edges = np.concatenate([around(x) for x in (table, midpoints, top, special)])
    out = np.concatenate([edges, patterns, within, np.zeros(1, np.float32)])
    return out[(out >= 0) & np.isfinite(out)]


def encode_numpy(x: np.ndarray, fmt, **kwargs) -> np.ndarray:  # type: ignore[no-untyped-def]
    return encode_scale(torch.from_numpy(x), fmt, **kwargs).numpy()


# Scales


def test_e4m3_scales_equal_ml_dtypes_and_torch_casts_on_two_million_values():
    fmt = SCALES["e4m3"]
    x = hard_values(scale_table("e4m3").numpy(), seed=1)
    assert len(x) > 2_000_000
    codes = encode_numpy(x, fmt)
    clipped = np.minimum(x, np.float32(448))  # both casts give NaN or saturate above, by version
    assert np.array_equal(codes, clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert np.array_equal(codes, torch.from_numpy(clipped).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    assert (codes[x > 448] == 0x7E).all()
    assert (codes[x > 448].size, codes[x == 0].size) > (1000, 0)


@pytest.mark.parametrize("name", ["ue5m3", "ue5m3-61440"])
def test_ue5m3_scales_equal_gfloat_on_two_million_values(name):
    fmt = SCALES[name]
    x = hard_values(scale_table(name).numpy()[: fmt.max_code + 1], seed=2)
    assert len(x) > 2_000_000
    info = gfloat_ue5m3(fmt.max_code)
    assert info.max == fmt.max
    rounded = round_ndarray(info, x.astype(np.float64), RoundMode.TiesToEven, sat=True)
    assert np.array_equal(encode_numpy(x, fmt), encode_ndarray(info, rounded).astype(np.uint8))


@pytest.mark.parametrize("name", FLOAT_SCALES)
def test_rounding_scales_up_gives_the_smallest_code_not_below(name):
    fmt = SCALES[name]
    values = scale_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    x = hard_values(values, seed=3)
    expected = np.minimum(np.searchsorted(values, x.astype(np.float64), side="left"), fmt.max_code)
    assert np.array_equal(encode_numpy(x, fmt, up=True), expected.astype(np.uint8))


@pytest.mark.parametrize("name", FLOAT_SCALES)
def test_ties_of_scales_go_to_the_even_code(name):
    fmt = SCALES[name]
    values = scale_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    midpoints = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    lower = np.arange(fmt.max_code)
    assert np.array_equal(encode_numpy(midpoints, fmt), lower + lower % 2)
    assert np.array_equal(encode_numpy(np.nextafter(midpoints, np.float32(0)), fmt), lower)
    assert np.array_equal(encode_numpy(np.nextafter(midpoints, np.float32(np.inf)), fmt), lower + 1)


def test_e8m0_decodes_as_ml_dtypes_and_is_never_made_by_rounding():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(decode_scale(torch.from_numpy(codes), SCALES["e8m0"]).numpy(), expected, equal_nan=True)
    with pytest.raises(ValueError, match="scale rule"):
        encode_scale(torch.ones(1), SCALES["e8m0"])


def test_study_scales_are_the_floats_themselves():
    x = torch.tensor([0.0, 1e-45, 1 / 3, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e30])
    assert torch.equal(encode_scale(x, SCALES["fp32"]), x)
    bf16 = encode_scale(x, SCALES["bf16"])
    assert np.array_equal(bf16.to(torch.float32).numpy(), x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32))
    assert torch.equal(decode_scale(bf16, SCALES["bf16"]), bf16.to(torch.float32))


@pytest.mark.parametrize("name", ["e8m0", *FLOAT_SCALES])
def test_the_effective_scale_is_one_fp32_division(name):
    fmt = SCALES[name]
    codes = torch.arange(fmt.max_code + 1, dtype=torch.uint8)
    stored = codes.view(scale_dtype(fmt))
    assert torch.equal(effective_scale(stored, fmt, None), scale_table(name)[: fmt.max_code + 1])
    rng = np.random.default_rng(4)
    globals_ = np.exp2(rng.uniform(1, 40, 500)).astype(np.float32)
    # For many of these 1/(1/g) is not g, so inverting twice would show.
    assert 20 < (np.float32(1) / (np.float32(1) / globals_) != globals_).sum() < 200
    values = scale_table(name).numpy()[: fmt.max_code + 1]
    for g in globals_:
        ours = effective_scale(stored, fmt, torch.tensor([g])).numpy()
        assert np.array_equal(ours, values / g)


# Elements


def encode_elements(x: np.ndarray, name: str) -> np.ndarray:
    t, fmt = torch.from_numpy(x), ELEMENTS[name]
    return (round_magnitude(t.abs(), fmt).to(torch.uint8) | sign_bits(t, fmt)).numpy()


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_equal_ml_dtypes_casts_on_four_million_values(name):
    fmt = ELEMENTS[name]
    x = hard_values(element_table(name).numpy(), seed=5)
    x = np.concatenate([x, -x])
    assert len(x) > 4_000_000
    clipped = np.clip(x, np.float32(-fmt.max), np.float32(fmt.max))
    assert np.array_equal(encode_elements(x, name), clipped.astype(ELEMENT_DTYPES[name]).view(np.uint8))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_bf16_pattern_rounds_to_the_nearest_code_and_ties_to_even(name):
    fmt = ELEMENTS[name]
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[np.isfinite(x)]
    table = element_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    distance = np.abs(np.minimum(np.abs(x), fmt.max).astype(np.float64)[:, None] - table)
    best = distance.argmin(1)  # of two equal distances the lower code
    tied = (distance == distance.min(1, keepdims=True)).sum(1) == 2
    assert tied.sum() == 2 * fmt.max_code
    best[tied] += best[tied] % 2
    expected = best | np.signbit(x).astype(np.int64) << fmt.bits - 1
    assert np.array_equal(encode_elements(x, name), expected.astype(np.uint8))


@pytest.mark.parametrize("name", ELEMENTS)
def test_ties_carry_over_binades_and_the_subnormal_border(name):
    fmt = ELEMENTS[name]
    table = element_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    midpoints = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    lower = np.arange(fmt.max_code)
    assert np.array_equal(encode_elements(midpoints, name), lower + lower % 2)
    assert np.array_equal(encode_elements(np.nextafter(midpoints, np.float32(0)), name), lower)
    assert np.array_equal(encode_elements(np.nextafter(midpoints, np.float32(9e9)), name), lower + 1)


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_saturate_and_keep_the_sign_of_zero(name):
    fmt = ELEMENTS[name]
    sign = 1 << fmt.bits - 1
    x = np.array([fmt.max, FP32_MAX, np.inf, -fmt.max, -FP32_MAX, -np.inf, 0.0, -0.0, 1e-45, -1e-45], np.float32)
    expected = [fmt.max_code] * 3 + [fmt.max_code | sign] * 3 + [0, sign] * 2
    assert encode_elements(x, name).tolist() == expected


@pytest.mark.parametrize("name", ELEMENTS)
def test_magnitude_codes_and_values_are_inverse(name):
    fmt = ELEMENTS[name]
    codes = torch.arange(fmt.max_code + 1, dtype=torch.float32)
    values = magnitude_values(codes, fmt)
    assert torch.equal(values, element_table(name)[: fmt.max_code + 1])
    assert torch.equal(round_magnitude(values, fmt), codes)


def test_rounding_leaves_its_input_alone():
    x = torch.rand(64) * 8
    before = x.clone()
    for fmt in ELEMENTS.values():
        round_magnitude(x, fmt)
        round_magnitude_stochastic(x, fmt, torch.zeros(64, dtype=torch.int32))
        magnitude_values(round_magnitude(x, fmt), fmt)
    for name in ("e4m3", "ue5m3", "bf16"):
        encode_scale(x, SCALES[name])
    assert torch.equal(x, before)


# Stochastic rounding of one value, with the random bits chosen by hand


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_takes_the_upper_neighbour_below_the_fraction_and_not_above(name):
    fmt = ELEMENTS[name]
    table = element_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    for sixteenths in range(16):
        x = torch.from_numpy((table[:-1] + (table[1:] - table[:-1]) * sixteenths / 16).astype(np.float32))
        lower = torch.arange(fmt.max_code, dtype=torch.float32)
        threshold = sixteenths << 20  # of 2^24
        for bits, up in (
            (0, sixteenths > 0),
            (threshold - 1, sixteenths > 0),
            (threshold, False),
            ((1 << 24) - 1, False),
        ):
            if bits >= 0:
                filled = torch.full((fmt.max_code,), bits, dtype=torch.int32)
                assert torch.equal(round_magnitude_stochastic(x, fmt, filled), lower + up)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("bits", [0, 1, 1 << 23, (1 << 24) - 1])
def test_stochastic_rounding_never_moves_values_of_the_grid_and_saturates(name, bits):
    fmt = ELEMENTS[name]
    codes = torch.arange(fmt.max_code + 1, dtype=torch.float32)
    filled = torch.full((fmt.max_code + 1,), bits, dtype=torch.int32)
    assert torch.equal(round_magnitude_stochastic(magnitude_values(codes, fmt), fmt, filled), codes)
    beyond = torch.tensor([fmt.max * 1.001, fmt.max * 1.5, 3e38, FP32_MAX, math.inf])
    assert (round_magnitude_stochastic(beyond, fmt, filled[:5]) == fmt.max_code).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_gives_one_of_the_two_neighbours(name):
    fmt = ELEMENTS[name]
    x = hard_values(element_table(name).numpy(), seed=6)[::4]
    table = element_table(name).numpy()[: fmt.max_code + 1].astype(np.float64)
    bits = np.random.default_rng(7).integers(0, 1 << 24, len(x)).astype(np.int32)
    codes = round_magnitude_stochastic(torch.from_numpy(x), fmt, torch.from_numpy(bits)).numpy().astype(np.int64)
    clipped = np.minimum(x.astype(np.float64), fmt.max)
    below = np.searchsorted(table, clipped, side="right") - 1
    above = np.searchsorted(table, clipped, side="left")
    assert ((codes == below) | (codes == above)).all()
    # And which of the two follows from the bits: below the fraction means up.
    inside = below != above
    fraction = (clipped - table[below])[inside] / (table[above] - table[below])[inside]
    assert np.array_equal(codes[inside] == above[inside], bits[inside] < fraction * 2.0**24)
