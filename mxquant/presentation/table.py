"""One kind of table, for terminals, Markdown, CSV and JSON. rich is imported only for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text

# Text columns wrap, but not below these widths: of a column that names the row, and of others.
_KEY_WIDTH, _TEXT_WIDTH = 24, 12
# What rich's SIMPLE_HEAD box puts at the edges of a table, and between two columns.
_EDGES, _GAP = 2, 3


@dataclass(frozen=True)
class Column:
    """A column of figures, which never wrap, or with ``is_text`` of words, which do.

    ``form`` makes text of a value; None shows as ``missing``. Where a terminal is too narrow, columns
    move to further tables below: those of one ``group`` together, ``is_key`` columns in each of them.
    """

    name: str
    form: Callable[[Any], str] = str
    missing: str = ""
    group: str = ""
    is_text: bool = False
    is_key: bool = False

    def text(self, value: Any) -> str:
        value = value.value if isinstance(value, Marked) else value
        return self.missing if value is None else self.form(value)


@dataclass(frozen=True)
class Marked:
    """A cell's value in a style of rich, e.g. ``red``, which only terminals show."""

    value: Any
    style: str


@dataclass(frozen=True)
class Row:
    """Cells, as many as there are columns; a terminal shows ``style`` and a rule below where ``ends_section``."""

    cells: tuple[Any, ...]
    style: str = ""
    ends_section: bool = False


@dataclass
class Table:
    """Columns and rows of values; ``to_...`` and ``records`` give them to files, rich prints them as they are."""

    columns: Sequence[Column]
    title: str = ""
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, left: Iterable[str | Column], right: Iterable[str | Column] = ()) -> Table:
        """An empty table: columns of words, the first of which names the row, then columns of figures."""
        words = [c if isinstance(c, Column) else Column(c, is_text=True, is_key=i == 0) for i, c in enumerate(left)]
        return cls([*words, *(c if isinstance(c, Column) else Column(c) for c in right)], title)

    def add(self, *cells: Any, style: str = "", ends_section: bool = False) -> None:
        """Append a row. Raises ``ValueError`` if the number of cells is not that of the columns."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(Row(cells, style, ends_section))

    @property
    def texts(self) -> list[list[str]]:
        """The cells of each row as people read them."""
        return [[c.text(cell) for c, cell in zip(self.columns, row.cells, strict=True)] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """A dict for each row, of values as they were given, for JSON."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, map(_value, row.cells), strict=True)) for row in self.rows]

    def to_csv(self) -> str:
        """Names and values, every figure in full; lines end in a newline alone."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows([_value(cell) for cell in row.cells] for row in self.rows)
        return out.getvalue()

    def to_markdown(self) -> str:
        """The table without its title, as wide as it is; bars in its cells are escaped."""
        return markdown([column.name for column in self.columns], self.texts)

    def parts(self, width: int) -> list[Table]:
        """Tables that stand below each other where ``width`` terminal columns do not hold this one; else itself."""
        everything = list(range(len(self.columns)))
        if self._fits(everything, width):
            return [self]
        keys = [i for i in everything if self.columns[i].is_key]
        groups: dict[str, list[int]] = {}
        for i in everything:
            if i not in keys:
                groups.setdefault(self.columns[i].group, []).append(i)
        chosen: list[list[int]] = []
        for members in groups.values():
            chosen.append(keys.copy())
            for i in members:
                if len(chosen[-1]) > len(keys) and not self._fits([*chosen[-1], i], width):
                    chosen.append(keys.copy())
                chosen[-1].append(i)
        return [self._only(part, continued=n > 0) for n, part in enumerate(chosen)]

    def _only(self, chosen: list[int], continued: bool) -> Table:
        rows = [Row(tuple(row.cells[i] for i in chosen), row.style, row.ends_section) for row in self.rows]
        more = f"{self.title}, continued".removeprefix(", ") if continued else self.title
        return Table([self.columns[i] for i in chosen], more, rows)

    def _fits(self, chosen: list[int], width: int) -> bool:
        return _EDGES + _GAP * (len(chosen) - 1) + sum(self._range(i)[0] for i in chosen) <= width

    def _range(self, index: int) -> tuple[int, int]:
        """The least width that is legible, and the one that wraps nothing."""
        from rich.cells import cell_len

        column = self.columns[index]
        widest = max((cell_len(column.text(row.cells[index])) for row in self.rows), default=0)
        head, word = cell_len(column.name), max(map(cell_len, column.name.split()), default=0)
        least = min(widest, _KEY_WIDTH if column.is_key else _TEXT_WIDTH) if column.is_text else widest
        return max(least, word), max(widest, head)

    def _widths(self, width: int) -> list[int]:
        """Of each column: at least what is legible; what remains goes to those that want little first."""
        ranges = [self._range(i) for i in range(len(self.columns))]
        widths = [low for low, _ in ranges]
        spare = width - _EDGES - _GAP * (len(widths) - 1) - sum(widths)
        order = sorted(range(len(widths)), key=lambda i: ranges[i][1] - ranges[i][0])
        for left, i in zip(range(len(order), 0, -1), order, strict=True):
            more = max(0, min(ranges[i][1] - ranges[i][0], spare // left))
            widths[i], spare = widths[i] + more, spare - more
        for i in [i for i, column in enumerate(self.columns) if column.is_text] if spare < 0 else []:
            less = min(widths[i] - 1, -spare)  # a screen too narrow for a single figure beside its name
            widths[i], spare = widths[i] - less, spare + less
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | RichTable]:
        from rich.text import Text

        for part in self.parts(options.max_width):
            if part.title:
                yield Text(part.title, "bold")
            yield part._to_rich(options.max_width)

    def _to_rich(self, width: int) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, fixed in zip(self.columns, self._widths(width), strict=True):
            made.add_column(
                Text(column.name), justify="left" if column.is_text else "right", width=fixed, overflow="fold"
            )
        for row, texts in zip(self.rows, self.texts, strict=True):
            styles = [cell.style if isinstance(cell, Marked) else "" for cell in row.cells]
            cells = [Text(text, style) for text, style in zip(texts, styles, strict=True)]
            made.add_row(*cells, style=row.style or None, end_section=row.ends_section)
        return made


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars in its cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _value(cell: Any) -> Any:
    return cell.value if isinstance(cell, Marked) else cell
