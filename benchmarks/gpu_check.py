"""On a machine with a GPU: are the kernels right there, and how fast are they?

    benchmarks/gpu_check.sh [--output benchmarks/results/NAME.json] [--minutes 6]

First every kernel against the PyTorch reference on the same device (bytes for quantize, bits for dequantize,
tolerances for products), then CUDA graphs and `torch.compile`, then the table of speeds. Stops before its time
is up and says what it left out. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
import triton

from mxquant.codec.qtensor import QTensor, dequantize_parts
from mxquant.codec.rng import derive_key
from mxquant.codec.rounding import quantize_tensor
from mxquant.evals.speed import measure, measure_ceilings, seconds
from mxquant.kernels.triton.backend import TritonBackend
from mxquant.ops import operators as ops
from mxquant.schemes.formats import SCALES, QuantScheme

TRITON = TritonBackend()

DEVICE = torch.device("cuda")
BLOCKS = (8, 16, 32, 64, (32, 32), (16, 16))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (333, 1205)  # odd both ways; the even one is read in words and without masks
EVEN = (512, 4096)
SPEEDS = [
    *((m, n, k) for n, k in ((14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)) for m in (1, 16, 64)),
    (2048, 14336, 4096),
    (8192, 8192, 8192),
]


def weight(shape: tuple[int, int]) -> torch.Tensor:
    exponents = torch.randint(-20, 6, (shape[0], 1), device=DEVICE)
    return torch.randn(shape, device=DEVICE) * torch.exp2(exponents.float())


def schemes() -> Iterator[QuantScheme]:
    for scale in ("e8m0", "e4m3", "ue5m3"):
        rules = SCALES[scale].rules
        for i, (block, g) in enumerate(product(BLOCKS, (False, True))):
            rounding = ("nearest", "stochastic")[i % 2]
            yield QuantScheme(
                scale=scale, block=block, global_scale=g, scale_rule=rules[i % len(rules)], rounding=rounding
            )


def wrong_with_encoding(scheme: QuantScheme, shape: tuple[int, int]) -> Iterator[str]:
    w = weight(shape)
    q = quantize_tensor(w, scheme, seed=1, name="n")
    packed, scale = TRITON.quantize(w, scheme, derive_key(1, "n"), q.global_scale)
    if not torch.equal(scale.view(torch.uint8), q.scale.view(torch.uint8)):
        yield f"quantize {scheme.name} {shape}: scales differ"
    if not torch.equal(packed, q.packed):
        yield f"quantize {scheme.name} {shape}: {int((packed != q.packed).sum())} packed bytes differ"
    for dtype in DTYPES:
        got = TRITON.dequantize(q.packed, q.scale, q.global_scale, shape, scheme, dtype)
        view = torch.int32 if dtype == torch.float32 else torch.int16
        expected = dequantize_parts(q.packed, q.scale, q.global_scale, shape, scheme, dtype)
        if not torch.equal(got.view(view), expected.view(view)):
            yield f"dequantize {scheme.name} {shape} {dtype}: bits differ"


def too_far(y: torch.Tensor, exact: torch.Tensor) -> bool:
    error = (y.double() - exact).norm()
    if y.dtype == torch.float32:
        return not bool(error <= 1e-5 * exact.norm())
    return not bool(error <= 1.1 * (exact.to(y.dtype).double() - exact).norm())


def wrong_with_products(scheme: QuantScheme, shape: tuple[int, int]) -> Iterator[str]:
    w = torch.randn(shape, device=DEVICE)
    q = quantize_tensor(w, scheme)
    dense = dequantize_parts(q.packed, q.scale, q.global_scale, shape, scheme, torch.float32).double()
    parts = (q.packed, q.scale, q.global_scale)
    for m, dtype in product((1, 3, 16, 17, 64, 300), DTYPES):
        x, bias = torch.randn(m, shape[1], device=DEVICE).to(dtype), torch.randn(shape[0], device=DEVICE).to(dtype)
        if too_far(TRITON.linear(x, *parts, bias, shape, scheme), x.double() @ dense.T + bias.double()):
            yield f"linear {scheme.name} {shape} {m} rows {dtype}: too far from the exact product"
        grad = torch.randn(m, shape[0], device=DEVICE).to(dtype)
        if m in (3, 300) and too_far(TRITON.linear_grad(grad, *parts, shape, scheme), grad.double() @ dense):
            yield f"linear_grad {scheme.name} {shape} {m} rows {dtype}: too far from the exact product"


def wrong_with_graphs() -> Iterator[str]:
    scheme = QuantScheme()
    q: QTensor = ops.quantize(torch.randn(EVEN, device=DEVICE), scheme)
    for m in (1, 16, 64):
        x = torch.randn(m, EVEN[1], device=DEVICE, dtype=torch.bfloat16)
        expected = ops.linear(x, q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.linear(x, q)
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(y, expected):
            yield f"CUDA graph, {m} rows: another result"
        if not torch.equal(torch.compile(ops.linear, fullgraph=True)(x, q), expected):
            yield f"torch.compile, {m} rows: another result"


def quantize_speed(scheme: QuantScheme, bandwidth: float) -> dict[str, object]:
    n, k = 14336, 4096
    w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
    g = torch.ones(1, device=DEVICE) if scheme.global_scale else None
    taken = seconds(lambda: TRITON.quantize(w, scheme, 0, g), DEVICE)
    moved = 2 * w.numel() + scheme.nbytes((n, k))
    return {"scheme": scheme.name, "seconds": taken, "of_copy_bandwidth": moved / taken / bandwidth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=5.5)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    os.environ.pop("MXQUANT_KERNELS", None)
    torch.manual_seed(0)

    left_out: list[str] = []
    problems = list(wrong_with_graphs())
    checks = 6
    # Correctness gets at most 60 % of the time: most of it is compiling.
    for scheme in schemes():
        for shape, check in product((SHAPE, EVEN), (wrong_with_encoding, wrong_with_products)):
            if end - time.monotonic() < 24 * options.minutes:
                left_out.append(f"{check.__name__} {scheme.name} {shape}")
                continue
            problems += check(scheme, shape)
            checks += 1
    for problem in problems:
        print("WRONG", problem, file=sys.stderr)
    print(f"{checks} checks, {len(problems)} problems, {len(left_out)} left out", file=sys.stderr)

    top = measure_ceilings(torch.bfloat16, DEVICE)
    table = []
    for scheme, (m, n, k) in product((QuantScheme(), QuantScheme.preset("mxfp4"), QuantScheme.preset("nvfp4")), SPEEDS):
        if end - time.monotonic() < 10:
            left_out.append(f"speed {scheme.name} {m},{n},{k}")
            continue
        row = {"scheme": scheme.name} | measure("", m, n, k, scheme, torch.bfloat16, DEVICE, top).to_dict()
        table.append(row)
        print(
            f"{scheme.name:14} {m:5} {n:6} {k:6} {1e6 * row['seconds']:9.1f} us {row['speedup']:6.2f}x "
            f"{row['bandwidth'] / top.bandwidth:5.0%} of copy {row['of_ceiling']:5.0%} of ceiling"
        )
    quantizers = ("mxfp4", "nvfp4/absmax")
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "autotune": os.environ.get("MXQUANT_AUTOTUNE") == "1",
        "checks": checks,
        "problems": problems,
        "left_out": left_out,
        "copy_bandwidth": top.bandwidth,
        "dense_flops": top.flops,
        "products": table,
        "quantize": [quantize_speed(QuantScheme.parse(name), top.bandwidth) for name in quantizers],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
