"""QuantLinear: the numbers of a linear layer, the bytes of a quantized tensor."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxquant
from mxquant.nn.quant_linear import QuantLinear

SCHEMES = {
    "ue5m3": mxquant.QuantScheme(scale="ue5m3", block=16),
    "mxfp4": mxquant.QuantScheme.preset("mxfp4"),
    "nvfp4": mxquant.QuantScheme.preset("nvfp4"),
    "mxfp6": mxquant.QuantScheme.preset("mxfp6"),
    "mxfp8": mxquant.QuantScheme.preset("mxfp8"),
    "tiles": mxquant.QuantScheme(scale="e4m3", block=(8, 8)),
    "fp32 scales": mxquant.QuantScheme(scale="fp32", block=5),
}


def make(name, rows=24, columns=40, bias=True):
    torch.manual_seed(0)
    q = mxquant.quantize(torch.randn(rows, columns) * 0.05, SCHEMES[name])
    return QuantLinear.from_qtensor(q, torch.randn(rows) if bias else None)


def encodings(layer):
    return {n: (b.dtype, b.clone().view(torch.uint8)) for n, b in layer.named_buffers()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name][0] == b[name][0]
        assert torch.equal(a[name][1], b[name][1])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_that_of_the_dequantized_weight(name, bias):
    layer = make(name, bias=bias)
    x = torch.randn(2, 3, 40)
    expected = F.linear(x, layer.dequantize(), layer.bias)
    assert (layer(x) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_little_more_than_the_result_does(name, dtype):
    layer = make(name, 64, 256).to(dtype)
    x = torch.randn(32, 256, dtype=dtype)
    exact = F.linear(x.double(), layer.dequantize().double(), layer.bias.double())
    error, rounding = (layer(x).double() - exact).norm(), (exact.to(dtype).double() - exact).norm()
    assert layer(x).dtype == dtype
    assert error <= 1.1 * rounding


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float64),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float16),
    ],
    ids=["half", "bfloat16", "to", "to-device", "type"],
)
def test_casts_change_the_bias_and_nothing_else(name, cast):
    layer = make(name)
    before = encodings(layer)
    cast(nn.Sequential(layer))
    assert_same(encodings(layer), before)
    assert layer.bias.dtype != torch.float32
    cast(layer)
    layer.float()
    assert_same(encodings(layer), before)
    assert layer.bias.dtype == torch.float32


def test_casts_on_the_meta_device_keep_dtypes_too():
    layer = QuantLinear((24, 40), SCHEMES["nvfp4"], bias=True, device="meta").bfloat16()
    assert layer.weight.dtype == torch.uint8
    assert layer.weight_scale.dtype == torch.float8_e4m3fn
    assert layer.weight_global_scale.dtype == torch.float32
    assert layer.to_empty(device="cpu").weight_scale.dtype == torch.float8_e4m3fn


def test_gradients_are_those_of_a_dense_layer():
    layer = make("nvfp4")
    x = torch.randn(5, 40, requires_grad=True)
    dense_x, dense_bias = x.detach().clone().requires_grad_(), layer.bias.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    F.linear(dense_x, layer.dequantize(), dense_bias).square().sum().backward()
    torch.testing.assert_close(x.grad, dense_x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.bias.grad, dense_bias.grad, rtol=1e-5, atol=1e-5)
    assert not any(b.requires_grad for b in layer.buffers())


def test_it_holds_the_tensors_it_is_given():
    q = mxquant.quantize(torch.randn(24, 40), SCHEMES["nvfp4"])
    layer = QuantLinear.from_qtensor(q)
    assert layer.weight.data_ptr() == q.packed.data_ptr()
    assert layer.qweight.packed.data_ptr() == q.packed.data_ptr()
    assert layer.qweight.nbytes == q.nbytes
    assert (layer.in_features, layer.out_features) == (40, 24)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_flattened_weight_is_the_same_weight(name):
    layer = make(name)
    count = layer.weight.numel()
    flat = QuantLinear((24, 40), SCHEMES[name], bias=True, stored_shape=(count,))
    state = layer.state_dict()
    state["weight"] = state["weight"].flatten()
    flat.load_state_dict(state)
    assert flat.weight.shape == (count,)
    x = torch.randn(4, 40)
    assert torch.equal(flat(x), layer(x))
    assert torch.equal(flat.dequantize(), layer.dequantize())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_it_can_be_copied_and_saved(name):
    layer, file = make(name), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = torch.randn(4, 40)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", ["ue5m3", "nvfp4"])
def test_it_compiles_into_one_graph(name):
    layer = make(name)
    x = torch.randn(4, 40)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_misfits_are_named():
    layer = make("nvfp4")
    with pytest.raises(ValueError, match="40 input features"):
        layer(torch.randn(2, 39))
    with pytest.raises(TypeError, match="uint8"):
        layer(torch.zeros(2, 40, dtype=torch.uint8))
    layer.weight_scale = layer.weight_scale[:, :-1]
    with pytest.raises(ValueError, match="scale"):
        layer(torch.randn(2, 40))
    assert "scheme=nvfp4" in repr(layer)
