"""Whole weights: the one equation, the same bytes however they are cut, and the ugly inputs."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxquant
from mxquant.codec.amax import tensor_amax
from mxquant.codec.numerics import element_table, scale_table
from mxquant.codec.packing import pack, unpack
from mxquant.codec.parallel import Workers
from mxquant.codec.qtensor import QTensor, dequantize_parts
from mxquant.codec.rng import derive_key, random_bits24
from mxquant.codec.rounding import QuantStats, RowQuantizer
from mxquant.codec.scaling import global_scale_for
from mxquant.errors import WeightError
from mxquant.ops.operators import quantize_rows, quantize_tensor
from mxquant.schemes.formats import ELEMENTS, PRESETS, SCALES, QuantScheme

FP32_MAX = float(np.finfo(np.float32).max)
ELEMENT_DTYPES = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
ALL_SCHEMES = [
    QuantScheme(element, scale, 16, global_scale, rule)
    for element in ELEMENTS
    for scale, fmt in SCALES.items()
    for rule in fmt.rules
    for global_scale in (False, True)
    if rule != "four-over-six" or element == "fp4_e2m1"
]
FP4_SCHEMES = [s for s in ALL_SCHEMES if s.element == "fp4_e2m1"]


pytestmark = pytest.mark.usefixtures("implementation")


def by_name(scheme: QuantScheme) -> str:
    return f"{scheme.name}-{scheme.scale_rule}"


def weight(rows: int, columns: int, seed: int = 0, sigma: float = 0.02) -> torch.Tensor:
    """Gaussian with a few outliers, zeros of both signs and an all-zero stretch."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g) * sigma
    w.view(-1)[::97] *= 20
    w.view(-1)[5::61] = 0.0
    w.view(-1)[6::61] = -0.0
    w[rows // 2, : columns // 2] = 0.0
    return w


def effective_scales(q: QTensor) -> np.ndarray:
    """fl32(scale / global) of every element, from independent tables and numpy's division."""
    fmt = q.scheme.scale_format
    if fmt.name == "e4m3":
        scale = q.scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif fmt.name == "e8m0":
        scale = np.ldexp(np.float32(1), q.scale.numpy().astype(np.int32) - 127)
    elif fmt.coded:
        scale = scale_table(fmt.name).numpy()[q.scale.numpy()]  # itself checked against gfloat
    else:
        scale = q.scale.float().numpy()
    if q.global_scale is not None:
        scale = scale / q.global_scale.numpy()[0]
    r, c = q.scheme.block_shape
    assert scale.dtype == np.float32
    return np.repeat(np.repeat(scale, r, 0), c, 1)[: q.shape[0], : q.shape[1]]


def codes_of(q: QTensor) -> np.ndarray:
    return unpack(q.packed, q.scheme.element_format.bits, q.shape[1]).numpy()


def nearest_codes(w: torch.Tensor, scale: np.ndarray, element: str) -> np.ndarray:
    """ml_dtypes' rounding of w / scale, saturating; zero where the scale is."""
    fmt = ELEMENTS[element]
    x = w.float().numpy()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(scale > 0, x / scale, np.copysign(np.float32(0), x))
    clipped = np.clip(quotient, np.float32(-fmt.max), np.float32(fmt.max))
    return clipped.astype(ELEMENT_DTYPES[element]).view(np.uint8)


def assert_equation(q: QTensor) -> None:
    """value = element * fl32(scale / global), in fp32, bit for bit."""
    elements = codes_of(q).view(ELEMENT_DTYPES[q.scheme.element]).astype(np.float32)
    expected = elements * effective_scales(q)
    ours = mxquant.dequantize(q).numpy()
    assert np.array_equal(ours.view(np.int32), expected.view(np.int32))


def same_bytes(a: QTensor, b: QTensor) -> bool:
    parts = [(a.packed, b.packed), (a.scale, b.scale)]
    if a.global_scale is not None:
        parts.append((a.global_scale, b.global_scale))
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in parts)


def in_chunks(w: torch.Tensor, scheme: QuantScheme, chunk_elements: int, **kwargs) -> QTensor:  # type: ignore[no-untyped-def]
    g = global_scale_for(tensor_amax(w), scheme) if scheme.global_scale else None
    options = {"seed": 0, "name": "weight", "global_scale": g, "chunk_elements": chunk_elements, **kwargs}
    job = RowQuantizer(w, scheme, quantize=quantize_rows, **options)
    with Workers(w.device) as workers:
        chunks = list(workers.map(job, job.starts))
    return QTensor(
        torch.cat([c.packed for c in chunks]), torch.cat([c.scale for c in chunks]), g, tuple(w.shape), scheme
    )


# The one equation


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=by_name)
def test_codes_are_the_nearest_and_values_follow_the_one_equation(scheme):
    w = weight(24, 100)
    before = w.clone()
    q = mxquant.quantize(w, scheme)
    assert torch.equal(w.view(torch.int32), before.view(torch.int32))
    assert np.array_equal(codes_of(q), nearest_codes(w, effective_scales(q), scheme.element))
    assert_equation(q)
    assert mxquant.dequantize(q).isfinite().all()
    assert (torch.signbit(mxquant.dequantize(q)) == torch.signbit(w)).all()


def test_a_global_scale_is_divided_by_once_even_where_its_reciprocal_is_inexact():
    w = weight(16, 64)
    moved = 0
    for g in np.exp2(np.random.default_rng(0).uniform(8, 14, 60)).astype(np.float32):
        if np.float32(1) / (np.float32(1) / g) == g:
            continue
        q = mxquant.quantize(w, QuantScheme.preset("nvfp4", scale_rule="absmax"), global_scale=torch.tensor([g]))
        assert q.global_scale.item() == g
        assert_equation(q)
        twice = q.scale.float().numpy() * (np.float32(1) / g)
        moved += int((np.repeat(twice, 16, 1) != effective_scales(q)).sum())
    assert moved > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dequantizing_to_another_dtype_is_one_rounding_of_the_fp32_values(dtype):
    q = mxquant.quantize(weight(9, 70), PRESETS["nvfp4"])
    assert torch.equal(mxquant.dequantize(q, dtype), mxquant.dequantize(q, torch.float32).to(dtype))


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_with_every_scale_dequantizes_by_the_equation(element):
    fmt = ELEMENTS[element]
    codes = torch.arange(1 << fmt.bits)[element_table(element).isfinite()]
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % 4)])
    columns = len(codes)
    for scale, f in SCALES.items():
        if not f.coded:
            continue
        rows = f.max_code + 1
        scheme = QuantScheme(element, scale, columns, True)
        packed = pack(codes.to(torch.uint8).repeat(rows, 1), fmt.bits)
        stored = torch.arange(rows, dtype=torch.uint8).view(-1, 1)
        stored = stored.view(torch.float8_e4m3fn) if scale == "e4m3" else stored
        with np.errstate(over="ignore"):
            assert_equation(QTensor(packed, stored, torch.tensor([2.7]), (rows, columns), scheme))


def test_exactly_representable_weights_come_back_unchanged():
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (64, 64), generator=g)
    codes[:, ::16] = codes[:, ::16] | 7  # every block has its maximum at 6
    for scale, power in itertools.product(("ue5m3", "e8m0", "fp32", "bf16"), (-10, 0, 5)):
        w = element_table("fp4_e2m1")[codes] * 2.0**power
        for rule in SCALES[scale].rules:
            if (scale, rule) not in {("e8m0", "ceil")}:  # which leaves room above
                q = mxquant.quantize(w, QuantScheme("fp4_e2m1", scale, 16, scale_rule=rule))
                assert torch.equal(mxquant.dequantize(q).view(torch.int32), w.view(torch.int32)), (scale, rule)


# The same bytes however the work is cut


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=by_name)
def test_bytes_do_not_depend_on_chunks(scheme):
    w = weight(13, 75, seed=2)
    whole = mxquant.quantize(w, scheme)
    for chunk_elements in (1, 75 * 4, 1 << 30):
        assert same_bytes(in_chunks(w, scheme, chunk_elements), whole)


TILED = [
    QuantScheme("fp4_e2m1", "e4m3", (4, 8), True, "four-over-six"),
    QuantScheme("fp4_e2m1", "ue5m3", (3, 5), False, "search"),
    QuantScheme("fp6_e2m3", "ue5m3", (32, 32), False, "ceil"),
    QuantScheme("fp8_e5m2", "e8m0", (16, 1), False, "search"),
    QuantScheme("fp4_e2m1", "e8m0", (32, 32), False, "rceil", "stochastic"),
    QuantScheme("fp6_e3m2", "e4m3", (2, 16), True, "absmax", "stochastic"),
    QuantScheme("fp4_e2m1", "ue5m3", 16, False, "search", "stochastic"),
    QuantScheme("fp4_e2m1", "fp32", 7, False, "absmax", "stochastic"),
]


@pytest.mark.parametrize("scheme", TILED, ids=by_name)
def test_bytes_of_tiles_and_of_stochastic_rounding_do_not_depend_on_chunks(scheme):
    w = weight(67, 75, seed=3)
    whole = mxquant.quantize(w, scheme, seed=5, name="w")
    assert_equation(whole)
    for chunk_elements in (1, 75 * 20, 75 * 33, 1 << 30):
        assert same_bytes(in_chunks(w, scheme, chunk_elements, seed=5, name="w"), whole)


@pytest.mark.parametrize("scheme", [*TILED, PRESETS["nvfp4"], PRESETS["mxfp4"], QuantScheme()], ids=by_name)
def test_bytes_do_not_depend_on_the_number_of_threads(scheme):
    w = weight(700, 515, seed=4)  # more than one chunk
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(mxquant.quantize(w, scheme))
            results.append(in_chunks(w, scheme, 1 << 14))
    finally:
        torch.set_num_threads(before)
    assert all(same_bytes(results[0], other) for other in results[1:])


@pytest.mark.parametrize("scheme", [*FP4_SCHEMES[::3], *TILED], ids=by_name)
def test_half_precision_weights_give_the_bytes_of_their_fp32_copies(scheme):
    for dtype in (torch.bfloat16, torch.float16):
        w = weight(20, 90, seed=6).to(dtype)
        assert same_bytes(mxquant.quantize(w, scheme), mxquant.quantize(w.float(), scheme))


@pytest.mark.parametrize("scheme", [PRESETS["nvfp4"], PRESETS["mxfp6"], QuantScheme(), *TILED], ids=by_name)
def test_views_give_the_bytes_of_their_copies_and_stay_untouched(scheme):
    base = weight(90, 90, seed=7)
    for view in (base.t(), base[::2], base[:, ::3], base[3:40, 5:37], base.view(1, 8100), base[:1].expand(6, 90)):
        before = view.clone()
        copy = view.clone(memory_format=torch.contiguous_format)
        assert same_bytes(mxquant.quantize(view, scheme), mxquant.quantize(copy, scheme))
        assert torch.equal(view, before)


def test_square_tiles_commute_with_transposition():
    w = weight(48, 80, seed=8)
    for scheme in (QuantScheme(block=(16, 16)), QuantScheme("fp4_e2m1", "e8m0", (8, 8), scale_rule="rceil")):
        q, t = mxquant.quantize(w, scheme), mxquant.quantize(w.t(), scheme)
        assert torch.equal(q.scale.t(), t.scale)
        assert torch.equal(mxquant.dequantize(q).t(), mxquant.dequantize(t))


def test_a_tile_of_one_row_is_a_plain_block():
    w = weight(5, 40)
    assert QuantScheme(block=(1, 16)) == QuantScheme(block=16)
    rows = mxquant.quantize(w.t().contiguous(), QuantScheme(block=(16, 1)))
    assert torch.equal(mxquant.dequantize(rows).t(), mxquant.quantize(w, QuantScheme(block=16)).dequantize())


def test_partial_blocks_equal_blocks_padded_with_zeros():
    w = weight(11, 29, seed=9)
    padded = torch.nn.functional.pad(w, (0, 3, 0, 1))
    for block in (8, (4, 8)):
        for scheme in (QuantScheme(block=block), QuantScheme("fp6_e2m3", "e4m3", block, True)):
            small, large = mxquant.quantize(w, scheme), mxquant.quantize(padded, scheme)
            assert torch.equal(small.scale.view(torch.uint8), large.scale.view(torch.uint8)[: small.scale.shape[0]])
            assert torch.equal(mxquant.dequantize(small), mxquant.dequantize(large)[:11, :29])


ANY_SCHEME = st.builds(
    lambda pair, block, with_global, rounding, n: (
        QuantScheme(
            pair[0],
            pair[1],
            block,
            with_global,
            [r for r in SCALES[pair[1]].rules if r != "four-over-six"][n % 4],
            rounding,
        )
        if SCALES[pair[1]].coded
        else QuantScheme(pair[0], pair[1], block, with_global, None, rounding)
    ),
    st.tuples(st.sampled_from(sorted(ELEMENTS)), st.sampled_from(sorted(SCALES))),
    st.one_of(st.integers(2, 40), st.tuples(st.integers(1, 9), st.integers(2, 9))),
    st.booleans(),
    st.sampled_from(["nearest", "stochastic"]),
    st.integers(0, 3),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ANY_SCHEME, st.integers(1, 40), st.integers(1, 70), st.integers(-30, 30), st.integers(0, 2**32), st.data())
def test_any_shape_in_any_scheme_obeys_the_equation_and_its_invariants(scheme, rows, columns, power, seed, data):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    q = mxquant.quantize(w, scheme, seed=seed)
    assert q.shape == (rows, columns)
    assert q.nbytes == scheme.nbytes((rows, columns))
    assert q.bits_per_weight == scheme.bits_per_weight((rows, columns)) == 8 * q.nbytes / (rows * columns)
    assert_equation(q)
    if scheme.rounding == "nearest":
        assert np.array_equal(codes_of(q), nearest_codes(w, effective_scales(q), scheme.element))
    if scheme.scale == "e8m0" and scheme.scale_rule == "ceil":
        assert (w.abs().numpy() <= effective_scales(q) * scheme.element_format.max).all()
    chunk_elements = data.draw(st.integers(1, rows * columns + 1))
    assert same_bytes(in_chunks(w, scheme, chunk_elements, seed=seed), q)
    padding = unpack(q.packed, scheme.element_format.bits, q.packed.shape[1] * 8 // scheme.element_format.bits)
    assert not padding[:, columns:].any()


# Ugly inputs


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=by_name)
def test_extreme_weights_give_finite_values_of_the_right_sign(scheme):
    values = [FP32_MAX, 3e38, 2.6e38, 1e-20, 2.0**-126, 1e-38, 1e-40, 3e-44, 2.0**-149]
    for value, other in itertools.product(values, (0.0, 0.3)):
        w = torch.full((3, 20), other * value)
        w[0, 0], w[0, 5], w[1, 17] = value, -value, -value / 2
        w[2, 16:] = 0
        q = mxquant.quantize(w, scheme)
        d = mxquant.dequantize(q)
        assert d.isfinite().all()
        assert torch.equal(torch.signbit(d), torch.signbit(w))
        assert (d[w == 0] == 0).all()
        with np.errstate(under="ignore"):
            assert_equation(q)


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=by_name)
def test_an_all_zero_weight_gives_zeros_and_keeps_their_signs(scheme):
    w = torch.zeros(4, 40)
    w[:, ::3] = -0.0
    q = mxquant.quantize(w, scheme)
    assert torch.equal(mxquant.dequantize(q).view(torch.int32), w.view(torch.int32))
    assert scheme.scale == "e8m0" or not q.scale.view(torch.uint8).any()
    assert q.global_scale is None or q.global_scale.item() == 1.0


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=by_name)
def test_a_power_of_two_moves_the_scales_and_nothing_else(scheme):
    w = weight(16, 64, seed=10, sigma=scheme.element_format.max / 4)
    q = mxquant.quantize(w, scheme)
    for power in (-2, 3):
        moved = mxquant.quantize(w * 2.0**power, scheme)
        assert torch.equal(moved.packed, q.packed)
        if scheme.global_scale:
            assert torch.equal(moved.scale.float(), q.scale.float())
            assert torch.equal(moved.global_scale, q.global_scale * 2.0**-power)
        elif scheme.scale_format.coded:
            steps = power * 2**scheme.scale_format.mantissa_bits
            codes, before = (t.scale.view(torch.uint8).int() for t in (moved, q))
            assert torch.equal(codes, torch.where(w.view(16, 4, 16).abs().amax(-1) > 0, before + steps, before))
        else:
            assert torch.equal(moved.scale, q.scale * 2.0**power)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_weights_are_refused_by_name_and_place(value, dtype):
    clean = weight(700, 515).to(dtype)
    for scheme in (QuantScheme(scale_rule="ceil"), PRESETS["nvfp4"], QuantScheme("fp6_e2m3", "e8m0", (4, 8))):
        for row, column in ((0, 0), (7, 33), (699, 514)):
            w = clean.clone()
            w[row, column] = value
            if (row, column) != (699, 514):
                w[699, 514] = math.nan  # the first one is named
            place = rf"model\.w: {str(value).replace('-', '-')} at row {row}, column {column};"
            with pytest.raises(WeightError, match=place):
                mxquant.quantize(w, scheme, name="model.w")


def test_things_that_are_no_weight_are_refused():
    for bad in (torch.zeros(8), torch.zeros(2, 2, 2), torch.zeros(0, 8), torch.zeros(8, 0)):
        with pytest.raises(WeightError, match="layer: only matrices"):
            quantize_tensor(bad, QuantScheme(), name="layer")
    for dtype in (torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(WeightError, match=f"layer: cannot quantize {str(dtype).removeprefix('torch.')}"):
            quantize_tensor(torch.zeros(4, 4).to(dtype), QuantScheme(), name="layer")


def test_global_scales_that_cannot_be_are_refused():
    w = weight(4, 32)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(WeightError, match="positive, finite"):
            mxquant.quantize(w, PRESETS["nvfp4"], global_scale=torch.tensor([bad]))
    for bad in (torch.tensor([1.0, 2.0]), torch.tensor([1.0], dtype=torch.float64), torch.tensor([1])):
        with pytest.raises(WeightError, match="one positive, finite fp32 number"):
            mxquant.quantize(w, PRESETS["nvfp4"], global_scale=bad)
    with pytest.raises(WeightError, match="no global scale"):
        mxquant.quantize(w, PRESETS["mxfp4"], global_scale=torch.tensor([1.0]))


@pytest.mark.parametrize("scheme", FP4_SCHEMES[::2], ids=by_name)
def test_parameters_that_want_gradients_are_quantized_without_any(scheme):
    w = weight(4, 32)
    q = mxquant.quantize(torch.nn.Parameter(w), scheme)
    assert same_bytes(q, mxquant.quantize(w, scheme))
    assert same_bytes(q, quantize_tensor(torch.nn.Parameter(w), scheme))
    assert not any(t.requires_grad for t in (q.packed, q.scale, mxquant.dequantize(q)))
    with torch.inference_mode():
        assert same_bytes(q, mxquant.quantize(w, scheme))


# Parts that do not belong together


def test_a_qtensor_refuses_parts_that_do_not_belong_together():
    q = mxquant.quantize(weight(8, 32), PRESETS["nvfp4"])
    good = {"packed": q.packed, "scale": q.scale, "global_scale": q.global_scale, "shape": q.shape, "scheme": q.scheme}
    assert same_bytes(QTensor(**good), q)
    for change, message in (
        ({"packed": q.packed[:, :-1]}, "packed of a .* must be torch.uint8"),
        ({"packed": q.packed.to(torch.int8)}, "packed of a .* must be torch.uint8"),
        ({"scale": q.scale.view(torch.uint8)}, "scale of a .* must be torch.float8_e4m3fn"),
        ({"scale": q.scale[:4]}, "scale of a"),
        ({"global_scale": None}, "needs a global scale"),
        ({"global_scale": torch.ones(2)}, "one fp32 number"),
        ({"global_scale": torch.ones(1, dtype=torch.float64)}, "one fp32 number"),
        ({"shape": (8, 33)}, "packed of a"),
        ({"scheme": QuantScheme("fp4_e2m1", "e4m3", 16)}, "has no global scale"),
        ({"scale": q.scale.to("meta")}, "scale is on meta"),
        ({"global_scale": q.global_scale.to("meta")}, "global scale is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            QTensor(**{**good, **change})


def test_moving_a_qtensor_keeps_its_bytes_and_says_where_it_is():
    q = mxquant.quantize(weight(8, 32), PRESETS["nvfp4"])
    assert same_bytes(q.to("cpu"), q)
    assert q.to("meta").device.type == "meta"
    assert "nvfp4" in repr(q)
    assert "(8, 32)" in repr(q)


def test_dequantizing_in_small_chunks_changes_nothing(monkeypatch):
    w = weight(37, 45)
    for scheme in (PRESETS["nvfp4"], QuantScheme(block=(4, 8)), QuantScheme("fp6_e2m3", "e8m0", (5, 3))):
        q = mxquant.quantize(w, scheme)
        whole = mxquant.dequantize(q)
        for elements in (1, 45 * 7, 45 * 8):
            monkeypatch.setattr("mxquant.codec.qtensor.CHUNK_ELEMENTS", elements)
            parts = dequantize_parts(q.packed, q.scale, q.global_scale, q.shape, scheme, torch.float32)
            assert torch.equal(parts.view(torch.int32), whole.view(torch.int32))


# What quantizing did


def test_statistics_equal_those_of_the_dequantized_weight():
    w = weight(30, 100, seed=11)
    w[4] *= 1e-5
    for scheme in (
        QuantScheme("fp4_e2m1", "e4m3", 16, scale_rule="absmax"),
        PRESETS["mxfp4"],
        QuantScheme("fp4_e2m1", "e8m0", (4, 16), scale_rule="floor"),
        QuantScheme("fp4_e2m1", "ue5m3", 16, rounding="stochastic"),
    ):
        q = mxquant.quantize(w, scheme)
        options = {"seed": 0, "name": "weight", "global_scale": None, "with_stats": True}
        for chunk_elements in (300, 1 << 20):
            job = RowQuantizer(w, scheme, chunk_elements=chunk_elements, quantize=quantize_rows, **options)
            stats = sum((job(start).stats for start in job.starts), QuantStats())
            d, scale = mxquant.dequantize(q).double(), effective_scales(q)
            blocks = q.scale.numel()
            assert (stats.elements, stats.blocks) == (3000, blocks)
            assert stats.error == pytest.approx(float(((d - w) ** 2).sum()), rel=1e-5)
            assert stats.signal == pytest.approx(float((w.double() ** 2).sum()), rel=1e-5)
            assert stats.relative_error == pytest.approx(float((d - w).norm() / w.norm()), rel=1e-5)
            assert stats.sqnr_db == pytest.approx(-20 * math.log10(stats.relative_error), rel=1e-5)
            with np.errstate(divide="ignore", invalid="ignore"):
                saturated = int((np.abs(w.numpy() / scale)[scale > 0] > 6).sum())
            assert stats.saturated == saturated
            lost = (scale == 0) & (w.numpy() != 0)
            assert (stats.zero_scales > 0) == lost.any()
    assert QuantStats().relative_error == 0
    assert QuantStats().sqnr_db == math.inf


def test_only_what_passes_the_largest_element_counts_as_saturated():
    w = torch.zeros(1, 64)
    w[0, ::16] = torch.tensor([6.0, -6.0, 6.0 + 2**-20, -7.9])  # one block each, all with scale 1
    scheme = QuantScheme("fp4_e2m1", "e8m0", 16, scale_rule="floor")
    job = RowQuantizer(w, scheme, seed=0, name="w", global_scale=None, with_stats=True, quantize=quantize_rows)
    stats = job(0).stats
    assert stats.saturated == 2


@pytest.mark.parametrize("element", ELEMENTS)
def test_truncation_free_rules_saturate_nothing(element):
    w = weight(120, 256, seed=12)
    for scale, rule, with_global in (
        ("e8m0", "ceil", False), ("e8m0", "rceil", False), ("e8m0", "rceil", True), ("e8m0", "ceil", True),
        ("ue5m3", "ceil", False), ("e4m3", "ceil", True), ("e4m3", "ceil", False),
    ):  # fmt: skip
        scheme = QuantScheme(element, scale, 16, with_global, rule)
        q = mxquant.quantize(w, scheme)
        top = effective_scales(q).astype(np.float64) * ELEMENTS[element].max  # exact in float64
        # A global scale is rounded, so the tensor's largest weight may pass the largest scale by that much.
        limit = np.repeat(q.scale.float().numpy() == SCALES[scale].max, 16, 1) * 2.0**-22
        assert (np.abs(w.double().numpy()) <= top * (1 + limit)).all()


# Stochastic rounding


STOCHASTIC = QuantScheme("fp4_e2m1", "ue5m3", 16, scale_rule="ceil", rounding="stochastic")


def test_stochastic_rounding_is_a_function_of_seed_and_name():
    w = weight(40, 100)
    first = mxquant.quantize(w, STOCHASTIC, seed=1, name="a")
    assert same_bytes(mxquant.quantize(w, STOCHASTIC, seed=1, name="a"), first)
    others = [mxquant.quantize(w, STOCHASTIC, seed=s, name=n) for s, n in ((2, "a"), (1, "b"), (0, "weight"))]
    for other in others:
        assert torch.equal(other.scale, first.scale)
        assert (codes_of(other) != codes_of(first)).mean() > 0.1


@pytest.mark.parametrize("scheme", TILED, ids=by_name)
def test_nearest_rounding_draws_no_random_bits(scheme):
    w = weight(20, 50)
    plain = QuantScheme.from_dict({**scheme.to_dict(), "rounding": "nearest"})
    assert same_bytes(mxquant.quantize(w, plain, seed=1, name="a"), mxquant.quantize(w, plain, seed=2, name="b"))


@pytest.mark.parametrize(
    "scheme",
    [QuantScheme.from_dict({**s.to_dict(), "rounding": "stochastic"}) for s in [*TILED, *map(PRESETS.get, PRESETS)]],
    ids=by_name,
)
def test_stochastic_codes_follow_from_the_bits_of_the_row_major_index(scheme):
    """The definition, in numpy: up where 24 random bits are below 2^24 times the fraction."""
    w = weight(37, 51, seed=13)
    q = mxquant.quantize(w, scheme, seed=3, name="layer")
    fmt = ELEMENTS[scheme.element]
    table = element_table(scheme.element).numpy()[: fmt.max_code + 1].astype(np.float64)
    scale = effective_scales(q)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(scale > 0, np.abs(w.numpy()) / scale, np.float32(0)).astype(np.float64)
    x = np.minimum(x, fmt.max)
    below = np.searchsorted(table, x, side="right") - 1
    above = np.minimum(below + 1, fmt.max_code)
    gap = np.where(above > below, table[above] - table[below], 1)
    bits = random_bits24(derive_key(3, "layer"), torch.arange(37 * 51)).view(37, 51).numpy()
    up = bits < (x - table[below]) / gap * 2.0**24
    expected = below + up | np.signbit(w.numpy()).astype(np.int64) << fmt.bits - 1
    assert np.array_equal(codes_of(q), expected.astype(np.uint8))
    assert 0.05 < up.mean() < 0.95


def test_stochastic_rounding_is_unbiased_everywhere_on_the_grid():
    """Each of many values, both signs, subnormals and the edge at 6 included: mean within 4 standard errors."""
    rows = 1 << 14
    grid = torch.cat([torch.linspace(-6, 6, 59), torch.tensor([1e-3, -0.01, 0.25, 0.499, -5.999, 5.5])])
    x = torch.cat([grid, torch.tensor([6.0, -6.0, 0.5, 1.0, 3.0, -0.0, 4.0])])  # the last seven are on the grid
    columns = len(x)
    w = x.repeat(rows, 1)
    q = mxquant.quantize(w, QuantScheme("fp4_e2m1", "e8m0", columns, scale_rule="rceil", rounding="stochastic"))
    assert (q.scale == 127).all()  # 6 maps to 6
    d = mxquant.dequantize(q).double()
    assert torch.equal(d[:, -7:].float(), w[:, -7:])
    mean, deviation = d.mean(0), d.std(0)
    z = (mean - x.double())[:-7] / (deviation / math.sqrt(rows))[:-7].clamp(min=1e-12)
    exact = deviation[:-7] == 0
    assert exact.sum() <= 15
    assert z[~exact].abs().max() < 4
    # All values together, too: their errors do not conspire.
    assert abs(float(z[~exact].mean())) * math.sqrt(int((~exact).sum())) < 4


def test_nearest_rounding_is_biased_where_stochastic_rounding_is_not():
    w = torch.full((256, 64), 0.2)
    w[:, 0] = 6
    nearest = QuantScheme("fp4_e2m1", "e8m0", 64, scale_rule="rceil")
    assert mxquant.quantize(w, nearest).dequantize()[:, 1:].abs().max() == 0
    stochastic = QuantScheme("fp4_e2m1", "e8m0", 64, scale_rule="rceil", rounding="stochastic")
    mean = float(mxquant.quantize(w, stochastic).dequantize()[:, 1:].mean())
    assert mean == pytest.approx(0.2, abs=4 * 0.25 / math.sqrt(256 * 63))
