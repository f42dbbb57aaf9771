"""Converting Hugging Face models: what becomes an FP4 layer, what stays, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.errors import CheckpointError, SchemeError
from mxquant.ops.operators import fake_quantize
from mxquant.training import RECIPES, TrainingRecipe, convert, noise_of
from mxquant.training.conversion import choose, fp4_layers
from mxquant.training.linear import FP4Conv1D, FP4Linear

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def load(make_checkpoint):
    return lambda kind: AutoModelForCausalLM.from_pretrained(make_checkpoint(kind))


def loss_of(model: nn.Module, tokens: int = 64) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, tokens // 2), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("recipe", ["mxfp4-1d", "fp4-2d"])
def test_any_causal_lm_trains_and_its_state_is_untouched(load, kind, recipe):
    model = load(kind)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    state = list(model.state_dict())
    assert mxquant.training.convert(model, recipe) is model
    assert list(model.state_dict()) == state
    assert {name: id(p) for name, p in model.named_parameters()} == {n: key for n, (key, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    loss_of(model.train()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert len(fp4_layers(model)) == (8 if kind == "gpt2" else 14)


def test_embeddings_norms_and_the_head_stay_high_unless_the_head_is_named(load):
    model = convert(load("llama"), "fp4-2d")
    assert type(model.lm_head) is nn.Linear
    recipe = TrainingRecipe.from_dict({"recipe": "fp4-2d", "rules": [{"lm_head": "e8m0/32x32/rceil"}]})
    assert type(convert(load("llama"), recipe).lm_head) is FP4Linear


def test_a_tied_weight_collects_the_gradients_of_both_its_places(load):
    recipe = TrainingRecipe.from_dict({"rules": [{"lm_head": "e8m0/32x32/rceil"}]})
    model = convert(load("llama-tied"), recipe)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loss_of(model).backward()
    whole = model.lm_head.weight.grad.clone()

    model.zero_grad()
    hidden = {}
    head = model.lm_head.register_forward_hook(lambda _, inputs, output: hidden.update(x=inputs[0], y=output))
    loss = loss_of(model)
    head.remove()
    (grad,) = torch.autograd.grad(loss, hidden["y"], retain_graph=True)
    scheme = model.lm_head.formats.weight_forward
    x, dy = hidden["x"].detach().flatten(0, 1), grad.flatten(0, 1)
    of_head = fake_quantize(dy, scheme).t() @ fake_quantize(x, scheme)
    (at_input,) = torch.autograd.grad(loss, model.model.embed_tokens.weight)
    torch.testing.assert_close(whole, at_input)
    assert (whole - of_head).abs().max() > 1e-4  # the rest is the embedding's
    dx = dy @ fake_quantize(model.lm_head.weight.detach(), scheme)
    assert dx.isfinite().all()


def test_gpt2s_transposed_layer_is_a_linear_layer(load):
    model = convert(load("gpt2"), "fp4-2d")
    layer = model.transformer.h[0].mlp.c_fc
    assert isinstance(layer, FP4Conv1D)
    plain = nn.Linear(64, 256)
    plain.weight.data, plain.bias.data = layer.weight.data.t().contiguous(), layer.bias.data.clone()
    twin = convert(nn.Sequential(plain), "fp4-2d")
    twin[0].name = layer.name
    noise_of(twin).start(0)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    layer.noise.state[1] = 1
    found, expected = layer(x), twin(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad.t(), plain.weight.grad)


def test_blocks_at_the_ends_and_excluded_layers(load):
    choices = {c.name: c for c in choose(load("llama"), RECIPES["fp4-2d"].override(exclude=["o_proj"]))}
    assert choices["model.layers.1.self_attn.o_proj"].formats is None
    assert choices["model.layers.1.self_attn.v_proj"].formats is not None
    assert choices["lm_head"].reason == "output head"
    first = TrainingRecipe("x", RECIPES["nvfp4"].default, keep_first=1)
    kept = [c.name for c in choose(load("llama"), first) if c.reason.startswith("decoder block")]
    assert len(kept) == 7
    assert all(name.startswith("model.layers.0.") for name in kept)


def test_bf16_changes_nothing(load):
    model = convert(load("llama"), "bf16")
    assert not fp4_layers(model)
    assert noise_of(model) is None
    torch.testing.assert_close(loss_of(model), loss_of(load("llama")), rtol=0, atol=0)


def test_saving_and_loading_know_nothing_of_the_conversion(load, tmp_path):
    model = convert(load("llama"), "fp4-2d")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert not fp4_layers(again)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("kind", "recipe", "error", "message"),
    [
        ("gpt2", "fp4-2d-qk8", SchemeError, "pattern 'q_proj|k_proj' matches no linear layer"),
        ("llama", RECIPES["fp4-2d"].override(exclude=["proj"]), SchemeError, "quantizes nothing of this model"),
        ("llama", "nvfp4", SchemeError, "quantizes nothing of this model"),  # of 2 decoder blocks, both are kept
        ("mixtral", "fp4-2d", SchemeError, "allow_high=True"),
        ("llama", "fp4", SchemeError, "unknown training recipe 'fp4'"),
    ],
)
def test_what_cannot_be_converted_is_refused(load, kind, recipe, error, message):
    with pytest.raises(error, match=re.escape(message)):
        convert(load(kind), recipe)


def test_experts_may_stay_high_when_that_is_accepted(load):
    model = convert(load("mixtral"), "fp4-2d", allow_high=True)
    loss_of(model).backward()


def test_quantized_and_converted_models_are_refused(load, make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "q", "ue5m3/16")
    with pytest.raises(CheckpointError, match="quantized already"):
        convert(mxquant.load(tmp_path / "q"), "fp4-2d")
    with pytest.raises(CheckpointError, match="converted before"):
        convert(convert(load("llama"), "fp4-2d"), "fp4-2d")
