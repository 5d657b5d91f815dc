"""The answer of ``show --report``: a bar for each stage of a save, rank by rank."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from xla_ckpt.cli.render import count, size, speed

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
        parts += [Text(title, style="bold"), _stages(rank["phases"], whole)]
    if (more := facts["ranks"] - len(ranks[:MAX_SHOWN])) > 0:
        parts.append(Text(f"\nand {count(more, 'rank')} more that {'was' if more == 1 else 'were'} done earlier"))
    return Group(*parts)


def _stages(phases: dict[str, Any], whole: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("when")  # the one column that gives way where there is little room
    for name in ("took", "bytes", "rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, phase in phases.items():
        took, nbytes = phase["ended"] - phase["began"], phase["nbytes"]
        rate = speed(nbytes, took)
        bar = _Bar(phase["began"] / whole if whole else 0.0, phase["ended"] / whole if whole else 0.0)
        table.add_row(escape(name), bar, duration(took), size(nbytes) if nbytes else "", rate)
    return table


class _Bar:
    """A bar as wide as there is room for it."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(bar(self.begin, self.end, min(options.max_width, WIDTHS[1]), "#" if options.ascii_only else "█"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(*WIDTHS)


def bar(begin: float, end: float, width: int, character: str) -> str:
    """A bar between two parts of 1, at least one character long.

    >>> [bar(*ends, 8, "#") for ends in ((0.0, 0.5), (0.49, 0.51), (1.0, 1.0))]
    ['####', '   ##', '       #']
    """
    first = min(max(math.floor(begin * width), 0), width - 1)
    last = min(max(math.ceil(end * width), first + 1), width)
    return " " * first + character * (last - first)


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.00123), duration(12.345)
    ('1.2 ms', '12.35 s')
    """
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
