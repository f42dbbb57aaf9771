"""Tables: nothing is lost where a terminal is narrow, and every form holds the same cells."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from mxquant.presentation.table import Column, Marked, Table

LONG = "model.layers.*.block_sparse_moe.experts.*.gate_and_up_projection"
WIDTHS = [80, 100, 132]


def printed(table: Table, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def wide(figures: int = 12) -> Table:
    """Longer names than any column has room for, and more figures than a line holds."""
    table = Table.of("Title", ("weight", "because"), [f"figure {i}" for i in range(figures)])
    for i in range(3):
        table.add(f"{LONG}.{i}", f"reason {i} that is a whole sentence", *(f"{i}.{n:05d}" for n in range(figures)))
    return table


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_wraps_or_vanishes_and_no_line_is_too_long(width):
    text = printed(wide(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.split()
    assert all(f"{i}.{n:05d}" in words for i in range(3) for n in range(12))
    assert "Title, continued" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_names_keep_a_width_at_which_they_can_be_read(width):
    for part in wide().parts(width):
        lines = printed(part, width).splitlines()
        assert part.columns[0].name == "weight"  # each part says whose figures they are
        assert any(LONG[:24] in line for line in lines)


def test_the_parts_hold_every_column_once_and_groups_together():
    figures = [Column(f"figure {i}", group="odd" if i % 2 else "") for i in range(6)]
    table = Table.of("", ("weight", "because"), figures)
    table.add(LONG, "a reason", *("1234567890",) * 6)
    assert table.parts(1000) == [table]
    names = [[column.name for column in part.columns] for part in table.parts(70)]
    assert names == [
        ["weight", "because", "figure 0", "figure 2"],
        ["weight", "figure 4"],
        ["weight", "figure 1", "figure 3", "figure 5"],
    ]


@pytest.mark.parametrize("width", [10, 20, 40])
def test_a_screen_too_narrow_for_anything_still_shows_figures(width):
    text = printed(wide(2), width)
    assert "…" not in text


def test_every_form_holds_the_same_cells():
    error = Column("error", form=lambda value: f"{value:.1%}", missing="-")
    table = Table.of("", ("layer",), (error, "result"))
    table.add("a|b", 0.1234567, Marked("FAIL", "red"))
    table.add("[bold]c", None, "pass")
    assert table.records() == [
        {"layer": "a|b", "error": 0.1234567, "result": "FAIL"},
        {"layer": "[bold]c", "error": None, "result": "pass"},
    ]
    assert json.loads(json.dumps(table.records())) == table.records()
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [
        ["layer", "error", "result"],
        ["a|b", "0.1234567", "FAIL"],
        ["[bold]c", "", "pass"],
    ]
    assert table.to_markdown().splitlines() == [
        "| layer | error | result |",
        "| --- | --- | --- |",
        "| a\\|b | 12.3% | FAIL |",
        "| [bold]c | - | pass |",
    ]
    assert [line.split() for line in printed(table, 80).splitlines()[3:5]] == [
        ["a|b", "12.3%", "FAIL"],
        ["[bold]c", "-", "pass"],
    ]


def test_colour_is_for_terminals_only():
    table = Table.of("", ("layer",), ("result",))
    table.add("a", Marked("FAIL", "red"))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table)
    assert "\x1b[31m" in console.file.getvalue()


def test_a_row_has_as_many_cells_as_there_are_columns():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table.of("", ("a",), ("b",)).add("x")
