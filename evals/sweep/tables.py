"""A sweep as tables for people and as CSV for programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mxquant.evals.sweep.inversions import inputs_name, lines_of, number, worse_than_coarser
from mxquant.evals.tables import with_error
from mxquant.presentation.table import Marked, Table
from mxquant.schemes.rules import rules_note

if TYPE_CHECKING:
    from mxquant.evals.sweep.cells import Cell
    from mxquant.evals.sweep.run import Sweep

_COLUMNS = (
    *("perplexity", "problem", "ratio", "ratio_low", "ratio_high", "kl", "kl_low", "kl_high", "agreement"),
    *("relative_error", "zero_scales", "subnormal_scales", "bits_per_weight"),
)


def tables(sweep: Sweep) -> list[Table]:
    """Rows are scales, columns blocks; perplexity, then KL, for each kind of inputs."""
    made = []
    worse = worse_than_coarser(sweep.cells)
    floor = number(sweep.dense.perplexity)
    for inputs in dict.fromkeys(line.inputs for line in lines_of(sweep.cells)):
        where = inputs_name(inputs)
        made.append(_table(sweep, inputs, f"perplexity, {where} (dense: {floor})", lambda c: _perplexity(c, worse)))
        made.append(_table(sweep, inputs, f"KL from the dense model in nats, {where}", _kl))
    made.append(_weights_table(sweep))
    for task in sweep.dense.tasks:
        made += _task_tables(sweep, task)
    return made


def _table(sweep: Sweep, inputs: str, title: str, text: Callable[[Cell], str | Marked]) -> Table:
    """One value of every cell with these inputs."""
    lines = [line for line in lines_of(sweep.cells) if line.inputs == inputs]
    sizes = {_block(cell): cell.spec.block_size for line in lines for cell in line.cells if cell.spec}
    blocks = sorted(sizes, key=lambda block: ("x" in block, sizes[block]))
    table = Table.of(title, ["scale"], blocks)
    for line in lines:
        found = {_block(cell): text(cell) for cell in line.cells}
        table.add(line.name, *(found.get(block, "") for block in blocks))
    return table


def _weights_table(sweep: Sweep) -> Table:
    """What quantizing did to the weights, which does not depend on the inputs."""
    first = sweep.cells[0].spec
    assert first is not None
    return _table(sweep, first.inputs, "error of the weights and share of zero or subnormal scales, in %", _weights)


def _task_tables(sweep: Sweep, task: str) -> list[Table]:
    made = []
    for metric, dense in sweep.dense.tasks[task].items():
        floor = with_error(dense["value"], None)
        for inputs in dict.fromkeys(line.inputs for line in lines_of(sweep.cells)):
            title = f"{task}, {metric}, {inputs_name(inputs)} (dense: {floor})"
            made.append(_table(sweep, inputs, title, lambda c, t=task, m=metric: _task(c, t, m)))  # type: ignore[misc]
    return made


def _block(cell: Cell) -> str:
    assert cell.spec is not None
    return cell.spec.weights.block_text


def _perplexity(cell: Cell, worse: set[str]) -> str | Marked:
    if cell.perplexity is None:
        return Marked("none", "red")
    text = number(cell.perplexity)
    return Marked(f"{text}^", "red") if cell.text in worse else text


def _kl(cell: Cell) -> str:
    return "-" if cell.kl is None else f"{cell.kl:.4f}"


def _weights(cell: Cell) -> str:
    if cell.relative_error is None:
        return "-"
    error = f"{100 * cell.relative_error:.1f}"
    return error if cell.small_scales < 0.0005 else f"{error} ({100 * cell.small_scales:.1f})"


def _task(cell: Cell, task: str, metric: str) -> str:
    found = cell.tasks.get(task, {}).get(metric)
    return "-" if found is None else f"{found['value']:.4f}"


def sentences(sweep: Sweep) -> list[str]:
    """What was found and what one must know to read the tables, a line each."""
    lines = [inversion.text + "." for inversion in sweep.inversions]
    if lines:
        lines.insert(0, "Finer is worse (^; paired over windows, 95 %):")
    elif any(len(line.cells) > 1 for line in lines_of(sweep.cells)):
        lines.append("No inversion: no smaller block is worse than the next larger one, paired over windows at 95 %.")
    lines += [f"{cell.text}: {cell.problem}." for cell in sweep.cells if cell.problem]
    lines += [f"Note: {note}." for note in sweep.notes]
    return [*lines, measured_on(sweep)]


def measured_on(sweep: Sweep) -> str:
    """Model, dtype, text, windows and scale rules in a sentence."""
    note = f" ({sweep.text.note})" if sweep.text.note else ""
    s = sweep.settings
    windows = f"{s['windows']} window{'s' * (s['windows'] != 1)} of {s['seq_len']} tokens"
    text = f"text {Path(sweep.text.name).name}{note}, sha256 {sweep.text.sha256[:16]}"
    rules = rules_note(cell.spec.weights for cell in sweep.cells if cell.spec)
    return f"{sweep.model} in {sweep.about['dtype']}; {text}, {windows}; scale rules of the weights: {rules}."


def to_csv(sweep: Sweep) -> str:
    """One row a cell, the dense model first, every figure in full."""
    tasks = [(task, metric) for task, metrics in sweep.dense.tasks.items() for metric in metrics]
    names = ["element", "scale", "block", "rule", "inputs", *_COLUMNS]
    table = Table.of("", [], [*names, *(f"{task} {metric}" for task, metric in tasks)])
    for cell in [sweep.dense, *sweep.cells]:
        figures = cell.to_dict()
        figures["ratio_low"], figures["ratio_high"] = cell.ratio_interval or (None, None)
        figures["kl_low"], figures["kl_high"] = cell.kl_interval or (None, None)
        values = [cell.tasks.get(task, {}).get(metric, {}).get("value") for task, metric in tasks]
        table.add(*_names(cell), *(figures[name] for name in _COLUMNS), *values)
    return table.to_csv()


def _names(cell: Cell) -> list[str]:
    if cell.spec is None:
        return ["dense", "", "", "", ""]
    w = cell.spec.weights
    return [w.element, cell.spec.scale, w.block_text, str(w.scale_rule), cell.spec.inputs]
