"""Inversions: cells that are worse than those with a larger block.

Two cells are compared window by window, so that only what differs between them counts: a smaller
block is worse if the 95 % interval of the paired difference of NLL lies above zero. Few windows have
no interval; then each of them must be worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.evals.intervals import bootstrap_interval
from mxquant.evals.sweep.cells import Cell
from mxquant.schemes.activations import NONE, SAME

_INPUTS = {NONE: "weights only", SAME: "weights and activations"}


def inputs_name(inputs: str) -> str:
    """``weights only``, ``weights and activations`` or ``weights, activations in e4m3/8``."""
    return _INPUTS.get(inputs, f"weights, activations in {inputs}")


@dataclass(frozen=True)
class Line:
    """Cells that differ in their block only, the finest first; ``name`` tells it from the others."""

    name: str
    scale: str
    rule: str
    inputs: str
    tiles: bool
    cells: tuple[Cell, ...]


def lines_of(cells: Sequence[Cell]) -> list[Line]:
    """The lines of a sweep, in its order. Rules and elements are named where there are several."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        assert cell.spec is not None
        w = cell.spec.weights
        key = (w.element, cell.spec.scale, str(w.scale_rule), cell.spec.inputs, str(cell.spec.is_tile))
        groups.setdefault(key, []).append(cell)
    elements = {element for element, *_ in groups}
    rules: dict[str, set[str]] = {}
    for _, scale, rule, *_ in groups:
        rules.setdefault(scale, set()).add(rule)
    made = []
    for (element, scale, rule, inputs, tiles), members in groups.items():
        words = [element] if len(elements) > 1 else []
        words += [scale, *([rule] if len(rules[scale]) > 1 else [])]
        words += ["tiles"] if tiles == "True" else []
        ordered = sorted(members, key=lambda cell: cell.spec.block_size)  # type: ignore[union-attr]
        made.append(Line(" ".join(words), scale, rule, inputs, tiles == "True", tuple(ordered)))
    return made


@dataclass(frozen=True)
class Inversion:
    """A run of ever smaller blocks, each worse than the one before; ``cells`` coarse to fine."""

    line: Line
    cells: tuple[Cell, ...]

    @property
    def text(self) -> str:
        """The finding in a sentence, with its likely cause."""
        coarse, *finer = self.cells
        where = "" if self.line.inputs == NONE else f", {inputs_name(self.line.inputs)}"
        *middle, last = [_at(cell) for cell in finer]
        steps = f"{', '.join(middle)} and {last}" if middle else last
        sentence = f"{self.line.name}{where}: perplexity rises from {_at(coarse)} to {steps}"
        finest = finer[-1]
        if finest.small_scales >= 0.0005:
            sentence += (
                f"; {_percent(finest.small_scales)} of blocks of {_block(finest)} have a zero or subnormal scale"
            )
            sentence += f" ({_percent(finest.zero_scales or 0.0)} zero)" if finest.zero_scales else ""
        return sentence

    def to_dict(self) -> dict[str, Any]:
        return {
            "line": self.line.name,
            "inputs": self.line.inputs,
            "blocks": [_block(cell) for cell in self.cells],
            "perplexities": [cell.perplexity for cell in self.cells],
            "small_scales": [cell.small_scales for cell in self.cells],
            "text": self.text,
        }


def find_inversions(cells: Sequence[Cell]) -> list[Inversion]:
    """Every inversion of a sweep, longest runs joined."""
    found = []
    for line in lines_of(cells):
        run: list[Cell] = []
        coarse_to_fine = [cell for cell in reversed(line.cells) if cell.perplexity is not None]
        for coarse, fine in itertools.pairwise(coarse_to_fine):
            if is_worse(fine, coarse):
                run = [*(run or [coarse]), fine]
            elif run:
                found.append(Inversion(line, tuple(run)))
                run = []
        if run:
            found.append(Inversion(line, tuple(run)))
    return found


def is_worse(cell: Cell, other: Cell) -> bool:
    """Whether a cell is worse than another by more than chance would do, see the module docstring."""
    difference = torch.tensor(cell.window_nll, dtype=torch.float64) - torch.tensor(
        other.window_nll, dtype=torch.float64
    )
    interval = bootstrap_interval(difference)
    return bool((difference > 0).all()) if interval is None else interval[0] > 0


def worse_than_coarser(cells: Iterable[Cell]) -> set[str]:
    """Texts of the cells at the fine end of some step of an inversion."""
    return {cell.text for inversion in find_inversions(list(cells)) for cell in inversion.cells[1:]}


def _at(cell: Cell) -> str:
    return f"{number(cell.perplexity)} at {_block(cell)}"


def _block(cell: Cell) -> str:
    assert cell.spec is not None
    return cell.spec.weights.block_text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    """A perplexity for people: four digits or so, thousands with commas, powers of ten where there is no end."""
    if value is None:
        return "none"
    if value >= 1000:
        return f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
