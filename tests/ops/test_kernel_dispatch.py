"""One dispatch point: who serves a call, why, and what happens to calls that make no sense."""

from __future__ import annotations

import os

import pytest
import torch

import mxquant
from mxquant.errors import WeightError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.ops import backends
from mxquant.schemes.formats import QuantScheme

SCHEME = QuantScheme(scale="ue5m3", block=16)
SHAPE = (40, 96)

# numpy, of overflows that the formats ask for
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators on CPU tensors run the Triton kernels, in the interpreter."""
    monkeypatch.setenv("MXQUANT_KERNELS", "triton")


@pytest.fixture
def q() -> mxquant.QTensor:
    torch.manual_seed(0)
    return mxquant.quantize(torch.randn(SHAPE), SCHEME)


def arguments(q: mxquant.QTensor) -> tuple:
    return q.packed, q.scale, q.global_scale


def count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    calls, original = [], getattr(backends.BACKENDS["cuda"], name)

    def counted(*args):
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(backends.BACKENDS["cuda"], name, counted)
    return calls


@needs_interpreter
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_operators_give_the_same_through_the_kernels(triton, monkeypatch, scheme):
    calls = [count(monkeypatch, name) for name in ("quantize", "dequantize", "linear", "linear_grad")]
    w, x = torch.randn(SHAPE), torch.randn(3, 2, SHAPE[1])
    results = []
    for kernels in ("triton", "reference"):
        monkeypatch.setenv("MXQUANT_KERNELS", kernels)
        q = mxquant.quantize(w, QuantScheme.preset(scheme))
        leaf, bias = x.clone().requires_grad_(), torch.ones(SHAPE[0]).requires_grad_()
        y = mxquant.linear(leaf, q, bias)
        y.square().sum().backward()
        results.append((q.packed, q.scale.view(torch.uint8), mxquant.dequantize(q), y, leaf.grad, bias.grad))
    assert all(len(c) == 1 for c in calls)
    for ours, reference in zip(*results, strict=True):
        assert (ours.double() - reference.double()).norm() <= 1e-5 * reference.double().norm()
    assert all(torch.equal(a, b) for a, b in zip(*(r[:3] for r in results), strict=True))


@needs_interpreter
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_operators_pass_opcheck(monkeypatch, q, kernels):
    monkeypatch.setenv("MXQUANT_KERNELS", kernels)
    o, spec, shape = torch.ops.mxquant, SCHEME.text, list(SHAPE)
    x, bias = torch.randn(2, SHAPE[1], requires_grad=True), torch.randn(SHAPE[0], requires_grad=True)
    nvfp4 = QuantScheme.preset("nvfp4")
    for operator, args in (
        (o.quantize, (torch.randn(SHAPE), spec, 0, "w", None)),
        (o.quantize, (torch.randn(SHAPE), nvfp4.text, 0, "w", None)),
        (o.dequantize, (*arguments(q), shape, spec, torch.bfloat16)),
        (o.linear, (x, *arguments(q), bias, shape, spec)),
        (o.linear, (x[0], *arguments(q), None, shape, spec)),
        (o.linear_grad, (torch.randn(2, SHAPE[0]), *arguments(q), shape, spec)),
    ):
        torch.library.opcheck(operator, args)


@needs_interpreter
def test_a_layer_compiles_without_graph_breaks_and_trains(triton, q):
    layer = QuantLinear.from_qtensor(q, torch.randn(SHAPE[0]))
    adapter = torch.nn.Linear(SHAPE[1], SHAPE[1], bias=False)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(adapter(x)).square().mean()

    x = torch.randn(4, SHAPE[1])
    loss(x).backward()
    expected, adapter.weight.grad = adapter.weight.grad, None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(x).backward()
    torch.testing.assert_close(adapter.weight.grad, expected)
    assert layer.weight.dtype == torch.uint8


def test_the_reference_can_be_forced_and_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("MXQUANT_KERNELS", "reference")
    assert backends.backend("cuda") is None
    served = backends.explain("linear", torch.empty(1, 96, device="meta"), SHAPE, SCHEME, device_type="cuda")
    assert served == ("reference", "MXQUANT_KERNELS=reference")
    monkeypatch.setenv("MXQUANT_KERNELS", "fast")
    with pytest.raises(ValueError, match="choose from reference"):
        backends.backend("cuda")


@pytest.mark.parametrize(
    ("scheme", "rows", "by", "why"),
    [
        (SCHEME, 1, "triton", "GEMV"),
        (SCHEME, 16, "triton", "split-K"),
        (QuantScheme.preset("mxfp4"), 17, "triton", "tiled GEMM"),
        (QuantScheme(scale="ue5m3", block=24), 1, "triton", "24 is no power of two"),
        (QuantScheme.preset("mxfp8"), 1, "reference", "fp8_e4m3"),
        (QuantScheme(scale="bf16", block=16), 1, "reference", "8-bit scales"),
    ],
)
def test_explain_names_the_kernel_or_the_rule_against_it(scheme, rows, by, why):
    served = backends.explain("linear", torch.empty(rows, 96, device="meta"), SHAPE, scheme, device_type="cuda")
    assert served.by == by
    assert why in served.why


def test_explain_knows_the_rules_of_quantize():
    w = torch.empty(SHAPE, device="meta")
    odd = QuantScheme(scale="ue5m3", block=24)
    assert "powers of two" in backends.explain("quantize", w, SHAPE, odd, device_type="cuda").why
    assert "contiguous" in backends.explain("quantize", w.T, SHAPE[::-1], SCHEME, device_type="cuda").why
    assert backends.explain("quantize", w, SHAPE, SCHEME, device_type="cuda").by == "triton"
    assert backends.explain("quantize", w, SHAPE, SCHEME, device_type="mps") == (
        "reference",
        "there are no kernels for mps tensors",
    )


@pytest.fixture(params=("triton", "reference"))
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, q) -> str:
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("MXQUANT_KERNELS", request.param)
    return request.param


def linear(x, q, packed=None, scale=None, bias=None, shape=SHAPE):
    packed, scale = q.packed if packed is None else packed, q.scale if scale is None else scale
    return torch.ops.mxquant.linear(x, packed, scale, None, bias, list(shape), SCHEME.text)


def test_calls_that_make_no_sense_are_refused_whoever_would_serve_them(served_by, q):
    x = torch.randn(2, SHAPE[1])
    with pytest.raises(TypeError, match="fp32, bf16 or fp16"):
        linear(x.double(), q)
    with pytest.raises(ValueError, match="packed of a"):
        linear(x, q, packed=q.packed.view(torch.int8))
    with pytest.raises(ValueError, match="scale of a"):
        linear(x, q, scale=q.scale[:, :-1])
    with pytest.raises(ValueError, match="96 input features"):
        linear(x[:, :-1], q)
    with pytest.raises(ValueError, match="packed of a"):
        linear(torch.randn(2, 98), q, shape=(40, 98))
    with pytest.raises(ValueError, match="bias must be"):
        linear(x, q, bias=torch.randn(3))
    with pytest.raises(ValueError, match="move them to one device"):
        linear(x.to("meta"), q)
    with pytest.raises(ValueError, match="does not fit"):
        torch.ops.mxquant.linear_grad(x, q.packed, q.scale, None, list(SHAPE), SCHEME.text)
    bad = torch.randn(SHAPE)
    bad[3, 5] = torch.nan
    with pytest.raises(WeightError, match="row 3, column 5"):
        mxquant.quantize(bad, SCHEME)
    with pytest.raises(WeightError, match="global scale must be one positive"):
        mxquant.quantize(torch.randn(SHAPE), QuantScheme.preset("nvfp4"), global_scale=torch.zeros(1))


def test_packed_bytes_that_are_not_contiguous_give_the_right_answer(served_by, q):
    x = torch.randn(2, SHAPE[1])
    apart = torch.stack([q.packed, q.packed], -1)[..., 0]
    scale = torch.stack([q.scale, q.scale], -1)[..., 0]
    assert not apart.is_contiguous()
    torch.testing.assert_close(linear(x, q, packed=apart, scale=scale), linear(x, q))
    dense = torch.ops.mxquant.dequantize(apart, scale, None, list(SHAPE), SCHEME.text, torch.float32)
    assert torch.equal(dense, q.dequantize())


def test_empty_activations_give_empty_results(served_by, q):
    assert linear(torch.randn(0, SHAPE[1]), q).shape == (0, SHAPE[0])
    assert linear(torch.randn(2, 0, SHAPE[1]).bfloat16(), q).shape == (2, 0, SHAPE[0])
