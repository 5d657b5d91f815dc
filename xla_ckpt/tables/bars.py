"""The answer of ``show --report``: a bar for each stage of a save, rank by rank."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from xla_ckpt.display import make_printable
from xla_ckpt.tables.rows import Bar, Rows
from xla_ckpt.tables.texts import count, duration, size, speed

MAX_SHOWN = 4
"""Ranks whose stages are shown, the slowest ones."""

WIDTHS = 8, 50
"""The narrowest and the widest bar (characters)."""


def report(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``show --report``."""
    ranks, whole = facts["measured"], facts["seconds"]
    about = f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}: saved by {count(facts['ranks'], 'rank')}"
    parts: list[RenderableType] = [
        Text.from_markup(f"{about}, {duration(whole)} from the call to the start of its commit")
    ]
    for number, rank in enumerate(ranks[:MAX_SHOWN]):
        slowest = " (the slowest)" if number == 0 and facts["ranks"] > 1 else ""
        title = (
            f"\nrank {rank['rank']}{slowest}: {size(rank['nbytes'])} in {count(rank['files'], 'file')}, its part done "
            f"after {duration(rank['done'])}, the caller waited {duration(rank['stall'])}"
        )
        parts += [Text(title, style="bold"), phase_rows(rank["phases"], whole)]
    if (more := facts["ranks"] - len(ranks[:MAX_SHOWN])) > 0:
        parts.append(Text(f"\nand {count(more, 'rank')} more that {'was' if more == 1 else 'were'} done earlier"))
    return Group(*parts)


def of_call(facts: dict[str, Any]) -> RenderableType:
    """What a save or a load of this process did: its report, of which what is empty is left out."""
    phases = facts["phases"]
    times = ("seconds", "stall")
    sizes = ("nbytes", "shared", "needed_bytes", "read_bytes", "proven_bytes")
    rows = []
    for name, value in facts.items():
        if name != "phases" and value not in (None, (), "", 0):
            text = duration(value) if name in times else size(value) if name in sizes else str(value)
            rows.append((name, ", ".join(value) if isinstance(value, tuple) else text))
    last = max((phase["ended"] for phase in phases.values()), default=0.0)
    return Group(Rows("", ("report", "value"), rows), phase_rows(phases, last))


def phase_rows(phases: dict[str, Any], whole: float) -> PhaseRows:
    """A row for each phase of a call that took `whole` seconds."""
    rows: list[tuple[str, Bar, str, str, str]] = []
    for name, phase in phases.items():
        took, nbytes = phase["ended"] - phase["began"], phase["nbytes"]
        where = Bar(phase["began"] / whole if whole else 0.0, phase["ended"] / whole if whole else 0.0)
        rows.append((name, where, duration(took), size(nbytes) if nbytes else "", speed(nbytes, took)))
    return PhaseRows("", ("stage", "when", ">took", ">bytes", ">rate"), rows)


class PhaseRows(Rows):
    """A table in which a bar gives way where there is little room; a pipe gets it as a terminal does."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, right in zip(self.names, self.to_right, strict=True):
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "when")
        for row in self.rows:
            table.add_row(*(Text(make_printable(cell)) if isinstance(cell, str) else _Drawn(cell) for cell in row))
        yield table


class _Drawn:
    """A bar as wide as there is room for it."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, character = min(options.max_width, WIDTHS[1]), "#" if options.ascii_only else "█"
        yield Text(drawn(self.bar, width, character))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(*WIDTHS)


def drawn(bar: Bar, width: int, character: str) -> str:
    """A bar in a line of text, at least one character long.

    >>> [drawn(Bar(*ends), 8, "#") for ends in ((0.0, 0.5), (0.49, 0.51), (1.0, 1.0))]
    ['####', '   ##', '       #']
    """
    first = min(max(math.floor(bar.begin * width), 0), width - 1)
    last = min(max(math.ceil(bar.end * width), first + 1), width)
    return " " * first + character * (last - first)
