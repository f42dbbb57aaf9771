"""Packed models whose weights wait in main memory or on disk until a layer runs (accelerate)."""

from __future__ import annotations

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.errors import MXQuantError

TOKENS = torch.tensor([[1, 17, 5, 30, 3, 42]])
SCHEMES = {"ue5m3": "ue5m3/16/absmax", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}
CPU = torch.device("cpu")
# Where each module of a model of two layers is kept.
MIXED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
PLACES = {"cpu": {"": "cpu"}, "mixed": MIXED, "disk": {"model": "disk", "lm_head": "disk"}}


KINDS = [("llama-tied", "ue5m3"), ("qwen2", "mxfp8"), ("mixtral-even", "nvfp4")]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def packed(request, make_checkpoint, tmp_path_factory):
    """A quantized checkpoint, and the logits and text of its model with everything in place."""
    kind, scheme = request.param
    path = tmp_path_factory.mktemp("packed") / kind
    mxquant.quantize_model(make_checkpoint(kind), path, mxquant.QuantScheme.parse(SCHEMES[scheme]))
    model = AutoModelForCausalLM.from_pretrained(path)
    return path, *_answers(model)


@torch.no_grad()
def _answers(model):
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model(TOKENS).logits, model.generate(TOKENS, **options)


def _assert_answers(model, packed):
    logits, text = _answers(model)
    assert torch.equal(logits, packed[1])
    assert torch.equal(text, packed[2])


def _offloaded(model):
    return [name for name, buffer in model.named_buffers() if buffer.is_meta]


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_hooks_of_accelerate_change_no_bit(where, offload_buffers, packed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(packed[0])
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=offload_buffers)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=CPU, offload_buffers=offload_buffers)
    assert bool(_offloaded(model)) == offload_buffers
    _assert_answers(model, packed)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_device_map_changes_no_bit_and_saves_the_same(place, offload_buffers, packed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        packed[0], device_map=PLACES[place], offload_folder=tmp_path / "off", offload_buffers=offload_buffers
    )
    assert bool(_offloaded(model)) == (offload_buffers and place != "cpu")
    model.save_pretrained(tmp_path / "again")
    again, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", packed[0]))
    assert again.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(again[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    _assert_answers(model, packed)


def test_saving_in_shards_gives_the_same_bytes(packed, tmp_path):
    AutoModelForCausalLM.from_pretrained(packed[0]).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert len(shards) > 2
    again, source = {n: t for s in shards for n, t in s.items()}, load_file(packed[0] / "model.safetensors")
    assert again.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(again[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    _assert_answers(AutoModelForCausalLM.from_pretrained(tmp_path), packed)


def test_a_layer_that_is_elsewhere_is_not_made_dense_of_nothing(packed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(packed[0])
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)
    with pytest.raises(MXQuantError, match="is offloaded"):
        model.dequantize()
    _assert_answers(model, packed)
