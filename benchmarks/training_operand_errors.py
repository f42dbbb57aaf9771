# SPDX-License-Identifier: Apache-2.0
"""How far training's quantization moves the weights, activations and gradients of a model.

    python benchmarks/training_operand_errors.py out/fp4_training/bf16-seed0

One step of a checkpoint that ``fp4_training.py`` has trained: each operand of each linear layer, rounded by
each scheme, gradients stochastically. Relative squared error, and the share of numbers that become zero,
are means over layers; they go to benchmarks/results/training_operand_errors.json.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import machine
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mxquant.evals.models import quiet_transformers
from mxquant.evals.training.text import load_training_text, training_windows
from mxquant.ops.operators import fake_quantize
from mxquant.schemes.formats import QuantScheme

HERE = Path(__file__).resolve().parent
SCHEMES = (
    "e8m0/32/floor",
    "e8m0/32/rceil",
    "e8m0/32x32/floor",
    "e8m0/32x32/rceil",
    "ue5m3/32x32/ceil",
    "ue5m3+global/32x32/ceil",
)


def operands(model: PreTrainedModel, windows: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Role -> that operand of every linear layer but the head's, as matrices."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)

    def forward(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        found["activation"].append(inputs[0].detach().flatten(0, -2))

    def backward(module: torch.nn.Module, inputs: tuple[torch.Tensor], outputs: tuple[torch.Tensor]) -> None:
        found["gradient"].append(outputs[0].flatten(0, -2))

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            found["weight"].append(module.weight.detach())
            module.register_forward_hook(forward)
            module.register_full_backward_hook(backward)
    model(windows, labels=windows).loss.backward()
    return found


def errors(tensors: list[torch.Tensor], scheme: QuantScheme) -> dict[str, float]:
    """Means over tensors."""
    moved, zeros = [], []
    for i, x in enumerate(tensors):
        rounded = fake_quantize(x.contiguous(), scheme, name=str(i))
        moved.append(float((rounded - x).square().sum() / x.square().sum()))
        zeros.append(float((rounded == 0).float().mean()))
    return {"relative_squared_error": sum(moved) / len(moved), "zeros": sum(zeros) / len(zeros)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "training_operand_errors.json")
    args = parser.parse_args()
    quiet_transformers(progress_bars=False)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    windows = training_windows(load_training_text("builtin"), tokenizer, 512)[:2].long()
    found = []
    for role, tensors in operands(model, windows).items():
        for text in SCHEMES:
            scheme = QuantScheme.parse(f"{text}/stochastic" if role == "gradient" else text)
            found.append({"role": role, "scheme": scheme.text, **errors(tensors, scheme)})
    rows = [[r["role"], r["scheme"], f"{r['relative_squared_error']:.4f}", f"{r['zeros']:.3f}"] for r in found]
    machine.print_table(["role", "scheme", "relative squared error", "zeros"], rows)
    machine.write_json(args.json, machine.describe() | {"errors": found})


if __name__ == "__main__":
    main()
