"""A tiny random model of every causal language model type that transformers knows.

Nothing here lists the types. A config starts as its class makes it, its sizes shrink by the names of
their attributes (in sub-configs too), and of its layers one of each kind stays. ``OVERRIDES`` has
what these rules do not find out by themselves.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

VOCABULARY, HIDDEN, WIDE, NARROW, HEADS, KV_HEADS, HEAD, POSITIONS = 128, 64, 128, 32, 4, 2, 16, 256

# Twelve words, none of them a special token of a tiny config.
PROMPT = [21, 42, 23, 97, 64, 35, 88, 30, 51, 76, 29, 60]

# A value, and the attributes that get it where a config has them and they are not None.
_RULES: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size unpadded_vocab_size"),
    (
        HIDDEN,
        "hidden_size n_embd d_model emb_dim embedding_dim input_embedding_size output_embedding_size "
        "word_embed_proj_dim hidden_size_global backbone_hidden_size out_hidden_size projector_input_dim "
        "projector_output_dim lru_width adapter_in_dim adapter_out_dim adapter_input_size "
        "ple_embed_dim prompt_mid_dim ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels",
    ),
    (
        WIDE,
        "intermediate_size d_ff dff dim_ff ffn_dim d_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
        "intermediate_size_mlp dense_intermediate_size mlp_dim shared_intermediate_size feed_forward_size "
        "attention_hidden_size mamba_d_ssm",
    ),
    (
        NARROW,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank o_lora_rank "
        "hidden_size_per_layer_input laurel_rank hc_lowrank loop_gate_rank router_hidden_size adapter_rank "
        "embedding_size linear_head_dim gated_norm_rank d_rel pronunciation_embed_dim shape_embed_dim output_channels "
        "downsample_hidden_size attention_head_dim "
        "dim_model_base",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_query_groups "
        "linear_num_value_heads linear_num_heads index_n_heads conf_num_attention_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts "
        "mamba_dt_rank time_step_rank patch_size mm_tokens_per_image index_block_size",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads heads_per_ngram "
        "decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks depth num_global_layers "
        "conf_num_hidden_layers num_layers_per_stack n_layers_per_attn_res_block "
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k index_topk_blocks "
        "zero_expert_num o_groups attn_layer_period split_ngram_parts ngram_size",
    ),
    (
        HEAD,
        "head_dim d_kv d_head dim_head kv_channels attention_head_size swa_head_dim qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim "
        "rotary_dim mamba_d_head mamba_head_dim mamba_headdim mamba_d_state state_size ssm_state_size num_centroids "
        "image_size crop_size num_position_embeddings num_mel_bins feature_size input_feat_size",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
        "context_length model_max_length ngram_vocab_size_base encoder_hash_byte_group_vocab "
        "pronunciation_vocab_size shape_vocab_size",
    ),
    (
        8,
        "sliding_window attention_window_size window_size sliding_window_size attention_chunk_size local_attention "
        "chunk_size mamba_chunk_size mamba_n_heads mamba_num_heads n_mamba_heads index_topk rel_extent "
        "keep_window_size block_size prompt_length prompt_types centroid_intermediate_top_k",
    ),
    (
        1,
        "n_group topk_group n_groups num_expert_group first_k_dense_replace num_dense_layers max_window_layers "
        "attn_layer_offset ",
    ),
    (True, "is_decoder"),
)
SMALL: dict[str, Any] = {name: value for value, names in _RULES for name in names.split()}

# Set even where a config has None, which stands for what its class cannot always work out.
_EVEN_IF_NONE = ("head_dim", "num_key_value_heads")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_CONV_AND_ATTENTION = {"layer_types": ["conv", "full_attention"]}
_SHARED_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MIXED_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}

# What else the config of a type needs, as a model or as a part of one.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {**_MIXED_WINDOWS, "rope_parameters": dict.fromkeys(_MIXED_WINDOWS["layer_types"], _ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": HEAD + HEAD * 3 // 2},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [WIDE] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "lfm2": {**_CONV_AND_ATTENTION, "full_attn_idxs": [1]},
    "lfm2_moe": _CONV_AND_ATTENTION,
    "llama4_text": {"moe_layers": [1]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen4_exp_text": {
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"hash_seed": 0, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_SHARED_ZAMBA, "n_mamba_heads": 2},
    "zamba2": _SHARED_ZAMBA,
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8},
}

# Parameters of recurrences: noise there would make them diverge.
_AS_MADE = re.compile(r"(^|\.)(A_log|D|dt_bias|dt_proj[._]bias|time_decay|time_first|recurrent_param)$")


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def _layers(values: dict[str, Any], count: int, own: dict[int, Any]) -> list[int]:
    """The first layer of each kind, but two at least.

    A kind is all that the lists with an item a layer say of it, and what its part of ``per_layer_config``
    does. A list of the numbers of all layers says nothing.
    """
    lists = [v for v in values.values() if isinstance(v, (list, tuple)) and len(v) == count and [*v] != [*range(count)]]
    kinds = [str([*(items[layer] for items in lists), own.get(layer)]) for layer in range(count)]
    first = [layer for layer in range(count) if kinds.index(kinds[layer]) == layer]
    return first if len(first) > 1 else [*range(min(count, 2))]


def _arguments(config: PreTrainedConfig) -> dict[str, Any]:
    """What makes a small config of the same class."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    count = next((values[name] for name in _LAYER_COUNTS if name in values), 0)
    own = {int(layer): changes for layer, changes in config.to_dict().get("per_layer_config", {}).items()}
    layers = _layers(values, count, own)
    other_tokens = sorted(name for name in values if _is_token(name) and name not in _TOKENS)
    tokens = _TOKENS | {name: len(_TOKENS) + i for i, name in enumerate(other_tokens)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and name not in _EVEN_IF_NONE:
            continue
        if isinstance(value, PreTrainedConfig):
            found[name] = type(value)(**_arguments(value))
        elif name in _LAYER_COUNTS:
            found[name] = len(layers)
        elif isinstance(value, (list, tuple)) and len(value) == count:
            found[name] = [SMALL.get(name, value[layer]) for layer in layers]
        elif name in tokens or name in SMALL:
            found[name] = tokens[name] if name in tokens else SMALL[name]
    if "kv_lora_rank" in found:  # keys and values of all heads come out of one projection
        found["num_key_value_heads"] = HEADS
    if own:  # as many times larger or smaller than in other layers as they were
        found["per_layer_config"] = {
            new: {k: max(1, found[k] * v // values[k]) if k in SMALL else v for k, v in own[old].items()}
            for new, old in enumerate(layers)
            if old in own
        }
    return found | OVERRIDES.get(config.model_type, {})


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of this type for a model of about a hundred thousand parameters."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_arguments(cls()))


@torch.no_grad()
def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """The model of ``tiny_config``, in float32 and with weights that are all different.

    Matrices are drawn anew; what starts as constants, such as norms and biases, gets noise.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if _AS_MADE.search(name) or not parameter.requires_grad:
            continue
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model says after each word of the prompt."""
    return model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits.float()
