"""How fast packed linear layers are: against the dense layer, and against what the machine can do.

Ceilings are measured, not looked up: the bandwidth of a large copy and the speed of a large dense product.
A packed product cannot be faster than its bytes at the one and its multiplications at the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from mxquant.errors import MXQuantError
from mxquant.ops.backends import explain
from mxquant.ops.operators import dequantize, linear, quantize
from mxquant.presentation import picture
from mxquant.schemes.formats import QuantScheme

_SECONDS = 0.2  # of measuring, for each product
_CACHES = 96 << 20  # bytes, more than the caches of a CPU hold


@dataclass(frozen=True)
class Shape:
    """``count`` layers ``[n, k]`` of a model, by the name of the first."""

    name: str
    n: int
    k: int
    count: int = 1


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second that a copy reads and writes, and floating-point operations a second of a dense product.

    On CPUs also those of ``instruction``, with which the kernels multiply, on registers alone; None elsewhere.
    """

    bandwidth: float
    flops: float
    instruction: str | None = None
    instruction_flops: float | None = None

    @property
    def most_flops(self) -> float:
        return max(self.flops, self.instruction_flops or 0)


@dataclass(frozen=True)
class Speed:
    """One product ``[m, k] x [n, k]^T``, packed and dense; times in seconds, rates by the second.

    ``bytes`` counts packed weight, scales, activations and result once each. ``of_ceiling``: the time that
    the ceilings would allow over the time it took. ``error``: relative to the exact product with the
    dequantized weight (Frobenius, float64).
    """

    name: str
    m: int
    n: int
    k: int
    served_by: str
    why: str
    seconds: float
    dense_seconds: float
    bytes: int
    error: float
    of_ceiling: float

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k / self.seconds

    @property
    def bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        rates = {"flops": self.flops, "bandwidth": self.bandwidth, "speedup": self.speedup}
        return asdict(self) | rates


def model_shapes(model: str) -> list[Shape]:
    """The different shapes of a model's linear layers, from its config alone (a folder or a hub id)."""
    from mxquant.transformers.architectures import build_meta_model, inventory

    found: dict[tuple[int, ...], list[str]] = {}
    for parameter in inventory(build_meta_model(Path(model))):
        if parameter.quantizable and parameter.tied_to is None:
            found.setdefault(parameter.shape, []).append(parameter.module)
    if not found:
        raise MXQuantError(f"{model} has no linear layers that could be quantized")
    return [Shape(names[0], n, k, len(names)) for (n, k), names in found.items()]


def explain_shapes(
    shapes: Sequence[Shape], rows: Sequence[int], scheme: QuantScheme, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """Which implementation serves each layer, and why; computes nothing."""
    found = []
    for shape in shapes:
        for m in rows:
            x = torch.empty(m, shape.k, dtype=dtype, device="meta")
            by, why = explain("linear", x, (shape.n, shape.k), scheme, device_type=device.type)
            found.append({**asdict(shape), "rows": m, "served_by": by, "why": why})
    return found


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """A copy of 256 MiB (64 on a CPU), a product of 8192 (1024) squared, and on CPUs the kernels' instruction."""
    gpu = device.type == "cuda"
    source = torch.empty((256 if gpu else 64) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if gpu else 1024
    a = torch.randn(size, size, dtype=dtype, device=device)
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source), device)
    flops = 2 * size**3 / seconds(lambda: F.linear(a, a), device)
    library = cpu_library() if device.type == "cpu" else None
    if library is None:
        return Ceilings(copied, flops)
    return Ceilings(copied, flops, library.product_instruction(dtype), library.peak_flops(dtype))


def cpu_library() -> Any:
    """The compiled kernels for CPUs, or None."""
    from mxquant.kernels.cpu import library

    return None if isinstance(library.load(), str) else library


def measure(
    name: str, m: int, n: int, k: int, scheme: QuantScheme, dtype: torch.dtype, device: torch.device, top: Ceilings
) -> Speed:
    """Time one product with random weights and activations."""
    generator = torch.Generator(device).manual_seed(0)
    w = (torch.randn(n, k, generator=generator, device=device) * 0.02).to(dtype)
    x = torch.randn(m, k, generator=generator, device=device).to(dtype)
    q = quantize(w, scheme)
    y = linear(x, q)
    some = torch.arange(0, n, max(1, n // 256), device=device)
    exact = x.double() @ dequantize(q)[some].double().T
    error = float((y[:, some].double() - exact).norm() / exact.norm())
    taken, dense = turns(device, lambda: linear(x, q), lambda: F.linear(x, w))
    size = q.nbytes + x.numel() * x.element_size() + y.numel() * y.element_size()
    by, why = explain("linear", x, (n, k), scheme, device_type=device.type)
    ideal = max(size / top.bandwidth, 2 * m * n * k / top.most_flops)
    return Speed(name, m, n, k, by, why, taken, dense, size, error, ideal / taken)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; see :func:`turns`."""
    return turns(device, function)[0]


def turns(device: torch.device, *functions: Callable[[], object]) -> list[float]:
    """Median time of a call of each, with the caches cleared before it, as the next layer of a model finds them.

    On a CPU they take turns, so that whatever else the machine does hits all alike.
    """
    if device.type == "cuda":
        return [_seconds_cuda(function, device) for function in functions]
    flush = torch.zeros(_CACHES, dtype=torch.uint8)
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    while len(times[0]) < 3 or (sum(map(sum, times)) < _SECONDS * len(functions) and len(times[0]) < 30):
        for function, taken in zip(functions, times, strict=True):
            flush.add_(1)
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]


def _seconds_cuda(function: Callable[[], object], device: torch.device) -> float:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(30)]
    for _ in range(5):
        function()
    for start_event, end_event in events:
        flush.zero_()
        start_event.record()
        function()
        end_event.record()
    torch.cuda.synchronize(device)
    return median(a.elapsed_time(b) for a, b in events) / 1000


def plot_roofline(results: Sequence[Speed], top: Ceilings, path: Path, title: str) -> None:
    """Operations a second over operations a byte, under the roof of the measured ceilings."""
    picture.check_format(path)
    figure = picture.new_figure(6.4, 4.2)
    axis = figure.subplots()
    intensity = [2 * r.m * r.n * r.k / r.bytes for r in results]
    low, ridge = min(intensity) / 2, top.most_flops / top.bandwidth
    xs = [low, ridge, max(*intensity, ridge) * 2]
    axis.plot(
        xs, [min(top.most_flops, x * top.bandwidth) / 1e12 for x in xs], color=picture.GREY, label="measured ceilings"
    )
    for number, m in enumerate(dict.fromkeys(r.m for r in results)):
        chosen = [(i, r) for i, r in zip(intensity, results, strict=True) if r.m == m]
        color = picture.COLORS[number % len(picture.COLORS)]
        axis.scatter([i for i, _ in chosen], [r.flops / 1e12 for _, r in chosen], label=f"{m} rows", color=color)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title=title)
    axis.legend()
    picture.save(figure, path)
