# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a packed model beside its dense form, on the CPU.

    python benchmarks/generate_speed.py --model MODEL [--packed FOLDER] [--name NAME]

Both are loaded by transformers in bf16 and continue the same prompt greedily, taking turns. Without
``--packed`` the model is quantized to ue5m3/16 first. Embeddings and the output head are dense in both.
The packed model takes a third turn with every product going through PyTorch's dispatcher: what the
prepared calls of ``QuantLinear`` (``kernels/cpu/calls.py``) gain.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from machine import describe, print_table, write_json
from transformers import AutoModelForCausalLM, logging

import mxquant
from mxquant.ops import operators

HERE = Path(__file__).parent
PROMPT = 16  # tokens


def measure_generation(model: str, packed: Path | None, tokens: int, repeats: int) -> dict[str, Any]:
    """Median tokens a second of both, and the median of the ratios of neighbouring turns."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if packed is None:
            packed = Path(folder) / "packed"
            mxquant.quantize_model(model, packed, mxquant.QuantScheme())
        models = {
            name: AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16).eval()
            for name, where in (("dense", model), ("packed", packed))
        }
    times: dict[str, list[float]] = {name: [] for name in (*models, "dispatched")}
    for turn in range(repeats + 1):
        for name in times:
            with mock.patch.object(operators, "needs_no_dispatcher", _never) if name == "dispatched" else nullcontext():
                taken = _generate(models.get(name, models["packed"]), tokens)
            if turn:
                times[name].append(taken)
    ratios = [d / p for d, p in zip(times["dense"], times["packed"], strict=True)]
    gains = [d / p for d, p in zip(times["dispatched"], times["packed"], strict=True)]
    return {
        "model": Path(model).name,
        "layers": sum(isinstance(m, mxquant.QuantLinear) for m in models["packed"].modules()),
        "tokens": tokens,
        **{f"{name}_tokens_per_second": tokens / statistics.median(taken) for name, taken in times.items()},
        "ratio": statistics.median(ratios),
        "gain_of_prepared_calls": statistics.median(gains),
    }


def _never(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return False


def _generate(model: Any, tokens: int) -> float:
    ids = torch.arange(PROMPT).view(1, PROMPT) % model.config.vocab_size
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub id of the dense model")
    parser.add_argument("--packed", type=Path, help="folder of the quantized model")
    parser.add_argument("--name", help="what to call the model (default: its folder)")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=HERE / "results" / "generate_speed.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure_generation(args.model, args.packed, args.tokens, args.repeats)
    found["model"] = args.name or found["model"]
    rows = [
        ["dense bf16", f"{found['dense_tokens_per_second']:.1f}", ""],
        ["packed", f"{found['packed_tokens_per_second']:.1f}", f"{found['ratio']:.2f}"],
        ["packed, dispatched", f"{found['dispatched_tokens_per_second']:.1f}", ""],
    ]
    print_table([found["model"], "tokens/s", "x dense"], rows)
    write_json(args.json, {**describe(), "threads": args.threads, **found})


if __name__ == "__main__":
    main()
