# SPDX-License-Identifier: Apache-2.0
"""One timed run of llm-compressor's ``model_free_ptq``: a folder in, a quantized folder out.

Runs in an environment that has llm-compressor; mxquant is not needed. Prints one line of JSON.
Imports are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch
from llmcompressor import model_free_ptq
from safetensors import safe_open


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scheme", default="NVFP4A16", help="preset name (weights only by default)")
    parser.add_argument("--workers", type=int, default=1, help="shards at once")
    return parser.parse_args()


def count_quantized(out: Path) -> tuple[int, int]:
    """Quantized tensors in the output, and the weights in them."""
    shapes = []
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes += [tensors.get_slice(n).get_shape() for n in tensors.keys() if n.endswith("weight_packed")]  # noqa: SIM118
    return len(shapes), sum(2 * rows * columns for rows, columns in shapes)


def main() -> None:
    args = parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # keep our standard output to one line
        began = time.perf_counter()
        model_free_ptq(
            model_stub=str(args.model),
            save_directory=str(args.out),
            scheme=args.scheme,
            ignore=["lm_head", "re:.*embed_tokens$", "re:.*norm$"],
            max_workers=args.workers,
            device="cpu",
        )
        seconds = time.perf_counter() - began
    tensors, parameters = count_quantized(args.out)
    names = ("llmcompressor", "compressed-tensors", "torch", "transformers")
    result = {
        "seconds": seconds,
        "quantized_parameters": parameters,
        "quantized_tensors": tensors,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
