"""What ``mxquant quantize`` prints for people."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.cli.common import human_bytes, output_console, printable
from mxquant.presentation.table import Marked, Table

if TYPE_CHECKING:
    from mxquant.convert.plan import QuantPlan, TensorPlan
    from mxquant.convert.report import QuantReport


def print_plan(plan: QuantPlan, out: Path) -> None:
    """The whole plan: every kind of tensor, what becomes of it and why."""
    table = Table.of(f"Plan for {plan.source}", ("tensor", "shape", "becomes", "because"), ("count", "before", "after"))
    for pattern, members in _alike(plan.tensors):
        t = members[0]
        table.add(
            pattern.removesuffix(".weight"),
            f"{t.dtype} {'x'.join(map(str, t.shape))}",
            Marked(t.scheme.name, "green") if t.scheme else "dense",
            t.reason,
            str(len(members)),
            human_bytes(sum(m.bytes_before for m in members)),
            human_bytes(sum(m.bytes_after for m in members)),
        )
    for name, source in plan.tied.items():
        table.add(name.removesuffix(".weight"), "", "shared", f"tied to {source}", "1", "0 B", "0 B")
    output_console().print(table)
    for warning in plan.warnings:
        output_console().print(f"[yellow]Warning:[/] {escape(printable(warning))}", soft_wrap=True)
    print_plan_summary(plan, out)


def print_plan_summary(plan: QuantPlan, out: Path) -> None:
    """A few lines: how much is quantized, to what size, in which format on disk."""
    quantized = sum(t.parameters for t in plan.quantized)
    lines = [
        f"Quantize {len(plan.quantized)} of {len(plan.tensors)} tensors, {quantized / 1e6:.1f} of "
        f"{plan.parameters / 1e6:.1f} M parameters, at {plan.bits_per_weight:.3f} bits per weight.",
        f"Size {human_bytes(plan.bytes_before)} -> {human_bytes(plan.bytes_after)} "
        f"in {len(plan.shards)} file{'s' * (len(plan.shards) > 1)}; "
        f"about {human_bytes(plan.peak_bytes)} of memory for the work"
        f"{_held(plan)}.",
        *_when_it_runs(plan),
        f"On disk: {plan.on_disk} ({plan.on_disk_reason}).",
        f"Output: {out}",
    ]
    for line in lines:
        output_console().print(line, soft_wrap=True)


def _held(plan: QuantPlan) -> str:
    return f", {human_bytes(plan.held_bytes)} of it for the source, which cannot be mapped" if plan.held_bytes else ""


def _when_it_runs(plan: QuantPlan) -> list[str]:
    found = {"activations": plan.activations, "KV cache": plan.kv_cache}
    said = [f"{what} {text}" for what, text in found.items() if text != "none"]
    return [f"As it runs: {', '.join(said)} (simulated; not stored)."] if said else []


def print_report(report: QuantReport) -> None:
    """What it cost: error by group of layers, what stayed dense, time and memory."""
    columns = ("count", "params", "rel. error", "SQNR dB", "bits/w", "size", "saturated")
    table = Table.of("Quantized", ("layers", "scheme"), columns)
    for row in report.groups():
        table.add(
            row["projection"],
            row["scheme"],
            str(row["tensors"]),
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['relative_error']:.4f}",
            "inf" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}",
            f"{row['bits_per_weight']:.3f}",
            human_bytes(row["bytes"]),
            f"{row['saturated'] / row['elements']:.2%}",
        )
    output_console().print(table)
    dense = Table.of("Stayed dense", ("because", "e.g."), ("count", "params", "size"))
    for row in report.dense():
        count, parameters = str(row["tensors"]), f"{row['parameters'] / 1e6:.2f} M"
        dense.add(row["reason"], row["example"], count, parameters, human_bytes(row["bytes"]))
    output_console().print(dense)
    _print_totals(report)


def _print_totals(report: QuantReport) -> None:
    plan, total = report.plan, report.total
    memory = "unknown" if report.peak_bytes is None else human_bytes(report.peak_bytes - (report.base_bytes or 0))
    rate = f"{report.parameters_per_second / 1e6:.0f} M parameters/s"
    head = report.headline()
    error, zero = head["worst_relative_error"], head["worst_zero_scales"]
    coarse = total.subnormal_scales / total.blocks if total.blocks else 0.0
    lines = [
        f"Relative error: {head['mean_relative_error']:.4f} in the mean of the layers, at worst {error['value']:.4f} "
        f"({error['layer']}).",
        f"Block scales: {total.zero_share:.2%} zero"
        f"{' (at worst {share:.1%}, {layer})'.format(**zero) if zero['share'] else ''}, "
        f"{coarse:.2%} subnormal. {plan.bits_per_weight:.3f} bits per quantized weight.",
        f"{human_bytes(plan.bytes_before)} -> {human_bytes(plan.bytes_after)} "
        f"({plan.bytes_before / plan.bytes_after:.2f}x smaller) in {report.seconds:.2f} s ({rate}); "
        f"peak memory for the work {memory}.",
        f"Wrote {report.out} ({plan.on_disk} format).",
    ]
    for line in lines:
        output_console().print(line, soft_wrap=True)


def _alike(tensors: list[TensorPlan]) -> list[tuple[str, list[TensorPlan]]]:
    """Tensors whose names differ in numbers only and that share shape, dtype and fate."""
    groups: dict[tuple[object, ...], list[TensorPlan]] = defaultdict(list)
    for t in tensors:
        groups[with_wildcards(t.name), t.shape, t.dtype, t.scheme, t.reason].append(t)
    return [(str(key[0]) if len(members) > 1 else members[0].name, members) for key, members in groups.items()]
