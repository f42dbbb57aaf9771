"""Loading quantized checkpoints through transformers. The checkpoints are written by hand here, so
that the loader is not tested against the library's own writer."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import mxquant
from mxquant.errors import CheckpointError, SchemeError

TOKENS = torch.tensor([[1, 17, 5, 80, 3, 42, 9, 60]])
UE5M3 = mxquant.QuantScheme(scale="ue5m3", block=16, scale_rule="absmax")
SCHEMES = {
    "ue5m3": UE5M3,
    "nvfp4": mxquant.QuantScheme.preset("nvfp4"),
    "mxfp8": mxquant.QuantScheme.preset("mxfp8"),
    "mxfp6": mxquant.QuantScheme.preset("mxfp6"),
    "tiles": mxquant.QuantScheme(scale="e8m0", block=(32, 32)),
    "odd block": mxquant.QuantScheme(scale="e4m3", block=7),
    "bf16 scales": mxquant.QuantScheme(scale="bf16", block=16),
}
COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, head_dim=12, sliding_window=32)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
}


@dataclass
class Written:
    """A quantized checkpoint, the dense one it came from, and the model of its dequantized weights."""

    path: Path
    dense: Path
    oracle: nn.Module
    packed: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def dense_models(tmp_path_factory):
    folders = {}
    for seed, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():  # biases and norms that matter
            parameter.data += 0.05 * torch.randn_like(parameter)
        folders[name] = tmp_path_factory.mktemp("dense") / name
        model.save_pretrained(folders[name])
    return folders


def write(dense: Path, out: Path, scheme: mxquant.QuantScheme, dtype=torch.float32, strip="") -> Written:
    """Quantize a tiny dense checkpoint by hand; ``strip``: a prefix that hub checkpoints do not have."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    tensors, modules = {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or name == "lm_head":
            continue
        transposed = isinstance(module, Conv1D)
        weight = module.weight.detach().t().contiguous() if transposed else module.weight.detach()
        q = mxquant.quantize(weight, scheme)
        back = q.dequantize(dtype)
        module.weight.data = back.t().contiguous() if transposed else back
        stored = name.removeprefix(strip)
        flat = scheme.element_format.bits == 8
        tensors[f"{stored}.weight"] = q.packed.flatten() if flat else q.packed
        tensors[f"{stored}.weight_scale"] = q.scale
        if q.global_scale is not None:
            tensors[f"{stored}.weight_global_scale"] = q.global_scale
        modules.append({"names": [stored], "scheme": "s", "shape": list(weight.shape), "transposed": transposed})
    names = {m["names"][0] for m in modules}
    for name, tensor in model.state_dict().items():
        stored = name.removeprefix(strip)
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if stored.removesuffix(".weight") not in names and not tied:
            tensors[stored] = tensor.clone()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = {
        "quant_method": "mxquant",
        "format_version": 1,
        "mxquant_version": "0.1.0",
        "schemes": {"s": scheme.to_dict()},
        "modules": modules,
    }
    (out / "config.json").write_text(json.dumps(config))
    return Written(out, dense, model.eval(), tensors)


@pytest.fixture(scope="session")
def llama(dense_models, tmp_path_factory):
    return write(dense_models["llama"], tmp_path_factory.mktemp("written") / "llama", SCHEMES["nvfp4"])


def quantized(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, mxquant.QuantLinear)}


def encodings(model):
    """Copies of all packed tensors, as bytes."""
    return {
        f"{n}.{k}": (b.dtype, b.view(torch.uint8).clone())
        for n, m in quantized(model).items()
        for k, b in m.named_buffers()
    }


def same(a, b):
    return a.keys() == b.keys() and all(a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a)


@torch.no_grad()
def logits(model):
    return model(TOKENS.to(model.device)).logits


def assert_like_oracle(model, written):
    expected = logits(written.oracle)
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()


def rewrite(written: Written, out: Path, change_tensors=None, change_config=None) -> Path:
    """A copy of a checkpoint with something changed."""
    tensors = dict(load_file(written.path / "model.safetensors"))
    config = json.loads((written.path / "config.json").read_text())
    if change_tensors:
        change_tensors(tensors)
    if change_config:
        change_config(config["quantization_config"])
    out.mkdir(exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_packed_model_equals_the_dense_model_of_its_dequantized_weights(name, dense_models, tmp_path):
    written = write(dense_models[name], tmp_path / "q", UE5M3)
    model = AutoModelForCausalLM.from_pretrained(written.path)
    assert len(quantized(model)) == len([k for k in written.packed if k.endswith("weight_scale")])
    assert_like_oracle(model, written)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), written.oracle.generate(TOKENS, **options))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_kind_of_scheme_loads_and_saves_its_bytes(name, dense_models, tmp_path):
    written = write(dense_models["llama"], tmp_path / "q", SCHEMES[name])
    model = AutoModelForCausalLM.from_pretrained(written.path)
    assert_like_oracle(model, written)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == written.packed.keys()
    for key, tensor in written.packed.items():
        assert saved[key].dtype == tensor.dtype
        assert saved[key].shape == tensor.shape
        assert torch.equal(saved[key].view(torch.uint8), tensor.view(torch.uint8))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp6"])
def test_names_of_the_hub_without_base_prefix(scheme, dense_models, tmp_path):
    written = write(dense_models["gpt2"], tmp_path / "q", SCHEMES[scheme], strip="transformer.")
    assert "h.0.attn.c_attn.weight" in written.packed
    model = AutoModelForCausalLM.from_pretrained(written.path)
    assert "transformer.h.0.attn.c_attn" in quantized(model)
    assert_like_oracle(model, written)
    # The model saves other names than it read, and the new config says so.
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
    base = AutoModel.from_pretrained(tmp_path / "again")
    assert "h.0.attn.c_attn" in quantized(base)
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_dtype_is_that_of_everything_but_the_encodings(name, dtype, dense_models, tmp_path):
    strip = "transformer." if name == "gpt2" else ""
    written = write(dense_models[name], tmp_path / "q", SCHEMES["nvfp4"], dtype=torch.bfloat16, strip=strip)
    model = AutoModelForCausalLM.from_pretrained(written.path, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    for layer in quantized(model).values():
        assert layer.weight.dtype == torch.uint8
        assert layer.weight_scale.dtype == torch.float8_e4m3fn
        assert layer.weight_global_scale.dtype == torch.float32
    reference = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.bfloat16)
    assert same(encodings(model), encodings(reference))
    assert logits(model).dtype == dtype
    assert logits(model).isfinite().all()


def test_layers_that_a_model_keeps_in_fp32_keep_their_encodings(llama, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"down_proj", "norm"})
    model = AutoModelForCausalLM.from_pretrained(llama.path, dtype=torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert same(encodings(model), encodings(AutoModelForCausalLM.from_pretrained(llama.path)))


def test_casting_a_loaded_model_leaves_the_encodings(llama):
    model = AutoModelForCausalLM.from_pretrained(llama.path)
    before, expected = encodings(model), logits(model)
    for cast in (model.bfloat16, lambda: model.to(torch.float16), lambda: model.to("cpu", torch.float32)):
        cast()
        assert same(encodings(model), before)
    assert (logits(model) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(device_map, llama):
    model = AutoModelForCausalLM.from_pretrained(llama.path, device_map=device_map)
    assert_like_oracle(model, llama)


def test_offloading_layers_to_disk_keeps_the_result(llama, tmp_path):
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
    for offload_buffers in (False, True):
        folder = tmp_path / str(offload_buffers)
        model = AutoModelForCausalLM.from_pretrained(
            llama.path, device_map=device_map, offload_folder=folder, offload_buffers=offload_buffers
        )
        assert_like_oracle(model, llama)


def test_memory_planned_for_a_device_is_that_of_the_packed_model(llama):
    from transformers.integrations.accelerate import compute_module_sizes

    model = AutoModelForCausalLM.from_pretrained(llama.path)
    sizes, _ = compute_module_sizes(model, model.hf_quantizer)
    tensors = [*model.parameters(), *model.buffers()]
    assert sizes[""] == sum(t.numel() * t.element_size() for t in tensors)
    layer = model.model.layers[0].mlp.up_proj
    assert sizes["model.layers.0.mlp.up_proj"] == layer.qweight.nbytes == 80 * 24 + 80 * 3 + 4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dequantize_gives_a_dense_model_that_saves_as_one(name, dense_models, tmp_path):
    written = write(dense_models[name], tmp_path / "q", UE5M3)
    model = AutoModelForCausalLM.from_pretrained(written.path).dequantize()
    assert not quantized(model)
    assert torch.equal(logits(model), logits(written.oracle))
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(again), logits(written.oracle))


def test_gradients_reach_adapters_through_packed_layers(llama):
    model = AutoModelForCausalLM.from_pretrained(llama.path)
    assert model.hf_quantizer.is_trainable
    grads = []
    for m in (model, llama.oracle):
        embeddings = m.get_input_embeddings()(TOKENS).detach().requires_grad_()
        m(inputs_embeds=embeddings, labels=TOKENS).loss.backward()
        grads.append(embeddings.grad)
        m.zero_grad()
    assert (grads[0] - grads[1]).norm() <= 1e-5 * grads[1].norm()


def test_wildcards_in_the_config(llama, tmp_path):
    def compact(config):
        by_shape = {}
        for group in config["modules"]:
            name = group["names"][0].replace("layers.0", "layers.*").replace("layers.1", "layers.*")
            by_shape.setdefault(tuple(group["shape"]), set()).add(name)
        config["modules"] = [
            {"names": sorted(names), "scheme": "s", "shape": list(shape), "transposed": False}
            for shape, names in by_shape.items()
        ]

    model = AutoModelForCausalLM.from_pretrained(rewrite(llama, tmp_path / "q", change_config=compact))
    assert_like_oracle(model, llama)


DAMAGE = {
    "missing scale": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"), "up_proj.weight_scale is missing"),
    "missing weight": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj"),
    "missing global": (
        lambda t: t.pop("model.layers.0.self_attn.q_proj.weight_global_scale"),
        "global_scale is missing",
    ),
    "other shape": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(48, 39, dtype=torch.uint8)}),
        "down_proj.weight is U8 \\[48, 39\\]",
    ),
    "other dtype": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight_scale": torch.zeros(48, 5)}),
        "down_proj.weight_scale is F32",
    ),
    "renamed": (
        lambda t: t.update({k.replace("q_proj", "query"): t.pop(k) for k in list(t) if "q_proj" in k}),
        "query",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(damage, llama, tmp_path):
    change, message = DAMAGE[damage]
    path = rewrite(llama, tmp_path / "q", change_tensors=change)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True)


WRONG_CONFIG = {
    "newer": (lambda c: c.update(format_version=99, new_field=1), "upgrade mxquant"),
    "unknown format": (lambda c: c["schemes"]["s"].update(scale="ue4m4"), "ue4m4"),
    "incomplete": (lambda c: c["modules"][0].pop("shape"), "malformed"),
    "unlisted": (lambda c: c["modules"].pop(0), "does not list it"),
    "too many": (lambda c: c["modules"][0]["names"].append("model.layers.7.mlp.up_proj"), "layers.7"),
    "not linear": (
        lambda c: c["modules"].append(
            {"names": ["model.embed_tokens"], "scheme": "s", "shape": [96, 48], "transposed": False}
        ),
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_CONFIG)
def test_configs_that_do_not_fit_are_refused(wrong, llama, tmp_path):
    change, message = WRONG_CONFIG[wrong]
    path = rewrite(llama, tmp_path / "q", change_config=change)
    for load in (AutoModelForCausalLM.from_pretrained, mxquant.load):
        with pytest.raises(CheckpointError, match=message) as error:
            load(path)
        assert "\n" not in str(error.value)


def test_a_quantized_head_is_no_error_where_only_the_base_is_loaded(llama, tmp_path):
    q = mxquant.quantize(llama.oracle.lm_head.weight.detach(), UE5M3)

    def pack_head(tensors):
        tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = q.packed, q.scale

    def list_head(config):
        config["schemes"]["head"] = UE5M3.to_dict()
        config["modules"].append({"names": ["lm_head"], "scheme": "head", "shape": [96, 48], "transposed": False})

    path = rewrite(llama, tmp_path / "q", pack_head, list_head)
    full, base = AutoModelForCausalLM.from_pretrained(path), AutoModel.from_pretrained(path)
    assert isinstance(full.lm_head, mxquant.QuantLinear)
    with torch.no_grad():
        hidden = base(TOKENS).last_hidden_state
        assert torch.equal(full.lm_head(hidden), logits(full))


# --- quantizing while loading ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_fly_bytes_are_those_of_quantize(name, dtype, dense_models, tmp_path):
    config = mxquant.MXQuantConfig(scale="ue5m3", block=16, rounding="stochastic", seed=3)
    dense = dense_models[name]
    if name == "gpt2":  # with the hub's names, as the names are part of the seed
        tensors = {k.removeprefix("transformer."): v for k, v in load_file(dense / "model.safetensors").items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((dense / "config.json").read_text())
        dense = tmp_path
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config, dtype=dtype)
    scheme = mxquant.QuantScheme(scale="ue5m3", block=16, rounding="stochastic")
    source = load_file(dense / "model.safetensors")
    assert len(quantized(model)) == (14 if name == "llama-tied" else 8)
    for module, layer in quantized(model).items():
        key = f"{module.removeprefix('transformer.')}.weight"
        weight = source[key].t().contiguous() if name == "gpt2" else source[key]
        expected = mxquant.quantize(weight, scheme, seed=3, name=key)
        assert torch.equal(layer.weight, expected.packed)
        assert torch.equal(layer.weight_scale, expected.scale)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert config.modules is None  # the caller's config is not written to
    model.save_pretrained(tmp_path / "q")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    assert same(encodings(again), encodings(model))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
@pytest.mark.parametrize("scheme", ["ue5m3", "nvfp4"])
def test_on_the_fly_bytes_are_those_of_quantize_model(name, scheme, dense_models, tmp_path):
    mxquant.quantize_model(dense_models[name], tmp_path / "q", SCHEMES[scheme])
    config = mxquant.MXQuantConfig(**SCHEMES[scheme].to_dict())
    model = AutoModelForCausalLM.from_pretrained(dense_models[name], quantization_config=config)
    assert same(encodings(model), encodings(mxquant.load(tmp_path / "q")))
    if scheme == "nvfp4" and name == "qwen2":
        attention = model.model.layers[0].self_attn
        assert attention.q_proj.weight_global_scale == attention.v_proj.weight_global_scale


def test_on_the_fly_recipe_include_and_exclude(dense_models):
    recipe = {"q_proj|k_proj": "mxfp8", "layers\\.1\\.mlp": "dense"}
    config = mxquant.MXQuantConfig(recipe=recipe, preset="nvfp4", exclude=["o_proj"])
    restored = mxquant.MXQuantConfig.from_dict(json.loads(config.to_json_string()))
    assert restored.quant_recipe() == config.quant_recipe()
    model = AutoModelForCausalLM.from_pretrained(dense_models["llama"], quantization_config=config)
    found = {n.removeprefix("model.layers."): m.scheme.name for n, m in quantized(model).items()}
    assert found.pop("0.self_attn.q_proj") == found.pop("1.self_attn.k_proj") == "mxfp8"
    assert found["0.mlp.up_proj"] == "nvfp4"
    assert "0.self_attn.o_proj" not in found
    assert "1.mlp.up_proj" not in found
    config = mxquant.MXQuantConfig(block=(32, 32), include=["down_proj$", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(dense_models["llama"], quantization_config=config)
    assert set(quantized(model)) == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"}


def test_on_the_fly_leaves_layers_that_are_more_than_linear(dense_models, monkeypatch):
    class Gate(nn.Linear):
        def forward(self, x):
            return super().forward(x).clamp(min=0)

    build = LlamaForCausalLM.__init__

    def with_gate(self, config):
        build(self, config)
        self.model.layers[0].mlp.gate_proj.__class__ = Gate

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_gate)
    with pytest.warns(UserWarning, match="1 layers stay dense.*layers.0.mlp.gate_proj"):
        model = AutoModelForCausalLM.from_pretrained(dense_models["llama"], quantization_config=mxquant.MXQuantConfig())
    assert len(quantized(model)) == 13
    assert isinstance(model.model.layers[0].mlp.gate_proj, Gate)


def test_on_the_fly_mistakes_are_named(dense_models):
    for config, message in (
        ({"exclude": ["no_such_layer"]}, "no_such_layer"),
        ({"exclude": [""]}, "nothing"),
    ):
        with pytest.raises(SchemeError, match=message):
            AutoModelForCausalLM.from_pretrained(
                dense_models["llama"], quantization_config=mxquant.MXQuantConfig(**config)
            )
    with pytest.raises(SchemeError, match="ue4m4"):
        mxquant.MXQuantConfig(scale="ue4m4")


# --- mxquant.load ---------------------------------------------------------------------------------


def compressed_tensors_copy(written: Written, out: Path, scale_dtype: str, activations=None) -> Path:
    """The checkpoint as compressed-tensors lays it out."""
    rename = {k: k + "_packed" for k in written.packed if f"{k}_scale" in written.packed}
    tensors = {rename.get(k, k): v for k, v in written.packed.items()}
    if activations:
        tensors |= {f"{k.removesuffix('.weight')}.input_global_scale": torch.ones(1) for k in rename}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((written.path / "config.json").read_text())
    nvfp4 = scale_dtype != "torch.uint8"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "scale_dtype": scale_dtype}
    weights |= {"strategy": "tensor_group" if nvfp4 else "group", "group_size": 16 if nvfp4 else 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if nvfp4 else "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_load_keeps_compressed_tensors_checkpoints_packed(preset, dense_models, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "hidden_size": 64, "intermediate_size": 96}))
    model.save_pretrained(tmp_path / "dense")
    written = write(tmp_path / "dense", tmp_path / "q", mxquant.QuantScheme.preset(preset))
    kind = "torch.float8_e4m3fn" if preset == "nvfp4" else "torch.uint8"
    path = compressed_tensors_copy(written, tmp_path / "ct", kind)
    model = mxquant.load(path)
    assert len(quantized(model)) == 14
    assert_like_oracle(model, written)
    # Plain transformers has compressed-tensors decompress the weights, at the first forward.
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    logits(plain)
    for name, layer in quantized(model).items():
        assert torch.equal(plain.get_submodule(name).weight, layer.dequantize(torch.bfloat16))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same(encodings(again), encodings(model))
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == written.packed.keys()


def test_load_says_that_activations_stay_unquantized(llama, tmp_path):
    activations = {"num_bits": 4, "type": "float", "dynamic": "local"}
    path = compressed_tensors_copy(llama, tmp_path / "ct", "torch.float8_e4m3fn", activations)
    with pytest.warns(UserWarning, match="float4 activations"):
        model = mxquant.load(path)
    assert_like_oracle(model, llama)


def test_load_reads_our_own_and_dense_checkpoints(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_like_oracle(mxquant.load(llama.path, device_map="cpu"), llama)
        dense = mxquant.load(str(llama.dense), dtype="bfloat16")
    assert not quantized(dense)
    assert dense.dtype == torch.bfloat16


def test_load_names_what_is_wrong_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "empty", r"no config\.json"),
        (tmp_path / "file", "is a file"),
        ("no-such-owner/no-such-model", "no such folder"),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            mxquant.load(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-1.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["llama-even", "mixtral-even"])
def test_a_global_scale_that_is_no_positive_number_is_refused(kind, value, make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint(kind, "bfloat16"), tmp_path / "q", "nvfp4")
    tensors = load_file(tmp_path / "q/model.safetensors")
    name = next(name for name in tensors if name.endswith("_proj.weight_global_scale"))
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, tmp_path / "q/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="global scale"):
        mxquant.load(tmp_path / "q")
