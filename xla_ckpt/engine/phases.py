"""How long each phase of a save or a load took, and what it moved: measured where it happens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SAVE_PHASES = (
    "describe",
    "plan",
    "snapshot",
    "copy",
    "digest",
    "write",
    "fsync",
    "meet",
    "commit",
    "retain",
)
"""Phases of a save, in their order. `copy`, `digest`, `write` and `fsync` happen side by side on several threads."""

LOAD_PHASES = ("open", "check", "plan", "read", "verify", "install")
"""Phases of a load, in their order. `read` and `verify` happen side by side on several threads."""


@dataclass(slots=True)
class Phase:
    """One phase of a save or a load, on this rank."""

    seconds: float = 0.0
    """Time spent in it. Where several threads work at once, the sum over them: it may exceed the time on the clock."""

    nbytes: int = 0
    """Bytes that it moved, read or digested; 0 for phases that do none of it."""

    files: int = 0
    """Files that it finished."""


class Phases:
    """Collects the phases of one save or load. Safe for several threads.

    Args:
        order: Names of the phases in the order in which `report` gives them.
    """

    def __init__(self, order: Sequence[str] = SAVE_PHASES) -> None:
        self._lock = threading.Lock()
        self._order = {name: i for i, name in enumerate(order)}
        self._phases: dict[str, Phase] = {}

    def add(self, name: str, seconds: float, nbytes: int = 0, files: int = 0) -> None:
        """Add to a phase what one thread did of it."""
        with self._lock:
            phase = self._phases.setdefault(name, Phase())
            phase.seconds += seconds
            phase.nbytes += nbytes
            phase.files += files

    @contextlib.contextmanager
    def timed(self, name: str, nbytes: int = 0, files: int = 0) -> Iterator[None]:
        """Add the time that the block takes to a phase, whether it ends well or not."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began, nbytes, files)

    def report(self) -> dict[str, Phase]:
        """What was measured so far, in the order of the phases."""
        with self._lock:
            found = sorted(self._phases.items(), key=lambda item: self._order.get(item[0], len(self._order)))
            return {name: Phase(p.seconds, p.nbytes, p.files) for name, p in found}


def as_line(phases: dict[str, Phase]) -> str:
    """The phases as a part of one line of log.

    >>> as_line({"plan": Phase(0.0004), "write": Phase(0.25, 50_000_000, 2)})
    'plan 0.4 ms, write 250.0 ms (50.0 MB, 2 files)'
    """
    return ", ".join(f"{name} {1e3 * p.seconds:.1f} ms{_amount(p)}" for name, p in phases.items())


def _amount(phase: Phase) -> str:
    said = [f"{phase.nbytes / 1e6:.1f} MB"] if phase.nbytes else []
    said += [f"{phase.files} file{'s' if phase.files > 1 else ''}"] if phase.files else []
    return f" ({', '.join(said)})" if said else ""
