"""Which linear layers vLLM and SGLang fuse into one matrix, by their names in checkpoints.

An engine multiplies by a fused matrix once, so the matrices in it must have one NVFP4 global scale. vLLM takes
the largest of several (``CompressedTensorsW4A4Fp4.process_weights_after_loading``), which makes the others wrong,
and refuses a fused layer of which only a part is quantized (``should_ignore_layer``).

Read on 2026-12-01 from vLLM 0.33.0 (PyPI, ``vllm``: ``vllm/model_executor/models``, ``vllm/models`` and
``vllm/model_executor/layers``) and SGLang 0.5.23 (PyPI, ``sglang``: ``sglang/srt/models`` and
``sglang/srt/layers``): the tables ``packed_modules_mapping``, ``stacked_params_mapping`` and
``orig_to_new_stacked``, the layers built with ``MergedColumnParallelLinear`` and ``QKVParallelLinear``, and what
the loaders concatenate themselves. Names that an engine changes while loading are those on the hub here.

A layer counts as fused if an engine fuses it under some configuration: a shared scale costs next to nothing.
Not here, because nothing has to be done: what a checkpoint holds as one matrix already, such as ``qkv_proj``,
``query_key_value``, ``Wqkv``, ``c_attn``, ``gate_up_proj``, ``in_proj`` or Qwen3-Next's ``in_proj_qkvz``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class FusedLayer(NamedTuple):
    """Layers that an engine fuses where they lie under one parent.

    ``members``: the last component of their names, or the last ones where one does not say which is meant.
    ``name``: what the engine calls the fused layer. ``source``: who fuses it, and in which file.
    ``whole``: only where all members are there; otherwise two are enough, since some layers lack one.
    ``dense``: built without quantization, so that the members must not be quantized to be served.
    """

    members: tuple[str, ...]
    name: str
    source: str
    whole: bool = False
    dense: bool = False


_QKV = ("q_proj", "k_proj", "v_proj")
_LING_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_JET_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BETA_AND_FORGET = (*_QKV, "b_proj", "f_a_proj")
_INDEX = ("sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z")

FUSED_LAYERS = (
    # Attention and MLP of most models. gate/up and w1/w3 are also those of one expert (w13_weight).
    FusedLayer(_QKV, "qkv_proj", "both: llama and most others"),
    FusedLayer(("gate_proj", "up_proj"), "gate_up_proj", "both: llama and most others; experts"),
    FusedLayer(("w1", "w3"), "w13", "vLLM lfm2, deepseek_v4; both internlm2; experts of mixtral, minimax_m2"),
    FusedLayer(("c_fc_0", "c_fc_1"), "gate_up_proj", "both: exaone"),
    FusedLayer(("query", "key", "value"), "qkv_proj", "both: bert, roberta", whole=True),
    FusedLayer(("query_net", "key_net", "value_net"), "qkv_proj", "vLLM cohere_asr"),
    FusedLayer(("wq", "wk", "wv"), "qkv_proj", "vLLM: vision of pixtral, molmo2"),
    FusedLayer(("q", "k", "v"), "qkv", "both: vision of qwen2_5_omni, qwen3_vl, cohere_compass", whole=True),
    FusedLayer(("q_proj.linear", "k_proj.linear", "v_proj.linear"), "qkv_proj", "SGLang gemma4_vision, gemma4_audio"),
    FusedLayer(("gate_proj.linear", "up_proj.linear"), "gate_up_proj", "SGLang gemma4_vision"),
    FusedLayer(("fc1", "fc3"), "fc13", "vLLM: aimv2, vision of dots_ocr"),
    FusedLayer(("fc11", "fc12"), "gate_up_proj", "vLLM bert_with_rope"),
    FusedLayer(("linear_proj.gate_proj", "linear_proj.dense_h_to_4h"), "linear_proj.merged_proj", "vLLM glm4v: vision"),
    # Attention with an output gate. vLLM's transformers backend fuses all that reads the same input.
    FusedLayer((*_QKV, "g_proj"), "qkvg_proj", "vLLM olmo_hybrid, step5; SGLang kimi_k3", whole=True),
    FusedLayer((*_QKV, "gate_proj"), "qkv_gate_proj", "both: beam, muse_spark", whole=True),
    FusedLayer(("wq_du", "wk_dv", "wv_dv", "wr_du"), "qkvr", "both: inkling"),
    # Multi-head latent attention.
    FusedLayer(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj", "both: deepseek_v2 and others with MLA"),
    FusedLayer(
        ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"), "fused_qkv_a_g_proj", "vLLM kimi_k3; SGLang dots3", whole=True
    ),
    FusedLayer(("wq_a", "wkv_a_with_mqa"), "fused_qkv_a_proj", "both: mistral_large_3"),
    FusedLayer(("wq_a", "wkv"), "fused_wqa_wkv", "both: deepseek_v4"),
    # What picks the tokens of sparse attention.
    FusedLayer(("wk", "weights_proj"), "wk_weights_proj", "both: deepseek_v2, v3.2; vLLM glm5next, hy_v4", dense=True),
    FusedLayer(("wkv", "wgate"), "fused_wkv_wgate", "both: compressor of deepseek_v4", dense=True),
    FusedLayer(("index_q_proj", "index_k_proj", "index_v_proj"), "index_qkv_proj", "SGLang minimax_m3"),
    FusedLayer((*_QKV, "index_q_proj", "index_k_proj"), "qkv_proj", "vLLM minimax_m3", whole=True),
    FusedLayer((*_QKV, "indexer.index_qk_proj"), "qkv_proj", "vLLM qwen4_exp", whole=True),
    FusedLayer((*_QKV, *_INDEX, "g_proj"), "qkv_indexer_proj", "vLLM step5", whole=True),
    # Linear attention.
    FusedLayer(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz", "both: qwen3_5, qwen4_exp"),
    FusedLayer(("in_proj_b", "in_proj_a"), "in_proj_ba", "both: qwen3_5, qwen4_exp"),
    FusedLayer(_BETA_AND_FORGET, "in_proj_qkvgfab", "vLLM kimi_k3, alice_ai", whole=True),
    FusedLayer((*_BETA_AND_FORGET, "g_a_proj"), "in_proj_qkvbfg_a", "vLLM glm5next", whole=True),
    FusedLayer((*_LING_QKV, "attention.b_proj"), "attention.qkvb_proj", "vLLM bailing_moe_v3", whole=True),
    FusedLayer(
        (*_LING_QKV, "attention.f_proj", "attention.g_proj"),
        "attention.fused_qkvbfg_proj",
        "SGLang bailing_moe_v3",
        whole=True,
    ),
    FusedLayer(
        (*_JET_QKV, "self_attn.a_proj", "self_attn.b_proj", "self_attn.g_proj"),
        "self_attn.qkvabz_proj",
        "SGLang jet_nemotron",
        whole=True,
    ),
    # Around the layers of Qwen4-Exp.
    FusedLayer(("ple.key_proj", "ple.value_proj"), "ple.kv_proj", "vLLM qwen4_exp"),
    FusedLayer(
        ("input_mix_weight_down", "block_inject_weight"),
        "input_mix_weight_down_block_inject",
        "vLLM qwen4_exp",
        dense=True,
    ),
)

_BY_LAST_COMPONENT: dict[str, list[tuple[str, FusedLayer]]] = defaultdict(list)
for _layer in FUSED_LAYERS:
    for _member in _layer.members:
        _BY_LAST_COMPONENT[_member.rpartition(".")[2]].append((_member, _layer))


def fused_groups(modules: Iterable[str]) -> dict[str, str]:
    """For each module of a model that engines fuse with others of it, a name that these share.

    ``modules``: all linear layers, dense ones too. Where several rows of the table apply to a module,
    as one engine fuses more than the other, what they fuse is one group.
    """
    found: dict[tuple[str, FusedLayer], list[str]] = defaultdict(list)
    for module in dict.fromkeys(modules):
        for place in _places(module):
            found[place].append(module)
    groups: dict[str, str] = {}
    members_of: dict[str, list[str]] = {}
    # The largest come last and give their name; of rows that found the same, the one with fewer members.
    for (parent, layer), members in sorted(found.items(), key=lambda item: (len(item[1]), -len(item[0][1].members))):
        if len(members) < (len(layer.members) if layer.whole else 2):
            continue
        joined = dict.fromkeys(members)
        for group in dict.fromkeys(groups[m] for m in members if m in groups):
            joined |= dict.fromkeys(members_of.pop(group))
        name = f"{parent}{layer.name}"
        members_of[name] = list(joined)
        groups |= dict.fromkeys(joined, name)
    return groups


def _places(module: str) -> Iterator[tuple[str, FusedLayer]]:
    """The rows that the module's name is in, each with what comes before: a parent and its dot, or nothing."""
    for member, layer in _BY_LAST_COMPONENT.get(module.rpartition(".")[2], ()):
        parent = module.removesuffix(member)
        if parent != module and (not parent or parent.endswith(".")):
            yield parent, layer
