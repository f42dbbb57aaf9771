"""Mixtures of experts that are tested: what their files and their planner say of them."""

from __future__ import annotations

_QWEN = {f"mlp.experts.*.{p}_proj.weight" for p in ("gate", "up", "down")}
# The matrices of experts and the routers, by the names in the files, and how many experts a tensor holds.
KINDS = {
    "mixtral-even": ({f"block_sparse_moe.experts.*.w{i}.weight" for i in (1, 2, 3)}, {"block_sparse_moe.gate.weight"}),
    "qwen3-moe": (_QWEN, {"mlp.gate.weight"}),
    "qwen2-moe": (_QWEN, {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}),
    "deepseek-v3": (_QWEN, {"mlp.gate.weight"}),
    "llama4": ({f"feed_forward.experts.{p}_proj" for p in ("gate_up", "down")}, {"feed_forward.router.weight"}),
    "gpt-oss": ({f"mlp.experts.{p}_proj" for p in ("gate_up", "down")}, {"mlp.router.weight"}),
    "granite-moe": (
        {f"block_sparse_moe.{p}_linear.weight" for p in ("input", "output")},
        {"block_sparse_moe.router.layer.weight"},
    ),
}
