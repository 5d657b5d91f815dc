"""Reports of saves and loads: phase timings, rank timings, trace files and report listeners.

A `PhaseRecorder` collects how long each phase takes and how many bytes it moves. A finished call creates a
`SaveReport` or a `LoadReport` from it, writes a trace file if one was requested, and notifies the listeners of
`on_report`. A tag stores the timings of its slowest ranks (`RankTimings`). Errors of background saves are reported
here as well, because the caller chooses with `on_error` who receives them.
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
"""Phases of a save, in order. `copy`, `digest`, `write` and `fsync` run concurrently on several threads."""

COLLECTIVE_PHASES = frozenset({"meet", "helper", "commit", "retain"})
"""Phases of a save in which a rank waits, or that only rank 0 runs; they do not show how slow a rank is."""

LOAD_PHASES = ("open", "check", "plan", "read", "verify", "install", "prove")
"""Phases of a load, in order. `read` and `verify` run concurrently on several threads; `prove` on several."""

STALL, SAVE, LOAD, WAIT = "stall", "save", "load", "wait"
"""Intervals of a trace that are not phases: the time that the caller of a save waited; the whole background part of a
save; a whole load; a wait for another rank, or for the previous save."""


@dataclass(slots=True)
class Phase:
    """Timing of one phase of a save or a load, on this rank."""

    seconds: float = 0.0
    """Seconds spent in the phase, summed over threads; the sum may exceed the elapsed time."""

    nbytes: int = 0
    """Bytes moved, read or digested in the phase; 0 for other phases."""

    files: int = 0
    """Number of files finished in the phase."""

    began: float = field(default=0.0, compare=False)
    """Start time on the first thread (s after the call)."""

    ended: float = field(default=0.0, compare=False)
    """End time on the last thread (s after the call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Uninterrupted work of one thread: a bar of a trace."""

    name: str
    """Name of a phase, or `STALL`, `SAVE`, `LOAD` or `WAIT`."""

    thread: int
    """Identifier of the thread in the operating system."""

    thread_name: str
    began: float
    """Start (s of `time.perf_counter`)."""

    ended: float
    """End (s of `time.perf_counter`)."""

    nbytes: int = 0
    files: int = 0
    about: str = ""
    """File or leaf that the interval is about, if any."""


class PhaseRecorder:
    """Recorder of the phases of one save or load, which begins now. Thread-safe.

    Args:
        order: Names of the phases in the order of `report`.
        keep_intervals: Keep intervals, too, for a trace. They take about 300 bytes of memory for each 8 MiB of a save
            and each 2 MiB of a load, and for each small file.
    """

    def __init__(self, order: Sequence[str] = SAVE_PHASES, *, keep_intervals: bool = False) -> None:
        self.origin = time.perf_counter()
        """Time of the call (s of `time.perf_counter`)."""
        self.wall = time.time()
        """Time of the call (s since 1970)."""
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
        """Add work of this thread to a phase, which ended at `ended` (s of `time.perf_counter`), by default now."""
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
        """Record an interval of this thread for the trace, if one is kept; it does not count for any phase."""
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
        """Measure the time of the block as part of a phase, even if the block raises an exception."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.add(name, ended - began, nbytes, files, ended=ended, about=about)

    def record_wait(self, rank: int, began: float) -> None:
        """Record an interval in which this thread waited, until now, for a message of rank `rank`."""
        self.record_interval(WAIT, began, time.perf_counter(), about=f"for rank {rank}")

    def report(self) -> dict[str, Phase]:
        """Return the phases measured so far, in order."""
        with self._lock:
            phases = sorted(self._phases.items(), key=lambda item: self._order.get(item[0], len(self._order)))
            return {name: replace(phase) for name, phase in phases}

    @property
    def intervals(self) -> Sequence[Interval] | None:
        """Intervals recorded so far; None if intervals are not kept."""
        with self._lock:
            return None if self._intervals is None else list(self._intervals)


def format_rate(nbytes: int, seconds: float) -> str:
    """Format bytes and their rate for a log line.

    >>> format_rate(1_500_000_000, 0.75), format_rate(80_000, 0.01)
    ('1.500 GB, 2.00 GB/s', '0.1 MB')
    """
    if nbytes < MIN_RATED_BYTES or seconds <= 0:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.3f} GB, {nbytes / 1e9 / seconds:.2f} GB/s"


def format_phases(phases: dict[str, Phase]) -> str:
    """Format the phases for a log line.

    >>> format_phases({"plan": Phase(0.0004), "write": Phase(0.25, 50_000_000, 2)})
    'plan 0.4 ms, write 250.0 ms (50.0 MB, 2 files)'
    """
    return ", ".join(f"{name} {1e3 * p.seconds:.1f} ms{_format_amount(p)}" for name, p in phases.items())


def _format_amount(phase: Phase) -> str:
    parts = [f"{phase.nbytes / 1e6:.1f} MB"] if phase.nbytes else []
    parts += [f"{phase.files} file{'s' if phase.files > 1 else ''}"] if phase.files else []
    return f" ({', '.join(parts)})" if parts else ""


def _render_html(report: SaveReport | LoadReport) -> str:
    """Render a report as HTML for a notebook."""
    from xla_ckpt.rendering import html, reports

    facts = {name: getattr(report, name) for name in type(report).__slots__}
    phases = {name: asdict(phase) for name, phase in report.phases.items()}
    return html.render_html(reports.render_call_report({**facts, "phases": phases}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Report of a finished save, on this rank."""

    path: str
    tag: str
    sequence: int
    """Commit number."""

    nbytes: int
    """Array bytes that this rank wrote."""

    files: int
    """Payload files that this rank wrote."""

    shared: int = 0
    """Array bytes that this rank did not write, because an earlier tag contains a file with them (`SaveOptions.share`).
    """

    seconds: float
    """Seconds from the start of the background work to the commit."""

    stall: float = 0.0
    """Seconds that the caller waited for the snapshot, and that later writes of the program waited for it."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Time per phase (see `xla_ckpt.reports.SAVE_PHASES`); not part of the `repr`."""

    error: BaseException | None = None
    """Error of a failed save, in the report that listeners of `on_report` receive. `sequence` is 0 then."""

    def _repr_html_(self) -> str:
        return _render_html(self)

    @property
    def in_words(self) -> str:
        """Summary of the report for the log."""
        speed, phases, waited = (
            format_rate(self.nbytes, self.seconds),
            format_phases(dict(self.phases)),
            1e3 * self.stall,
        )
        took = f"{self.seconds:.2f} s ({speed}), of which the caller waited {waited:.1f} ms"
        return f"saved tag {self.tag} in {took}: {phases}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of a finished load, on this rank."""

    path: str
    tag: str
    """Name of the loaded tag. Empty for a failed load of the newest tag."""

    skipped: tuple[str, ...] = ()
    """With ``strict=False``: state that did not fit and was not loaded, with the reason."""

    corrupt_tags: tuple[str, ...] = ()
    """Newer tags that were skipped because they are damaged."""

    arrays: int = 0
    """Number of arrays that were restored."""

    needed_bytes: int = 0
    """Size of these arrays in bytes."""

    read_bytes: int = 0
    """Bytes read for these arrays. Large CPU tensors that are overwritten in place count twice: they are read first to
    be verified, and then again, from the page cache, into their memory."""

    proven_bytes: int = 0
    """With ``prove=True``: bytes that were read back from memory and compared with the tag. Copies on several local
    devices count separately."""

    unproven: tuple[str, ...] = ()
    """With ``prove=True``: arrays whose bytes cannot be compared, with the reason."""

    seconds: float = 0.0
    """Seconds from the call to its end."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Time per phase (see `xla_ckpt.reports.LOAD_PHASES`); not part of the `repr`."""

    error: Exception | None = None
    """Error of a failed load, in the report that listeners of `on_report` receive."""

    def _repr_html_(self) -> str:
        return _render_html(self)


MAX_RECORDED_RANKS = 64
"""Maximum number of ranks whose timings a tag stores, the slowest: for thousands of ranks they would take a megabyte.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimings:
    """Timings of one rank's part of a save."""

    rank: int
    stall: float
    """Seconds that the caller waited."""

    nbytes: int
    """Array bytes that the rank wrote."""

    files: int
    """Payload files that the rank wrote."""

    phases: Mapping[str, Phase]

    @property
    def finished(self) -> float:
        """Time at which the rank finished its own part (s after the call)."""
        return max((phase.ended for name, phase in self.phases.items() if name not in COLLECTIVE_PHASES), default=0.0)

    def to_json(self) -> list[Any]:
        """Return the timings as plain JSON, in short form, because a tag may store them for many ranks."""
        phases = [
            [name, *(round(s, 5) for s in (p.began, p.ended, p.seconds)), p.nbytes, p.files]
            for name, p in self.phases.items()
        ]
        return [self.rank, round(self.stall, 5), self.nbytes, self.files, phases]

    @classmethod
    def from_json(cls, json: Any) -> RankTimings:
        """Return the timings that `to_json` serialized.

        Raises:
            TypeError, ValueError: The value has another form.
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
    """Return the timings of the slowest ranks, which a tag stores, as plain JSON.

    >>> phases = {"write": Phase(1.5, 8, 1, 0.25, 1.75)}
    >>> select_slowest_ranks([RankTimings(rank=0, stall=0.5, nbytes=8, files=1, phases=phases)])
    {'ranks': 1, 'measured': [[0, 0.5, 8, 1, [['write', 0.25, 1.75, 1.5, 8, 1]]]]}
    """
    slowest = sorted(timings, key=lambda m: (-m.finished, m.rank))[:MAX_RECORDED_RANKS]
    return {"ranks": len(timings), "measured": [m.to_json() for m in slowest]}


def parse_rank_timings(report: Any, path: str, tag: str) -> tuple[int, list[RankTimings]]:
    """Return the number of ranks that saved a tag, and the timings of the slowest, slowest first.

    Args:
        report: Report that was stored with the commit (`Root.read_report`).
        path: Root directory.
        tag: Name of the tag.

    Raises:
        UsageError: The tag contains no report.
        FormatError: The report is damaged.
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
    """Return the timings of a save as plain JSON with named fields.

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
    """Requested trace of a call."""

    file: TraceFile
    doing: str
    """``"save"`` or ``"load"``."""

    rank: int
    world: int

    def write(self, phases: PhaseRecorder, tag: str | None, error: BaseException | None) -> None:
        """Write the trace of a finished call. A failure is logged and does not fail the call."""
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
    """Return the trace of a call of this rank, if requested."""
    return None if file is None else Trace(file=file, doing=doing, rank=exchange.rank, world=exchange.size)


def build_trace_json(
    phases: PhaseRecorder, *, doing: str, tag: str | None, rank: int, error: BaseException | None
) -> dict[str, Any]:
    """Return the contents of a trace file."""
    intervals = sorted(phases.intervals or (), key=lambda i: (i.began, -i.ended))
    shift = phases.wall - phases.origin  # converts from the clock of the intervals to seconds since 1970
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
"""Errors of the program, which would fail every save. They are always raised."""


class ListenerRegistry:
    """Registry of the callbacks that receive each report of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._functions: dict[object, Listener] = {}

    def add(self, function: Listener) -> Callable[[], None]:
        """Register a callback for all following reports, and return a function that removes it."""
        key = object()  # the same function may be added twice; each registration is removed separately
        with self._lock:
            self._functions[key] = function

        def remove() -> None:
            with self._lock:
                self._functions.pop(key, None)

        return remove

    def notify(self, report: Report) -> None:
        """Call all callbacks, in the order in which they were added."""
        with self._lock:
            functions = list(self._functions.values())
        for function in functions:
            try:
                function(report)
            except BaseException as error:
                # A callback may raise any exception; the save or load has finished and is not affected.
                if is_from_signal_handler(error):
                    raise
                logger.exception("a function that on_report was given failed for the tag %s", report.tag)


LISTENERS = ListenerRegistry()
"""Listeners of this process."""


@check_arguments
def on_report(function: Callable[[SaveReport | LoadReport], object]) -> Callable[[], None]:
    """Register a callback that is called with the report of each finished save and load of this process.

    Saves by `xla_ckpt.dcp` are reported, too: `path` is the directory above the checkpoint, and `tag` is its name.
    Loads by `xla_ckpt.dcp`, conversions and exports are not reported.

    A `SaveReport` comes from the thread of the save, before `handle.result()` returns; a `LoadReport` from the thread
    that loads. Failures are reported, too, with `report.error` set. Each rank reports its own part. Exceptions of the
    callback are logged and have no other effect. The next save of the same path waits until the callback has returned;
    the callback must not wait for saves itself.

    Args:
        function: Called with the report as its only argument. Its return value is ignored.

    Returns:
        A function without arguments that removes the callback. Calling it again has no effect.

    >>> import torch, xla_ckpt
    >>> remove = xla_ckpt.on_report(lambda report: print(type(report).__name__, report.tag, report.nbytes, "bytes"))
    >>> handle = xla_ckpt.save("memory://reported", "a", {"w": torch.ones(2)})
    SaveReport a 8 bytes
    >>> remove()
    """
    return LISTENERS.add(function)


def publish_report(report: Report, phases: PhaseRecorder, trace: Trace | None) -> None:
    """Write the trace of a finished call, if requested, and notify the listeners."""
    if trace is not None:
        trace.write(phases, report.tag, report.error)
    LISTENERS.notify(report)


def report_error(on_error: OnError, error: BaseException) -> bool:
    """Report the error of a save according to `on_error`, and return True if it need not be raised."""
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
        return False  # the error is raised as if there were no callback
    return True


def make_deferred_error(error: BaseException, consequence: str = "") -> CheckpointError:
    """Return the error of a save for a later call to raise. The error of the save's handle is not changed.

    Args:
        error: The error of the save.
        consequence: Clause about the work that the later call skips because of the error.
    """
    problem = error if isinstance(error, CheckpointError) else SaveError(f"{type(error).__name__}: {error}")
    # The tag of the error is the same on all ranks. The tag of the handle may differ on a rank that skipped a save.
    text = f"an asynchronous save before this call has failed{consequence}: {problem.problem}"
    later = from_json(problem.to_json() | {"problem": text})
    later.__cause__ = error
    return later
