"""``mxquant verify`` judges checkpoints by what loaders and engines do with them, whoever wrote them."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from architecture_cases import CASES, TEXT_ALONE
from click.testing import CliRunner
from packed_by_hand import pack
from safetensors.torch import load_file, save_file
from tiny_models import make_source

import mxquant
from mxquant.cli.main import main
from mxquant.errors import CheckpointError
from mxquant.inspection import load
from mxquant.inspection.faults import KINDS
from mxquant.inspection.load import difference
from mxquant.inspection.verify import verify_checkpoint
from mxquant.transformers.architectures import build_meta_model
from mxquant.transformers.linears import loader_linears

EVERY = {**CASES, **{f"{kind}-whole": case for kind, case in TEXT_ALONE.items()}}
# The class of newer versions of transformers fails at tokens alone, quantized or not.
NOT_RUN: set[str] = set() if hf.__version__.startswith("5.17.") else {"llama4-whole"}
# Their layers are whole blocks of 32; others in MXFP4 would be in the file format of ue5m3/16.
_WHOLE = {"granitemoehybrid-dense", "granitemoehybrid", "gpt2", "zamba2"}
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """``sources(kind)``: folder of a dense bfloat16 model, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_source(EVERY[kind], tmp_path_factory.mktemp(kind), torch.bfloat16)
        return made[kind]

    return make


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def jamba() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 32}
    return hf.JambaForCausalLM(hf.JambaConfig(**_SIZES, **layers, num_experts=1, num_experts_per_tok=1))


def llama(cls: type = hf.LlamaForCausalLM, **more: object) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return cls(hf.LlamaConfig(**_SIZES, **more))


def edited(folder: Path, edit, name: str = "config.json") -> Path:
    data = json.loads((folder / name).read_text())
    edit(data)
    (folder / name).write_text(json.dumps(data))
    return folder


def with_tensors(folder: Path, edit) -> Path:
    found = load_file(folder / "model.safetensors")
    edit(found)
    save_file({k: v.contiguous() for k, v in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def kinds(folder: Path, **options: object) -> set[str]:
    return {fault.kind for fault in verify_checkpoint(folder, **options).faults}


def messages(folder: Path, **options: object) -> str:
    return "\n".join(str(fault) for fault in verify_checkpoint(folder, **options).faults)


# --- what is right passes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind in EVERY for text in ("nvfp4", "mxfp4", "ue5m3/16") if text != "mxfp4" or kind in _WHOLE],
)
def test_what_we_write_loads_into_what_the_files_hold(kind, text, sources, tmp_path):
    mxquant.quantize_model(sources(kind), tmp_path / "q", text)
    found = verify_checkpoint(tmp_path / "q", load=True)
    assert not found.faults
    ours = hf.AutoConfig.from_pretrained(sources(kind))
    with torch.device("meta"):
        whole = getattr(hf, found.checked["loaded"])(ours)
    assert found.checked["tensors compared after loading"] == len(whole.state_dict())
    assert (found.checked["forward"] == "yes") == (kind not in NOT_RUN)


CLASSIFIERS = ("LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering")


@pytest.mark.parametrize("text", ["nvfp4", "ue5m3/16"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_other_than_language_models_are_loaded_as_themselves(name, text, tmp_path):
    source = save(llama(getattr(hf, name), tie_word_embeddings=True), tmp_path / "source")
    mxquant.quantize_model(source, tmp_path / "q", text)
    found = verify_checkpoint(tmp_path / "q")
    assert not found.faults
    assert (found.checked["loaded"], found.checked["forward"]) == (name, "yes")


def test_a_dense_checkpoint_is_loaded_too(sources):
    found = verify_checkpoint(sources("llama-tied"))
    assert not found.faults
    assert found.checked["tensors compared after loading"] == 21


def test_a_tied_embedding_may_be_stored_under_the_name_of_the_head(tmp_path):
    source = save(llama(tie_word_embeddings=True), tmp_path / "source")
    with_tensors(source, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    found = verify_checkpoint(source, load=True)
    assert not found.faults
    assert found.checked["forward"] == "yes"


# --- layers that the config does not name ---------------------------------------------------------


def test_loaders_replace_just_the_layers_that_compressed_tensors_matches(sources):
    match = pytest.importorskip("compressed_tensors.utils.match")
    for kind in EVERY:
        model = build_meta_model(sources(kind))
        linears = [n for n, m in match.match_named_modules(model, ["Linear"]) if isinstance(m, torch.nn.Linear)]
        assert loader_linears(model) == linears, kind


def test_a_dense_layer_that_is_no_linear_of_ours_is_missed_by_nobody(tmp_path):
    """Jamba's step: compressed-tensors leaves it as it was in memory."""
    source = save(jamba(), tmp_path / "source")
    step = "model.layers.0.mamba.dt_proj"
    right = pack(source, tmp_path / "right", "mxfp4", r"(?<!dt)_proj", ["lm_head", step])
    wrong = pack(source, tmp_path / "wrong", "mxfp4", r"(?<!dt)_proj", ["lm_head"])
    assert not kinds(right, load=True)
    assert f"config: {step}.weight is dense" in messages(wrong)
    found = verify_checkpoint(wrong, load=True)
    assert found.exit_code == KINDS["config"].code
    assert any(f.kind == "load" and step in f.message for f in found.faults)


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_the_head_of_a_reward_model_must_be_ignored(preset, tmp_path):
    reward = llama(hf.LlamaForSequenceClassification, num_labels=1, tie_word_embeddings=True)
    source = save(reward, tmp_path / "source")
    right = pack(source, tmp_path / "right", preset, "_proj", ["score"])
    wrong = pack(source, tmp_path / "wrong", preset, "_proj", ["lm_head"])
    assert not kinds(right, load=True)
    assert "config: score.weight is dense" in messages(wrong)
    assert kinds(wrong, load=True) == {"config", "load"}


def test_a_tied_head_must_be_ignored_by_its_own_name(tmp_path):
    torch.manual_seed(0)
    config = hf.ModernBertDecoderConfig(**_SIZES, cls_token_id=1, sep_token_id=2)
    source = save(hf.ModernBertDecoderForCausalLM(config), tmp_path / "source")
    wrong = pack(source, tmp_path / "wrong", "mxfp4", r"layers\.", ["lm_head", "lm_head.dense"])
    assert "decoder.weight is tied to model.embeddings.tok_embeddings.weight, and" in messages(wrong)
    named = pack(source, tmp_path / "named", "mxfp4", r"layers\.", ["decoder", "lm_head.dense"])
    assert not kinds(named, load=False)
    # The class touches weights that compressed-tensors has not decoded: only loading shows it.
    assert "load: ModernBertDecoderForCausalLM cannot be loaded: AttributeError" in messages(named)


def test_a_head_that_is_tied_and_packed_by_accident_is_found(tmp_path):
    source = save(llama(tie_word_embeddings=True), tmp_path / "source")
    right = pack(source, tmp_path / "right", "nvfp4", "_proj", ["lm_head"])
    wrong = pack(source, tmp_path / "wrong", "nvfp4", "_proj", [])
    assert not kinds(right, load=True)
    assert "config: lm_head.weight is tied" in messages(wrong)


def test_a_tied_head_that_is_ignored_is_no_stale_name(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = hf.BertConfig(**sizes, num_hidden_layers=1)
    source = save(hf.BertForMaskedLM(config), tmp_path / "source")
    kept = ["re:cls.*", "cls.predictions.decoder"]
    for name, more in (("right", []), ("stale", ["cls.other"])):
        folder = pack(source, tmp_path / name, "nvfp4", r"encoder\.layer", [*kept, *more, "bert.pooler.dense"])
        found = verify_checkpoint(folder)
        assert not found.faults
        assert any("keeps cls.other" in w for w in found.warnings) == bool(more)
        assert not any("decoder" in w for w in found.warnings)


EXTRA = {"mtp.fc.weight": (32, 64), "mtp.layers.0.self_attn.q_proj.weight": (64, 32), "mtp.norm.weight": (32,)}


@pytest.mark.parametrize(("listed", "right"), [([], False), (["re:^mtp.*"], True), (["mtp.fc"], False)])
def test_layers_that_only_engines_load_must_be_ignored_or_packed(listed, right, sources, tmp_path):
    mxquant.quantize_model(sources("qwen3_5-whole"), tmp_path / "q", "nvfp4")
    with_tensors(tmp_path / "q", lambda t: t.update({n: torch.ones(s).bfloat16() for n, s in EXTRA.items()}))
    edited(tmp_path / "q", lambda c: c["quantization_config"]["ignore"].extend(listed))
    found = messages(tmp_path / "q")
    assert bool(found) == (not right)
    assert right or "mtp.layers.0.self_attn.q_proj.weight is dense" in found
    assert ("mtp.fc" in found) == (not listed)
    assert "norm" not in found


def test_embeddings_that_only_engines_load_need_not_be_ignored(sources, tmp_path):
    mxquant.quantize_model(sources("qwen3_5-whole"), tmp_path / "q", "nvfp4")
    with_tensors(tmp_path / "q", lambda t: t.update({"mtp.embed_tokens.weight": torch.ones(64, 32).bfloat16()}))
    assert not kinds(tmp_path / "q")


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class {name}Config(LlamaConfig):
    model_type = "{name}-kind"


class {name}ForCausalLM(LlamaForCausalLM):
    config_class = {name}Config

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj = DoubledLinear(64, 64, bias=False)
        self.post_init()
{more}
"""
SHARED = """
    def tie_weights(self, *args, **kwargs):
        super().tie_weights(*args, **kwargs)
        one, two = (layer.mlp.up_proj for layer in self.model.layers)
        two.weight = one.weight
"""
DROPPED = """
        self.extra = torch.nn.Linear(4, 4)

    _keys_to_ignore_on_load_missing = ["extra"]
"""


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """transformers copies custom code into a cache and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def with_code(folder: Path, name: str, more: str = "") -> Path:
    module = f"modeling_{name.lower()}"
    (folder / f"{module}.py").write_text(CODE.format(name=name, more=more))
    classes = {"AutoConfig": f"{module}.{name}Config", "AutoModelForCausalLM": f"{module}.{name}ForCausalLM"}
    said = {"model_type": f"{name}-kind", "architectures": [f"{name}ForCausalLM"], "auto_map": classes}
    return edited(folder, lambda config: config.update(said))


def test_a_subclass_of_a_linear_layer_is_replaced_like_any_other(tmp_path, modules_cache):
    source = with_code(save(llama(), tmp_path / "source"), "Doubled")
    right = pack(source, tmp_path / "right", "nvfp4", r"[qkvepn]_proj", ["lm_head", "re:.*o_proj$"])
    wrong = pack(source, tmp_path / "wrong", "nvfp4", r"[qkvepn]_proj", ["lm_head"])
    assert not kinds(right, load=True, trust_remote_code=True)
    found = verify_checkpoint(wrong, trust_remote_code=True)
    assert any("model.layers.0.self_attn.o_proj is packed" in f.message for f in found.faults)
    untrusted = verify_checkpoint(right)
    assert untrusted.checked["loaded"] == "no (transformers does not know its class)"
    with pytest.raises(CheckpointError, match="does not know its class"):
        verify_checkpoint(right, load=True)


def test_layers_that_a_class_ties_by_accident_are_found(tmp_path, modules_cache):
    source = with_code(save(llama(), tmp_path / "source"), "Shared", SHARED)
    found = verify_checkpoint(source, trust_remote_code=True)
    assert {f.kind for f in found.faults} == {"load"}
    assert "up_proj.weight of the loaded model differs" in found.faults[0].message


def test_a_parameter_that_a_class_fills_itself_is_found(tmp_path, modules_cache):
    """Its class has the loader not report it, so nobody else does."""
    source = with_code(save(llama(), tmp_path / "source"), "Dropped", DROPPED)
    found = messages(source, load=True, trust_remote_code=True)
    assert "load: no tensor of the files fills extra.weight of the loaded model" in found


# --- fused projections ----------------------------------------------------------------------------


def test_global_scales_of_linear_attention_must_agree(sources, tmp_path):
    mxquant.quantize_model(sources("qwen3_5-whole"), tmp_path / "q", "nvfp4")
    assert not kinds(tmp_path / "q")
    name = "model.language_model.layers.0.linear_attn.in_proj_z.weight_global_scale"
    with_tensors(tmp_path / "q", lambda t: t.update({name: 2 * t[name]}))
    assert re.search(r"groups: engines fuse .*in_proj_qkv .*in_proj_z", messages(tmp_path / "q"))


def test_global_scales_of_latent_attention_must_agree(make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint("deepseek-v3", "bfloat16"), tmp_path / "q", "nvfp4")
    assert not kinds(tmp_path / "q")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_global_scale"
    with_tensors(tmp_path / "q", lambda t: t.update({name: 2 * t[name]}))
    found = messages(tmp_path / "q")
    assert re.search(r"groups: engines fuse .*\bq_a_proj ", found)
    assert re.search(r"groups: engines fuse .*\bkv_a_proj_with_mqa ", found)


def test_a_fused_layer_that_is_dense_in_part_is_a_warning(tmp_path):
    source = save(llama(), tmp_path / "source")
    kept = ["lm_head", *(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))]
    pack(source, tmp_path / "q", "nvfp4", "(?<!q)_proj", kept)
    found = verify_checkpoint(tmp_path / "q")
    assert not found.faults
    assert any("not read by vLLM" in w and "q_proj" in w for w in found.warnings)
    whole = verify_checkpoint(pack(source, tmp_path / "whole", "nvfp4", "_proj", ["lm_head"]))
    assert not [w for w in whole.warnings if "not read" in w]


# --- what only loading and running show -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_a_dtype_that_does_not_multiply_is_found(preset, dtype, tmp_path):
    source = save(llama(), tmp_path / "source", dtype)
    folder = pack(source, tmp_path / "q", preset, "_proj", ["lm_head"])
    assert not kinds(folder, load=False)
    assert "load: the loaded model fails at its first tokens: RuntimeError" in messages(folder)
    edited(folder, lambda config: config.update(dtype="bfloat16"))
    assert not kinds(folder, load=True)


def rwkv() -> hf.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 64}
    return hf.RwkvForCausalLM(hf.RwkvConfig(**sizes, num_hidden_layers=8, context_length=32))


def falcon() -> hf.PreTrainedModel:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.FalconForCausalLM(hf.FalconConfig(**sizes, **ids, ffn_hidden_size=64))


def mamba() -> hf.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 32}
    return hf.MambaForCausalLM(hf.MambaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


@pytest.mark.parametrize(
    ("make", "packed", "ignore"),
    [
        (rwkv, r"\.blocks\.", ["head"]),
        (falcon, r"transformer\.h\.", ["lm_head"]),
        (mamba, "(in|out|x)_proj", ["lm_head", "re:.*dt_proj$"]),
    ],
)
def test_a_model_that_compressed_tensors_cannot_hold_is_found(make, packed, ignore, tmp_path):
    torch.manual_seed(0)
    source = save(make(), tmp_path / "source")
    assert not kinds(source, load=True)
    folder = pack(source, tmp_path / "q", "mxfp4", packed, ignore)
    assert not kinds(folder, load=False)
    assert kinds(folder) == {"load"}


def test_weights_are_compared_before_a_model_changes_them(tmp_path):
    """RWKV divides some of its matrices by powers of two when it runs."""
    torch.manual_seed(0)
    found = verify_checkpoint(save(rwkv(), tmp_path / "source"), load=True)
    assert not found.faults
    assert found.checked["forward"] == "yes"


def test_experts_that_only_others_stack_are_a_warning(tmp_path):
    """transformers ignores the global scales of packed experts; mxquant.load and engines do not."""
    torch.manual_seed(0)
    mixtral = hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=2))
    source = save(mixtral, tmp_path / "source")
    for preset, fine in [("mxfp4", True), ("nvfp4", False)]:
        folder = pack(source, tmp_path / preset, preset, r"_proj|experts", ["lm_head", "re:.*gate$"])
        found = verify_checkpoint(folder, load=True)
        assert not found.faults
        assert any("does not read its packed experts" in w for w in found.warnings) == (not fine)
        assert found.checked["loaded"] == "MixtralForCausalLM" + ("" if fine else " (by mxquant.load)")


def test_a_router_that_is_not_ignored_is_a_warning(tmp_path):
    torch.manual_seed(0)
    source = save(hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=2)), tmp_path / "source")
    folder = pack(source, tmp_path / "q", "mxfp4", r"_proj|experts", ["lm_head"])
    found = verify_checkpoint(folder)
    assert not found.faults
    assert any("gate.weight is dense, and the config does not say so" in w for w in found.warnings)


def test_logits_that_are_no_numbers_are_found(tmp_path):
    model = llama(rms_norm_eps=0.0)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    found = messages(save(model, tmp_path / "q"), load=True)
    assert re.search(r"load: the loaded model's first logits are NaN or infinite: 512 of 512", found)


def test_values_are_compared_to_the_bit_and_packed_ones_to_the_last_place():
    x = torch.tensor([1.0, -3.0, 0.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    assert difference(x, x.clone(), exact=True) is None
    near = x.clone()
    near[0] = 1.0078125  # the next bfloat16 number
    assert difference(near, x, exact=True) == "differs in 1 of 5 values from"
    assert difference(near, x, exact=False) is None
    near[1] = -3.1
    assert difference(near, x, exact=False) == "differs in 1 of 5 values from"
    assert difference(x[:3], x, exact=True) == "is [3], not the [5] of"
    whole = torch.arange(3)
    assert difference(whole, whole.clone(), exact=True) is None
    assert difference(whole, whole + 1, exact=True) == "differs from"


# --- when it loads, and what it leaves behind -----------------------------------------------------


def test_a_model_that_is_too_large_is_loaded_only_if_asked_to(sources, tmp_path, monkeypatch):
    mxquant.quantize_model(sources("llama"), tmp_path / "q", "ue5m3/16")
    monkeypatch.setattr(load, "available_bytes", lambda: 20_000)
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "q")])
    assert result.exit_code == 0
    assert "loaded no (it needs 0.0 GB, more than 50% of the 0.0 GB available; --load loads it anyway)" in result.stdout
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "q"), "--load"])
    assert "loaded LlamaForCausalLM" in result.stdout
    monkeypatch.setattr(load, "available_bytes", lambda: None)
    assert "is not known; --load loads it anyway" in verify_checkpoint(tmp_path / "q").checked["loaded"]
    assert "loaded" not in verify_checkpoint(tmp_path / "q", load=False).checked


def test_a_faulty_checkpoint_is_loaded_only_if_asked_to(sources, tmp_path):
    mxquant.quantize_model(sources("llama"), tmp_path / "q", "ue5m3/16")
    with_tensors(tmp_path / "q", lambda t: t["model.norm.weight"].fill_(float("nan")))
    found = verify_checkpoint(tmp_path / "q")
    assert found.checked["loaded"] == "no (faults were found before)"
    assert kinds(tmp_path / "q", load=True) == {"values", "load"}


def test_what_transformers_cannot_load_is_said(sources, tmp_path):
    mxquant.quantize_model(sources("llama"), tmp_path / "q", "nvfp4")

    def relabel(tensors):
        for name in [n for n in tensors if n.endswith("weight_packed")]:
            base = name.removesuffix("_packed")
            tensors[base] = tensors.pop(name)
            tensors[f"{base}_scale_2"] = 1 / tensors.pop(f"{base}_global_scale")[0]

    with_tensors(tmp_path / "q", relabel)
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    for excluded, fine in [(["lm_head"], True), (["*head"], True), ([], False)]:
        edited(tmp_path / "q", lambda c, e=excluded: c.update(quantization_config={**said, "exclude_modules": e}))
        found = verify_checkpoint(tmp_path / "q")
        assert found.checked["loaded"].startswith("no (transformers loads no modelopt")
        assert ("config: lm_head.weight is dense" in "\n".join(map(str, found.faults))) == (not fine)
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "q"), "--load"])
    assert result.exit_code == 1
    assert "cannot be loaded: transformers loads no modelopt" in result.stderr


def test_loading_leaves_nothing_behind(sources, tmp_path):
    mxquant.quantize_model(sources("llama"), tmp_path / "q", "nvfp4")

    def state():
        level = hf.utils.logging.get_verbosity()
        return torch.get_default_dtype(), level, list(warnings.filters), sys.stderr, torch.is_grad_enabled()

    torch.manual_seed(5)
    before, numbers = state(), torch.get_rng_state()
    verify_checkpoint(tmp_path / "q", load=True)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), numbers)
