# SPDX-License-Identifier: Apache-2.0
"""Which measure of weight errors says what they do to the model, and what mixing schemes by it gains.

    python benchmarks/diagnose_evidence.py --model DIR --text FILE --calibration FILE

Quantizes one part of the model at a time, each projection and each layer, measures the KL divergence that it
causes, and compares the proportions with those of four measures that need no such runs. Then the mixes of
`mxquant diagnose` at one budget, with and without calibration, beside the best single scheme. Measured figures
are written as they are found; a second run continues.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, print_table, write_json

from mxquant import quantize
from mxquant.analysis.defaults import SCHEMES
from mxquant.analysis.examine import Subject, examine, prepare
from mxquant.analysis.places import place
from mxquant.analysis.sensitivity import Calibration
from mxquant.evals.calibration import calibrate
from mxquant.evals.models import EvalModel, load_model
from mxquant.evals.text import load_text
from mxquant.evals.windows import cut_windows
from mxquant.schemes.formats import QuantScheme

RESULTS = Path(__file__).parent / "results"
Chosen = dict[str, QuantScheme]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a dense model")
    parser.add_argument("--text", required=True, help="UTF-8 text file on which KL is measured, or 'builtin'")
    parser.add_argument("--calibration", required=True, help="UTF-8 text file to calibrate on")
    parser.add_argument("--scheme", default="ue5m3/16", help="what parts of the model are quantized to")
    parser.add_argument("--budget", type=float, default=4.5, help="bits per weight of the mixes (default 4.5)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a window (default 512)")
    parser.add_argument("--windows", type=int, default=6, help="windows to measure on (default 6)")
    parser.add_argument("--json", type=Path, help="default: results/diagnose_evidence-<model>.json beside this script")
    return parser.parse_args()


class Divergence:
    """KL in nats per token of the model with some weights quantized, from itself."""

    def __init__(self, model: EvalModel, windows: torch.Tensor):
        self._net, self._windows = model.model, windows
        with torch.inference_mode():
            self._before = [self._predictions(window) for window in windows]

    @torch.inference_mode()
    def __call__(self, chosen: Chosen) -> float:
        with self._quantized(chosen):
            each = []
            for window, before in zip(self._windows, self._before, strict=True):
                gap = (before.exp() * (before - self._predictions(window))).sum(-1)
                each.append(float(gap[:-1].mean()))
        return float(np.mean(each))

    def _predictions(self, window: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self._net(window[None], use_cache=False).logits[0], -1, dtype=torch.float32)

    @contextmanager
    def _quantized(self, chosen: Chosen) -> Iterator[None]:
        originals = {name: self._net.get_parameter(name).data for name in chosen}
        for name, scheme in chosen.items():
            self._net.get_parameter(name).data = quantize(originals[name], scheme).dequantize(originals[name].dtype)
        yield
        for name, original in originals.items():
            self._net.get_parameter(name).data = original


@torch.inference_mode()
def input_moments(model: EvalModel, names: list[str], windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean square of each input feature of each linear layer."""
    sums: dict[str, Any] = defaultdict(float)

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            sums[name] = sums[name] + inputs[0].float().square().flatten(0, -2).sum(0)

        return hook

    handles = [model.model.get_submodule(n.removesuffix(".weight")).register_forward_hook(watch(n)) for n in names]
    for window in windows:
        model.model(window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: total / windows.numel() for name, total in sums.items()}


def measures(
    subject: Subject, scheme: QuantScheme, moments: dict[str, torch.Tensor], calibration: Calibration
) -> dict[str, dict[str, float]]:
    """Measure -> matrix -> what it says the scheme costs."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for t in subject.plan.quantized:
        weight = subject.checkpoint.read(t.name).float()
        error = quantize(weight, scheme).dequantize() - weight
        squares = error.square()
        found["squared error"][t.name] = float(squares.sum())
        found["squared error / squared norm"][t.name] = float(squares.sum() / weight.square().sum())
        found["weighted by inputs"][t.name] = float((squares @ moments[t.name]).sum())
        found["weighted by gradients"][t.name] = calibration.sensitivity[t.name].cost(error, 0)
    return found


def parts(names: list[str]) -> dict[str, list[str]]:
    """Each projection, each layer, and the whole model."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        layer, projection = place(name.removesuffix(".weight"))
        found[f"projection {projection.rpartition('.')[2]}"].append(name)
        found[f"layer {layer}"].append(name)
    return dict(sorted(found.items(), key=lambda part: not part[0].startswith("p"))) | {"everything": names}


def agreement(
    kl: dict[str, float], cost: dict[str, float], members: dict[str, list[str]], kind: str
) -> dict[str, float]:
    """How the logarithms of measured and expected proportions agree over the parts of one kind."""
    chosen = [part for part in members if part.startswith(kind)]
    measured = np.log([kl[part] for part in chosen])
    expected = np.log([sum(cost[name] for name in members[part]) for part in chosen])
    return {
        "correlation": float(np.corrcoef(measured, expected)[0, 1]),
        "spread": float(np.std(measured - expected, ddof=1)),
    }


def main() -> None:
    args = parse_args()
    path = args.json or RESULTS / f"diagnose_evidence-{Path(args.model).resolve().name}.json"
    record = json.loads(path.read_text()) if path.exists() else {"kl": {}}
    model = load_model(args.model, dtype="float32", device="cpu")
    text = load_text(args.text)
    divergence = Divergence(model, cut_windows(model.tokenizer, text, args.seq_len, args.windows))
    subject = prepare(args.model, SCHEMES)
    scheme = QuantScheme.parse(args.scheme)
    names = [t.name for t in subject.plan.quantized]
    members = parts(names)
    source = load_text(args.calibration)
    calibration = calibrate(model, source, subject.plan.quantized)
    moments = input_moments(model, names, cut_windows(model.tokenizer, source, 512, 8))
    costs = measures(subject, scheme, moments, calibration)
    plain, weighed = (examine(subject, calibration=c) for c in (None, calibration))
    mixes = {"mix": plain.mix(args.budget), "calibrated mix": weighed.mix(args.budget)}
    best = weighed.best(args.budget)
    assert best is not None
    wanted = {f"{part}: {scheme.text}": dict.fromkeys(members[part], scheme) for part in members}
    wanted[f"everything: {best.text}"] = dict.fromkeys(names, best)
    wanted |= {f"{name} at {args.budget:g} bits": mix.chosen for name, mix in mixes.items()}
    for name, chosen in wanted.items():
        if name not in record["kl"]:
            record["kl"][name] = divergence(chosen)
            print(f"{name}: {record['kl'][name]:.5f}", flush=True)
            path.write_text(json.dumps(record))
    kl = {part: record["kl"][f"{part}: {scheme.text}"] for part in members}
    record["agreement"] = {
        measure: {kind: agreement(kl, cost, members, kind) for kind in ("projection", "layer")}
        for measure, cost in costs.items()
    }
    record["expected_kl"] = {
        f"everything: {scheme.text}": sum(costs["weighted by gradients"].values()),
        f"everything: {best.text}": weighed.total_cost(best),
        f"calibrated mix at {args.budget:g} bits": mixes["calibrated mix"].cost,
    }
    texts = {"measured on": text.sha256, "calibrated on": source.sha256}
    record |= {"windows": args.windows, "seq_len": args.seq_len, "sha256 of texts": texts, **describe()}
    write_json(path, record)
    show(record)


def show(record: dict[str, Any]) -> None:
    rows = [
        [
            measure,
            *(f"{found[kind][what]:.2f}" for kind in ("projection", "layer") for what in ("correlation", "spread")),
        ]
        for measure, found in record["agreement"].items()
    ]
    print_table(["measure", "projections: correlation", "spread", "layers: correlation", "spread"], rows)
    whole = [name for name in record["kl"] if name.startswith(("everything", "mix", "calibrated"))]
    expected = record["expected_kl"]
    print_table(
        ["model", "KL", "expected"],
        [[name, f"{record['kl'][name]:.4f}", f"{expected[name]:.4f}" if name in expected else ""] for name in whole],
    )


if __name__ == "__main__":
    main()
