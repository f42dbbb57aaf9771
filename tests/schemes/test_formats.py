"""Every number format against independent tables, and what a scheme says about itself."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo, decode_ndarray
from gfloat.formats import (
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_e8m0,
)

from mxquant.codec.numerics import decode_scale, element_table, encode_scale, round_magnitude, scale_table, sign_bits
from mxquant.errors import SchemeError
from mxquant.schemes.formats import (
    ELEMENTS,
    PRESETS,
    SCALES,
    QuantScheme,
    packed_row_bytes,
    parse_block,
)

UE5M3 = FormatInfo(
    "ue5m3",
    8,
    4,
    bias=15,
    is_signed=False,
    domain=Domain.Finite,
    has_nz=False,
    num_high_nans=1,
    has_subnormals=True,
    is_twos_complement=False,
)
ELEMENT_ORACLES = {
    "fp4_e2m1": (format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn),
    "fp6_e2m3": (format_info_ocp_e2m3, ml_dtypes.float6_e2m3fn),
    "fp6_e3m2": (format_info_ocp_e3m2, ml_dtypes.float6_e3m2fn),
    "fp8_e4m3": (format_info_ocp_e4m3, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": (format_info_ocp_e5m2, ml_dtypes.float8_e5m2),
}
CODED_SCALES = [name for name, fmt in SCALES.items() if fmt.coded]


def scale_oracle(name: str) -> np.ndarray:
    codes = np.arange(256, dtype=np.uint8)
    if name == "e8m0":
        return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    if name == "e4m3":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return np.where(codes < 128, values, np.nan)  # unsigned use: a set sign bit is no number
    return decode_ndarray(UE5M3, codes)


def bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as numbers, signs of zeros and places of NaN included."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(same.all())


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_element_code_decodes_as_gfloat_and_ml_dtypes_say(name):
    info, dtype = ELEMENT_ORACLES[name]
    fmt = ELEMENTS[name]
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = decode_ndarray(info, codes)
    assert bits_equal(expected, codes.view(dtype).astype(np.float64))
    finite = np.isfinite(expected)
    ours = np.array([fmt.value(int(c)) for c in codes])
    assert bits_equal(ours[finite], expected[finite])
    # Infinities and NaN are never produced, and decode to NaN.
    assert bits_equal(element_table(name).numpy(), np.where(finite, expected, np.nan))
    assert int(finite[: len(codes) // 2].sum()) == fmt.max_code + 1
    assert fmt.max == expected[finite].max() == info.max


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_element_value_encodes_to_its_code(name):
    fmt = ELEMENTS[name]
    table = element_table(name)
    codes = torch.arange(len(table))[table.isfinite()]
    values = table[codes]
    encoded = round_magnitude(values.abs(), fmt).to(torch.uint8) | sign_bits(values, fmt)
    assert torch.equal(encoded, codes.to(torch.uint8))


def test_e2m1_is_the_table_of_the_specification():
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float32)
    expected[8] = -0.0
    assert torch.equal(element_table("fp4_e2m1").view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", CODED_SCALES)
def test_every_scale_code_decodes_as_the_independent_table_says(name):
    fmt, expected = SCALES[name], scale_oracle(name)
    assert bits_equal([fmt.value(c) for c in range(256)], expected)
    assert bits_equal(scale_table(name).numpy(), expected)
    assert bits_equal(decode_scale(torch.arange(256, dtype=torch.uint8), fmt).numpy(), expected)


@pytest.mark.parametrize("name", [n for n in CODED_SCALES if n != "e8m0"])
def test_every_scale_value_encodes_to_its_code(name):
    fmt = SCALES[name]
    codes = torch.arange(fmt.max_code + 1, dtype=torch.uint8)
    values = scale_table(name)[: fmt.max_code + 1]
    assert torch.equal(encode_scale(values, fmt), codes)
    assert torch.equal(encode_scale(values, fmt, up=True), codes)


def test_e8m0_agrees_with_gfloat_including_its_nan():
    assert bits_equal(decode_ndarray(format_info_ocp_e8m0, np.arange(256)), scale_oracle("e8m0"))
    assert math.isnan(SCALES["e8m0"].value(0xFF))
    assert SCALES["e8m0"].value(0) == 2.0**-127


def test_ue5m3_code_shifted_by_seven_is_the_fp16_bit_pattern():
    codes = np.arange(0xF8, dtype=np.uint16)
    fp16 = (codes << 7).view(np.float16).astype(np.float64)
    assert bits_equal(fp16, scale_table("ue5m3")[:0xF8].numpy())


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "normal"),
    [
        ("e8m0", 2.0**127, 2.0**-127, 0.0),
        ("e4m3", 448.0, 2.0**-9, 2.0**-6),
        ("ue5m3", 114688.0, 2.0**-17, 2.0**-14),
        ("ue5m3-61440", 61440.0, 2.0**-17, 2.0**-14),
    ],
)
def test_scale_formats_have_the_published_limits(name, largest, smallest, normal):
    fmt = SCALES[name]
    assert (fmt.max, fmt.min_positive, fmt.min_normal) == (largest, smallest, normal)


def test_presets_are_the_standard_formats():
    facts = {n: (s.element, s.scale, s.block, s.global_scale, s.rounding) for n, s in PRESETS.items() if s.name == n}
    assert facts == {
        "mxfp4": ("fp4_e2m1", "e8m0", 32, False, "nearest"),
        "nvfp4": ("fp4_e2m1", "e4m3", 16, True, "nearest"),
        "mxfp8": ("fp8_e4m3", "e8m0", 32, False, "nearest"),
        "mxfp6": ("fp6_e2m3", "e8m0", 32, False, "nearest"),
    }
    assert QuantScheme.preset("nvfp4", scale_rule="absmax").scale_rule == "absmax"


def all_schemes():
    for element in ELEMENTS:
        for scale, fmt in SCALES.items():
            for rule in fmt.rules:
                if rule == "four-over-six" and element != "fp4_e2m1":
                    continue
                for block in (16, (8, 4)):
                    for rounding in ("nearest", "stochastic"):
                        for global_scale in (False, True):
                            yield QuantScheme(element, scale, block, global_scale, rule, rounding)


def test_names_and_specs_tell_every_scheme_apart():
    schemes = list(all_schemes())
    assert len(schemes) > 800
    assert len({s.name for s in schemes}) == len({s.text for s in schemes}) == len(set(schemes)) == len(schemes)
    for scheme in schemes:
        assert QuantScheme.parse(scheme.text) == scheme
        assert QuantScheme.from_dict(scheme.to_dict()) == scheme


def test_a_preset_with_changes_reads_from_a_dictionary():
    scheme = QuantScheme.from_dict({"preset": "nvfp4", "block": [16, 16], "rounding": "stochastic"})
    assert scheme == dataclasses.replace(PRESETS["nvfp4"], block=(16, 16), rounding="stochastic")


@pytest.mark.parametrize(
    ("text", "block"),
    [("16", 16), ("32x32", (32, 32)), ("1x16", 16), ("16X1", (16, 1)), (8, 8), ((1, 8), 8), ([4, 8], (4, 8))],
)
def test_block_shapes_read_as_they_are_written(text, block):
    assert parse_block(text) == block
    scheme = QuantScheme(block=text)
    assert scheme.block == block
    assert parse_block(scheme.block_text) == block
    rows, columns = scheme.block_shape
    assert rows * columns == (block if isinstance(block, int) else block[0] * block[1])


@pytest.mark.parametrize("block", ["", "x", "16x", "axb", "1", "0", 1, 0, -4, True, 2.5, (1, 1), (0, 8), (2, 2, 2)])
def test_impossible_blocks_are_refused(block):
    with pytest.raises(SchemeError, match="block"):
        QuantScheme(block=block)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"element": "fp5"}, "fp5"),
        ({"scale": "e4m4"}, "e4m4"),
        ({"rounding": "up"}, "up"),
        ({"scale": "e8m0", "scale_rule": "absmax"}, "absmax"),
        ({"scale": "e4m3", "scale_rule": "rceil"}, "rceil"),
        ({"scale": "bf16", "scale_rule": "search"}, "search"),
        ({"element": "fp8_e4m3", "scale_rule": "four-over-six"}, "four-over-six"),
    ],
)
def test_unknown_and_unfitting_choices_are_refused_by_name(fields, named):
    with pytest.raises(SchemeError, match=named):
        QuantScheme(**fields)
    with pytest.raises(SchemeError, match="blok"):
        QuantScheme.from_dict({**fields, "blok": 3})


def test_rows_are_padded_to_whole_bytes():
    for columns in range(1, 70):
        assert packed_row_bytes(columns, 4) == math.ceil(columns / 2)
        assert packed_row_bytes(columns, 6) == 3 * math.ceil(columns / 4)
        assert packed_row_bytes(columns, 8) == columns


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (QuantScheme("fp4_e2m1", "ue5m3", 16), 4.5),
        (QuantScheme("fp4_e2m1", "ue5m3", 8), 5.0),
        (QuantScheme("fp4_e2m1", "e4m3", (32, 32)), 4 + 8 / 1024),
        (PRESETS["mxfp4"], 4.25),
        (PRESETS["mxfp6"], 6.25),
        (PRESETS["mxfp8"], 8.25),
        (PRESETS["nvfp4"], 4.5 + 32 / (64 * 128)),
        (QuantScheme("fp4_e2m1", "bf16", 16), 5.0),
        (QuantScheme("fp4_e2m1", "fp32", 16), 6.0),
    ],
)
def test_bits_per_weight_of_whole_blocks(scheme, bits):
    assert scheme.bits_per_weight((64, 128)) == bits


def test_bits_per_weight_counts_partial_blocks_and_padding():
    # 3 x 21 in 2 x 16 tiles: 2 x 2 scales; 11, 18 and 21 bytes a row of fp4, fp6 and fp8.
    for element, row in (("fp4_e2m1", 11), ("fp6_e3m2", 18), ("fp8_e5m2", 21)):
        scheme = QuantScheme(element, "ue5m3", (2, 16), global_scale=True)
        assert scheme.nbytes((3, 21)) == 3 * row + 4 + 4
        assert scheme.bits_per_weight((3, 21)) == 8 * (3 * row + 8) / 63


ALL_SCHEMES = [
    QuantScheme(element, scale, block, has_global, rule, rounding)
    for element in ("fp4_e2m1", "fp8_e4m3")
    for scale, fmt in SCALES.items()
    for block in (8, 16, (32, 32))
    for has_global in (False, True)
    for rule in fmt.rules
    for rounding in ("nearest", "stochastic")
    if not (element != "fp4_e2m1" and rule == "four-over-six")
]


def test_every_scheme_is_read_back_from_its_text():
    texts = [scheme.text for scheme in ALL_SCHEMES]
    assert len(set(texts)) == len(texts)
    assert [QuantScheme.parse(text) for text in texts] == ALL_SCHEMES


def test_scheme_texts_start_from_a_preset_and_take_parts_in_any_order():
    assert QuantScheme.parse("8/ue5m3") == QuantScheme(scale="ue5m3", block=8)
    assert QuantScheme.parse("nvfp4/32/search") == QuantScheme.preset("nvfp4", block=32, scale_rule="search")
    assert QuantScheme.parse("mxfp4/ue5m3") == QuantScheme(scale="ue5m3", block=32)  # the rule is that of the new scale


@pytest.mark.parametrize("text", ["", "ue5m3/", "foo", "ue5m3+globe", "e4m3/floor", "16x", "1", "ue5m3+/16"])
def test_texts_that_name_no_scheme_are_refused(text):
    with pytest.raises(SchemeError):
        QuantScheme.parse(text)
