"""The tables of a report: models, tasks, the gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mxquant.presentation.table import Column, Marked, Table

if TYPE_CHECKING:
    from mxquant.evals.gate import Gate
    from mxquant.evals.intervals import Interval
    from mxquant.evals.perplexity import Perplexity
    from mxquant.evals.results import ModelResult
    from mxquant.evals.tasks import Metric

# Marks figures that were not measured this time.
CACHED = "†"
_NONE, _FAIL = Marked("none", "red"), Marked("FAIL", "red")


def all_of(results: list[ModelResult], gate: Gate | None) -> list[Table]:
    """A report's tables."""
    found = _models(results)
    if any(row.tasks for row in results):
        found.append(_tasks(results))
    if gate is not None:
        found.append(_gate(gate))
    return found


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
# Names of columns, and what they say of a line.
_Columns = dict[str, Callable[[_Line], Any]]


def _models(results: list[ModelResult]) -> list[Table]:
    """Sizes and quality of each model; with several texts, quality in a table of its own."""
    lines: list[_Line] = []
    for row in results:
        lines += [(row, *item) for item in row.perplexities.items()] or [(row, "", None)]
    names: _Columns = {"model": lambda line: line[0].name}
    sizes: _Columns = {
        "bits": lambda line: _bits(line[0]),
        "disk MB": lambda line: megabytes(line[0].disk_bytes),
        "RAM MB": lambda line: megabytes(line[0].weight_bytes),
    }
    quality: _Columns = {"perplexity": _perplexity}
    if any(found and found.divergence for *_, found in lines):
        quality |= {"ratio": _ratio, "KL, nats": _kl, "same top-1": _agreement}
    speed: _Columns = {"tokens/s": _tokens_per_second}
    described = names | {"weights": lambda line: line[0].scheme}
    if not any(found for *_, found in lines):
        return [_table(described, sizes, lines)]
    short = _short(text for row in results for text in row.perplexities)
    if len(short) == 1:
        return [_table(described, sizes | quality | speed, lines, together=tuple(quality))]
    one_a_model = list({id(line[0]): line for line in lines}.values())
    by_text = names | {"text": lambda line: short.get(line[1], "")}
    return [_table(described, sizes, one_a_model), _table(by_text, quality | speed, lines)]


def _short(names: Iterable[str]) -> dict[str, str]:
    """Paths by their last part, where that is enough to tell them apart."""
    short = {name: PurePath(name).name for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _table(left: _Columns, right: _Columns, lines: list[_Line], together: tuple[str, ...] = ()) -> Table:
    """Columns by name; those ``together`` move as one where a terminal is narrow."""
    figures = [Column(name, group="quality" if name in together else "") for name in right]
    table = Table.of("", left, figures)
    for line in lines:
        table.add(*(cell(line) for cell in (left | right).values()))
    return table


def _bits(row: ModelResult) -> str:
    return "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3g}"


def _perplexity(line: _Line) -> str | Marked:
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
    table = Table.of("", ("task", "metric", "model"), right)
    for task, name in {(metric.task, metric.name): None for row in results for metric in row.tasks}:
        for row in results:
            metric = row.metric(task, name)
            cells = ("-",) * len(right) if metric is None else _task_cells(row, metric)[: len(right)]
            table.add(task, name, row.name, *cells)
    return table


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
    table = Table.of("", ("model", "gate", "on"), ("measured", "limit", "result"))
    for check in gate.checks:
        result = "pass" if check.passed else _FAIL
        table.add(check.model, check.figure, on[check.on], check.measured_text, f"at most {check.limit_text}", result)
    return table
