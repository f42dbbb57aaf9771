"""Compile every Triton kernel for every supported chip, on any machine, and print what it became.

    python benchmarks/kernel_table.py                   # all of it, as Markdown
    python benchmarks/kernel_table.py --write           # put the rows that represent it into docs/kernels.md
    python benchmarks/kernel_table.py --json out.json --chip sm_90 --full

No GPU is needed: Triton compiles for a named chip. ``--full`` compiles all scale formats and block
shapes and every candidate of the tile lists, else the ones that a shape of each class is served with.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from compiled_kernels import CHIPS, figures

from mxquant.kernels.triton import backend, dequantize, gradient, grouped, linear, native, quantize
from mxquant.kernels.triton.configs import candidates
from mxquant.kernels.triton.launch import Launch
from mxquant.schemes.formats import QuantScheme

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
N, K = 14336, 4096  # Llama 3 8B's up projection, and that of Mixtral's experts
EXPERTS = 8
SCHEMES = {
    "ue5m3/16": QuantScheme(scale="ue5m3", block=16),
    "mxfp4": QuantScheme.preset("mxfp4"),
    "nvfp4": QuantScheme.preset("nvfp4", scale_rule="absmax"),
    "e8m0/32x32": QuantScheme(scale="e8m0", block=(32, 32), scale_rule="rceil", rounding="stochastic"),
}
# Chips whose tensor cores multiply block-scaled FP4 of a scheme.
NATIVE = {name: backend.NATIVE[backend.key(SCHEMES[name])] for name in ("mxfp4", "nvfp4")}
MORE = {
    f"{scale}/{block}{'+global' if g else ''}": QuantScheme(scale=scale, block=block, global_scale=g)
    for scale in ("e8m0", "e4m3", "ue5m3")
    for block in (8, 24, 64, (16, 16))
    for g in (False, True)
}


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def parts(scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed elements, scales and global scale of an ``[N, K]`` weight, without memory."""
    fp32 = meta((1,), torch.float32) if scheme.global_scale else None
    return meta(scheme.packed_shape((N, K)), torch.uint8), meta(scheme.scale_shape((N, K)), torch.uint8), fp32


def products(scheme: QuantScheme, dtype: torch.dtype, full: bool) -> Iterator[tuple[str, Launch]]:
    """The linear kernels for one row, a few and many."""
    for rows in (1, 16, 64, 2048):
        x, out = meta((rows, K), dtype), meta((rows, N), dtype)
        bias = meta((N,), dtype)
        found = candidates(rows, N, K, linear.terms(dtype, scheme))
        for config in found if full else found[:1]:
            name = f"linear {str(dtype).removeprefix('torch.')} {rows} [{config.name}]"
            for launch in linear.plan(x, *parts(scheme), bias, out, scheme, config):
                step = "reduce " if "splits" in launch.arguments else ""
                yield step + name, launch


def experts_product(scheme: QuantScheme, rows_each: int) -> Launch:
    """The products of the experts of a mixture, in bf16."""
    packed, scale, g = (None if t is None else meta((EXPERTS, *t.shape), t.dtype) for t in parts(scheme))
    m = EXPERTS * rows_each
    x, out = meta((m, K), torch.bfloat16), meta((m, N), torch.bfloat16)
    g = None if g is None else meta((EXPERTS,), torch.float32)
    return grouped.plan(x, meta((EXPERTS,), torch.int32), packed, scale, g, None, out, scheme)


def cases(full: bool = False) -> dict[tuple[str, str], Launch]:
    """(kernel, scheme) -> the launch to compile."""
    found: dict[tuple[str, str], Launch] = {}
    for name, scheme in (SCHEMES | MORE if full else SCHEMES).items():
        packed, scale, g = parts(scheme)
        for kernel, launch in products(scheme, torch.bfloat16, full and name in SCHEMES):
            found[kernel, name] = launch
        if name == "ue5m3/16" or full:
            for dtype in (torch.float16, torch.float32):
                found |= {(kernel, name): launch for kernel, launch in products(scheme, dtype, False)}
        weight = meta((N, K), torch.bfloat16)
        if scheme.block != 24:
            found["quantize", name] = quantize.plan(weight, packed, scale, g, meta((1,), torch.int32), scheme, 1 << 63)
        found["dequantize", name] = dequantize.plan(packed, scale, g, weight, scheme)
        grad, out = meta((2048, N), torch.bfloat16), meta((2048, K), torch.bfloat16)
        found["gradient", name] = gradient.plan(grad, packed, scale, g, out, scheme)
        for rows_each in (4, 256) if name in ("ue5m3/16", "nvfp4") or full else ():
            found[f"grouped {EXPERTS} experts, {rows_each} rows each", name] = experts_product(scheme, rows_each)
        if name in NATIVE:
            rows, shape = meta((2048, N), torch.bfloat16), (2048, K)
            x = (meta(scheme.packed_shape(shape), torch.uint8), meta(scheme.scale_shape(shape), torch.uint8), g)
            found["native W4A4", name] = native.plan(x, (packed, scale, g), None, rows, scheme)
    return found


def compiles(chip: str, kernel: str, scheme: str) -> bool:
    return kernel != "native W4A4" or chip in NATIVE[scheme]


def measure(job: tuple[str, str, str, bool]) -> dict[str, object]:
    """Figures of one kernel on one chip, as a row."""
    chip, kernel, scheme, full = job
    launch = cases(full)[kernel, scheme]
    row = {"chip": chip, "kernel": kernel, "scheme": scheme, "shared_limit": CHIPS[chip].shared}
    return row | {"bytes_per_weight": bytes_per_weight(scheme)} | figures(launch, CHIPS[chip]).to_dict()


def bytes_per_weight(scheme: str) -> float:
    return round((SCHEMES | MORE)[scheme].nbytes((N, K)) / (N * K), 4)


def rows(chips: list[str], full: bool, workers: int) -> list[dict[str, object]]:
    jobs = [(chip, *key, full) for chip in chips for key in cases(full) if compiles(chip, *key)]
    if workers == 1:
        return [measure(job) for job in jobs]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(measure, jobs, chunksize=2))


def markdown(table: list[dict[str, object]]) -> str:
    head = ("chip", "kernel", "scheme", "registers", "spills", "shared", "occupancy", "bytes", "instructions", "matrix")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in table:
        matrix = ", ".join(f"{n} {name}" for name, n in r["matrix"].items()) or "none"  # type: ignore[attr-defined]
        cells = (r["chip"], r["kernel"], r["scheme"], r["registers"], r["spills"], r["shared"])
        share = f"{100 * float(r['occupancy']):.0f} %"  # type: ignore[arg-type]
        lines.append(
            "| " + " | ".join(map(str, (*cells, share, r["bytes_per_weight"], r["per_weight"], matrix))) + " |"
        )
    return "\n".join(lines)


def is_on_page(row: dict[str, object]) -> bool:
    """Whether docs/kernels.md has the row: one scheme in bf16, and FP4 times FP4, stand for the rest."""
    kernel, scheme = str(row["kernel"]), row["scheme"]
    other_dtype = "float16 " in kernel.replace("bfloat16", "") or "float32" in kernel
    return kernel == "native W4A4" or (scheme == "ue5m3/16" and not other_dtype and not kernel.startswith("reduce"))


def write(table: str) -> None:
    """Replace what is between the marks in docs/kernels.md."""
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(r"(<!-- table -->\n).*(\n<!-- end of table -->)", lambda m: m[1] + table + m[2], text, flags=re.S)
    PAGE.write_text(new, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="default: all")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    table = rows(options.chip or list(CHIPS), options.full, options.workers)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(markdown([row for row in table if is_on_page(row)]))
    if not options.json and not options.write:
        print(markdown(table))


if __name__ == "__main__":
    main()
