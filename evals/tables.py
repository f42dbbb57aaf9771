"""The tables of a report as rows of text, and those as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from mxquant.evals.gate import Gate
    from mxquant.evals.intervals import Interval
    from mxquant.evals.perplexity import Perplexity
    from mxquant.evals.results import ModelResult
    from mxquant.evals.tasks import Metric

# Marks figures that were not measured this time.
CACHED = "†"
# Columns of a terminal that take the whole table of models.
_WIDE = 120
_NONE, _FAIL = "none", "FAIL"


@dataclass(frozen=True)
class Table:
    """Columns of words, then columns of figures; ``rows`` are as long as both together."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def all_of(results: list[ModelResult], gate: Gate | None, width: int) -> list[Table]:
    """A report's tables, those of the models fit for ``width`` columns."""
    found = _models(results, width)
    if any(row.tasks for row in results):
        found.append(_tasks(results))
    if gate is not None:
        found.append(_gate(gate))
    return found


def to_rich(table: Table) -> RichTable:
    """The table for a terminal; what failed or is missing is red."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in table.left:
        made.add_column(title, overflow="fold", min_width=min(len(title), 12))
    for title in table.right:
        made.add_column(title, justify="right", overflow="fold")
    for row in table.rows:
        made.add_row(*(f"[red]{cell}[/red]" if cell in (_NONE, _FAIL) else escape(cell) for cell in row))
    return made


def megabytes(count: int | None) -> str:
    """``123.4`` MB (10^6 bytes), or a dash."""
    if count is None:
        return "-"
    return f"{count / 1e6:,.{2 if count < 1e7 else 1 if count < 1e9 else 0}f}"


def with_error(value: float, interval: Interval | None) -> str:
    """``1.0412 ± 0.0021``: half the interval's width, to two digits, after the value."""
    error = 0.0 if interval is None else (interval[1] - interval[0]) / 2
    digits = min(max(1 - math.floor(math.log10(error)), 0), 5) if error > 0 else 4
    return f"{value:.{digits}f}" + ("" if interval is None else f" ± {error:.{digits}f}")


# A row of the models' table: a model, and what it did on one text.
_Line = tuple["ModelResult", str, "Perplexity | None"]


def _models(results: list[ModelResult], width: int) -> list[Table]:
    """Sizes and quality beside each other, or below each other where the terminal is narrow."""
    lines: list[_Line] = []
    for row in results:
        lines += [(row, *item) for item in row.perplexities.items()] or [(row, "", None)]
    names: dict[str, Callable[[_Line], str]] = {"model": lambda line: line[0].name}
    scheme: dict[str, Callable[[_Line], str]] = {"weights": lambda line: line[0].scheme}
    sizes = {
        "bits": lambda line: _bits(line[0]),
        "disk MB": lambda line: megabytes(line[0].disk_bytes),
        "RAM MB": lambda line: megabytes(line[0].weight_bytes),
    }
    short = _short(text for row in results for text in row.perplexities)
    text = {"text": lambda line: short.get(line[1], "")} if len(short) > 1 else {}
    quality: dict[str, Callable[[_Line], str]] = {"perplexity": _perplexity}
    if any(found and found.divergence for *_, found in lines):
        quality |= {"ratio": _ratio, "KL, nats": _kl, "same top-1": _agreement}
    speed = {"tokens/s": _tokens_per_second}
    one_a_model = list({id(line[0]): line for line in lines}.values())
    if not any(found for *_, found in lines):
        return [_table(names | scheme, sizes, lines)]
    if width >= _WIDE and not text:
        return [_table(names | scheme, sizes | quality | speed, lines)]
    if text:
        return [_table(names | scheme, sizes, one_a_model), _table(names | text, quality | speed, lines)]
    return [_table(names | scheme, sizes | speed, lines), _table(names, quality, lines)]


def _short(names: Iterable[str]) -> dict[str, str]:
    """Paths by their last part, where that is enough to tell them apart."""
    short = {name: PurePath(name).name for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _table(
    left: dict[str, Callable[[_Line], str]], right: dict[str, Callable[[_Line], str]], lines: list[_Line]
) -> Table:
    cells = [*left.values(), *right.values()]
    return Table(tuple(left), tuple(right), [tuple(cell(line) for cell in cells) for line in lines])


def _bits(row: ModelResult) -> str:
    return "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3g}"


def _perplexity(line: _Line) -> str:
    found = line[2]
    if found is None:
        return "-"
    value = found.perplexity
    if value is None:
        return _NONE
    return (f"{value:.4g}" if value < 1000 else f"{value:,.0f}") + CACHED * found.cached


def _tokens_per_second(line: _Line) -> str:
    found = line[2]
    # A time of another day, on a machine with other work, says nothing beside those of today.
    unknown = found is None or found.problem or found.cached
    return "-" if found is None or unknown else f"{found.tokens / max(found.seconds, 1e-9):,.0f}"


def _ratio(line: _Line) -> str:
    row, _, found = line
    if row.is_baseline:
        return "baseline"
    against = found.divergence if found else None
    return "-" if against is None else with_error(against.ratio, against.ratio_interval)


def _kl(line: _Line) -> str:
    against = line[2].divergence if line[2] else None
    return "-" if against is None else with_error(against.kl, against.kl_interval)


def _agreement(line: _Line) -> str:
    against = line[2].divergence if line[2] else None
    if against is None:
        return "-"
    ends = against.agreement_interval
    return f"{against.agreement:.1%}" + ("" if ends is None else f" ± {50 * (ends[1] - ends[0]):.1f}")


def _tasks(results: list[ModelResult]) -> Table:
    """A line for each metric and model, so that models stand below each other."""
    compared = any(row.baseline is not None for row in results)
    right = ("value", "to the baseline") if compared else ("value",)
    rows = []
    for task, name in {(metric.task, metric.name): None for row in results for metric in row.tasks}:
        for row in results:
            metric = row.metric(task, name)
            cells = ("-",) * len(right) if metric is None else _task_cells(row, metric)[: len(right)]
            rows.append((task, name, row.name, *cells))
    return Table(("task", "metric", "model"), right, rows)


def _task_cells(row: ModelResult, metric: Metric) -> tuple[str, str]:
    difference = row.difference(metric)
    value = _plus_minus(metric.value, metric.stderr) + CACHED * metric.cached
    if row.is_baseline:
        return value, "baseline"
    return value, "-" if difference is None else _plus_minus(difference.value, difference.stderr, "+")


def _plus_minus(value: float, error: float | None, sign: str = "") -> str:
    form = ".4f" if abs(value) < 1000 else ",.0f" if abs(value) < 1e7 else ".3g"
    return f"{value:{sign}{form}}" + ("" if error is None else f" ± {error:{form}}")


def _gate(gate: Gate) -> Table:
    on = _short(check.on for check in gate.checks)
    rows = [
        (
            check.model,
            check.figure,
            on[check.on],
            check.measured_text,
            f"at most {check.limit_text}",
            "pass" if check.passed else _FAIL,
        )
        for check in gate.checks
    ]
    return Table(("model", "gate", "on"), ("measured", "limit", "result"), rows)
