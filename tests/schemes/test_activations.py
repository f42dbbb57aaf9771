"""Quantized activations and KV cache: the codec's own values, and no token sees another."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.convert.pipeline import plan_model
from mxquant.errors import PlanError, SchemeError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.ops import operators as ops
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.kv_cache import quantize_kv_cache, quantized_kv_cache

TEXTS = [
    "ue5m3/16",
    "e4m3/8/absmax",
    "mxfp4",
    "nvfp4",
    "e4m3+token/16",
    "ue5m3+token/8/absmax",
    "fp8_e4m3/e8m0+token/32",
]
INDEPENDENT = [t for t in TEXTS if t != "nvfp4"]


def normal(*shape: int, seed: int = 0, sigma: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * sigma


@pytest.mark.parametrize("text", TEXTS)
def test_schemes_are_read_back_from_text_and_json(text):
    scheme = ActivationScheme.parse(text)
    assert ActivationScheme.parse(scheme.text) == scheme
    assert ActivationScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ue5m3/32x32", "tile spans several tokens"),
        ("ue5m3/16/stochastic", "nearest"),
        ("e4m3+global/16/nvfp4/e4m3+token", "choose one"),
        ("nonsense", "nonsense"),
    ],
)
def test_impossible_schemes_are_refused_with_the_reason(text, message):
    with pytest.raises(SchemeError, match=message):
        ActivationScheme.parse(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", TEXTS)
def test_values_are_those_of_the_weight_codec(text, dtype, implementation):
    scheme = ActivationScheme.parse(text)
    x = normal(2, 3, 37, sigma=0.3).to(dtype)
    y = ops.quantize_activations(x, scheme)
    if scheme.per_token:
        rows = [mxquant.quantize(row[None], scheme.scheme).dequantize(dtype) for row in x.view(-1, 37)]
        expected = torch.cat(rows).view(x.shape)
    else:
        expected = mxquant.quantize(x.view(-1, 37), scheme.scheme).dequantize(dtype).view(x.shape)
    assert y.dtype == dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("text", INDEPENDENT)
def test_changing_one_token_changes_no_other(text):
    scheme = ActivationScheme.parse(text)
    x = normal(4, 5, 48)
    before = ops.quantize_activations(x, scheme)
    x[2, 3] = normal(48, seed=1) * 1000
    after = ops.quantize_activations(x, scheme)
    changed = (before != after).any(-1)
    assert changed[2, 3]
    assert changed.sum() == 1


def test_a_global_scale_over_all_tokens_does_tie_them_together():
    x = normal(2, 16)
    before = ops.quantize_activations(x, ActivationScheme.parse("nvfp4"))
    x[0] *= 1e6
    assert not torch.equal(before[1], ops.quantize_activations(x, ActivationScheme.parse("nvfp4"))[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_a_token_that_is_not_finite_becomes_nan(text, bad):
    x = normal(3, 20)
    clean = ops.quantize_activations(x, ActivationScheme.parse(text))
    x[1, 7] = bad
    y = ops.quantize_activations(x, ActivationScheme.parse(text))
    assert y[1].isnan().all()
    if text in INDEPENDENT:
        assert torch.equal(y[[0, 2]], clean[[0, 2]])
    else:
        assert y.isnan().all()


def test_no_tokens_at_all_are_fine():
    assert ops.quantize_activations(torch.empty(0, 16), ActivationScheme.parse("ue5m3/16")).shape == (0, 16)


def test_operator_passes_opcheck_and_its_gradient_passes_through():
    x = normal(3, 32).requires_grad_()
    torch.library.opcheck(torch.ops.mxquant.quantize_activations, (x, QuantScheme().text, False))
    weight = normal(3, 32, seed=1)
    (ops.quantize_activations(x, ActivationScheme.parse("ue5m3/16")) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("text", ["ue5m3/16", "e4m3+token/8"])
def test_product_is_an_operator_whose_gradient_is_that_of_the_weight(text):
    scheme, q = ActivationScheme.parse(text), mxquant.quantize(normal(8, 32, sigma=0.1), QuantScheme())
    x, bias = normal(3, 32).requires_grad_(), normal(8, seed=2).requires_grad_()
    parts = (q.packed, q.scale, None, bias, [8, 32], q.scheme.text, scheme.scheme.text, scheme.per_token)
    torch.library.opcheck(torch.ops.mxquant.quantized_linear, (x, *parts))
    grad = normal(3, 8, seed=3)
    (ops.quantized_linear(x, q, scheme, bias) * grad).sum().backward()
    torch.testing.assert_close(x.grad, grad @ q.dequantize())
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_layer_is_compiled_without_a_break():
    layer = QuantLinear.from_qtensor(mxquant.quantize(normal(16, 32), QuantScheme()))
    layer.activations = ActivationScheme.parse("ue5m3/16")
    x = normal(3, 32)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_layer_multiplies_what_its_inputs_are_rounded_to():
    q = mxquant.quantize(normal(24, 32, sigma=0.1), QuantScheme())
    layer = QuantLinear.from_qtensor(q)
    layer.activations = ActivationScheme.parse("e4m3+token/8")
    x = normal(2, 5, 32)
    expected = ops.quantize_activations(x, layer.activations).double() @ q.dequantize().double().T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert "e4m3+token/8" in repr(layer)


def test_recipe_says_what_each_layer_takes():
    recipe = QuantRecipe.from_dict({"rules": {"q_proj": "mxfp8"}, "default": "ue5m3/16", "activations": "same"})
    assert recipe.activations_for(QuantScheme.preset("mxfp8")) == ActivationScheme(QuantScheme.preset("mxfp8"))
    assert QuantRecipe.from_dict(recipe.to_dict()) == recipe
    other = QuantRecipe.from_dict({"default": "ue5m3/32x32", "activations": "ue5m3/16", "kv_cache": "e4m3+token/16"})
    assert other.activations_for(QuantScheme(block=(32, 32))) == ActivationScheme(QuantScheme(scale_rule="absmax"))
    assert QuantRecipe.from_dict(other.to_dict()) == other


def test_recipe_refuses_tiles_for_activations_and_one_scale_for_a_growing_cache():
    with pytest.raises(SchemeError, match="see the others"):
        QuantRecipe(default=QuantScheme(block=(32, 32)), activations="same")
    with pytest.raises(SchemeError, match="arrive one by one"):
        QuantRecipe(default=QuantScheme(), kv_cache=ActivationScheme.parse("nvfp4"))


# Through a checkpoint


def recipe_of(weights: str, activations: str | None, kv_cache: str | None = None) -> QuantRecipe:
    return QuantRecipe(QuantRecipe.of(weights).rules, QuantScheme.parse(weights), (), (), activations, kv_cache)


def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens).logits


TOKENS = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("activations", ["same", "e4m3+token/8", "nvfp4"])
def test_output_runs_as_its_recipe_says(activations, make_checkpoint, tmp_path):
    source = make_checkpoint("llama")
    recipe = recipe_of("ue5m3/16", activations)
    mxquant.quantize_model(source, tmp_path / "out", recipe)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dense = AutoModelForCausalLM.from_pretrained(source)
    expected = recipe.activations_for(QuantScheme())
    packed = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert {m.activations for m in packed.values()} == {expected}
    for name, layer in packed.items():
        linear = dense.get_submodule(name)
        linear.weight.data = layer.dequantize()
        linear.register_forward_pre_hook(lambda m, args: (ops.quantize_activations(args[0], expected), *args[1:]))
    torch.testing.assert_close(logits(model, TOKENS), logits(dense, TOKENS), rtol=1e-4, atol=1e-5)


def test_saving_loading_and_quantizing_on_the_fly_agree(make_checkpoint, tmp_path):
    source = make_checkpoint("llama")
    mxquant.quantize_model(source, tmp_path / "out", recipe_of("ue5m3/16", "e4m3+token/8", "ue5m3/8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = mxquant.MXQuantConfig(scale="ue5m3", block=16, activations="e4m3+token/8", kv_cache="ue5m3/8")
    other = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    first = logits(model, TOKENS)
    assert torch.equal(first, logits(other, TOKENS))
    assert torch.equal(first, logits(again, TOKENS))
    assert quantized_kv_cache(again) == ActivationScheme.parse("ue5m3/8")


def test_readers_that_do_not_know_activations_are_told_by_the_version(make_checkpoint):
    version = {}
    for activations in (None, "same"):
        _, plan = plan_model(make_checkpoint("llama"), recipe_of("ue5m3/16", activations))
        version[activations] = plan.quantization_config["format_version"]
    assert version == {None: 1, "same": 2}


def test_compressed_tensors_is_not_written_where_it_cannot_say_it(make_checkpoint):
    _, plan = plan_model(make_checkpoint("llama-even"), recipe_of("nvfp4", "same"))
    assert plan.on_disk == "mxquant"
    assert "activations" in plan.on_disk_reason
    with pytest.raises((SchemeError, PlanError), match="tile"):
        plan_model(make_checkpoint("llama-even"), recipe_of("ue5m3/16x16", "same"))


# Keys and values


def test_keys_and_values_are_rounded_before_attention(make_checkpoint):
    scheme = ActivationScheme.parse("ue5m3/8")
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama"), attn_implementation="sdpa")
    plain = logits(model, TOKENS)
    quantize_kv_cache(model, scheme)
    quantized = logits(model, TOKENS)
    assert not torch.equal(plain, quantized)
    reference = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama"), attn_implementation="sdpa")
    product = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, *args, **kwargs):
        return product(
            query, ops.fake_quantize(key, scheme.scheme), ops.fake_quantize(value, scheme.scheme), *args, **kwargs
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        expected = logits(reference, TOKENS)
    torch.testing.assert_close(quantized, expected, rtol=1e-5, atol=1e-6)


def test_a_cache_filled_token_by_token_gives_the_logits_of_the_whole(make_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama"))
    quantize_kv_cache(model, ActivationScheme.parse("e4m3+token/8"))
    whole, cache, parts = logits(model, TOKENS), None, []
    with torch.inference_mode():
        for i in range(TOKENS.shape[1]):
            out = model(TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["ue5m3/8", "e4m3+token/8"])
def test_no_token_of_a_model_sees_the_future(text, make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "out", recipe_of("ue5m3/16", text, text))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    changed = TOKENS.clone()
    changed[:, -1] = 60
    torch.testing.assert_close(logits(model, changed)[:, :-1], logits(model, TOKENS)[:, :-1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits(model, changed)[:, -1], logits(model, TOKENS)[:, -1])
