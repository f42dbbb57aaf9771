"""Tiny models of each architecture, and which of their layers are to be quantized, written down by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TEXT = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_SWA = {**_TEXT, "head_dim": 8, "sliding_window": 16}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_MAMBA1 = {
    **{k: v for k, v in _SIZES.items() if not k.startswith(("num_att", "max_pos"))},
    "state_size": 8,
    "expand": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [0],
}
# transformers 5.17 writes the names of these models with "model." twice.
_AUDIO_PREFIX = "language_model.model." + ("model." if hf.__version__.startswith("5.17.") else "") + "layers."
IMAGE = 5  # the token that stands for a part of an image
_IDS = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}

_GATED = "{gate,up,down}_proj"
_ATTENTION = "self_attn.{q,k,v,o}_proj"
_LLAMA = f"{{0,1}}.{_ATTENTION} {{0,1}}.mlp.{_GATED}"
_IN_OUT = "{in,out}_proj"


def _axes() -> dict[str, Any]:
    """The sections of rotary embeddings with three axes, for heads of 8."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    ``layers``: names of quantized layers below ``prefix`` in the files, with ``{a,b}`` for choices;
    ``others``: the same for those elsewhere. ``tied``: parameters without a tensor of their own.
    ``compressed``: whether NVFP4 is written in compressed-tensors' format. ``images``: what the
    model is given besides tokens, of which ``parts`` stand for the image. ``auto``: the class that loads it.
    """

    config: Callable[[], Any]
    layers: str
    prefix: str = "model.layers."
    others: str = ""
    tied: frozenset[str] = frozenset()
    compressed: bool = True
    images: Callable[[], dict[str, torch.Tensor]] = dict
    parts: int = 0
    auto: Any = hf.AutoModelForCausalLM

    @property
    def quantized(self) -> set[str]:
        """The tensors to be quantized."""
        names = {f"{self.prefix}{name}" for name in expanded(self.layers)} | set(expanded(self.others))
        return {name if re.search(r"\.experts\.[a-z_]+$", name) else f"{name}.weight" for name in names}


def expanded(text: str) -> Iterator[str]:
    """``"a.{b,c} d"`` -> ``a.b``, ``a.c``, ``d``."""
    for word in text.split():
        parts = [part.split(",") for part in re.split(r"[{}]", word)]
        # Commas only separate inside braces, which are every other part.
        choices = [part if i % 2 else [",".join(part)] for i, part in enumerate(parts)]
        yield from ("".join(choice) for choice in itertools.product(*choices))


HEAD = frozenset({"lm_head.weight"})


def _copies(layer: int, shared: str, names: str) -> frozenset[str]:
    """Parameters of a layer that repeats an earlier one."""
    return frozenset(f"model.layers.{layer}.{shared}.{name}.weight" for name in expanded(names))


_ZAMBA_SHARED = f"{_ATTENTION} feed_forward.{_GATED}"
_ZAMBA_NORMS = "input_layernorm pre_ff_layernorm"
_ZAMBA2_SHARED = (
    "self_attn.{q,k,v,o}_proj self_attn.linear_{q,k,v}_adapter_list.{0,2}.{0,1} "
    "feed_forward.{gate_up,down}_proj feed_forward.gate_up_proj_adapter_list.{0,2}.{0,1}"
)

DENSE = {
    "llama": Case(lambda: hf.LlamaConfig(**_TEXT), _LLAMA),
    "llama-tied": Case(lambda: hf.LlamaConfig(**_TEXT, tie_word_embeddings=True), _LLAMA, tied=HEAD),
    "qwen2": Case(lambda: hf.Qwen2Config(**_TEXT), _LLAMA),
    "gemma": Case(lambda: hf.GemmaConfig(**_TEXT, head_dim=8), _LLAMA, tied=HEAD),
    "gemma3_text": Case(lambda: hf.Gemma3TextConfig(**_SWA), _LLAMA, tied=HEAD),
    "gpt2": Case(
        lambda: hf.GPT2Config(vocab_size=64, n_layer=2, n_embd=32, n_head=4, n_positions=64, eos_token_id=2),
        "{0,1}.attn.c_{attn,proj} {0,1}.mlp.c_{fc,proj}",
        "transformer.h.",
        tied=HEAD,
        compressed=False,
    ),
    "mistral": Case(lambda: hf.MistralConfig(**_TEXT, sliding_window=16), _LLAMA),
    "qwen3": Case(lambda: hf.Qwen3Config(**_TEXT, head_dim=8, tie_word_embeddings=True), _LLAMA, tied=HEAD),
    "gemma2": Case(lambda: hf.Gemma2Config(**_SWA), _LLAMA, tied=HEAD),
    "granite": Case(lambda: hf.GraniteConfig(**_TEXT, tie_word_embeddings=True), _LLAMA, tied=HEAD),
    "phi3": Case(lambda: hf.Phi3Config(**_TEXT), "{0,1}.self_attn.{qkv,o}_proj {0,1}.mlp.{gate_up,down}_proj"),
    "opt": Case(
        lambda: hf.OPTConfig(**_SIZES, ffn_dim=48, word_embed_proj_dim=24),
        "{0,1}.self_attn.{q,k,v,out}_proj {0,1}.fc{1,2}",
        "model.decoder.layers.",
        "model.decoder.project_{in,out}",
        HEAD,
        compressed=False,  # 24 features are no whole number of blocks
    ),
    "gpt_neox": Case(
        lambda: hf.GPTNeoXConfig(**_SIZES, intermediate_size=48),
        "{0,1}.attention.{query_key_value,dense} {0,1}.mlp.dense_{h_to_4h,4h_to_h}",
        "gpt_neox.layers.",
    ),
    "olmo2": Case(lambda: hf.Olmo2Config(**_TEXT), _LLAMA),
    "falcon": Case(
        lambda: hf.FalconConfig(**_SIZES, new_decoder_architecture=True, num_kv_heads=2),
        "{0,1}.self_attention.{query_key_value,dense} {0,1}.mlp.dense_{h_to_4h,4h_to_h}",
        "transformer.h.",
        tied=HEAD,
        compressed=False,
    ),
    "falcon-multi-query": Case(
        lambda: hf.FalconConfig(**_SIZES, multi_query=True),
        "{0,1}.self_attention.{query_key_value,dense} {0,1}.mlp.dense_{h_to_4h,4h_to_h}",
        "transformer.h.",
        tied=HEAD,
        compressed=False,
    ),
    "falcon-alibi": Case(
        lambda: hf.FalconConfig(**_SIZES, multi_query=False, alibi=True, parallel_attn=False, bias=True),
        "{0,1}.self_attention.{query_key_value,dense} {0,1}.mlp.dense_{h_to_4h,4h_to_h}",
        "transformer.h.",
        tied=HEAD,
        compressed=False,
    ),
    "smollm3": Case(lambda: hf.SmolLM3Config(**_TEXT, no_rope_layers=[1, 0]), _LLAMA, tied=HEAD),
    "cohere": Case(lambda: hf.CohereConfig(**_TEXT, use_qk_norm=True), _LLAMA, tied=HEAD),
    "cohere2": Case(lambda: hf.Cohere2Config(**_TEXT, sliding_window=16), _LLAMA, tied=HEAD),
    "stablelm": Case(lambda: hf.StableLmConfig(**_TEXT, qk_layernorm=True, use_qkv_bias=True), _LLAMA),
}

STATE_SPACES = {
    "mamba": Case(
        lambda: hf.MambaConfig(**_MAMBA1),
        "{0,1}.mixer.{in,x,out}_proj",
        "backbone.layers.",
        tied=HEAD,
        compressed=False,
    ),
    "falcon_mamba": Case(
        lambda: hf.FalconMambaConfig(**_MAMBA1),
        "{0,1}.mixer.{in,x,out}_proj",
        "backbone.layers.",
        tied=HEAD,
        compressed=False,
    ),
    "mamba2": Case(
        lambda: hf.Mamba2Config(**_MAMBA1, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
        f"{{0,1}}.mixer.{_IN_OUT}",
        "backbone.layers.",
        compressed=False,
    ),
    "bamba": Case(
        lambda: hf.BambaConfig(**_TEXT, **_MAMBA, attn_layer_indices=[1]),
        f"0.mamba.{_IN_OUT} 1.{_ATTENTION} {{0,1}}.feed_forward.{_GATED}",
    ),
    "granitemoehybrid": Case(
        lambda: hf.GraniteMoeHybridConfig(
            **_TEXT,
            **_MAMBA,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            tie_word_embeddings=True,
        ),
        f"0.mamba.{_IN_OUT} 1.{_ATTENTION} {{0,1}}.{{shared_mlp,block_sparse_moe}}.{{input,output}}_linear",
        tied=HEAD,
        compressed=False,
    ),
    "granitemoehybrid-dense": Case(
        lambda: hf.GraniteMoeHybridConfig(
            **_TEXT,
            **_MAMBA,
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=32,
        ),
        f"0.mamba.{_IN_OUT} 1.{_ATTENTION} {{0,1}}.shared_mlp.{{input,output}}_linear",
    ),
    "nemotron_h": Case(
        lambda: hf.NemotronHConfig(
            **{**_TEXT, "num_hidden_layers": 4},
            layers_block_type=["mamba", "attention", "mlp", "moe"],
            head_dim=8,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
        f"0.mixer.{_IN_OUT} 1.mixer.{{q,k,v,o}}_proj 2.mixer.{{up,down}}_proj "
        "3.mixer.shared_experts.{up,down}_proj 3.mixer.experts.{0,1,2,3}.{up,down}_proj",
        "backbone.layers.",
        compressed=False,
    ),
    "zamba": Case(
        lambda: hf.ZambaConfig(
            **{**_TEXT, "num_hidden_layers": 4},
            attention_hidden_size=64,
            attention_head_dim=16,
            mamba_d_state=8,
            n_mamba_heads=2,
            mamba_dt_rank=8,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        ),
        f"{{0,2}}.mamba.{_IN_OUT} {{1,3}}.mamba_decoder.mamba.{_IN_OUT} {{1,3}}.linear "
        f"1.shared_transf.{_ATTENTION} 1.shared_transf.feed_forward.{_GATED}",
        tied=HEAD | _copies(3, "shared_transf", f"{_ZAMBA_SHARED} {_ZAMBA_NORMS}"),
        compressed=False,
    ),
    "zamba2": Case(
        lambda: hf.Zamba2Config(
            **{**_TEXT, "num_hidden_layers": 5, "num_key_value_heads": 4},
            mamba_d_state=8,
            n_mamba_heads=4,
            mamba_headdim=16,
            mamba_ngroups=1,
            chunk_size=8,
            layers_block_type=["mamba", "hybrid", "hybrid", "hybrid", "hybrid"],
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=8,
        ),
        f"0.mamba.{_IN_OUT} {{1,2,3,4}}.mamba_decoder.mamba.{_IN_OUT} {{1,2,3,4}}.linear "
        "{1,2}.shared_transformer.self_attn.{q,k,v,o}_proj {1,2}.shared_transformer.feed_forward.{gate_up,down}_proj "
        "1.shared_transformer.self_attn.linear_{q,k,v}_adapter_list.{0,2}.{0,1} "
        "2.shared_transformer.self_attn.linear_{q,k,v}_adapter_list.{1,3}.{0,1} "
        "1.shared_transformer.feed_forward.gate_up_proj_adapter_list.{0,2}.{0,1} "
        "2.shared_transformer.feed_forward.gate_up_proj_adapter_list.{1,3}.{0,1}",
        tied=HEAD
        | _copies(3, "shared_transformer", f"{_ZAMBA2_SHARED} {_ZAMBA_NORMS}")
        | _copies(4, "shared_transformer", f"{_ZAMBA2_SHARED} {_ZAMBA_NORMS}".replace("{0,2}", "{1,3}")),
        compressed=False,
    ),
    "falcon_h1": Case(
        lambda: hf.FalconH1Config(**_TEXT, **_MAMBA, mamba_d_ssm=64, head_dim=8),
        f"{{0,1}}.mamba.{_IN_OUT} {{0,1}}.{_ATTENTION} {{0,1}}.feed_forward.{_GATED}",
    ),
    "jamba": Case(
        lambda: hf.JambaConfig(
            **_TEXT,
            num_experts=4,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
        f"0.mamba.{{in,x,out}}_proj 1.{_ATTENTION} 0.feed_forward.{_GATED} 1.feed_forward.experts.{{0,1,2,3}}.{_GATED}",
        compressed=False,
    ),
}


def _pixels(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(7)), **others}


def _qwen_pixels() -> dict[str, torch.Tensor]:
    """Patches of 4 x 4 pixels of two frames, and how many there are in time, height and width."""
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(7))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}


_VLM: dict[str, Any] = {"auto": hf.AutoModelForImageTextToText, "prefix": "language_model.model.layers."}
MULTIMODAL = {
    "llava": Case(
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**_TEXT),
            vision_config=hf.CLIPVisionConfig(**_VISION, projection_dim=32),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        _LLAMA,
        images=_pixels,
        parts=4,
        **_VLM,
    ),
    "gemma3": Case(
        lambda: hf.Gemma3Config(
            text_config=hf.Gemma3TextConfig(**_SWA),
            vision_config=hf.SiglipVisionConfig(**_VISION, vision_use_head=False),
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=6,
            eoi_token_index=7,
        ),
        _LLAMA,
        tied=HEAD,
        images=_pixels,
        parts=4,
        **_VLM,
    ),
    "paligemma": Case(
        lambda: hf.PaliGemmaConfig(
            text_config=hf.GemmaConfig(**_TEXT, head_dim=8),
            vision_config=hf.SiglipVisionConfig(**_VISION, projection_dim=32, vision_use_head=False),
            image_token_index=IMAGE,
            projection_dim=32,
        ),
        _LLAMA,
        tied=HEAD,
        images=_pixels,
        parts=4,
        **_VLM,
    ),
    "mistral3": Case(
        lambda: hf.Mistral3Config(
            text_config=hf.MistralConfig(**_TEXT),
            vision_config=hf.PixtralVisionConfig(**_VISION),
            image_token_index=IMAGE,
            spatial_merge_size=1,
        ),
        _LLAMA,
        tied=HEAD,
        images=lambda: _pixels(image_sizes=torch.tensor([[8, 8]])),
        parts=4,
        **_VLM,
    ),
    "qwen2_5_vl": Case(
        lambda: hf.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _axes()}, vision_config=_QWEN_VISION, **_IDS
        ),
        _LLAMA,
        images=_qwen_pixels,
        parts=4,
        auto=hf.AutoModelForImageTextToText,
    ),
    "idefics3": Case(
        lambda: hf.Idefics3Config(
            text_config=hf.LlamaConfig(**_TEXT), vision_config=_VISION, image_token_id=IMAGE, scale_factor=2
        ),
        _LLAMA,
        "model.text_model.layers.",
        images=lambda: {"pixel_values": _pixels()["pixel_values"][None]},
        parts=1,
        auto=hf.AutoModelForImageTextToText,
    ),
    "qwen2_audio": Case(
        lambda: hf.Qwen2AudioConfig(
            text_config=hf.Qwen2Config(**_TEXT),
            audio_config={
                "num_mel_bins": 8,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "max_source_positions": 16,
            },
            audio_token_index=IMAGE,
        ),
        _LLAMA,
        auto=hf.AutoModelForMultimodalLM,
        prefix=_AUDIO_PREFIX,
    ),
}

_EXPERTS = "{0,1}.feed_forward.experts.{gate_up,down}_proj"
# Multimodal checkpoints of which AutoModelForCausalLM loads the language model alone.
TEXT_ALONE = {
    "llama4": Case(
        lambda: hf.Llama4Config(
            text_config=hf.Llama4TextConfig(
                **_TEXT,
                intermediate_size_mlp=96,
                num_local_experts=4,
                num_experts_per_tok=1,
                head_dim=8,
                interleave_moe_layer_step=1,
            ),
            vision_config=hf.Llama4VisionConfig(
                **{**_VISION, "intermediate_size": 128},
                vision_output_dim=32,
                projector_input_dim=32,
                projector_output_dim=32,
            ),
        ),
        f"{{0,1}}.{_ATTENTION} {_EXPERTS} {{0,1}}.feed_forward.shared_expert.{_GATED}",
        compressed=False,
        **_VLM,
    ),
    "qwen3_5": Case(
        lambda: hf.Qwen3_5Config(
            text_config={
                **_TEXT,
                "head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": {**_axes(), "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
            },
            vision_config={k: v for k, v in _QWEN_VISION.items() if k not in ("window_size", "fullatt_block_indexes")},
            **_IDS,
        ),
        f"0.linear_attn.in_proj_{{qkv,z,a,b}} 0.linear_attn.out_proj 1.{_ATTENTION} {{0,1}}.mlp.{_GATED}",
        "model.language_model.layers.",
        auto=hf.AutoModelForImageTextToText,
    ),
}

CASES = {**DENSE, **STATE_SPACES, **MULTIMODAL}
