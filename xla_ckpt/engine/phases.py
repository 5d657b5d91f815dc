"""How long each phase of a save or a load took, and what it moved: measured where it happens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from xla_ckpt.tables.texts import LEAST_RATED

SAVE_PHASES = (
    "describe",
    "plan",
    "snapshot",
    "share",
    "copy",
    "digest",
    "write",
    "fsync",
    "meet",
    "parity",
    "helper",
    "commit",
    "retain",
)
"""Phases of a save, in their order. `copy`, `digest`, `write` and `fsync` happen side by side on several threads."""

NOT_OF_THE_RANK = frozenset({"meet", "helper", "commit", "retain"})
"""Phases of a save in which a rank waits, or that rank 0 alone has: how slow a rank is does not show in them."""

LOAD_PHASES = ("open", "check", "plan", "read", "verify", "install", "prove")
"""Phases of a load, in their order. `read` and `verify` happen side by side on several threads; `prove` on several."""

STALL, SAVE, LOAD, WAIT = "stall", "save", "load", "wait"
"""Intervals of a trace that are no phase: the time for which the caller of a save waited; all that the save did in the
background; a whole load; a wait for another rank, or for the save before."""


@dataclass(slots=True)
class Phase:
    """One phase of a save or a load, on this rank."""

    seconds: float = 0.0
    """Time spent in it. Where several threads work at once, the sum over them: it may exceed the time on the clock."""

    nbytes: int = 0
    """Bytes that it moved, read or digested; 0 for phases that do none of it."""

    files: int = 0
    """Files that it finished."""

    began: float = field(default=0.0, compare=False)
    """When the first thread began with it (s after the call)."""

    ended: float = field(default=0.0, compare=False)
    """When the last thread ended it (s after the call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What one thread did without a break: a bar of a trace."""

    name: str
    """A phase, or `STALL`, `SAVE`, `LOAD` or `WAIT`."""

    thread: int
    """The identifier that the operating system has for the thread."""

    thread_name: str
    began: float
    """Begin (s of `time.perf_counter`)."""

    ended: float
    """End (s of `time.perf_counter`)."""

    nbytes: int = 0
    files: int = 0
    about: str = ""
    """The file or the leaf that it is about, if it is about one."""


class Phases:
    """Collects the phases of one save or load, which begins now. Safe for several threads.

    Args:
        order: Names of the phases in the order in which `report` gives them.
        keep: Whether intervals are kept, too, for a trace. They take memory: some 300 bytes for each 8 MiB of a save
            and each 2 MiB of a load, and for each small file.
    """

    def __init__(self, order: Sequence[str] = SAVE_PHASES, *, keep: bool = False) -> None:
        self.origin = time.perf_counter()
        """When the call began (s of `time.perf_counter`)."""
        self.wall = time.time()
        """The same instant (s since 1970)."""
        self._lock = threading.Lock()
        self._order = {name: i for i, name in enumerate(order)}
        self._phases: dict[str, Phase] = {}
        self._intervals: list[Interval] | None = [] if keep else None

    def add(
        self,
        name: str,
        seconds: float,
        nbytes: int = 0,
        files: int = 0,
        *,
        ended: float | None = None,
        about: str = "",
    ) -> None:
        """Add to a phase what this thread did of it, until `ended` (s of `time.perf_counter`), by default until now."""
        end = time.perf_counter() if ended is None else ended
        begin = end - seconds - self.origin
        with self._lock:
            phase = self._phases.get(name)
            if phase is None:
                phase = self._phases[name] = Phase(began=begin)
            phase.seconds += seconds
            phase.nbytes += nbytes
            phase.files += files
            phase.began = min(phase.began, begin)
            phase.ended = max(phase.ended, end - self.origin)
        if self._intervals is not None:
            self.keep(name, end - seconds, end, nbytes, files, about)

    def keep(self, name: str, began: float, ended: float, nbytes: int = 0, files: int = 0, about: str = "") -> None:
        """Keep an interval of this thread for the trace, if there will be one; no phase gets longer by it."""
        if self._intervals is None:
            return
        interval = Interval(
            name=name,
            thread=threading.get_native_id(),
            thread_name=threading.current_thread().name,
            began=began,
            ended=ended,
            nbytes=nbytes,
            files=files,
            about=about,
        )
        with self._lock:
            self._intervals.append(interval)

    @contextlib.contextmanager
    def timed(self, name: str, nbytes: int = 0, files: int = 0, about: str = "") -> Iterator[None]:
        """Add the time that the block takes to a phase, whether it ends well or not."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.add(name, ended - began, nbytes, files, ended=ended, about=about)

    def waited(self, whose: int, began: float) -> None:
        """Keep an interval in which this thread waited, until now, for what rank `whose` says."""
        self.keep(WAIT, began, time.perf_counter(), about=f"for rank {whose}")

    def report(self) -> dict[str, Phase]:
        """What was measured so far, in the order of the phases."""
        with self._lock:
            phases = sorted(self._phases.items(), key=lambda item: self._order.get(item[0], len(self._order)))
            return {name: replace(phase) for name, phase in phases}

    @property
    def intervals(self) -> Sequence[Interval] | None:
        """What was kept so far; None if nothing is kept."""
        with self._lock:
            return None if self._intervals is None else list(self._intervals)


def rate(nbytes: int, seconds: float) -> str:
    """Bytes and their rate, as a part of a line of log.

    >>> rate(1_500_000_000, 0.75), rate(80_000, 0.01)
    ('1.500 GB, 2.00 GB/s', '0.1 MB')
    """
    if nbytes < LEAST_RATED or seconds <= 0:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.3f} GB, {nbytes / 1e9 / seconds:.2f} GB/s"


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
