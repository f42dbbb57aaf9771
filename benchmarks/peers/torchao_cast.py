# SPDX-License-Identifier: Apache-2.0
"""One timed run of torchao's NVFP4 cast: bf16 weights in memory to packed tensors in memory.

Runs in an environment that has torchao; mxquant is not needed. Prints one line of JSON. Imports and
reading the weights are not timed. As torchao's own weight-only path does, the scale of a tensor is
derived from its largest magnitude; its re-ordering of scales for GPUs is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--no-tensor-scale", action="store_true", help="block scales only")
    return parser.parse_args()


def linear_weights(model: Path) -> Iterator[torch.Tensor]:
    """The matrices of the checkpoint other than embeddings and head, bf16, in memory."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith("_proj.weight"):
                    yield tensors.get_tensor(name).to(torch.bfloat16).clone()


def cast(weight: torch.Tensor, with_tensor_scale: bool) -> NVFP4Tensor:
    scale = per_tensor_amax_to_scale(torch.max(torch.abs(weight))) if with_tensor_scale else None
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale)


def main() -> None:
    args = parse_args()
    weights = list(linear_weights(args.model))
    cast(weights[0], not args.no_tensor_scale)  # warm up
    began = time.perf_counter()
    packed = [cast(weight, not args.no_tensor_scale) for weight in weights]
    seconds = time.perf_counter() - began
    count = sum(w.numel() for w in weights)
    stored = sum(q.qdata.nbytes + q.scale.nbytes for q in packed)
    result = {
        "seconds": seconds,
        "quantized_parameters": count,
        "quantized_tensors": len(weights),
        "bits_per_weight": 8 * stored / count,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("torchao", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
