"""Reports of saves and loads: phase timings, rank timings, trace files and report listeners.

A `PhaseRecorder` collects how long each phase takes and how many bytes it moves. A finished call makes a `SaveReport`
or a `LoadReport` of it, writes a trace file if one was requested, and notifies the listeners of `on_report`. A tag
keeps the timings of its slowest ranks (`RankTimings`). Errors of background saves are reported here as well, because
the caller chooses with `on_error` who receives them.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.errors import (
    CheckpointError,
    FormatError,
    InvalidTagError,
    SaveError,
    UnsupportedStateError,
    UsageError,
    from_json,
)
from xla_ckpt.keywords import check_arguments
from xla_ckpt.logs import get_logger
from xla_ckpt.options import OnError
from xla_ckpt.rendering.formatting import MIN_RATED_BYTES
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.storage.signals import is_from_signal_handler
from xla_ckpt.storage.trace_file import TraceFile

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

COLLECTIVE_PHASES = frozenset({"meet", "helper", "commit", "retain"})
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


class PhaseRecorder:
    """Collects the phases of one save or load, which begins now. Safe for several threads.

    Args:
        order: Names of the phases in the order in which `report` gives them.
        keep: Whether intervals are kept, too, for a trace. They take memory: some 300 bytes for each 8 MiB of a save
            and each 2 MiB of a load, and for each small file.
    """

    def __init__(self, order: Sequence[str] = SAVE_PHASES, *, keep_intervals: bool = False) -> None:
        self.origin = time.perf_counter()
        """When the call began (s of `time.perf_counter`)."""
        self.wall = time.time()
        """The same instant (s since 1970)."""
        self._lock = threading.Lock()
        self._order = {name: i for i, name in enumerate(order)}
        self._phases: dict[str, Phase] = {}
        self._intervals: list[Interval] | None = [] if keep_intervals else None

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
            self.record_interval(name, end - seconds, end, nbytes, files, about)

    def record_interval(
        self, name: str, began: float, ended: float, nbytes: int = 0, files: int = 0, about: str = ""
    ) -> None:
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
    def measure(self, name: str, nbytes: int = 0, files: int = 0, about: str = "") -> Iterator[None]:
        """Add the time that the block takes to a phase, whether it ends well or not."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.add(name, ended - began, nbytes, files, ended=ended, about=about)

    def record_wait(self, rank: int, began: float) -> None:
        """Keep an interval in which this thread waited, until now, for what rank `rank` says."""
        self.record_interval(WAIT, began, time.perf_counter(), about=f"for rank {rank}")

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


def format_rate(nbytes: int, seconds: float) -> str:
    """Bytes and their rate, as a part of a line of log.

    >>> format_rate(1_500_000_000, 0.75), format_rate(80_000, 0.01)
    ('1.500 GB, 2.00 GB/s', '0.1 MB')
    """
    if nbytes < MIN_RATED_BYTES or seconds <= 0:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.3f} GB, {nbytes / 1e9 / seconds:.2f} GB/s"


def format_phases(phases: dict[str, Phase]) -> str:
    """The phases as a part of one line of log.

    >>> format_phases({"plan": Phase(0.0004), "write": Phase(0.25, 50_000_000, 2)})
    'plan 0.4 ms, write 250.0 ms (50.0 MB, 2 files)'
    """
    return ", ".join(f"{name} {1e3 * p.seconds:.1f} ms{_format_amount(p)}" for name, p in phases.items())


def _format_amount(phase: Phase) -> str:
    said = [f"{phase.nbytes / 1e6:.1f} MB"] if phase.nbytes else []
    said += [f"{phase.files} file{'s' if phase.files > 1 else ''}"] if phase.files else []
    return f" ({', '.join(said)})" if said else ""


def _render_html(report: SaveReport | LoadReport) -> str:
    """What a notebook shows of a report."""
    from xla_ckpt.rendering import html, reports

    facts = {name: getattr(report, name) for name in type(report).__slots__}
    phases = {name: asdict(phase) for name, phase in report.phases.items()}
    return html.render_html(reports.render_call_report({**facts, "phases": phases}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a finished save did, on this rank."""

    path: str
    tag: str
    sequence: int
    """Commit number."""

    nbytes: int
    """Array bytes that this rank wrote."""

    files: int
    """Payload files that this rank wrote."""

    shared: int = 0
    """Array bytes that this rank did not write, since an earlier tag has a file of them (`SaveOptions.share`)."""

    seconds: float
    """From the start of the background work to the commit."""

    stall: float = 0.0
    """Seconds that the caller waited for the snapshot, and the program's writers for it afterwards."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Where the time went (see `xla_ckpt.reports.SAVE_PHASES`); `repr` leaves it out."""

    error: BaseException | None = None
    """Why the save failed, in the report that `on_report` has of it. Then `sequence` is 0."""

    def _repr_html_(self) -> str:
        return _render_html(self)

    @property
    def in_words(self) -> str:
        """What the log says of it."""
        speed, phases, waited = (
            format_rate(self.nbytes, self.seconds),
            format_phases(dict(self.phases)),
            1e3 * self.stall,
        )
        took = f"{self.seconds:.2f} s ({speed}), of which the caller waited {waited:.1f} ms"
        return f"saved tag {self.tag} in {took}: {phases}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a finished load did, on this rank."""

    path: str
    tag: str
    """The tag that was loaded. Empty where a load failed that was to take the newest."""

    skipped: tuple[str, ...] = ()
    """With ``strict=False``: what did not fit and was left alone, with the reason."""

    corrupt_tags: tuple[str, ...] = ()
    """Newer tags that were passed over because they are damaged."""

    arrays: int = 0
    """Arrays that were restored."""

    needed_bytes: int = 0
    """Bytes of those."""

    read_bytes: int = 0
    """Bytes that were read for them. Those of large tensors of the CPU, which are overwritten in place, count twice:
    they are read first to verify them, and then again, out of the page cache, into their places."""

    proven_bytes: int = 0
    """With ``prove=True``: bytes that were read back from memory, and compared with the tag. Copies on several local
    devices count each."""

    unproven: tuple[str, ...] = ()
    """With ``prove=True``: arrays whose bytes cannot be compared, with the reason."""

    seconds: float = 0.0
    """From the call to its end."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Where the time went (see `xla_ckpt.reports.LOAD_PHASES`); `repr` leaves it out."""

    error: Exception | None = None
    """Why the load failed, in the report that `on_report` has of it."""

    def _repr_html_(self) -> str:
        return _render_html(self)


MAX_RECORDED_RANKS = 64
"""Ranks of which a tag keeps what they measured, the slowest: of thousands of ranks it would be a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimings:
    """What one rank measured of its part of a save."""

    rank: int
    stall: float
    """Seconds that the caller waited."""

    nbytes: int
    """Array bytes that it wrote."""

    files: int
    """Payload files that it wrote."""

    phases: Mapping[str, Phase]

    @property
    def finished(self) -> float:
        """When it had done its own part (s after the call)."""
        return max((phase.ended for name, phase in self.phases.items() if name not in COLLECTIVE_PHASES), default=0.0)

    def to_json(self) -> list[Any]:
        """As plain JSON, and short: a tag may keep it of many ranks."""
        phases = [
            [name, *(round(s, 5) for s in (p.began, p.ended, p.seconds)), p.nbytes, p.files]
            for name, p in self.phases.items()
        ]
        return [self.rank, round(self.stall, 5), self.nbytes, self.files, phases]

    @classmethod
    def from_json(cls, json: Any) -> RankTimings:
        """What `to_json` gave.

        Raises:
            TypeError, ValueError: It is something else.
        """
        rank, stall, nbytes, files, phases = json
        by_name = {}
        for name, began, ended, seconds, moved, finished in phases:
            times = float(seconds), float(began), float(ended)
            if not all(map(math.isfinite, times)):
                raise ValueError(f"no times: {times}")
            by_name[str(name)] = Phase(times[0], int(moved), int(finished), *times[1:])
        return cls(rank=int(rank), stall=float(stall), nbytes=int(nbytes), files=int(files), phases=by_name)


def select_slowest_ranks(timings: Sequence[RankTimings]) -> dict[str, Any]:
    """What a tag keeps of it, as plain JSON.

    >>> phases = {"write": Phase(1.5, 8, 1, 0.25, 1.75)}
    >>> select_slowest_ranks([RankTimings(rank=0, stall=0.5, nbytes=8, files=1, phases=phases)])
    {'ranks': 1, 'measured': [[0, 0.5, 8, 1, [['write', 0.25, 1.75, 1.5, 8, 1]]]]}
    """
    slowest = sorted(timings, key=lambda m: (-m.finished, m.rank))[:MAX_RECORDED_RANKS]
    return {"ranks": len(timings), "measured": [m.to_json() for m in slowest]}


def parse_rank_timings(report: Any, path: str, tag: str) -> tuple[int, list[RankTimings]]:
    """Number of ranks that saved a tag, and what the slowest of them measured, the slowest first.

    Args:
        report: What the commit was given to keep (`Root.report_of`).
        path: Root directory.
        tag: Which tag.

    Raises:
        UsageError: The tag keeps none of it.
        FormatError: What it keeps is damaged.
    """
    if report is None:
        raise UsageError(
            "this tag has no report of its save",
            path=path,
            tag=tag,
            hint="Tags have one that save and save_checkpoint wrote since there are reports. "
            "Conversions, xla_ckpt.dcp and other libraries leave none.",
        )
    try:
        measured = [RankTimings.from_json(json) for json in report["measured"]]
        return int(report["ranks"]), measured
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError("the report of the save is damaged", path=path, tag=tag, found=error) from error


def describe_timings(report: Any, path: str, tag: str) -> dict[str, Any]:
    """The same as plain JSON that says what each number is.

    Raises:
        CheckpointError: As `parse_rank_timings`.
    """
    ranks, measured = parse_rank_timings(report, path, tag)
    return {
        "path": path,
        "tag": tag,
        "ranks": ranks,
        "seconds": max((p.ended for m in measured for p in m.phases.values()), default=0.0),
        "measured": [
            {
                "rank": m.rank,
                "stall": m.stall,
                "done": m.finished,
                "nbytes": m.nbytes,
                "files": m.files,
                "phases": {name: asdict(phase) for name, phase in m.phases.items()},
            }
            for m in measured
        ],
    }


logger = get_logger(__name__)

_NON_PHASES = frozenset({SAVE, LOAD, STALL, WAIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that is wanted of a call."""

    file: TraceFile
    doing: str
    """``"save"`` or ``"load"``."""

    rank: int
    world: int

    def write(self, phases: PhaseRecorder, tag: str | None, error: BaseException | None) -> None:
        """Write the trace of a call that is done. That it cannot be written is logged: the call is what counts."""
        trace = build_trace_json(phases, doing=self.doing, tag=tag, rank=self.rank, error=error)
        try:
            path = self.file.write(
                json.dumps(trace).encode(), operation=self.doing, tag=tag, rank=self.rank, world_size=self.world
            )
        except OSError as problem:
            logger.warning("the trace of this %s could not be written to %s: %s", self.doing, self.file.path, problem)
        else:
            logger.info("trace of this %s: %s", self.doing, path)


def create_trace(file: TraceFile | None, doing: str, exchange: Exchange) -> Trace | None:
    """The trace of a call of this rank, if one is wanted."""
    return None if file is None else Trace(file=file, doing=doing, rank=exchange.rank, world=exchange.size)


def build_trace_json(
    phases: PhaseRecorder, *, doing: str, tag: str | None, rank: int, error: BaseException | None
) -> dict[str, Any]:
    """What the file of a trace holds."""
    intervals = sorted(phases.intervals or (), key=lambda i: (i.began, -i.ended))
    shift = phases.wall - phases.origin  # from the clock of the intervals to seconds since 1970
    threads = {i.thread: i.thread_name for i in intervals}
    names = [_make_name_event("process_name", rank, 0, f"{doing} {tag}, rank {rank}")]
    names += [_make_name_event("thread_name", rank, thread, name) for thread, name in threads.items()]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "writer": "xla_ckpt",
            "doing": doing,
            "tag": tag,
            "rank": rank,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        },
        "traceEvents": [*names, *(_make_event(i, rank, shift) for i in intervals)],
    }


def _make_event(interval: Interval, rank: int, shift: float) -> dict[str, Any]:
    seconds = interval.ended - interval.began
    about: dict[str, Any] = {"about": interval.about} if interval.about else {}
    if interval.nbytes:
        about |= {"bytes": interval.nbytes, "GB/s": round(interval.nbytes / 1e9 / max(seconds, 1e-9), 3)}
    if interval.files:
        about["files"] = interval.files
    return {
        "name": interval.name,
        "cat": "call" if interval.name in _NON_PHASES else "phase",
        "ph": "X",
        "ts": round(1e6 * (interval.began + shift), 1),
        "dur": round(1e6 * seconds, 1),
        "pid": rank,
        "tid": interval.thread,
        "args": about,
    }


def _make_name_event(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


Report = SaveReport | LoadReport
Listener = Callable[[Report], object]

PROGRAM_ERRORS = (UsageError, UnsupportedStateError, InvalidTagError)
"""Errors of the program, which fail every save and not this one alone. They are raised in any case."""


class ListenerRegistry:
    """The functions that hear of each report of this process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._functions: dict[object, Listener] = {}

    def add(self, function: Listener) -> Callable[[], None]:
        """Have a function hear of each report from now on; returns what removes it again."""
        key = object()  # the same function may be added twice, and is removed once then
        with self._lock:
            self._functions[key] = function

        def remove() -> None:
            with self._lock:
                self._functions.pop(key, None)

        return remove

    def notify(self, report: Report) -> None:
        """Call all functions, in the order in which they were added."""
        with self._lock:
            functions = list(self._functions.values())
        for function in functions:
            try:
                function(report)
            except BaseException as error:
                # It is the program's own code, and may raise anything; the save or load is done, and stays what it is.
                if is_from_signal_handler(error):
                    raise
                logger.exception("a function that on_report was given failed for the tag %s", report.tag)


LISTENERS = ListenerRegistry()
"""Those of this process."""


@check_arguments
def on_report(function: Callable[[SaveReport | LoadReport], object]) -> Callable[[], None]:
    """Have a function called with the report of each save and each load of this process, when it is done.

    Saves by `xla_ckpt.dcp` are told, too: their `path` is the directory above the checkpoint, and `tag` is its name.
    Loads by it, conversions and exports have no reports.

    A `SaveReport` comes from the thread of the save, before `handle.result()` returns; a `LoadReport` from the thread
    that loads. What failed is reported, too: then `report.error` says why. Each rank hears of its own part. What the
    function raises is logged, and changes nothing. The next save of the same path waits until it has returned; it must
    not wait for saves itself.

    Args:
        function: Called with the report as its only argument. What it returns is ignored.

    Returns:
        A function without arguments that removes it. A second call of that does nothing.

    >>> import torch, xla_ckpt
    >>> remove = xla_ckpt.on_report(lambda report: print(type(report).__name__, report.tag, report.nbytes, "bytes"))
    >>> handle = xla_ckpt.save("memory://reported", "a", {"w": torch.ones(2)})
    SaveReport a 8 bytes
    >>> remove()
    """
    return LISTENERS.add(function)


def publish_report(report: Report, phases: PhaseRecorder, trace: Trace | None) -> None:
    """Write the trace of a call that is done, if one is wanted, and tell the program's functions."""
    if trace is not None:
        trace.write(phases, report.tag, report.error)
    LISTENERS.notify(report)


def report_error(on_error: OnError, error: BaseException) -> bool:
    """Tell of the error of a save as its caller wishes; whether that is enough."""
    if on_error == "raise" or not isinstance(error, CheckpointError) or isinstance(error, PROGRAM_ERRORS):
        return False
    if on_error == "warn":
        logger.warning("a save failed, and the program goes on: %s", error)
        return True
    try:
        on_error(error)
    except BaseException as raised:
        if is_from_signal_handler(raised):
            raise
        logger.exception("the function that hears of failed saves has failed itself")
        return False  # the error is raised, as if there were no such function
    return True


def make_deferred_error(error: BaseException, consequence: str = "") -> CheckpointError:
    """Return the error of a save for a later call to raise. That of the save's handle stays what it was.

    Args:
        error: The error of the save.
        consequence: What the later call has not done for it.
    """
    problem = error if isinstance(error, CheckpointError) else SaveError(f"{type(error).__name__}: {error}")
    # Its tag is a fact of the error, the same on all ranks. That of the handle is another one on a rank that has left a
    # save out.
    text = f"an asynchronous save before this call has failed{consequence}: {problem.problem}"
    later = from_json(problem.to_json() | {"problem": text})
    later.__cause__ = error
    return later
