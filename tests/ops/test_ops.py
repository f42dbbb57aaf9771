"""The operators and ``QuantLinear``: PyTorch's own checks, tracing, precision, gradients, bad inputs."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import mxquant
from mxquant.codec.numerics import element_table, scale_dtype, scale_table
from mxquant.codec.qtensor import QTensor
from mxquant.nn.quant_linear import QuantLinear
from mxquant.ops.operators import exact_in
from mxquant.schemes.formats import ELEMENTS, PRESETS, SCALES, QuantScheme

OPS = torch.ops.mxquant
PAIRS = [
    QuantScheme(element, scale, block, global_scale)
    for element, scale in itertools.product(ELEMENTS, SCALES)
    for block, global_scale in ((16, False), ((4, 8), True))
]
SOME = [PRESETS["nvfp4"], PRESETS["mxfp4"], PRESETS["mxfp6"], QuantScheme(block=(4, 8)), QuantScheme(scale="bf16")]


pytestmark = pytest.mark.usefixtures("implementation")


def name_of(scheme: QuantScheme) -> str:
    return scheme.name


@functools.cache
def make(scheme: QuantScheme, rows: int = 24, columns: int = 72, seed: int = 0, sigma: float = 0.05) -> QTensor:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * sigma
    return mxquant.quantize(w, scheme)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# PyTorch's checks of operators


def opcheck(op, arguments) -> None:  # type: ignore[no-untyped-def]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments):
        checks.remove("test_schema")  # which compares its inputs by arithmetic that float8 lacks
    torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize("scheme", SOME, ids=name_of)
def test_quantize_passes_opcheck(scheme):
    w = normal(9, 37).bfloat16()
    opcheck(OPS.quantize, (w, scheme.text, 0, "w", None))
    if scheme.global_scale:
        opcheck(OPS.quantize, (w.t(), scheme.text, 3, "w", torch.tensor(300.0)))


@pytest.mark.parametrize("scheme", SOME, ids=name_of)
def test_dequantize_passes_opcheck(scheme):
    q = make(scheme, 9, 37)
    opcheck(OPS.dequantize, (q.packed, q.scale, q.global_scale, list(q.shape), scheme.text, torch.bfloat16))


@pytest.mark.parametrize("scheme", SOME, ids=name_of)
def test_linear_passes_opcheck_with_gradients(scheme):
    q = make(scheme, 9, 37)
    wide = scheme == SOME[0]
    inputs = [normal(2, 5, 37), normal(37, 4).t().bfloat16(), *([normal(37), normal(0, 37)] if wide else [])]
    for x in inputs:
        x = x.detach().requires_grad_()
        bias = normal(9).to(x.dtype).requires_grad_() if x.ndim != 3 else None
        opcheck(OPS.linear, (x, q.packed, q.scale, q.global_scale, bias, list(q.shape), scheme.text))


def test_fake_results_have_the_shapes_and_dtypes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for scheme in PAIRS:
        w = normal(10, 37)
        real = OPS.quantize(w, scheme.text, 0, "w", None)
        with FakeTensorMode() as mode:
            fake = OPS.quantize(mode.from_tensor(w), scheme.text, 0, "w", None)
        for a, b in zip(real, fake, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# Tracing


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_quant_linear_compiles_into_one_graph_without_breaks(backend):
    torch._dynamo.reset()
    for scheme in (PRESETS["nvfp4"], QuantScheme()):
        layer = QuantLinear.from_qtensor(make(scheme), bias=normal(24))
        x = normal(5, 72).requires_grad_()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), layer(x))
        grads = [torch.autograd.grad(f(x).square().sum(), (x, layer.bias)) for f in (compiled, layer)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch._dynamo.explain(layer)(x).graph_break_count == 0


def test_quant_linear_exports_with_a_dynamic_batch():
    layer = QuantLinear.from_qtensor(make(QuantScheme()), bias=normal(24))
    program = torch.export.export(layer, (normal(5, 72),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.equal(program.module()(normal(11, 72)), layer(normal(11, 72)))


# Precision


@pytest.mark.parametrize("scheme", PAIRS, ids=name_of)
def test_linear_in_fp32_equals_the_dense_product(scheme):
    q, bias = make(scheme, 64, 256), normal(64, seed=2)
    dense = q.dequantize(torch.float64).t()
    for batch in ((1,), (7,), (2, 33), ()):
        x = normal(*batch, 256)
        exact, y = x.double() @ dense, mxquant.linear(x, q)
        assert y.shape == (*batch, 64)
        assert y.dtype == torch.float32
        assert relative(y, exact) < 1e-5
        assert relative(mxquant.linear(x, q, bias), exact + bias.double()) < 1e-5
        # Element by element, relative to what a sum of these terms can lose.
        assert ((y.double() - exact).abs() <= 1e-5 * (x.double().abs() @ dense.abs())).all()


def rounding_error(exact: torch.Tensor, dtype: torch.dtype) -> float:
    return relative(exact.to(dtype), exact)


@pytest.mark.parametrize("scheme", PAIRS, ids=name_of)
def test_linear_in_half_precision_errs_at_most_a_tenth_more_than_rounding_the_exact_result(scheme):
    q, bias = make(scheme, 64, 256), normal(64, seed=2)
    dense = q.dequantize(torch.float64).t()
    for dtype, rows in itertools.product((torch.bfloat16, torch.float16), (1, 5, 64)):
        x = normal(rows, 256).to(dtype)
        product = x.double() @ dense
        for b in (None, bias.to(dtype), bias):
            y = mxquant.linear(x, q, b)
            exact = product if b is None else product + b.double()
            assert y.dtype == dtype
            assert relative(y, exact) <= 1.1 * rounding_error(exact, dtype)


def test_fp16_activations_survive_weights_that_fp16_cannot_hold():
    q = make(QuantScheme("fp4_e2m1", "e8m0", 16), 32, 64, sigma=1e-7)
    x = normal(3, 64).half() * 100
    exact = x.double() @ q.dequantize(torch.float64).t()
    assert relative(mxquant.linear(x, q), exact) <= 1.1 * rounding_error(exact, torch.float16)


@pytest.mark.parametrize("scheme", PAIRS, ids=name_of)
def test_exact_in_bf16_holds_for_every_code_and_normal_scale(scheme):
    if scheme.global_scale or not scheme.scale_format.coded:
        assert not exact_in(torch.bfloat16, scheme)
        return
    elements, scales = element_table(scheme.element), scale_table(scheme.scale)
    products = (elements[elements.isfinite()][:, None] * scales[scales.isfinite()]).flatten()
    products = products[products.isfinite() & ((products == 0) | (products.abs() >= 2.0**-126))]
    unchanged = torch.equal(products.bfloat16().float(), products)
    assert exact_in(torch.bfloat16, scheme) == unchanged
    assert exact_in(torch.float32, scheme)
    assert not exact_in(torch.float16, scheme)


# Gradients


@pytest.mark.parametrize("scheme", PAIRS[::3], ids=name_of)
@pytest.mark.parametrize("batch", [(), (1,), (6,), (2, 3)], ids=str)
def test_gradients_equal_those_of_the_dense_layer(scheme, batch):
    q = make(scheme)
    x, bias = normal(*batch, 72).requires_grad_(), normal(24, seed=2).requires_grad_()
    dense_x, dense_bias = (t.detach().clone().requires_grad_() for t in (x, bias))
    upstream = normal(*batch, 24, seed=3)
    (mxquant.linear(x, q, bias) * upstream).sum().backward()
    (nn.functional.linear(dense_x, q.dequantize(), dense_bias) * upstream).sum().backward()
    assert relative(x.grad, dense_x.grad) < 1e-5
    assert relative(bias.grad, dense_bias.grad) < 1e-5
    assert x.grad.shape == x.shape


def test_gradients_are_correct_by_finite_differences():
    q = make(PRESETS["nvfp4"], 6, 16, sigma=1.0)
    x, bias = normal(3, 16).requires_grad_(), normal(6).requires_grad_()
    upstream = normal(3, 6, seed=3)
    grads = torch.autograd.grad((mxquant.linear(x, q, bias) * upstream).sum(), (x, bias))
    for t, grad in zip((x, bias), grads, strict=True):
        for i in range(t.numel()):
            step = torch.zeros(t.numel())
            step[i] = 0.5  # the function is linear, so any step will do
            pair = [(x + d.view_as(x), bias) if t is x else (x, bias + d) for d in (step, -step)]
            up, down = ((mxquant.linear(a, q, b) * upstream).double().sum() for a, b in pair)
            assert (up - down).item() == pytest.approx(grad.flatten()[i].item(), abs=1e-4)


@pytest.mark.parametrize("scheme", SOME, ids=name_of)
def test_bf16_gradients_err_at_most_a_tenth_more_than_rounding_the_exact_ones(scheme):
    q = make(scheme, 128, 512)
    for rows in (1, 5, 64):
        x, bias = normal(rows, 512).bfloat16().requires_grad_(), normal(128).bfloat16().requires_grad_()
        upstream = normal(rows, 128, seed=3).bfloat16()
        mxquant.linear(x, q, bias).backward(upstream)
        exact = upstream.double() @ q.dequantize(torch.float64)
        assert relative(x.grad, exact) <= 1.1 * rounding_error(exact, torch.bfloat16)
        exact = upstream.double().sum(0)
        assert relative(bias.grad, exact) <= 1.1 * rounding_error(exact, torch.bfloat16) + 1e-9


def test_only_wanted_gradients_are_computed():
    q = make(QuantScheme())
    bias = normal(24).requires_grad_()
    mxquant.linear(normal(3, 72), q, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((24,), 3.0))
    x = normal(3, 72).requires_grad_()
    mxquant.linear(x, q, bias.detach()).sum().backward()
    assert x.grad is not None
    assert not mxquant.linear(x.detach(), q).requires_grad


# Bad inputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 71)}, r"activations \[3, 71\] do not fit a weight of 72 input features"),
        ({"x": torch.zeros(())}, "activations"),
        ({"x": torch.zeros(3, 72, dtype=torch.float64)}, "activations must be fp32, bf16 or fp16"),
        ({"x": torch.zeros(3, 72, dtype=torch.int32)}, "activations must be fp32, bf16 or fp16"),
        ({"bias": torch.zeros(23)}, r"bias must be \[24\]"),
        ({"bias": torch.zeros(24, 1)}, r"bias must be \[24\]"),
        ({"x": torch.zeros(3, 72, device="meta")}, "activations are on meta, the weight on cpu"),
        ({"bias": torch.zeros(24, device="meta")}, "bias is on meta, the weight on cpu"),
    ],
)
def test_linear_refuses_what_does_not_fit(change, message):
    q = make(PRESETS["nvfp4"])
    arguments = {"x": torch.zeros(3, 72), "bias": None, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        OPS.linear.default(
            arguments["x"], q.packed, q.scale, q.global_scale, arguments["bias"], [24, 72], q.scheme.text
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.zeros(24, 35, dtype=torch.uint8)}, "packed of a nvfp4"),
        ({"packed": torch.zeros(24, 36)}, "packed of a nvfp4"),
        ({"scale": torch.zeros(24, 5, dtype=torch.uint8)}, "scale of a nvfp4"),
        ({"scale": torch.zeros(24, 4).to(torch.float8_e4m3fn)}, "scale of a nvfp4"),
        ({"global_scale": None}, "needs a global scale"),
        ({"global_scale": torch.ones(3)}, "one fp32 number"),
    ],
)
@pytest.mark.parametrize("op", ["linear", "dequantize"])
def test_operators_refuse_parts_that_do_not_belong_together(op, change, message):
    q = make(PRESETS["nvfp4"])
    parts = list({"packed": q.packed, "scale": q.scale, "global_scale": q.global_scale, **change}.values())
    if op == "linear":
        call = functools.partial(OPS.linear, torch.zeros(3, 72), *parts, None, [24, 72], q.scheme.text)
    else:
        call = functools.partial(OPS.dequantize, *parts, [24, 72], q.scheme.text, torch.float32)
    with pytest.raises(ValueError, match=message):
        call()


# QuantLinear


@pytest.mark.parametrize("scheme", [*SOME, QuantScheme(scale="fp32", global_scale=True)], ids=name_of)
def test_casting_a_module_leaves_encodings_alone(scheme):
    q = make(scheme)
    model = nn.Sequential(QuantLinear.from_qtensor(q, bias=normal(24)), nn.Linear(24, 3))
    before = {k: v.clone() for k, v in model[0].state_dict().items() if k != "bias"}
    casts = [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.double()]
    casts += [lambda m: m.to("cpu", torch.bfloat16), lambda m: m.float(), lambda m: m.to(torch.bfloat16).float()]
    for cast in casts:
        model = cast(model)
        for key, value in before.items():
            after = model[0].state_dict()[key]
            assert after.dtype == value.dtype
            assert torch.equal(after.view(torch.uint8), value.view(torch.uint8))
        assert model[0].bias.dtype == model[1].weight.dtype
    assert set(before) == {"weight", "weight_scale"} | ({"weight_global_scale"} if scheme.global_scale else set())


def test_a_meta_layer_casts_moves_and_loads():
    q = make(PRESETS["nvfp4"])
    layer = QuantLinear(q.shape, q.scheme, bias=True, device="meta").to(torch.bfloat16)
    assert layer.weight_scale.dtype == scale_dtype(q.scheme.scale_format)
    assert layer.weight_global_scale.dtype == torch.float32
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(QuantLinear.from_qtensor(q, bias=normal(24)).state_dict())
    assert torch.equal(layer.dequantize(), q.dequantize())
    assert layer.bias.dtype == torch.bfloat16


def test_a_layer_shares_its_tensors_computes_like_linear_and_survives_a_copy():
    q = make(PRESETS["nvfp4"])
    layer = QuantLinear.from_qtensor(q, bias=normal(24))
    assert layer.qweight.packed.data_ptr() == q.packed.data_ptr()
    x = normal(3, 72)
    for other in (layer, copy.deepcopy(layer)):
        assert torch.equal(other(x), mxquant.linear(x, q, layer.bias))
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert "nvfp4" in repr(layer)
    assert not [p for n, p in layer.named_parameters() if n != "bias"]
