"""Plain tables for terminals and pipes. `xla_ckpt.rendering.html` renders the same tables as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from xla_ckpt.display import make_printable

MAX_RICH_ROWS = 500
"""Maximum number of rows in a table that rich lays out. Longer tables are plain lines."""

MIN_FOLDED_WIDTH = 40
"""Width (characters) above which a text column is folded instead of dropping optional columns."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Cell with a bar, from `begin` to `end` as fractions of 1."""

    begin: float
    end: float

    def __str__(self) -> str:
        return f"{100 * self.begin:.0f} % to {100 * self.end:.0f} %"


Cell = str | Bar


class PlainTable:
    """Table that fits the terminal. In a pipe it has one line per row, with tabs between the cells.

    Args:
        title: Line above the table on a terminal. A pipe has the column names in its first line.
        columns: Column names. The prefix ``>`` aligns cells right. The prefix ``?`` marks a column as optional:
            optional columns are dropped, the last first, if the terminal is too narrow.
        rows: Plain cells.
        problem_rows: Indices of rows whose last cell describes a problem, which is shown in red.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        problem_rows: frozenset[int] = frozenset(),
    ) -> None:
        self.title, self.rows, self.problem_rows = title, rows, problem_rows
        self.names = [column.lstrip("?>") for column in columns]
        self.right_aligned = [">" in column for column in columns]
        self.is_optional = [column.startswith("?") for column in columns]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title and options.is_terminal:
            yield Text(self.title, style="bold")
        table = [self.names, *([make_printable(str(cell)) for cell in row] for row in self.rows)]
        if not options.is_terminal:
            lines = "".join("\t".join(row).rstrip("\t") + "\n" for row in table)
            yield Segment(lines)
            return
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        chosen = self._choose_columns(widths, options.max_width)
        if len(self.rows) > MAX_RICH_ROWS:
            yield from self._render_lines(table, widths, chosen)
        else:
            yield self._build_rich_table(table[1:], widths, chosen, options.max_width)

    def _choose_columns(self, widths: list[int], room: int) -> list[int]:
        """Return the indices of the columns that fit, and of those that are not optional."""
        chosen = list(range(len(widths)))
        for i in reversed(range(len(widths))):
            if sum(min(widths[j], MIN_FOLDED_WIDTH) + 2 for j in chosen) - 2 > room and self.is_optional[i]:
                chosen.remove(i)
        return chosen

    def _render_lines(self, table: list[list[str]], widths: list[int], columns: list[int]) -> Iterator[Segment]:
        """Yield padded lines. rich takes a third of a millisecond to lay out each row of a table."""
        for row in table:
            cells = [row[i].rjust(widths[i]) if self.right_aligned[i] else row[i].ljust(widths[i]) for i in columns]
            yield Segment(" ".join(cells).rstrip() + "\n")

    def _build_rich_table(self, rows: list[list[str]], widths: list[int], columns: list[int], room: int) -> Table:
        table = Table(header_style="bold", box=None, pad_edge=False)
        whole = sum(widths[i] + 2 for i in columns) - 2 <= room
        for i in columns:
            right = self.right_aligned[i]
            # Numbers are never folded, because half of a number would look like another number.
            table.add_column(
                self.names[i], justify="right" if right else "left", no_wrap=whole or right, overflow="fold"
            )
        for number, row in enumerate(rows):
            cells = [Text(row[i]) for i in columns]
            if number in self.problem_rows:
                cells[-1].stylize("red")
            table.add_row(*cells)
        return table
