# SPDX-License-Identifier: Apache-2.0
"""CPU kernels beside dense PyTorch and the machine's own limits, with the targets they are held to.

    python benchmarks/cpu_kernels.py [--size 4096] [--repeats 15] [--threads 2]

Contenders take turns, so that whatever else the machine does hits all alike; medians are compared.
The caches are flushed before each call, as the next layer of a model finds them. ``--quick`` is for
a look; ``load`` in the result says how busy the machine was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from ctypes import byref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe, print_table, write_json

import mxquant
import mxquant.ops
from mxquant import QuantScheme
from mxquant.kernels.cpu import backend, library

HERE = Path(__file__).parent
# M: at least this many times the speed of dense bf16.
LINEAR_TARGETS = {1: 4.5, 2: 4.0, 4: 3.0, 8: 2.1, 16: 1.5, 32: 1.1, 64: 1.1, 256: 0.97, 1024: 0.97}
RULES = ("absmax", "search", "four-over-six")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight (default 4096)")
    parser.add_argument("--repeats", type=int, default=15, help="turns each contender takes (default 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="few repeats, small M only")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "cpu_kernels.json")
    return parser.parse_args()


class Bench:
    """Times contenders in turns; between calls it writes more memory than any cache holds."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self._junk = torch.zeros(96 << 20, dtype=torch.uint8)

    def __call__(self, contenders: dict[str, Callable[[], Any]], repeats: int | None = None) -> dict[str, float]:
        """Median seconds of each."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range((repeats or self.repeats) + 1):
            for name, call in contenders.items():
                self._junk.add_(1)
                start = time.perf_counter()
                call()
                if turn:  # the first turn warms up
                    times[name].append(time.perf_counter() - start)
        return {name: statistics.median(t) for name, t in times.items()}


def at_level(level: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        library.set_level(level)
        call()

    return run


def quantize_into(w: torch.Tensor, scheme: QuantScheme) -> Callable[[], Any]:
    """Quantizing into memory that is already there, as ``copy_`` does."""
    q = mxquant.quantize(w, scheme)
    rule = backend._rule(scheme)
    job = library.QuantJob(
        x=w.data_ptr(), rows=w.shape[0], columns=w.shape[1], stride=w.stride(0), dtype=library.DTYPES[w.dtype],
        block_rows=1, block_columns=scheme.block, rule=rule.number, format=backend._format(scheme, 0.0),
        tables=backend._quant_tables(scheme, w.dtype, 0.0).data_ptr(), threads=torch.get_num_threads(),
        tries=len(rule.offsets), offsets=(backend.c_float * 16)(*rule.offsets),
        packed=q.packed.data_ptr(), scale=q.scale.data_ptr(),
    )  # fmt: skip
    return lambda: (library.library().mxq_quantize(byref(job)), q)


def dequantize_into(out: torch.Tensor, q: mxquant.QTensor) -> Callable[[], Any]:
    table = backend._decode_table(q.scheme.scale, out.dtype, 0.0)
    job = library.DequantJob(
        packed=q.packed.data_ptr(), scale=q.scale.data_ptr(), rows=q.shape[0], columns=q.shape[1],
        dtype=library.DTYPES[out.dtype], bits=4, block_rows=1, block_columns=q.scheme.block,
        format=backend._format(q.scheme, 0.0), table=table.data_ptr(), out=out.data_ptr(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return lambda: library.library().mxq_dequantize(byref(job))


def measure_elements(bench: Bench, size: int, levels: list[str]) -> list[dict[str, Any]]:
    """Quantizing and dequantizing beside a copy of the dense weight."""
    w = torch.randn(size, size).mul_(0.02).to(torch.bfloat16)
    out = torch.empty_like(w)
    contenders: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(w)}
    q = mxquant.quantize(w, QuantScheme(scale_rule="absmax"))
    for level in levels:
        for rule in RULES:
            contenders[f"quantize {rule}, {level}"] = at_level(level, quantize_into(w, QuantScheme(scale_rule=rule)))
        contenders[f"dequantize, {level}"] = at_level(level, dequantize_into(out, q))
    seconds = bench(contenders)
    targets = {
        "quantize absmax, avx512": (0.9, 8.0),
        "quantize absmax, avx2": (None, 6.0),
        "dequantize, avx512": (1.2, None),
    }
    rows = []
    for name, s in seconds.items():
        ratio, rate = targets.get(name, (None, None))
        rows.append(
            {
                "work": name,
                "elements_per_second": w.numel() / s,
                "ratio_to_copy": seconds["copy"] / s,
                "target_ratio": ratio,
                "target_rate": rate and rate * 1e9,
            }
        )
    return rows


def measure_linear(bench: Bench, size: int, levels: list[str], quick: bool) -> list[dict[str, Any]]:
    """The packed layer beside the dense one, bf16, for many numbers of rows."""
    w = torch.randn(size, size).mul_(0.02).to(torch.bfloat16)
    q = mxquant.quantize(w, QuantScheme(scale_rule="absmax"))
    rows = []
    for m, target in LINEAR_TARGETS.items():
        if quick and m > 64:
            continue
        x = torch.randn(m, size).to(torch.bfloat16)
        contenders: dict[str, Callable[[], Any]] = {"dense": lambda x=x: F.linear(x, w)}
        for level in levels:
            call = lambda x=x: backend.linear(x, q.packed, q.scale, None, None, q.shape, q.scheme)  # noqa: E731
            contenders[level] = at_level(level, call)
        seconds = bench(contenders, None if m < 64 else max(3, bench.repeats // 4))
        for level in levels:
            rows.append(
                {
                    "m": m,
                    "level": level,
                    "dense_us": seconds["dense"] * 1e6,
                    "packed_us": seconds[level] * 1e6,
                    "ratio": seconds["dense"] / seconds[level],
                    "target": target if level == "avx512" else 3.3 if m == 1 else None,
                    "gflops": 2e-9 * m * size * size / seconds[level],
                }
            )
    return rows


def measure_overhead() -> dict[str, float]:
    """Microseconds of a call whose work is next to nothing: through the module, and dense."""
    q = mxquant.quantize(torch.randn(16, 32), QuantScheme())
    packed, dense = mxquant.QuantLinear.from_qtensor(q), torch.nn.Linear(32, 16, bias=False)
    x, found = torch.randn(1, 32), {}
    with torch.inference_mode():
        for name, layer in (("packed", packed), ("dense", dense)):
            times = []
            for _ in range(20):
                start = time.perf_counter()
                for _ in range(200):
                    layer(x)
                times.append((time.perf_counter() - start) / 200)
            found[name] = min(times) * 1e6
    return found


def met(value: float, target: float | None) -> str:
    return "" if target is None else "met" if value >= target else f"{value / target:.0%}"


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    load = os.getloadavg()
    best = library.best_level()
    levels = [level for level in ("avx512", "avx2") if library.LEVELS.index(level) <= library.LEVELS.index(best)]
    bench = Bench(5 if args.quick else args.repeats)
    elements = measure_elements(bench, args.size, levels)
    print_table(
        ["work", "G/s", "x copy", "target G/s", "target x copy", ""],
        [
            [
                r["work"],
                f"{r['elements_per_second'] / 1e9:.2f}",
                f"{r['ratio_to_copy']:.2f}",
                f"{r['target_rate'] / 1e9:.1f}" if r["target_rate"] else "",
                f"{r['target_ratio']:.2f}" if r["target_ratio"] else "",
                met(r["ratio_to_copy"], r["target_ratio"]) or met(r["elements_per_second"], r["target_rate"]),
            ]
            for r in elements
        ],
    )
    print()
    linear = measure_linear(bench, args.size, levels, args.quick)
    print_table(
        ["linear", "dense us", "packed us", "ratio", "target", "", "GFLOP/s"],
        [
            [
                f"M = {r['m']}, {r['level']}",
                f"{r['dense_us']:.0f}",
                f"{r['packed_us']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['target']:.2f}" if r["target"] else "",
                met(r["ratio"], r["target"]),
                f"{r['gflops']:.0f}",
            ]
            for r in linear
        ],
    )
    library.set_level(best)
    overhead = measure_overhead()
    print(f"\nper call: packed {overhead['packed']:.1f} us, dense {overhead['dense']:.1f} us")
    print(f"load average before and after: {load[0]:.1f}, {os.getloadavg()[0]:.1f}; {args.threads} threads")
    write_json(
        args.json,
        {
            **describe(),
            "load_before": load,
            "load_after": os.getloadavg(),
            "threads": args.threads,
            "elements": elements,
            "linear": linear,
            "overhead_us": overhead,
        },
    )


if __name__ == "__main__":
    main()
