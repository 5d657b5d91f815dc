"""What a group and a row of it are, and the three commonest kinds of rows: a save, a load, and a stall."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import measures

ALWAYS = 99
LATEST = ".venv-latest/bin/python"
"""The interpreter of the environment with the newest torch, for what the one with torch_xla is too old for."""
Unit = str
"""``s``, ``ms`` or ``%``: what the figure "seconds" of a group is shown in."""


@dataclass(frozen=True)
class Saved:
    """What a load reads: the save that prepares it, and of what."""

    saver: str
    device: str
    gb: float
    count: int = 0
    python: str = ""
    """As that of `Row`."""


@dataclass(frozen=True)
class Row:
    """One contender of a group."""

    name: str
    function: Callable[..., object]
    """At the top of its module; called with `args`, and with what `kind` adds."""
    args: tuple[object, ...]
    kind: str = "alone"
    """``alone``: in one process, with a fresh directory; ``load``: with the digest and directory of `saved`;
    ``ranks``: on four ranks; ``start``: in this process, which starts an interpreter: with a fresh directory and the
    time limit after `args`."""
    saved: Saved | None = None
    cold: bool = False
    """Whether the page cache has nothing of `saved`; else it has all of it."""
    xla: bool = True
    rounds: int = ALWAYS
    short: bool = False
    """Whether the short form has it, too: what a target is about."""
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    """The interpreter of another environment that it runs in; by default that of the benchmark."""


@dataclass(frozen=True)
class Group:
    """Contenders that do the same."""

    key: str
    title: str
    rows: tuple[Row, ...]
    unit: Unit = "s"
    rate: bool = False
    """Whether GB/s say something."""
    plot: bool = False


def save(name: str, saver: str, gb: float, device: str = "xla", count: int = 0, **options: object) -> Row:
    return Row(name, measures.save, (saver, device, gb, count), xla=device == "xla", **options)  # type: ignore[arg-type]


def load(name: str, loader: str, saved: Saved, *, warm: bool, onto: str = "", **options: object) -> Row:
    device = onto or saved.device
    args = (loader, device, saved.gb, saved.count)
    where: dict[str, Any] = {"saved": saved, "cold": not warm, "xla": device == "xla", "python": saved.python}
    return Row(name, measures.load, args, "load", **where, **options)


def stall(
    name: str, saver: str, gb: float, device: str = "xla", count: int = 0, times: int = 3, **options: object
) -> Row:
    args = (saver, device, gb, count, times)
    return Row(name, measures.stall, args, xla=device == "xla", **options)  # type: ignore[arg-type]
