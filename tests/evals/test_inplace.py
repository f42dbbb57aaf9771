"""``mxquant.evals.inplace``: a dense model that stands in for quantized ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf

import mxquant
import mxquant.bundled
from mxquant.errors import MXQuantError
from mxquant.evals import experts
from mxquant.evals.inplace import RememberingVariant, Variant, inputs_quantized, linear_weights, weights_in_place
from mxquant.evals.models import EvalModel, load_model
from mxquant.ops.operators import quantize_activations
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

_MOE = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_EXPERTS = {
    "mixtral": lambda: hf.MixtralConfig(**_MOE),
    "gpt-oss: transposed, interleaved, biases": lambda: hf.GptOssConfig(**_MOE, head_dim=8),
    "granite": lambda: hf.GraniteMoeConfig(**_MOE),
}
_TOKENS = torch.arange(40).view(2, 20) * 7 % 64


def random_model(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    return model


def variant(model, **changes) -> Variant:
    return Variant("variant", "", model, None, linears=linear_weights(model), **changes)


def quantized(linears, scheme: QuantScheme) -> list:
    return [[mxquant.quantize(matrix, scheme) for matrix in linear.matrices] for linear in linears]


@torch.no_grad()
def logits(model, tokens: torch.Tensor = _TOKENS) -> torch.Tensor:
    return model(tokens).logits


@torch.no_grad()
def variant_logits(one: EvalModel, tokens: torch.Tensor = _TOKENS) -> torch.Tensor:
    with one.logits(tokens) as piece:
        return torch.cat([piece(0, 7), piece(7, tokens.shape[1])], 1)


@pytest.mark.parametrize("activations", [None, "e4m3+token/8", "ue5m3/16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_logits_are_those_of_the_quantized_checkpoint(kind, activations, make_checkpoint, tmp_path):
    scheme = QuantScheme.parse("ue5m3/8/absmax")
    inputs = None if activations is None else ActivationScheme.parse(activations)
    recipe = replace(mxquant.QuantRecipe.of(scheme), activations=inputs)
    mxquant.quantize_model(make_checkpoint(kind), tmp_path / "q", recipe)
    expected = logits(mxquant.load(tmp_path / "q").eval())
    model = hf.AutoModelForCausalLM.from_pretrained(make_checkpoint(kind)).eval()
    dense = logits(model)
    ours = variant(model, activations=inputs)
    ours.weights = quantized(ours.linears, scheme)
    torch.testing.assert_close(variant_logits(ours), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, dense, rtol=1e-2, atol=1e-3)
    assert torch.equal(logits(model), dense), "the dense model is back"


def test_the_dense_weights_are_back_even_after_an_error():
    model = random_model(hf.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2))
    linears = linear_weights(model)
    before = [(linear.parameter.data.data_ptr(), linear.parameter.data.clone()) for linear in linears]

    def work() -> None:
        with (
            weights_in_place(linears, quantized(linears, QuantScheme())),
            inputs_quantized(linears, ActivationScheme.parse("ue5m3/16")),
        ):
            for linear, (_, old) in zip(linears, before, strict=True):
                assert not torch.equal(linear.parameter.data, old)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    for linear, (address, old) in zip(linears, before, strict=True):
        assert linear.parameter.data.data_ptr() == address
        assert torch.equal(linear.parameter.data, old)
        assert not linear.module._forward_pre_hooks


@pytest.mark.parametrize("kind", _EXPERTS)
def test_experts_compute_what_transformers_computes_and_see_quantized_inputs(kind):
    model = random_model(_EXPERTS[kind]())
    dense = logits(model)
    modules = [m for m in model.modules() if experts.is_experts(m)]
    assert len(modules) == 1
    seen = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[-1])
        return x

    with experts.inputs_through(spy, modules):
        torch.testing.assert_close(logits(model), dense, rtol=1e-5, atol=1e-6)
    assert set(seen) == {32, 48}, "the input of the first matrix and that of the second"
    with experts.inputs_through(lambda x: quantize_activations(x, ActivationScheme.parse("ue5m3/16")), modules):
        assert not torch.allclose(logits(model), dense, rtol=1e-3, atol=1e-4)


def test_layers_whose_inputs_are_not_quantized_can_be_told():
    model = random_model(_EXPERTS["mixtral"]())
    ours = variant(model, activations=ActivationScheme.parse("ue5m3/16"))
    variant_logits(ours)
    assert ours.called == {linear.module for linear in ours.linears}
    attention = model.model.layers[0].self_attn
    q_proj = attention.q_proj

    class ByItself(torch.nn.Module):  # as some models do: the weight without the layer
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, q_proj.weight)

    attention.q_proj = ByItself()
    ours.called.clear()
    variant_logits(ours)
    assert {linear.module for linear in ours.linears} - ours.called == {q_proj}


@pytest.mark.parametrize("kind", _EXPERTS)
def test_each_expert_is_a_matrix_of_its_own(kind):
    model = random_model(_EXPERTS[kind]())
    linears = linear_weights(model)
    shapes = {linear.name.rpartition(".")[2]: [tuple(m.shape) for m in linear.matrices] for linear in linears}
    assert shapes["gate_up_proj"] == [(96, 32)] * 4
    assert shapes["down_proj"] == [(32, 48)] * 4
    scheme = QuantScheme.parse("e4m3+global/8")
    packed = quantized(linears, scheme)
    with weights_in_place(linears, packed):
        for linear, matrices in zip(linears, packed, strict=True):
            for view, q in zip(linear.matrices, matrices, strict=True):
                assert torch.equal(view, q.dequantize(torch.float32))


def test_a_model_with_matrices_of_an_unknown_kind_is_refused():
    model = random_model(hf.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2))

    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(3, 32, 32))

    model.transformer.mixer = Mixer()
    with pytest.raises(MXQuantError, match=r"20% of .* would stay dense, e\.g\. transformer\.mixer\.weights"):
        linear_weights(model)


def test_a_remembering_variant_runs_its_body_once_a_batch_and_within_its_budget():
    dense = load_model(mxquant.bundled.path(), device="cpu")
    calls = []
    handle = dense.model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    linears = linear_weights(dense.model)
    one_batch = 2 * 20 * dense.model.config.hidden_size * 2
    with torch.inference_mode():
        reference = RememberingVariant.of(dense, "dense", linears, budget=one_batch)
        expected = variant_logits(dense)
        for batch, body_runs in ((_TOKENS, 1), (_TOKENS, 0), (_TOKENS + 1, 1), (_TOKENS + 1, 1), (_TOKENS, 0)):
            calls.clear()
            found = variant_logits(reference, batch)
            assert sum(calls) == body_runs
            assert batch is not _TOKENS or torch.equal(found, expected)
    handle.remove()
