# SPDX-License-Identifier: Apache-2.0
"""Which scale rule is best for which scale format: error of the weights, perplexity, speed.

    python benchmarks/rule_evidence.py --model DIR --text FILE --seq-len 512 --windows 24

Each rule of each scale format quantizes all linear weights of a dense model (embeddings, head and
norms stay dense, activations too). The quantized weights then stand in for the dense ones in the
same model, which reads the same windows of text, so every figure is a paired comparison.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe, print_table, write_json

import mxquant
from mxquant.codec.qtensor import QTensor
from mxquant.evals.inplace import LinearWeight, Variant, linear_weights
from mxquant.evals.models import EvalModel, load_model
from mxquant.evals.perplexity import Perplexity, evaluate
from mxquant.evals.text import load_text
from mxquant.ops.operators import dequantize
from mxquant.schemes.formats import SCALES, QuantScheme

# Scale format, global scale, block: the usual block of each format, and two more of ue5m3.
GROUPS = (
    ("e4m3", False, 16),
    ("e4m3", True, 16),
    ("ue5m3", False, 8),
    ("ue5m3", False, 16),
    ("ue5m3", False, 32),
    ("e8m0", False, 32),
)
RESULTS = Path(__file__).parent / "results"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a dense model")
    parser.add_argument("--text", required=True, help="UTF-8 text file, or 'builtin'")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a window (default 512)")
    parser.add_argument("--windows", type=int, help="use the first N windows (default: all)")
    parser.add_argument("--batch-size", type=int, default=4, help="windows at once (default 4)")
    parser.add_argument("--speed-repeats", type=int, default=1, help="timed passes over the weights (default 1)")
    parser.add_argument("--scales", nargs="+", choices=list(SCALES), help="only these scale formats")
    parser.add_argument("--json", type=Path, help="default: results/rule_evidence-<model>.json beside this script")
    return parser.parse_args()


def schemes(scales: list[str] | None) -> list[QuantScheme]:
    """Every rule of every group."""
    return [
        QuantScheme("fp4_e2m1", scale, block, global_scale=has_global, scale_rule=rule)
        for scale, has_global, block in GROUPS
        if not scales or scale in scales
        for rule in SCALES[scale].rules
    ]


def quantize_all(
    linears: list[LinearWeight], scheme: QuantScheme, repeats: int
) -> tuple[list[list[QTensor]], dict[str, Any]]:
    """The quantized weights, with their error and what they took."""
    wall, cpu, packed = math.inf, math.inf, []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        packed = [[mxquant.quantize(matrix, scheme) for matrix in linear.matrices] for linear in linears]
        cpu, wall = min(cpu, time.process_time() - cpu_began), min(wall, time.perf_counter() - began)
    count = sum(linear.parameter.numel() for linear in linears)
    return packed, {
        **weight_error(linears, packed),
        "bits_per_weight": 8 * sum(q.nbytes for qs in packed for q in qs) / count,
        "parameters_per_second": count / wall,
        "parameters_per_cpu_second": count / cpu,
    }


def weight_error(linears: list[LinearWeight], packed: list[list[QTensor]]) -> dict[str, float]:
    """Error of all weights together, and the share of those that became zero."""
    error = signal = 0.0
    lost = count = 0
    matrices = [matrix for linear in linears for matrix in linear.matrices]
    for matrix, q in zip(matrices, itertools.chain(*packed), strict=True):
        weight, decoded = matrix.float(), dequantize(q)
        error += float((decoded - weight).square().sum(dtype=torch.float64))
        signal += float(weight.square().sum(dtype=torch.float64))
        lost += int(((decoded == 0) & (weight != 0)).sum())
        count += weight.numel()
    relative = math.sqrt(error / signal)
    return {
        "relative_error": relative,
        "sqnr_db": -20 * math.log10(relative) if relative else math.inf,
        "rounded_to_zero": lost / count,
    }


def make_variants(dense: EvalModel, args: argparse.Namespace) -> tuple[Variant, list[Variant], list[dict[str, Any]]]:
    """The baseline, a variant for each scheme, and what is known before any text is read."""
    linears = linear_weights(dense.model)
    baseline = Variant.of(dense, "dense", linears)
    variants, rows = [], []
    for scheme in schemes(args.scales):
        packed, figures = quantize_all(linears, scheme, args.speed_repeats)
        say(f"{scheme.name}, {scheme.scale_rule}: error {100 * figures['relative_error']:.2f} %")
        variants.append(Variant.of(dense, f"{scheme.name} {scheme.scale_rule}", linears, weights=packed))
        rows.append({"scheme": scheme.to_dict(), **figures})
    return baseline, variants, rows


def without_copies(variants: list[Variant]) -> tuple[list[Variant], list[int]]:
    """The variants that differ, and for each variant the number of the one to read.

    Rules often agree: no scale is zero for absmax-nonzero to repair, and even is oas but for ties.
    """
    different: list[Variant] = []
    number = []
    for variant in variants:
        same = (i for i, other in enumerate(different) if same_weights(variant, other))
        number.append(next(same, len(different)))
        if number[-1] == len(different):
            different.append(variant)
    return different, number


def same_weights(one: Variant, other: Variant) -> bool:
    """Whether two variants hold the same bytes in the same format."""
    ours, theirs = ([q for packed in v.weights or () for q in packed] for v in (one, other))
    a, b = ours[0].scheme, theirs[0].scheme
    if (a.scale, a.block, a.global_scale) != (b.scale, b.block, b.global_scale):
        return False
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.equal(p.packed, q.packed) for p, q in pairs) and all(
        torch.equal(p.scale.view(torch.uint8), q.scale.view(torch.uint8)) for p, q in pairs
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as data."""
    about = describe()
    dense, text = load_model(args.model), load_text(args.text)
    baseline, variants, rows = make_variants(dense, args)
    different, number = without_copies(variants)
    say(f"evaluating {len(different)} different models and the dense one")
    began = time.monotonic()
    reference, *results = evaluate(
        different,
        text,
        baseline=baseline,
        seq_len=args.seq_len,
        windows=args.windows,
        batch_size=args.batch_size,
        progress=lambda done, total: say(f"{done}/{total} windows, {time.monotonic() - began:.0f} s"),
    )
    return {
        **about,
        "model": model_name(Path(args.model).resolve()),
        "dtype": str(dense.model.dtype).removeprefix("torch."),
        "parameters": sum(linear.parameter.numel() for linear in baseline.linears),
        "text": {**text.to_dict(), "name": Path(text.name).name},
        "dense": figures_of(reference),
        "rules": [{**row, **figures_of(results[i])} for row, i in zip(rows, number, strict=True)],
    }


def model_name(folder: Path) -> str:
    """The folder's name, or that of its parent where the folder is just called ``model``."""
    return folder.parent.name if folder.name == "model" else folder.name


def figures_of(result: Perplexity) -> dict[str, Any]:
    """What a result says, without its times: they are shared by all variants."""
    kept = result.to_dict()
    for name in ("seconds", "tokens_per_second"):
        kept.pop(name, None)
    return kept


def print_results(result: dict[str, Any]) -> None:
    """One table a scale format; ``*`` marks the format's default rule."""
    dense = result["dense"]
    print(f"\n{result['model']}, {result['parameters'] / 1e6:.2f} M linear weights, {result['dtype']}")
    print(f"{dense['windows']} windows of {dense['seq_len']} tokens, dense perplexity {dense['perplexity']:.3f}\n")
    header = ["scale/block, rule", "error %", "SQNR dB", "zeros %", "perplexity", "ratio", "95 % interval"]
    header += ["KL", "top-1 %", "M/s", "M/cpu s"]
    print_table(header, [table_row(row) for row in result["rules"]])
    print("\n* default rule. M/s: million weights quantized a second; M/cpu s: the same, a second of CPU time.")


def table_row(row: dict[str, Any]) -> list[str]:
    scheme, d = row["scheme"], row["divergence"]
    fmt = SCALES[scheme["scale"]]
    label = f"{scheme['scale']}{'+global' if scheme['global_scale'] else ''}/{scheme['block']} {scheme['scale_rule']}"
    label += " *" if scheme["scale_rule"] == fmt.default_rule else ""
    known = [f"{100 * row['relative_error']:.2f}", f"{row['sqnr_db']:.2f}", f"{100 * row['rounded_to_zero']:.1f}"]
    speed = [f"{row[k] / 1e6:.1f}" for k in ("parameters_per_second", "parameters_per_cpu_second")]
    if d is None:
        return [label, *known, "not finite", "-", "-", "-", "-", *speed]
    low, high = d["perplexity_ratio_interval"] or (math.nan, math.nan)
    measured = [f"{row['perplexity']:.3f}", f"{d['perplexity_ratio']:.4f}", f"{low:.3f}-{high:.3f}"]
    return [label, *known, *measured, f"{d['kl']:.4f}", f"{100 * d['top1_agreement']:.1f}", *speed]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    args = parse_args()
    result = run(args)
    print_results(result)
    write_json(args.json or RESULTS / f"rule_evidence-{result['model']}.json", result)


if __name__ == "__main__":
    main()
