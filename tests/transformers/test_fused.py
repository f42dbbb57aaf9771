"""The groups of layers that engines fuse, against ones written by hand for each kind of architecture."""

from __future__ import annotations

import pytest

from mxquant.transformers.fused import FUSED_LAYERS, fused_groups

MLP = {"mlp.gate_up_proj": {"mlp.gate_proj", "mlp.up_proj"}}

# What lies under one layer, and the groups of it.
ARCHITECTURES = {
    "llama": (
        [f"self_attn.{p}_proj" for p in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        {"self_attn.qkv_proj": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, **MLP},
    ),
    "gemma4, values are keys": (
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"],
        {"self_attn.qkv_proj": {"self_attn.q_proj", "self_attn.k_proj"}},
    ),
    "mixtral": (
        [f"block_sparse_moe.experts.{e}.w{w}" for e in range(2) for w in (1, 2, 3)] + ["block_sparse_moe.gate"],
        {
            f"block_sparse_moe.experts.{e}.w13": {
                f"block_sparse_moe.experts.{e}.w1",
                f"block_sparse_moe.experts.{e}.w3",
            }
            for e in range(2)
        },
    ),
    "deepseek v3.2": (
        [f"self_attn.{p}" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
        + [f"self_attn.indexer.{p}" for p in ("wq_b", "wk", "weights_proj")]
        + [f"mlp.{e}.{p}_proj" for e in ("experts.7", "shared_experts") for p in ("gate", "up", "down")],
        {
            "self_attn.fused_qkv_a_proj": {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
            "self_attn.indexer.wk_weights_proj": {"self_attn.indexer.wk", "self_attn.indexer.weights_proj"},
            "mlp.experts.7.gate_up_proj": {"mlp.experts.7.gate_proj", "mlp.experts.7.up_proj"},
            "mlp.shared_experts.gate_up_proj": {"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"},
        },
    ),
    "deepseek v2 lite, queries without low rank": (
        [f"self_attn.{p}" for p in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")],
        {},
    ),
    "deepseek v4": (
        [f"attn.{p}" for p in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "compressor.wkv", "compressor.wgate")]
        + [f"ffn.shared_experts.w{w}" for w in (1, 2, 3)],
        {
            "attn.fused_wqa_wkv": {"attn.wq_a", "attn.wkv"},
            "attn.compressor.fused_wkv_wgate": {"attn.compressor.wkv", "attn.compressor.wgate"},
            "ffn.shared_experts.w13": {"ffn.shared_experts.w1", "ffn.shared_experts.w3"},
        },
    ),
    "qwen3-next, fused on disk": (
        ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"],
        {},
    ),
    "qwen3.5": (
        [f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
        + ["mlp.shared_expert_gate"],
        {
            "linear_attn.in_proj_qkvz": {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z"},
            "linear_attn.in_proj_ba": {"linear_attn.in_proj_b", "linear_attn.in_proj_a"},
        },
    ),
    "kimi linear": (
        [f"self_attn.{p}_proj" for p in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b", "o")],
        {"self_attn.in_proj_qkvbfg_a": {f"self_attn.{p}_proj" for p in ("q", "k", "v", "b", "f_a", "g_a")}},
    ),
    "kimi k3, two rows of the table in one group": (
        [f"self_attn.{p}_proj" for p in ("q", "k", "v", "g", "b", "f_a", "f_b", "o")],
        {"self_attn.in_proj_qkvgfab": {f"self_attn.{p}_proj" for p in ("q", "k", "v", "g", "b", "f_a")}},
    ),
    "kimi k3, latent attention with a gate": (
        [f"self_attn.{p}" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")],
        {"self_attn.fused_qkv_a_g_proj": {f"self_attn.{p}" for p in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")}},
    ),
    "latent attention with a gate, queries without low rank": (
        [f"attention.{p}" for p in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")],
        {},
    ),
    "olmo hybrid, a and b alone": (
        [f"linear_attn.{p}_proj" for p in "qkvgabo"],
        {"linear_attn.qkvg_proj": {f"linear_attn.{p}_proj" for p in "qkvg"}},
    ),
    "ling 3": (
        [f"attention.{p}_proj" for p in "qkvbfgo"],
        {"attention.fused_qkvbfg_proj": {f"attention.{p}_proj" for p in "qkvbfg"}},
    ),
    "minimax m3": (
        [f"self_attn.{p}_proj" for p in ("q", "k", "v", "o", "index_q", "index_k")],
        {"self_attn.qkv_proj": {f"self_attn.{p}_proj" for p in ("q", "k", "v", "index_q", "index_k")}},
    ),
    "qwen4, a member a level deeper": (
        [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "indexer.index_qk_proj")],
        {"self_attn.qkv_proj": {f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")}},
    ),
    "beam, gates of attention and of the MLP": (
        [f"self_attn.{p}_proj" for p in ("q", "k", "v", "gate", "o")] + ["mlp.gate_proj", "mlp.up_proj"],
        {"self_attn.qkv_gate_proj": {f"self_attn.{p}_proj" for p in ("q", "k", "v", "gate")}, **MLP},
    ),
    "inkling": (
        [f"attn.{p}" for p in ("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud")] + ["mlp.w13_dn", "mlp.w2_md"],
        {"attn.qkvr": {f"attn.{p}" for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")}},
    ),
    "exaone": (
        ["mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"],
        {"mlp.gate_up_proj": {"mlp.c_fc_0", "mlp.c_fc_1"}},
    ),
    "bert": (
        [f"attention.self.{p}" for p in ("query", "key", "value")] + ["attention.output.dense"],
        {"attention.self.qkv_proj": {f"attention.self.{p}" for p in ("query", "key", "value")}},
    ),
    "rwkv, a key and a value of another kind": (
        ["feed_forward.key", "feed_forward.receptance", "feed_forward.value"],
        {},
    ),
    "phi3, fused on disk": (["self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"], {}),
    "gpt2 and neox, fused on disk": (["attn.c_attn", "attn.c_proj", "attention.query_key_value", "attn.Wqkv"], {}),
}


def by_name(groups: dict[str, str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, group in groups.items():
        found.setdefault(group, set()).add(module)
    return found


@pytest.mark.parametrize(("modules", "expected"), ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_groups_are_those_of_the_engines(modules, expected):
    prefix = "model.layers.0."
    found = by_name(fused_groups([prefix + m for m in modules]))
    assert found == {prefix + name: {prefix + m for m in members} for name, members in expected.items()}


@pytest.mark.parametrize(("modules", "expected"), ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_groups_do_not_depend_on_order_or_repetition(modules, expected):
    assert by_name(fused_groups([*reversed(modules), *modules])) == expected


@pytest.mark.parametrize(("modules", "expected"), ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_no_group_spans_two_layers(modules, expected):
    layers = ["model.layers.1.", "model.layers.11.", "mtp.layers.1."]
    for group, members in by_name(fused_groups(layer + m for layer in layers for m in modules)).items():
        assert len({layer for layer in layers for m in members if m.startswith(layer)}) == 1, group
        assert len(members) > 1


@pytest.mark.parametrize("layer", FUSED_LAYERS, ids=lambda layer: f"{layer.name}-{len(layer.members)}")
def test_a_row_makes_one_group_of_its_members(layer):
    modules = [f"model.layers.0.{m}" for m in layer.members]
    assert set(fused_groups(modules)) == set(modules)
    assert len(set(fused_groups(modules).values())) == 1
    assert len(set(fused_groups(layer.members).values())) == 1  # without anything before the names


@pytest.mark.parametrize("layer", FUSED_LAYERS, ids=lambda layer: f"{layer.name}-{len(layer.members)}")
def test_a_member_alone_is_in_no_group(layer):
    assert all(fused_groups([f"model.layers.0.{m}"]) == {} for m in layer.members)


def test_members_under_different_parents_are_in_no_group():
    assert fused_groups(["layers.0.q_proj", "layers.1.k_proj", "layers.2.v_proj"]) == {}
    assert fused_groups(["experts.3.w1", "experts.4.w3"]) == {}
    assert fused_groups(["self_attn.q_a_proj", "cross_attn.kv_a_proj_with_mqa"]) == {}


def test_part_of_a_component_is_no_member():
    assert fused_groups(["mlp.pregate_proj", "mlp.up_proj"]) == {}
    assert fused_groups(["xattention.q_proj", "xattention.b_proj"]) == {}


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.o_proj", None),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"),
        ("model.layers.0.block_sparse_moe.experts.3.w1", "model.layers.0.block_sparse_moe.experts.3.w13"),
        ("model.layers.0.block_sparse_moe.experts.3.w3", "model.layers.0.block_sparse_moe.experts.3.w13"),
        ("model.layers.0.block_sparse_moe.experts.3.w2", None),
        ("model.layers.0.self_attn.q_a_proj", "model.layers.0.self_attn.fused_qkv_a_proj"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.0.self_attn.fused_qkv_a_proj"),
        ("model.layers.0.linear_attn.in_proj_z", "model.layers.0.linear_attn.in_proj_qkvz"),
        ("q_proj", "qkv_proj"),
        ("lm_head", None),
        ("", None),
    ],
)
def test_the_group_of_a_name_beside_its_siblings(module, group):
    parent, _, leaf = module.rpartition(".")
    rows = [row for row in FUSED_LAYERS if leaf in row.members and not row.whole]
    siblings = {leaf, *(member for row in rows[:1] for member in row.members)}
    assert fused_groups([f"{parent}.{sibling}" if parent else sibling for sibling in siblings]).get(module) == group


def test_table_holds_no_row_twice_and_names_its_source():
    keys = [frozenset(layer.members) for layer in FUSED_LAYERS]
    assert len(set(keys)) == len(keys)
    assert all(len(set(layer.members)) == len(layer.members) > 1 for layer in FUSED_LAYERS)
    assert all(layer.source.startswith(("both: ", "vLLM", "SGLang")) for layer in FUSED_LAYERS)
