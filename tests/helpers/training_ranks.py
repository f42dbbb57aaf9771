"""What ``test_training_distributed.py`` runs on each of two ranks: ``training_ranks.py FILE``.

Rank 0 writes the losses of each scenario to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mxquant.training import TrainingRecipe, convert

STEPS, BATCH, LENGTH, VOCABULARY = 4, 4, 32, 64
# Nearest rounding, tiles of 32 tokens that no rank shares with another, no global scale.
NEAREST = TrainingRecipe.from_dict({"recipe": "fp4-2d", "name": "nearest"}).override(rounding={"gradient": "nearest"})


def make_model(recipe: TrainingRecipe | str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return convert(LlamaForCausalLM(config), recipe)


def train(model: nn.Module, rank: int = 0, ranks: int = 1) -> list[float]:
    """Losses of one batch, step by step; each rank sees its rows of it."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(ranks)[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(whole)
        losses.append(float(whole) / ranks)
    return losses


def sharded(recipe: TrainingRecipe | str, **options: Any) -> nn.Module:
    model = make_model(recipe)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = {
        "ddp": lambda: nn.parallel.DistributedDataParallel(make_model(NEAREST)),
        "ddp stochastic": lambda: nn.parallel.DistributedDataParallel(make_model("fp4-2d")),
        "fsdp": lambda: sharded(NEAREST),
        "fsdp 1d bf16": lambda: sharded("mxfp4-1d-tf-sr", mp_policy=bf16),
    }
    losses = {name: train(make(), rank, ranks) for name, make in models.items()}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
