"""CPU kernels that quantize and dequantize give the bytes of the reference, at every instruction level."""

from __future__ import annotations

import itertools
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

import mxquant
from mxquant.codec.qtensor import QTensor
from mxquant.codec.rounding import QuantStats, RowQuantizer
from mxquant.errors import WeightError
from mxquant.kernels.cpu.backend import CpuBackend
from mxquant.ops.backends import backend, explain
from mxquant.ops.operators import quantize_rows
from mxquant.schemes.formats import ELEMENTS, SCALES, QuantScheme

L = pytest.importorskip("mxquant.kernels.cpu.library")
if isinstance(L.load(), str):
    pytest.skip(L.load(), allow_module_level=True)

BEST = L.best_level()
LEVELS = L.LEVELS[: L.LEVELS.index(BEST) + 1]
CODED = [name for name, fmt in SCALES.items() if fmt.coded]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = [8, 16, 32, 64, 128, (8, 8), (16, 16), (32, 32), (3, 16), (2, 128)]
SCHEMES = [
    QuantScheme("fp4_e2m1", scale, 16, with_global, rule)
    for scale in CODED
    for rule in SCALES[scale].rules
    for with_global in (False, True)
]


def by_name(scheme: QuantScheme) -> str:
    return f"{scheme.name}-{scheme.scale_rule}"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=LEVELS)
def level(request):  # type: ignore[no-untyped-def]
    L.set_level(request.param)
    yield request.param
    L.set_level(BEST)


@pytest.fixture
def reference(monkeypatch):  # type: ignore[no-untyped-def]
    """``reference(function, ...)`` calls a function without kernels."""

    def call(function, *args, **kwargs):  # type: ignore[no-untyped-def]
        with monkeypatch.context() as patch:
            patch.setenv("MXQUANT_KERNELS", "reference")
            return function(*args, **kwargs)

    return call


def weight(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of very different sizes, with zeros of both signs, all-zero stretches and exact ties."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-12, 3, (rows, 1), generator=g).float())
    w.view(-1)[::97] *= 20
    w.view(-1)[5::61] = 0.0
    w.view(-1)[6::61] = -0.0
    w[rows // 2, : columns // 2] = 0.0
    w[0] = torch.tensor([6.0, 0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0]).repeat(columns // 8 + 1)[:columns]
    return w.to(dtype)


def assert_same(a: QTensor, b: QTensor) -> None:
    assert torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))
    assert torch.equal(a.packed, b.packed)
    assert a.global_scale is None or torch.equal(a.global_scale, b.global_scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=by_name)
def test_every_rule_gives_the_bytes_of_the_reference(scheme, level, reference):
    assert explain("quantize", weight(8, 8), (8, 8), scheme, device_type="cpu").by == "cpu"
    for dtype in DTYPES:
        w = weight(9, 200, dtype=dtype)
        assert_same(mxquant.quantize(w, scheme), reference(mxquant.quantize, w, scheme))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_shape_gives_the_bytes_of_the_reference(block, level, reference):
    for rule, scale, rounding in (
        ("search", "ue5m3", "nearest"), ("absmax", "e4m3", "nearest"), ("even", "e8m0", "nearest"),
        ("search", "e8m0", "stochastic"), ("four-over-six", "e4m3", "stochastic"), ("ceil", "ue5m3", "stochastic"),
    ):  # fmt: skip
        scheme = QuantScheme("fp4_e2m1", scale, block, scale == "e4m3", rule, rounding)
        for shape, dtype in itertools.product(((5, 129), (67, 64)), DTYPES):
            w = weight(*shape, dtype=dtype)
            assert_same(mxquant.quantize(w, scheme, seed=3), reference(mxquant.quantize, w, scheme, seed=3))


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2047, 2048, 2049, 4100])
def test_every_length_of_a_row_gives_the_bytes_of_the_reference(columns, level, reference):
    for block, rounding in ((8, "nearest"), (16, "nearest"), (128, "stochastic"), ((4, 32), "nearest")):
        for dtype in DTYPES:
            scheme = QuantScheme(block=block, scale_rule="absmax", rounding=rounding)
            w = weight(6, columns, seed=columns, dtype=dtype)
            q = mxquant.quantize(w, scheme)
            assert_same(q, reference(mxquant.quantize, w, scheme))
            for out in DTYPES:
                assert torch.equal(mxquant.dequantize(q, out), reference(mxquant.dequantize, q, out))


@pytest.mark.parametrize("scale", CODED)
def test_every_finite_bf16_amax_gives_the_bytes_of_the_reference(scale, level, reference):
    # All 0x7F80 magnitudes, each the largest of a block of 8, with its half and its tie points beside it.
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    parts = torch.tensor([1.0, 0.5, -0.25, 0.75, -5 / 6, 7 / 12, 1 / 24, -1 / 8])
    w = (amax.float()[:, None] * parts).to(torch.bfloat16).view(-1, 64)
    for rule in SCALES[scale].rules:
        for g in (None, torch.tensor([448.0 * 6 / 0.37])):
            scheme = QuantScheme("fp4_e2m1", scale, 8, g is not None, rule)
            assert_same(
                mxquant.quantize(w, scheme, global_scale=g), reference(mxquant.quantize, w, scheme, global_scale=g)
            )


@pytest.mark.parametrize("g", [1e-30, 2.7, 3e9, 1e36])
def test_extreme_global_scales_give_the_bytes_of_the_reference(g, level, reference):
    for scale, rule in (
        ("e4m3", "absmax"),
        ("e4m3", "ceil"),
        ("ue5m3", "search"),
        ("e8m0", "rceil"),
        ("e8m0", "search"),
    ):
        scheme = QuantScheme("fp4_e2m1", scale, 16, True, rule)
        for power in (-140, -30, 0, 60, 120):
            w = weight(12, 64) * 2.0**power
            if not w.isfinite().all():
                continue
            given = torch.tensor([g])
            q = mxquant.quantize(w, scheme, global_scale=given)
            assert_same(q, reference(mxquant.quantize, w, scheme, global_scale=given))
            for dtype in DTYPES:
                ours, theirs = mxquant.dequantize(q, dtype), reference(mxquant.dequantize, q, dtype)
                assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


def test_magnitudes_around_every_threshold_are_rounded_as_by_the_reference(level, reference):
    for scale in ("e4m3", "ue5m3", "e8m0"):
        codes = torch.arange(1 if scale != "e8m0" else 30, SCALES[scale].max_code - 3)
        s = torch.tensor([SCALES[scale].value(int(c)) for c in codes])
        middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[None] * s[:, None]
        bits = middles.view(torch.int32)
        around = torch.cat([(bits + d).view(torch.float32) for d in (-2, -1, 0, 1, 2)], 1)
        w = torch.cat([6 * s[:, None], around, torch.zeros(len(s), 64 - 36)], 1)
        scheme = QuantScheme("fp4_e2m1", scale, 64, scale_rule="absmax" if scale != "e8m0" else "rceil")
        assert_same(mxquant.quantize(w, scheme), reference(mxquant.quantize, w, scheme))


@pytest.mark.parametrize("scheme", SCHEMES[::3], ids=by_name)
def test_views_of_any_layout_give_the_bytes_of_their_copies(scheme, level, reference):
    for dtype in DTYPES:
        base = weight(90, 90, seed=7, dtype=dtype)
        for view in (base.t(), base[::2], base[:, ::3], base[3:40, 5:37], base.view(-1)[1:8001].view(80, 100)):
            assert_same(mxquant.quantize(view, scheme), reference(mxquant.quantize, view.contiguous(), scheme))
        assert_same(
            mxquant.quantize(base[:1].expand(6, 90), scheme), reference(mxquant.quantize, base[:1].repeat(6, 1), scheme)
        )


def test_extreme_weights_give_the_bytes_of_the_reference(level, reference):
    values = [3.4e38, 3e38, 2.0**60, 1e-20, 2.0**-100, 2.0**-126, 1e-40, 2.0**-149]
    for scheme in SCHEMES:
        for value, other in itertools.product(values, (0.0, 0.3)):
            w = torch.full((3, 40), other * value)
            w[0, 0], w[0, 5], w[1, 17], w[2, 16:] = value, -value, -value / 2, 0
            assert_same(mxquant.quantize(w, scheme), reference(mxquant.quantize, w, scheme))


def test_threads_do_not_change_the_bytes(level):
    before = torch.get_num_threads()
    try:
        for scheme in (*SCHEMES[::5], QuantScheme(block=(16, 16), rounding="stochastic")):
            w = weight(260, 1000, dtype=torch.bfloat16)
            made = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                made.append(mxquant.quantize(w, scheme))
                made[-1].dense = mxquant.dequantize(made[-1], torch.bfloat16)
            for other in made[1:]:
                assert_same(made[0], other)
                assert torch.equal(made[0].dense, other.dense)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_number_that_is_not_finite_is_named(value, level):
    for dtype, scheme in itertools.product(DTYPES, (SCHEMES[0], QuantScheme(block=(4, 8)), QuantScheme(block=128))):
        for row, column in ((0, 0), (7, 33), (299, 514)):
            w = weight(300, 515, dtype=dtype)
            w[row, column] = value
            w[299, 514] = value
            with pytest.raises(WeightError, match=rf"model\.w: {value} at row {row}, column {column};"):
                mxquant.quantize(w, scheme, name="model.w")


@pytest.mark.parametrize("scheme", [*SCHEMES[::4], QuantScheme(block=(8, 8)), QuantScheme(block=8)], ids=by_name)
def test_statistics_are_those_of_the_reference(scheme, level, reference):
    def stats(w: torch.Tensor) -> QuantStats:
        g = torch.tensor([100.0]) if scheme.global_scale else None
        job = RowQuantizer(
            w, scheme, seed=0, name="w", global_scale=g, with_stats=True, chunk_elements=1 << 12, quantize=quantize_rows
        )
        return sum((job(start).stats for start in job.starts), QuantStats())

    for dtype in DTYPES:
        w = weight(50, 203, dtype=dtype)
        w[3] *= 2.0**-13
        ours, theirs = stats(w), reference(stats, w)
        for name in ("elements", "blocks", "zero_scales", "subnormal_scales", "saturated"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.error == pytest.approx(theirs.error, rel=1e-4)
        assert ours.signal == pytest.approx(theirs.signal, rel=1e-4)


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_element_format_dequantizes_to_the_bytes_of_the_reference(element, level, reference):
    for scale, block, shape in itertools.product(CODED, (8, 16, 64, (3, 16)), ((7, 200), (33, 61))):
        for with_global in (False, True):
            scheme = QuantScheme(element, scale, block, with_global, SCALES[scale].rules[0])
            q = mxquant.quantize(weight(*shape), scheme)
            for dtype in DTYPES:
                ours, theirs = mxquant.dequantize(q, dtype), reference(mxquant.dequantize, q, dtype)
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_large_and_unaligned_results_are_dequantized_right(level, reference):
    q = mxquant.quantize(weight(2050, 2056, dtype=torch.bfloat16), QuantScheme())
    for dtype in DTYPES:
        assert torch.equal(mxquant.dequantize(q, dtype), reference(mxquant.dequantize, q, dtype))


def test_flushing_subnormals_changes_nothing(level, reference):
    w = torch.cat([weight(8, 64) * 2.0**p for p in (-140, -126, -110, 0)])
    schemes = [
        *SCHEMES,
        *(QuantScheme(s.element, s.scale, 16, False, s.scale_rule, "stochastic") for s in SCHEMES[::2]),
    ]
    expected = [
        reference(mxquant.quantize, w, s, global_scale=None if not s.global_scale else torch.ones(1)) for s in schemes
    ]
    dense = [reference(mxquant.dequantize, q, torch.float32) for q in expected]
    from mxquant.kernels.cpu import backend as module

    module._quant_tables.cache_clear()
    module._decode_table.cache_clear()
    assert torch.set_flush_denormal(True)
    try:
        made = [mxquant.quantize(w, s, global_scale=None if not s.global_scale else torch.ones(1)) for s in schemes]
        back = [mxquant.dequantize(q, torch.float32) for q in made]
    finally:
        torch.set_flush_denormal(False)
    for q, e, b, d in zip(made, expected, back, dense, strict=True):
        assert_same(q, e)
        assert torch.equal(b.view(torch.int32), d.view(torch.int32))


def test_what_no_kernel_serves_is_left_to_the_reference_and_said():
    for scheme, why in (
        (QuantScheme("fp8_e4m3", "e8m0", 32), "elements are fp8_e4m3"),
        (QuantScheme("fp4_e2m1", "fp32", 16), "block scales are fp32"),
        (QuantScheme(block=12), "blocks are 12"),
        (QuantScheme(block=(16, 1)), "blocks are 16x1"),
    ):
        w = weight(8, 64)
        assert explain("quantize", w, (8, 64), scheme, device_type="cpu") == ("reference", why)
        assert mxquant.quantize(w, scheme).shape == (8, 64)
    q = mxquant.quantize(weight(8, 64), QuantScheme())
    wide = explain("dequantize", q.packed, q.shape, q.scheme, dtype=torch.float64, device_type="cpu")
    assert "torch.float64" in wide.why


def test_an_environment_variable_turns_kernels_off(reference):
    served = reference(explain, "quantize", weight(8, 64), (8, 64), QuantScheme(), device_type="cpu")
    assert served == ("reference", "MXQUANT_KERNELS=reference")
    assert reference(backend, "cpu") is None
    assert isinstance(backend("cpu"), CpuBackend)


@pytest.mark.parametrize("work", ["quantize", "dequantize fp4", "dequantize fp8"])
def test_tables_live_as_long_as_a_kernel_reads_them(work, monkeypatch):
    """Two threads may miss a cache of tables at once. It keeps one result; the other thread has only its own."""
    from mxquant.kernels.cpu import backend as module

    made = []

    def uncached(function):
        def make(*args):
            table = function(*args).clone()
            made.append(weakref.ref(table))
            return table

        return make

    for name in ("_quant_tables", "_decode_table", "element_table"):
        monkeypatch.setattr(module, name, uncached(getattr(module, name)))

    def watched(function):
        def call(job):
            assert made.pop()() is not None
            return function(job)

        return call

    scheme = QuantScheme(element="fp8_e4m3" if work.endswith("fp8") else "fp4_e2m1")
    q = mxquant.quantize(weight(8, 64), scheme)
    made.clear()
    library = L.library()
    functions = {name: getattr(library, name) for name in ("mxq_level", "mxq_quant_tables", "mxq_decode_table")}
    functions |= {name: watched(getattr(library, name)) for name in ("mxq_quantize", "mxq_dequantize")}
    monkeypatch.setattr(L, "library", lambda: SimpleNamespace(**functions))
    if work == "quantize":
        assert CpuBackend().quantize(weight(8, 64), scheme, 0, None) is not None
    else:
        assert torch.equal(
            CpuBackend().dequantize(q.packed, q.scale, None, (8, 64), scheme, torch.float32), mxquant.dequantize(q)
        )
    assert not made
