"""What ``mxquant inspect`` prints for people."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.checkpoint.headers import TensorInfo
from mxquant.cli.common import human_bytes, output_console
from mxquant.inspection.statistics import DenseStats, ElementStats, ScaleStats
from mxquant.inspection.summary import Inspection, WeightSummary
from mxquant.presentation.table import Column, Marked, Table

if TYPE_CHECKING:
    from rich.console import Console

_SIZES = ("count", "shape", "bits/w", "size")
_SHARES = ("zero scale", "subnormal", "max scale", "zero code", "max code")
_BAR = 40
_BARS = Column("", is_text=True)
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Long and of no interest here: which layers have which scheme is in the table.
_LONG = ("modules", "schemes", "config_groups", "ignore", "exclude", "exclude_modules", "modules_to_not_convert")


def print_inspection(found: Inspection) -> None:
    """The whole checkpoint: how it is quantized, its weights by kind, histograms, what is dense."""
    out = output_console()
    for line in _headline(found):
        out.print(line, soft_wrap=True)
    if found.weights:
        out.print(weight_table(found.weights))
    for name, scales in found.scale_stats().items():
        print_scales(out, scales, f"Block scales of {name}")
    out.print(_dense_table(found))


def _headline(found: Inspection) -> list[str]:
    names = ", ".join(found.checkpoint.config.get("architectures") or ["unknown architecture"])
    files = len({t.file for t in found.checkpoint.tensors.values()})
    size = human_bytes(found.checkpoint.nbytes)
    lines = [
        f"{found.checkpoint.folder}: {names}",
        f"{found.parameters / 1e6:,.1f} M parameters, {size} in {files} file{'s' * (files > 1)}, "
        f"{8 * found.checkpoint.nbytes / max(1, found.parameters):.2f} bits per parameter",
    ]
    if found.unknown is not None:
        lines.append(f"[yellow]Not understood:[/] {found.unknown}; parameters are counted as stored.")
    elif found.method is None:
        lines.append("Dense: the config names no quantization.")
    else:
        share = found.packed_parameters / max(1, found.parameters)
        bits = f"{found.bits_per_weight:.3f}" if found.bits_per_weight else "no"
        lines.append(f"Quantized by {found.method}: {share:.1%} of the parameters, {bits} bits per packed weight.")
    if found.quantization:
        said = {k: v for k, v in found.quantization.items() if k not in _LONG and v is not None}
        lines.append(f"Config: {json.dumps(said)}")
    return lines


def weight_table(weights: list[WeightSummary]) -> Table:
    """Sizes of the weights by kind and, where the values were read, shares of their scales and codes."""
    groups = _alike((w, w.weight.name, (w.weight.scheme, w.weight.shape)) for w in weights)
    read = weights[0].scales is not None
    shares = [Column(name, group="shares") for name in _SHARES] if read else []
    table = Table.of("Packed weights", ("weight", "scheme"), (*_SIZES, *shares))
    for pattern, members in groups:
        name = pattern.removesuffix(".weight"), members[0].weight.scheme.name
        table.add(*name, *_sizes(members), *(_shares(members) if read else ()))
    return table


def _sizes(members: list[WeightSummary]) -> list[str]:
    first = members[0].weight
    stack = f"{first.experts} x " if first.experts is not None else ""
    parameters, nbytes = sum(w.weight.parameters for w in members), sum(w.nbytes for w in members)
    shape = f"{stack}{first.shape[0]} x {first.shape[1]}"
    return [str(len(members)), shape, f"{8 * nbytes / parameters:.3f}", human_bytes(nbytes)]


def _shares(members: list[WeightSummary]) -> list[str]:
    scheme = members[0].weight.scheme
    scales, elements = ScaleStats(scheme.scale_format), ElementStats(scheme.element_format)
    for w in members:
        assert w.scales is not None
        assert w.elements is not None
        scales.merge(w.scales)
        elements.merge(w.elements)
    of_scales = [share(n, scales.count) for n in (scales.zero, scales.subnormal, scales.largest)]
    return of_scales + [share(n, elements.count) for n in (elements.zero, elements.largest)]


def _dense_table(found: Inspection) -> Table:
    """Tensors that are not packed weights; what they hold, where that was read."""
    parts = {part.name for w in found.weights for part in w.weight.parts.values()}
    others = [t for t in found.checkpoint.tensors.values() if t.name not in parts]
    read = bool(found.dense)
    table = Table.of(
        "Other tensors", ("tensor", "what"), ("count", "dtype", "shape", "size", *(("std", "largest") if read else ()))
    )
    for pattern, members in _alike((t, t.name, (t.dtype, t.shape, found.roles[t.name])) for t in others):
        first = members[0]
        cells = [str(len(members)), first.dtype, " x ".join(map(str, first.shape)) or "one"]
        cells.append(human_bytes(sum(t.nbytes for t in members)))
        if read:
            stats = [found.dense[t.name] for t in members if t.name in found.dense]
            largest = max((s.amax for s in stats), default=None)
            cells += [_spread(stats), "-" if largest is None else f"{largest:.4g}"]
        table.add(pattern, found.roles[first.name], *cells)
    return table


def _spread(stats: list[DenseStats]) -> str | Marked:
    """The standard deviation over the values of several tensors; what is not finite shows."""
    if any(s.nan or s.infinite for s in stats):
        return Marked("not finite", "red")
    count = sum(s.count for s in stats)
    if not count:
        return "-"
    mean = sum(s.total for s in stats) / count
    return f"{max(0.0, sum(s.squares for s in stats) / count - mean**2) ** 0.5:.4g}"


def _alike(rows: Iterable[tuple[Any, str, Any]]) -> list[tuple[str, list[Any]]]:
    """Things whose names differ in numbers only and that agree in ``key``."""
    groups: dict[Any, list[tuple[Any, str]]] = defaultdict(list)
    for thing, name, key in rows:
        groups[with_wildcards(name), key].append((thing, name))
    return [(key[0] if len(m) > 1 else m[0][1], [thing for thing, _ in m]) for key, m in groups.items()]


def print_tensor(info: TensorInfo, content: WeightSummary | DenseStats | None) -> None:
    """One tensor: what it is, and its histograms."""
    out = output_console()
    shape = " x ".join(map(str, info.shape)) or "one number"
    out.print(f"{info.name}: {info.dtype} {shape}, {human_bytes(info.nbytes)}, in {info.file.name}", soft_wrap=True)
    if isinstance(content, WeightSummary):
        _print_weight(content)
    elif content is not None:
        _print_dense(content)


def _print_weight(found: WeightSummary) -> None:
    out, w = output_console(), found.weight
    assert found.scales is not None
    assert found.elements is not None
    stack = f"{w.experts} matrices of " if w.experts is not None else ""
    out.print(
        f"Stands for {w.name}: {stack}{w.shape[0]} x {w.shape[1]}{' (stored transposed)' if w.transposed else ''}, "
        f"{w.scheme.name}, {found.bits_per_weight:.3f} bits per weight, {human_bytes(found.nbytes)} in all",
        soft_wrap=True,
    )
    if found.global_scales:
        low, high = min(found.global_scales), max(found.global_scales)
        values = f"{low:.9g}" if low == high else f"{low:.9g} to {high:.9g}"
        out.print(f"Global scale {values}, which {'multiplies' if w.multiplied else 'divides'} the block scales")
    print_scales(out, found.scales, "Block scales")
    print_elements(out, found.elements)


def _print_dense(stats: DenseStats) -> None:
    out = output_console()
    out.print(
        f"mean {stats.mean:.4g}, std {stats.std:.4g}, from {stats.smallest:.4g} to {stats.largest:.4g}; "
        f"{share(stats.zero, stats.count)} zero, {stats.nan} NaN, {stats.infinite} infinite"
    )
    out.print(_binade_table(stats.binades, stats.count, []))


def print_scales(out: Console, stats: ScaleStats, title: str) -> None:
    """A bar for each power of two, and rows for zeros and what is no scale."""
    fmt = stats.format
    shares = f"{share(stats.zero, stats.count)} zero, {share(stats.subnormal, stats.count)} subnormal"
    extra = [("zero", stats.zero), ("invalid", stats.invalid)]
    largest = f", {share(stats.largest, stats.count)} the largest code" if fmt.coded else ""
    out.print(f"{title} ({fmt.name}): {stats.count:,}; {shares}{largest}", soft_wrap=True)
    out.print(_binade_table(stats.binades, stats.count, extra, fmt.min_normal))


def _binade_table(binades: Counter[int], count: int, extra: list[tuple[str, int]], min_normal: float = 0.0) -> Table:
    table = Table.of("", ("from",), ("share", _BARS))
    top = max([*binades.values(), *(n for _, n in extra)], default=0)
    for name, n in extra:
        if n:
            table.add(name, share(n, count), bar(n, top))
    for e in range(min(binades), max(binades) + 1) if binades else ():
        name = f"2^{e}" + (" (subnormal)" if 2.0**e < min_normal else "")
        table.add(name, share(binades[e], count), bar(binades[e], top))
    return table


def print_elements(out: Console, stats: ElementStats) -> None:
    """A bar for each magnitude code, and how its two signs share it."""
    fmt = stats.format
    half = 1 << (fmt.bits - 1)
    both = [stats.codes[c] + stats.codes[c + half] for c in range(half)]
    shares = f"{share(stats.zero, stats.count)} zero, {share(stats.largest, stats.count)} the largest"
    out.print(f"Elements ({fmt.name}): {stats.count:,}; {shares}", soft_wrap=True)
    table = Table.of("", ("code",), ("value", "share", "negative", _BARS))
    for code, n in enumerate(both):
        if n or half <= 16:
            value = f"{fmt.magnitude(code):g}" if code <= fmt.max_code else "NaN"
            table.add(
                f"{code:#04x}", value, share(n, stats.count), share(stats.codes[code + half], n), bar(n, max(both))
            )
    out.print(table)


def share(part: int, whole: int) -> str:
    """A percentage; a value above zero is never shown as 0 %."""
    if not part or not whole:
        return "0"
    return f"{part / whole:.2%}" if part / whole >= 5e-5 else "<0.01%"


def bar(value: int, top: int) -> str:
    """A bar of blocks, an eighth of a character fine; never empty for a value that is not zero."""
    eighths = max(round(8 * _BAR * value / top), 1) if value else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
