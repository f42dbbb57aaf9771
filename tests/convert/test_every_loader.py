"""What is written means the same to every loader: to transformers alone, to ours, and to engines by their rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import is_match
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError, PlanError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.architectures import build_meta_model

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("nvfp4/absmax", "mxfp4", "ue5m3/16")
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TEXT = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
_JAMBA = {
    **{**_TEXT, "use_mamba_kernels": False, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    **{"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
}
# The class that a config names, and what stays dense at its end.
MODELS: dict[str, tuple[Any, Callable[[], Any], set[str]]] = {
    "causal": (hf.AutoModelForCausalLM, lambda: hf.LlamaConfig(**_TEXT), {"lm_head"}),
    "reward": (hf.AutoModelForSequenceClassification, lambda: hf.LlamaConfig(**_TEXT, num_labels=1), {"score"}),
    "tied reward": (
        hf.AutoModelForSequenceClassification,
        lambda: hf.LlamaConfig(**_TEXT, num_labels=1, tie_word_embeddings=True),
        {"score"},
    ),
    "classes of tokens": (hf.AutoModelForTokenClassification, lambda: hf.MistralConfig(**_TEXT), {"score"}),
    "answers": (hf.AutoModelForQuestionAnswering, lambda: hf.LlamaConfig(**_TEXT), {"qa_outputs"}),
    "embeddings": (hf.AutoModel, lambda: hf.Qwen3Config(**_TEXT, head_dim=16), set()),
    "encoder": (
        hf.AutoModelForMaskedLM,
        lambda: hf.BertConfig(**_SIZES, intermediate_size=96),
        {"cls.predictions.transform.dense", "cls.predictions.decoder"},
    ),
    "head of another name": (
        hf.AutoModelForCausalLM,
        lambda: hf.ModernBertDecoderConfig(**_SIZES, intermediate_size=96, tie_word_embeddings=True),
        {"lm_head.dense", "decoder"},
    ),
    "step of a whole block": (hf.AutoModelForCausalLM, lambda: hf.JambaConfig(**_JAMBA, mamba_dt_rank=32), {"lm_head"}),
    "step of less": (hf.AutoModelForCausalLM, lambda: hf.JambaConfig(**_JAMBA, mamba_dt_rank=8), {"lm_head"}),
    "weights changed as it runs": (
        hf.AutoModelForCausalLM,
        lambda: hf.RwkvConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, attention_hidden_size=64, intermediate_size=128
        ),
        {"head"},
    ),
    "buffers changed as it runs": (
        hf.AutoModelForCausalLM,
        lambda: hf.CTRLConfig(vocab_size=64, n_positions=64, n_embd=64, dff=128, n_layer=2, n_head=4),
        {"lm_head"},
    ),
    "conversions that cannot pack": (
        hf.AutoModelForCausalLM,
        lambda: hf.OlmoHybridConfig(
            **_TEXT,
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
        ),
        {"lm_head"},
    ),
}


def make(auto: Any, config: Any, folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = auto.from_config(config).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def outputs(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(3, 64, (1, 8), generator=torch.Generator().manual_seed(1))
    return next(iter(model(input_ids=tokens).values())).float()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_computes_what_the_dequantized_checkpoint_computes(kind, scheme, dtype, tmp_path):
    auto, config, heads = MODELS[kind]
    source = make(auto, config(), tmp_path / "source", dtype)
    plan = mxquant.quantize_model(source, tmp_path / "q", scheme).plan
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    wanted = auto.from_pretrained(tmp_path / "d")
    found, info = auto.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(found) is type(wanted)
    assert plan.auto_class == auto.__name__
    # Our own format multiplies in fp32, and by values that a dense checkpoint with global scales has to round.
    half, rounded = found.dtype is not torch.float32, QuantScheme.parse(scheme).global_scale
    bound = 0.03 if half and rounded else 1e-3 if half else 1e-5
    own = plan.on_disk == "mxquant"
    assert distance(outputs(found), outputs(wanted)) <= (bound if own else 1e-5)
    assert distance(outputs(mxquant.load(tmp_path / "q")), outputs(wanted)) <= bound
    dense = {t.module for t in plan.dense}
    assert {head for head in heads if head in dense | {p.removesuffix(".weight") for p in plan.tied}} == heads


@pytest.mark.parametrize("scheme", FORMATS[:2])
@pytest.mark.parametrize("kind", MODELS)
def test_the_list_of_dense_layers_is_what_compressed_tensors_needs(kind, scheme, tmp_path):
    """By its own matching, each ``nn.Linear`` of the model is either packed in the files or ignored."""
    auto, config, _ = MODELS[kind]
    source = make(auto, config(), tmp_path / "source", torch.bfloat16)
    _, plan = plan_model(source, scheme)
    if plan.on_disk != "compressed-tensors":
        assert plan.on_disk_reason
        return
    said = QuantizationConfig.model_validate(plan.quantization_config)
    model, packed = build_meta_model(source), {t.module for t in plan.quantized}
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    replaced = {n for n, m in linear.items() if is_match(n, m, "Linear", ignore=said.ignore)}
    assert replaced == {n for n in linear if n in packed or n.removeprefix("model.") in packed}


def test_layers_that_engines_load_and_the_class_does_without_are_listed(tmp_path):
    source = make(hf.AutoModelForCausalLM, hf.Qwen3NextConfig(**_QWEN_NEXT), tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(64, 128), "mtp.layers.0.mlp.gate_proj.weight": torch.randn(96, 64)}
    extra = {name: t.bfloat16() for name, t in {**extra, "mtp.norm.weight": torch.ones(64)}.items()}
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    _, plan = plan_model(source, "mxfp4")
    assert plan.on_disk == "compressed-tensors"
    said = plan.quantization_config["ignore"]
    linear = torch.nn.Linear(1, 1)
    for name in ("mtp.fc", "mtp.layers.0.mlp.gate_proj"):
        assert is_match(name, linear, said)
    assert not is_match("mtp.norm", linear, said)


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_rule_keeps_layers_dense_that_only_engines_know(scheme, tmp_path):
    """Without it, more than 5 % of the weights would stay dense unasked, and the message says to exclude them."""
    source = make(hf.AutoModelForCausalLM, hf.LlamaConfig(**_TEXT), tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    extra = {"model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16()}
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    default = QuantScheme.parse(scheme)
    with pytest.raises(PlanError, match=r"model\.layers\.2\.eh_proj\.weight .*exclude them"):
        plan_model(source, default)
    with pytest.raises(PlanError, match=r"eh_proj"):
        plan_model(source, QuantRecipe(default=default, include=("layers.[01]",)))
    for recipe in (
        QuantRecipe(default=default, exclude=(r"layers\.2\.",)),
        QuantRecipe.from_dict({"rules": [{"eh_proj": "dense"}], "default": scheme}),
    ):
        _, plan = plan_model(source, recipe)
        assert len(plan.quantized) == 14
    with pytest.raises(PlanError, match="'eh_proj' matches no module"):
        plan_model(source, QuantRecipe.from_dict({"rules": [{"eh_proj": scheme}], "default": scheme}))


_QWEN_NEXT = {
    **_TEXT,
    **{"head_dim": 16, "num_experts": 0, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    **{"num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"mlp_only_layers": [0, 1]},
}

_OWN_CONFIG = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width=64, vocab_size=64, **kwargs):
        self.hidden_size, self.vocab_size, self.num_hidden_layers = width, vocab_size, 1
        super().__init__(**kwargs)
"""
_OWN_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnModel(PreTrainedModel):
    config_class, base_model_prefix = OwnConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.plain, self.scaled = nn.Linear(width, width), Scaled(width, width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **kwargs):
        x = self.embedding(input_ids)
        return CausalLMOutput(logits=self.head(x + self.scaled(torch.tanh(self.plain(x)))))
"""


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_subclass_of_a_linear_layer_stays_dense_in_every_loader(scheme, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "configuration_own.py").write_text(_OWN_CONFIG)
    (source / "modeling_own.py").write_text(_OWN_MODEL)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": own, "dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    g = torch.Generator().manual_seed(0)
    shapes = {
        "embedding.weight": (64, 64),
        "plain.weight": (64, 64),
        "scaled.weight": (64, 64),
        "head.weight": (64, 64),
    }
    tensors = {n: (0.1 * torch.randn(s, generator=g)).bfloat16() for n, s in shapes.items()}
    tensors |= {f"{n}.bias": torch.zeros(64, dtype=torch.bfloat16) for n in ("plain", "scaled")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"scaled\.weight"):
        plan_model(source, scheme, trust_remote_code=True)
    mxquant.quantize_model(source, tmp_path / "q", scheme, trust_remote_code=True, allow_dense=True)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    found, wanted = (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True) for name in ("q", "d")
    )
    assert distance(outputs(found), outputs(wanted)) <= 1e-5


# --- fused layers ----------------------------------------------------------------------------------

_MLA = {
    **{**_TEXT, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (lambda: hf.LlamaConfig(**_TEXT), [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        (lambda: hf.DeepseekV3Config(**_MLA), [("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")]),
        (
            lambda: hf.Qwen3_5TextConfig(**_QWEN_NEXT),
            [("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("q_proj", "k_proj", "v_proj")],
        ),
    ],
    ids=["attention", "latent attention", "linear attention"],
)
def test_layers_that_engines_fuse_have_one_global_scale(config, groups, tmp_path):
    source = make(hf.AutoModelForCausalLM, config(), tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):  # all of a different width
        if tensors[name].ndim == 2:
            tensors[name] = tensors[name] * 2.0 ** (number % 7)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = mxquant.quantize_model(source, tmp_path / "q", QuantRecipe(default=QuantScheme.preset("nvfp4"))).plan
    written = load_file(tmp_path / "q/model.safetensors")
    scales = {n.rpartition(".")[0]: float(t) for n, t in written.items() if n.endswith("global_scale")}
    assert set(scales) == {t.module for t in plan.quantized}
    for group in groups:
        parents = {n.rpartition(".")[0] for n in scales if n.rpartition(".")[2] in group}
        assert parents
        for parent in parents:
            members = [f"{parent}.{member}" for member in group if f"{parent}.{member}" in scales]
            assert len(members) == len(group)
            largest = max(float(tensors[f"{m}.weight"].abs().max()) for m in members)
            assert len({scales[m] for m in members}) == 1
            assert scales[members[0]] == pytest.approx(448 * 6 / largest, rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (QuantRecipe(default=QuantScheme.preset("nvfp4"), exclude=("q_proj",)), "k_proj, q_proj and v_proj"),
        (QuantRecipe(default=QuantScheme.preset("mxfp4"), exclude=("layers.1.mlp.up",)), "gate_proj and up_proj"),
    ],
)
def test_a_plan_does_not_claim_engines_that_need_one_format_for_fused_layers(recipe, word, tmp_path):
    source = make(hf.AutoModelForCausalLM, hf.LlamaConfig(**_TEXT), tmp_path / "source", torch.bfloat16)
    _, plan = plan_model(source, recipe)
    assert "vLLM" not in plan.on_disk_reason
    assert any("vLLM" in w and word in w for w in plan.warnings)
    _, plain = plan_model(source, QuantRecipe(default=recipe.default))
    assert "vLLM" in plain.on_disk_reason
    assert not plain.warnings


# --- rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_rule_for_the_head_is_taken_whether_or_not_it_is_tied(tied, tmp_path):
    config = hf.LlamaConfig(**_TEXT, tie_word_embeddings=tied)
    source = make(hf.AutoModelForCausalLM, config, tmp_path / "source", torch.bfloat16)
    scheme = QuantScheme.preset("mxfp4")
    _, plan = plan_model(source, QuantRecipe(default=scheme, exclude=("lm_head",)))
    assert len(plan.quantized) == 14
    with pytest.raises(PlanError, match="'lm_heads' matches no module"):
        plan_model(source, QuantRecipe(default=scheme, exclude=("lm_heads",)))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ({"default": "mxfp4", "include": ["embed_tokens", "down_proj"]}, "model.embed_tokens"),
        ({"rules": [{"embed_tokens": "mxfp8"}], "default": "mxfp4"}, "model.embed_tokens"),
        ({"rules": [{"embed|q_proj": "mxfp8"}], "default": "mxfp4"}, "model.embed_tokens"),
        ({"rules": [{"norm": "mxfp8"}], "default": "mxfp4"}, "model.layers.0.input_layernorm"),
        ({"rules": [{"lm_head": "mxfp8"}], "default": "mxfp4"}, "lm_head"),
    ],
)
def test_a_rule_that_names_what_cannot_be_quantized_is_an_error(recipe, name, tmp_path):
    config = hf.LlamaConfig(**_TEXT, tie_word_embeddings=True)
    source = make(hf.AutoModelForCausalLM, config, tmp_path / "source", torch.bfloat16)
    with pytest.raises(PlanError, match=f"names {name}, which cannot be quantized"):
        plan_model(source, QuantRecipe.from_dict(recipe))


@pytest.mark.parametrize("pattern", [".*", "model", r"layers\.0", "proj"])
def test_a_rule_for_many_layers_may_match_others_beside_them(pattern, tmp_path):
    config = hf.LlamaConfig(**_TEXT, tie_word_embeddings=True)
    source = make(hf.AutoModelForCausalLM, config, tmp_path / "source", torch.bfloat16)
    recipe = QuantRecipe.from_dict({"rules": [{pattern: "ue5m3/16"}], "default": "ue5m3/16"})
    assert len(plan_model(source, recipe)[1].quantized) == 14


def test_a_rule_for_a_tower_names_no_embedding(tmp_path):
    from architecture_cases import CASES
    from tiny_models import make_source

    source = make_source(CASES["llava"], tmp_path / "source", torch.bfloat16)
    scheme = QuantScheme.parse("ue5m3/16")
    _, plan = plan_model(source, QuantRecipe(default=scheme, include=("vision_tower", "language_model")))
    assert any("vision_tower" in t.name for t in plan.quantized)
    with pytest.raises(PlanError, match=r"names vision_tower\.embeddings\.position_embedding"):
        plan_model(source, QuantRecipe(default=scheme, include=("position_embedding", "language_model")))


def test_a_class_that_is_not_built_is_refused_by_its_name(tmp_path):
    auto, config, _ = MODELS["encoder"]
    source = make(auto, config(), tmp_path / "source", torch.bfloat16)
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "architectures": ["BertForPreTraining"]}))
    with pytest.raises(CheckpointError, match="architecture BertForPreTraining cannot be quantized"):
        plan_model(source, "mxfp4", allow_dense=True)
