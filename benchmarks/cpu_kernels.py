# SPDX-License-Identifier: Apache-2.0
"""CPU kernels beside dense PyTorch and the machine's own limits, with the targets they are held to.

    python benchmarks/cpu_kernels.py [--size 4096] [--repeats 15] [--threads 2]

Contenders take turns, so that whatever else the machine does hits all alike; medians are compared.
The caches are flushed before each call, as the next layer of a model finds its weight. ``--quick`` is for
a look; ``load`` in the result says how busy the machine was. The rows about whole models are those that
generate_speed.py and large_checkpoint_memory.py left in ``results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from ctypes import byref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe, print_table, write_json
from turns import Turns

import mxquant
from mxquant import QuantScheme
from mxquant.kernels.cpu import backend, library

RESULTS = Path(__file__).parent / "results"
# M: at least this many times the speed of dense bf16.
LINEAR_TARGETS = {1: 4.5, 2: 4.0, 4: 3.0, 8: 2.1, 16: 1.5, 32: 1.1, 64: 1.1, 256: 0.97, 1024: 0.97}
AVX2_TARGET = 3.3  # of one row
RULES = ("absmax", "search", "four-over-six")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight (default 4096)")
    parser.add_argument("--repeats", type=int, default=15, help="turns each contender takes (default 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="few repeats, small M only")
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu_kernels.json")
    return parser.parse_args()


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


def packed_layer(w: torch.Tensor) -> mxquant.QuantLinear:
    return mxquant.QuantLinear.from_qtensor(mxquant.quantize(w, QuantScheme(scale_rule="absmax")))


def measure_elements(turns: Turns, size: int, levels: list[str]) -> list[dict[str, Any]]:
    """Quantizing and dequantizing beside a copy of the dense weight."""
    w = torch.randn(size, size).mul_(0.02).to(torch.bfloat16)
    out = torch.empty_like(w)
    contenders: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(w)}
    q = mxquant.quantize(w, QuantScheme(scale_rule="absmax"))
    for level in levels:
        for rule in RULES:
            contenders[f"quantize {rule}, {level}"] = at_level(level, quantize_into(w, QuantScheme(scale_rule=rule)))
        contenders[f"dequantize, {level}"] = at_level(level, dequantize_into(out, q))
    seconds = turns(contenders)
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


def measure_linear(turns: Turns, size: int, levels: list[str], quick: bool) -> list[dict[str, Any]]:
    """The packed layer beside the dense one, bf16, for many numbers of rows."""
    w = torch.randn(size, size).mul_(0.02).to(torch.bfloat16)
    layer, small = (packed_layer(weight) for weight in (w, w[:32, :64]))
    rows = []
    for m, target in LINEAR_TARGETS.items():
        if quick and m > 64:
            continue
        x = torch.randn(m, size).to(torch.bfloat16)
        contenders: dict[str, Callable[[], Any]] = {"dense": lambda x=x: F.linear(x, w)}
        contenders |= {level: at_level(level, lambda x=x: layer(x)) for level in levels}
        code: dict[str, Callable[[], Any]] = {"dense": lambda x=x: F.linear(x[:, :64], w[:32, :64])}
        code |= {level: at_level(level, lambda x=x: small(x[:, :64])) for level in levels}
        seconds = turns(contenders, None if m < 64 else max(3, turns.repeats // 4), code)
        for level in levels:
            rows.append(
                {
                    "m": m,
                    "level": level,
                    "dense_us": seconds["dense"] * 1e6,
                    "packed_us": seconds[level] * 1e6,
                    "ratio": seconds["dense"] / seconds[level],
                    "target": target if level == "avx512" else AVX2_TARGET if m == 1 else None,
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


def measure_limits() -> dict[str, Any]:
    """Operations a second of the instruction that multiplies, on registers alone."""
    peak = library.peak_flops(torch.bfloat16, seconds=1.0)
    return {"instruction": library.product_instruction(torch.bfloat16), "instruction_flops": peak}


def earlier(name: str) -> dict[str, Any] | None:
    """The result of another script, if it left one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table_of(result: dict[str, Any]) -> list[list[str]]:
    """Work, what was measured, the target, and how far that was met."""
    rows = []
    for r in result["elements"]:
        rate, ratio = r["elements_per_second"] / 1e9, r["ratio_to_copy"]
        wanted = [(rate, r["target_rate"] and r["target_rate"] / 1e9), (ratio, r["target_ratio"])]
        targets = [f"{t:.1f}{unit}" for (_, t), unit in zip(wanted, (" G/s", "x"), strict=True) if t]
        rows.append([r["work"], f"{rate:.2f} G/s, {ratio:.2f}x copy", " and ".join(targets), met(wanted)])
    for r in result["linear"]:
        rows.append(
            [
                f"linear M = {r['m']}, {r['level']}",
                f"{r['packed_us']:.0f} us, {r['ratio']:.2f}x dense, {r['gflops']:.0f} GFLOP/s",
                f"{r['target']:.2f}x" if r["target"] else "",
                met([(r["ratio"], r["target"])]),
            ]
        )
    overhead = result["overhead_us"]
    rows.append(
        [
            "a call of a tiny layer",
            f"{overhead['packed']:.1f} us, dense {overhead['dense']:.1f} us",
            "10 us",
            met([(10.0 / overhead["packed"], 1.0)]),
        ]
    )
    if g := earlier("generate_speed"):
        speed = f"{g['packed_tokens_per_second']:.1f} tokens/s, {g['ratio']:.2f}x dense"
        rows.append([f"generate, {g['model']}", speed, "1.8x", met([(g["ratio"], 1.8)])])
    if c := earlier("large_checkpoint_memory"):
        slower, memory = c["wall_seconds"] / c["copy_seconds"], c["peak_rss_anon_bytes"] / 1e9
        rows.append(
            [
                f"{c['parameters'] / 1e9:.1f}e9 parameters, files",
                f"{c['wall_seconds']:.1f} s, {slower:.2f}x copying, {memory:.2f} GB",
                "1.5x, 3 GB",
                met([(1.5 / slower, 1.0), (3 / memory, 1.0)]),
            ]
        )
    return rows


def met(wanted: list[tuple[float, float | None]]) -> str:
    """``met``, or the share of the target that was reached; nothing without a target."""
    shares = [value / target for value, target in wanted if target]
    if not shares:
        return ""
    return "met" if min(shares) >= 1 else f"{min(shares):.0%}"


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    load = os.getloadavg()
    best = library.best_level()
    levels = [level for level in ("avx512", "avx2") if library.LEVELS.index(level) <= library.LEVELS.index(best)]
    turns = Turns(5 if args.quick else args.repeats)
    result: dict[str, Any] = {**describe(), "load_before": load, "threads": args.threads, "size": args.size}
    result |= {"limits": measure_limits(), "elements": measure_elements(turns, args.size, levels)}
    result["linear"] = measure_linear(turns, args.size, levels, args.quick)
    library.set_level(best)
    result |= {"overhead_us": measure_overhead(), "load_after": os.getloadavg()}
    print_table(["work", "measured", "target", ""], table_of(result))
    copied = next(r for r in result["elements"] if r["work"] == "copy")["elements_per_second"] * 4
    limits = result["limits"]
    print(f"\ncopy {copied / 1e9:.1f} GB/s; {limits['instruction']} {limits['instruction_flops'] / 1e9:.0f} GFLOP/s")
    print(f"load average before and after: {load[0]:.1f}, {result['load_after'][0]:.1f}; {args.threads} threads")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
