# SPDX-License-Identifier: Apache-2.0
"""One timed mxquant run: ``quantize_model`` end to end, or the cast of weights in memory.

Prints one line of JSON. Imports and, for the cast, reading the weights are not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import mxquant
from mxquant.checkpoint.reader import Checkpoint
from mxquant.convert import pipeline
from mxquant.schemes.formats import QuantScheme


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="folder to write; without it, only cast in memory")
    parser.add_argument("--scheme", required=True, help="JSON fields of a QuantScheme")
    return parser.parse_args()


def end_to_end(model: Path, out: Path, scheme: QuantScheme) -> dict[str, Any]:
    """Plan, read, quantize, write and report; ``work_seconds`` is the part after the plan."""
    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        getattr(transformers, name)  # imported lazily, and imports are not timed
    began = time.perf_counter()
    report = mxquant.quantize_model(model, out, scheme)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "work_seconds": report.seconds,
        "quantized_parameters": sum(t.parameters for t in report.plan.quantized),
        "quantized_tensors": len(report.plan.quantized),
        "bits_per_weight": report.plan.bits_per_weight,
    }


def cast(model: Path, scheme: QuantScheme) -> dict[str, Any]:
    """The linear weights, read beforehand, as packed tensors in memory."""
    checkpoint, plan = pipeline.plan_model(model, scheme)
    weights = [read(checkpoint, t.name) for t in plan.quantized]
    mxquant.quantize(weights[0], scheme)  # warm up
    began = time.perf_counter()
    packed = [mxquant.quantize(weight, scheme) for weight in weights]
    seconds = time.perf_counter() - began
    count = sum(w.numel() for w in weights)
    return {
        "seconds": seconds,
        "quantized_parameters": count,
        "quantized_tensors": len(weights),
        "bits_per_weight": 8 * sum(q.nbytes for q in packed) / count,
    }


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A copy in memory, not a view of the file; bf16 whatever the file has."""
    return checkpoint.read(name).to(torch.bfloat16).clone()


def main() -> None:
    args = parse_args()
    scheme = QuantScheme.from_dict(json.loads(args.scheme))
    result = cast(args.model, scheme) if args.out is None else end_to_end(args.model, args.out, scheme)
    versions = {"mxquant": mxquant.__version__, "torch": torch.__version__}
    print(json.dumps({**result, "threads": torch.get_num_threads(), "versions": versions}))


if __name__ == "__main__":
    main()
