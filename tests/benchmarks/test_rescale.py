"""``rescale``: the same function with narrower or wider weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers as hf
from rescale import PROJECTIONS, projections, rescale
from scipy.optimize import minimize

import mxquant.bundled
from mxquant.errors import MXQuantError

_SIZES = {
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_CONFIGS = {
    "llama": lambda **k: hf.LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **k),
    "llama-tied": lambda **k: hf.LlamaConfig(**_SIZES, tie_word_embeddings=True, **k),
    "mistral": lambda **k: hf.MistralConfig(**_SIZES, sliding_window=8, **k),
    "qwen2": lambda **k: hf.Qwen2Config(**_SIZES, tie_word_embeddings=True, **k),
    "granite": lambda **k: hf.GraniteConfig(
        **_SIZES,
        tie_word_embeddings=True,
        residual_multiplier=0.22,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        attention_multiplier=0.1,
        **k,
    ),
    "smollm3": lambda **k: hf.SmolLM3Config(**_SIZES, pad_token_id=None, **k),
}
_TOKENS = torch.arange(48).view(2, 24) * 7 % 64


def make(kind: str, dtype: torch.dtype = torch.float32):
    """A random model in which every kind of parameter matters: no bias is 0, no norm is 1."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(_CONFIGS[kind]()).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


def bundled(dtype: torch.dtype = torch.bfloat16):
    return hf.AutoModelForCausalLM.from_pretrained(mxquant.bundled.path(), dtype=dtype).eval()


@torch.no_grad()
def logits(model, tokens: torch.Tensor = _TOKENS) -> torch.Tensor:
    return model(tokens).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _CONFIGS)
def test_logits_stay_the_same_bit_for_bit_and_every_sigma_moves_by_the_factor(kind, dtype):
    for factor in (2.0**-7, 8.0):
        model = make(kind, dtype)
        before = logits(model)
        weights = [linear.weight.clone() for layer in model.model.layers for linear in projections(layer).values()]
        rescale(model, factor=factor)
        assert torch.equal(logits(model), before)
        after = [linear.weight for layer in model.model.layers for linear in projections(layer).values()]
        for old, new in zip(weights, after, strict=True):
            assert torch.equal(new, old * factor)


def test_the_trained_model_stays_the_same_when_it_is_saved_and_loaded(tmp_path):
    model = bundled()
    tokens = torch.randint(0, 2048, (2, 100), generator=torch.Generator().manual_seed(1))
    before = logits(model, tokens)
    moved = rescale(model, factor=2.0**-6)
    assert [m.name for m in moved[:7]] == [f"layers.0.{name}_proj" for name in PROJECTIONS]
    assert all(m.after == pytest.approx(m.before / 64, rel=1e-6) for m in moved)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, tokens), before)
    # It is the epsilon of the norms that makes this so: it is small, but it is not nothing.
    again.config.rms_norm_eps = 1e-6
    for module in again.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6
    assert not torch.equal(logits(again, tokens), before)


@pytest.mark.parametrize("goal", [{"sigma": 0.004}, {"factor": 0.01}])
def test_factors_that_are_no_powers_of_two_change_logits_in_rounding_only(goal):
    model = bundled(torch.float32)
    before = logits(model, _TOKENS)
    moved = rescale(model, **goal, exact=False)
    torch.testing.assert_close(logits(model, _TOKENS), before, rtol=1e-4, atol=1e-4)
    if "factor" in goal:
        assert all(m.after == pytest.approx(0.01 * m.before, rel=1e-5) for m in moved)


def test_a_sigma_is_met_within_a_factor_of_two_whatever_the_model_had():
    for kind in ("llama", "granite"):
        model = make(kind)
        with torch.no_grad():
            for i, layer in enumerate(model.model.layers):
                layer.mlp.up_proj.weight *= 2.0**i
                layer.self_attn.k_proj.weight[: layer.self_attn.head_dim] *= 5  # one KV head of two
        before = logits(model)
        moved = rescale(model, sigma=0.003)
        assert torch.equal(logits(model), before)
        assert all(0.5 < m.after / 0.003 < 2 for m in moved)
        assert not all(0.4 < m.before / 0.02 < 2.5 for m in moved)  # there was something to do


def test_the_fit_to_a_sigma_is_the_least_squares_one():
    """Against a general optimizer over the five factors of a layer and that of the residual stream."""
    model = make("llama-tied")
    with torch.no_grad():
        for name, size in zip(PROJECTIONS, (3, 0.2, 5, 1, 0.1, 2, 7), strict=True):
            projections(model.model.layers[0])[name].weight *= size
    del model.model.layers[1:]
    # One KV head's factor for both, as the optimizer below has it.
    model.config.num_key_value_heads = 1
    want = np.array(
        [math.log2(0.01 / float(p.weight.detach().std())) for p in projections(model.model.layers[0]).values()]
    )
    moved = rescale(model, sigma=0.01, exact=False)
    ours = sum(math.log2(m.after / 0.01) ** 2 for m in moved)

    def cost(x: np.ndarray) -> float:
        y, m, a, b, u, s = x
        change = np.array([y + a, y - a, y + b, s - b, m, m + u, s - u])
        return float(((want - change) ** 2).sum())

    best = minimize(cost, np.zeros(6), method="BFGS").fun
    assert ours == pytest.approx(best, rel=1e-4)
    assert ours < 0.1 * float((want**2).sum())


def test_fp16_is_refused_where_bits_would_be_lost_and_nothing_has_changed_then():
    model = make("llama", torch.float16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MXQuantError, match="lose bits"):
        rescale(model, factor=2.0**-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.Qwen3Config(**_SIZES, head_dim=8), "'qwen3'"),
        (hf.Gemma3TextConfig(**_SIZES, head_dim=8), "'gemma3_text'"),
        (hf.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2), "'gpt2'"),
        (hf.MixtralConfig(**_SIZES, num_local_experts=2), "'mixtral'"),
    ],
)
def test_architectures_it_does_not_know_are_refused(config, message):
    model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(MXQuantError, match=f"cannot rescale a model of type {message}"):
        rescale(model, factor=0.5)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({}, "either a factor or the sigma"),
        ({"factor": 0.5, "sigma": 0.1}, "either a factor or the sigma"),
        ({"factor": 0.3}, "no power of two"),
        ({"factor": 0.0}, "positive number"),
        ({"sigma": math.inf}, "positive number"),
        ({"sigma": math.nan}, "positive number"),
    ],
)
def test_goals_that_make_no_sense_are_refused(goal, message):
    with pytest.raises(MXQuantError, match=message):
        rescale(make("llama-tied"), **goal)


def test_a_quantized_model_is_refused(tmp_path):
    mxquant.quantize_model(mxquant.bundled.path(), tmp_path / "q", "mxfp4")
    with pytest.raises(MXQuantError, match="q_proj, a QuantLinear"):
        rescale(mxquant.load(tmp_path / "q"), factor=0.5)
