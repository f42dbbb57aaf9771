# SPDX-License-Identifier: Apache-2.0
"""How fast is quantizing a checkpoint, beside llm-compressor, torchao and a plain copy?

    python benchmarks/quantize_vs_peers.py --model DIR --peers-python peers/bin/python

Repeats are interleaved (each contender once, then all again), each in a fresh process of its own
environment, so that whatever else the machine does hits all alike. Only the work is timed, not
imports. The peers write NVFP4 with one scale a tensor, weights only (llm-compressor's NVFP4A16);
"mxquant nvfp4 absmax" is the same format by the same rule. ``--model`` is a folder of bf16
safetensors whose linears are called ``*_proj``, as in Llama.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from machine import describe, print_table, write_json

HERE = Path(__file__).parent
WORKERS = HERE / "peers"
UE5M3 = {"scale": "ue5m3", "block": 16}
NVFP4 = {"preset": "nvfp4", "scale_rule": "absmax"}


@dataclass
class Contender:
    """Something to time. ``measure(out)`` gives a result with ``seconds``, or raises ``WorkerError``."""

    name: str
    measure: Callable[[Path], dict[str, Any]]
    runs: list[dict[str, Any] | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def times(self, key: str = "seconds") -> list[float | None]:
        """A time for each repeat, None where it failed."""
        return [None if run is None else run.get(key) for run in self.runs]

    @property
    def last(self) -> dict[str, Any]:
        return next((run for run in reversed(self.runs) if run is not None), {})


class WorkerError(Exception):
    """A worker that gave no result; the text says why."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a dense checkpoint")
    parser.add_argument("--peers-python", help="Python of an environment with llm-compressor and torchao")
    parser.add_argument("--repeats", type=int, default=5, help="times each contender runs (default 5)")
    parser.add_argument("--dir", type=Path, help="where outputs go (default: the system's temporary folder)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run (default 900)")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "quantize_vs_peers.json")
    return parser.parse_args()


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    """All that are timed, in the order in which they take turns."""

    def ours(scheme: dict[str, Any], to_disk: bool = True) -> Callable[[Path], dict[str, Any]]:
        words = ["--scheme", json.dumps(scheme)]
        return lambda out: worker(sys.executable, "mxquant_quantize.py", args, out if to_disk else None, words)

    def peer(script: str, to_disk: bool, *words: str) -> Callable[[Path], dict[str, Any]]:
        return lambda out: worker(args.peers_python, script, args, out if to_disk else None, list(words))

    found = {
        "ours": Contender("mxquant ue5m3/16", ours(UE5M3)),
        "llmcompressor": Contender(
            "llm-compressor model_free_ptq NVFP4A16", peer("llmcompressor_ptq.py", to_disk=True)
        ),
        "ours-absmax": Contender("mxquant ue5m3/16 absmax", ours({**UE5M3, "scale_rule": "absmax"})),
        "torchao": Contender("torchao NVFP4 cast, in memory", peer("torchao_cast.py", to_disk=False)),
        "ours-nvfp4": Contender("mxquant nvfp4 absmax", ours(NVFP4)),
        "copy": Contender("plain copy of the folder", lambda out: copy(args.model, out)),
        "ours-cast": Contender("mxquant nvfp4 absmax, in memory", ours(NVFP4, to_disk=False)),
    }
    if not args.peers_python:
        del found["llmcompressor"], found["torchao"]
    return found


def worker(python: str, script: str, args: argparse.Namespace, out: Path | None, words: list[str]) -> dict[str, Any]:
    """Run a worker script and read the last line that it prints."""
    command = [python, str(WORKERS / script), "--model", str(args.model.resolve()), *words]
    command += [] if out is None else ["--out", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"no result after {args.timeout:.0f} s") from error
    except OSError as error:
        raise WorkerError(f"cannot run {Path(python).name}: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise WorkerError(lines[-1] if lines else f"exit code {done.returncode}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise WorkerError(f"no result in its output: {done.stdout[-200:]!r}") from error


def copy(source: Path, out: Path) -> dict[str, Any]:
    """The floor of anything that reads and writes the checkpoint."""
    began = time.perf_counter()
    shutil.copytree(source, out)
    return {"seconds": time.perf_counter() - began}


def take_turns(entrants: list[Contender], repeats: int, folder: Path) -> None:
    """Run all, one after another, ``repeats`` times over."""
    for repeat in range(repeats):
        for contender in entrants:
            out = folder / "out"
            try:
                contender.runs.append(contender.measure(out))
                note = f"{contender.runs[-1]['seconds']:.3f} s"
            except WorkerError as failure:
                contender.runs.append(None)
                contender.failures.append(str(failure))
                note = f"FAILED: {failure}"
            shutil.rmtree(out, ignore_errors=True)
            print(f"{repeat + 1}/{repeats} {contender.name}: {note}", file=sys.stderr, flush=True)


def checkpoint_parameters(model: Path) -> int:
    """Parameters in all tensors of a folder, from the headers of its files."""
    total = 0
    for file in model.glob("*.safetensors"):
        with open(file, "rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(length))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def summarize(values: list[float | None]) -> dict[str, float] | None:
    """Median and range of what was measured; None if nothing was."""
    known = [v for v in values if v is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def speeds(contender: Contender, parameters: int, key: str = "seconds") -> dict[str, float] | None:
    """Parameters a second."""
    return summarize([None if t is None else parameters / t for t in contender.times(key)])


def ratio(fast: Contender, slow: Contender, key: str = "seconds") -> dict[str, float] | None:
    """How many times as fast ``fast`` is, in each repeat: there the two ran within a minute or so."""
    pairs = zip(fast.times(key), slow.times(), strict=True)
    return summarize([None if a is None or b is None else b / a for a, b in pairs])


def evaluate(found: dict[str, Contender], parameters: int) -> dict[str, Any]:
    """Medians, ranges and ratios, as data."""
    rows = {}
    for key, contender in found.items():
        quantized, in_memory = contender.last.get("quantized_parameters"), "in memory" in contender.name
        rows[key] = {
            "name": contender.name,
            "seconds": summarize(contender.times()),
            "work_seconds": summarize(contender.times("work_seconds")),
            "parameters_per_second": None if in_memory else speeds(contender, parameters),
            "parameters_per_second_of_work": None if in_memory else speeds(contender, parameters, "work_seconds"),
            "quantized_parameters_per_second": speeds(contender, quantized) if quantized else None,
            "quantized_parameters": quantized,
            "quantized_tensors": contender.last.get("quantized_tensors"),
            "bits_per_weight": contender.last.get("bits_per_weight"),
            "threads": contender.last.get("threads"),
            "versions": contender.last.get("versions"),
            "failures": contender.failures,
            "runs": contender.runs,
        }
    pairs = [(ours, peer) for peer in ("llmcompressor", "torchao", "copy") for ours in found if ours.startswith("ours")]
    ratios = {
        f"{ours} / {peer}": {
            "whole_call": ratio(found[ours], found[peer]),
            "read_quantize_write": ratio(found[ours], found[peer], "work_seconds"),
        }
        for ours, peer in pairs
        if peer in found and (ours != "ours-cast" or peer == "torchao")
    }
    return {"contenders": rows, "ratios": ratios}


def print_results(result: dict[str, Any], found: dict[str, Contender]) -> None:
    size = f"{result['parameters'] / 1e6:.1f} M parameters"
    print(f"\n{result['model']}: {size}, {result['repeats']} interleaved repeats, median (min-max)\n")
    print_table(
        ["contender", "seconds", "M param/s", "M param/s*", "M quantized/s", "tensors", "failed"],
        [speed_row(row, result["repeats"]) for row in result["contenders"].values()],
    )
    print("\n* reading, quantizing and writing alone, without the plan.")
    print("\nTimes as fast, repeat by repeat, the same weights on both sides:\n")
    rows = []
    for pair, values in result["ratios"].items():
        ours, peer = pair.split(" / ")
        rows.append([f"{found[ours].name} / {found[peer].name}", *(spread(v, 1, 2) for v in values.values())])
    print_table(["ours / peer", "whole call", "without the plan*"], rows)
    for row in result["contenders"].values():
        for failure in sorted(set(row["failures"])):
            print(f"\n{row['name']} failed: {failure}")


def spread(value: dict[str, float] | None, factor: float, digits: int) -> str:
    """``median (min-max)``."""
    if value is None:
        return "-"
    median, low, high = (f"{value[k] * factor:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


def speed_row(row: dict[str, Any], repeats: int) -> list[str]:
    return [
        row["name"],
        spread(row["seconds"], 1, 3),
        spread(row["parameters_per_second"], 1e-6, 1),
        spread(row["parameters_per_second_of_work"], 1e-6, 1),
        spread(row["quantized_parameters_per_second"], 1e-6, 1),
        str(row["quantized_tensors"] or "-"),
        f"{len(row['failures'])}/{repeats}",
    ]


def main() -> None:
    args = parse_args()
    about, parameters, found = describe(), checkpoint_parameters(args.model), contenders(args)
    with tempfile.TemporaryDirectory(prefix="quantize-vs-peers-", dir=args.dir) as folder:
        take_turns(list(found.values()), args.repeats, Path(folder))
    result = {
        **about,
        "model": args.model.resolve().name,
        "parameters": parameters,
        "repeats": args.repeats,
        **evaluate(found, parameters),
    }
    print_results(result, found)
    write_json(args.json, result)
    if not args.peers_python:
        print("peers were not measured: pass --peers-python")


if __name__ == "__main__":
    main()
