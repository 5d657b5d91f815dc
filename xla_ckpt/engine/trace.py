"""The trace of one save or load: a file that Perfetto (ui.perfetto.dev) and chrome://tracing show as bars on threads.

The format is Chrome's Trace Event Format, in its form of a JSON object:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each interval is a complete event
(``"ph": "X"``), with its begin and its length in microseconds. Begins are counted from 1970, and a rank is a process:
so the files of several ranks can be put together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from xla_ckpt.engine.phases import LOAD, SAVE, STALL, WAIT, Interval, Phases
from xla_ckpt.job.round import Round
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.trace_file import TraceFile

logger = get_logger(__name__)

_NO_PHASES = frozenset({SAVE, LOAD, STALL, WAIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that is wanted of a call."""

    file: TraceFile
    doing: str
    """``"save"`` or ``"load"``."""

    rank: int
    world: int

    def write(self, phases: Phases, tag: str | None, error: BaseException | None) -> None:
        """Write the trace of a call that is done. That it cannot be written is logged: the call is what counts."""
        trace = as_json(phases, doing=self.doing, tag=tag, rank=self.rank, error=error)
        try:
            path = self.file.write(
                json.dumps(trace).encode(), doing=self.doing, tag=tag, rank=self.rank, world=self.world
            )
        except OSError as problem:
            logger.warning("the trace of this %s could not be written to %s: %s", self.doing, self.file.path, problem)
        else:
            logger.info("trace of this %s: %s", self.doing, path)


def traced(file: TraceFile | None, doing: str, exchange: Round) -> Trace | None:
    """The trace of a call of this rank, if one is wanted."""
    return None if file is None else Trace(file=file, doing=doing, rank=exchange.rank, world=exchange.size)


def as_json(phases: Phases, *, doing: str, tag: str | None, rank: int, error: BaseException | None) -> dict[str, Any]:
    """What the file of a trace holds."""
    intervals = sorted(phases.intervals or (), key=lambda i: (i.began, -i.ended))
    shift = phases.wall - phases.origin  # from the clock of the intervals to seconds since 1970
    threads = {i.thread: i.thread_name for i in intervals}
    names = [_name("process_name", rank, 0, f"{doing} {tag}, rank {rank}")]
    names += [_name("thread_name", rank, thread, name) for thread, name in threads.items()]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "writer": "xla_ckpt",
            "doing": doing,
            "tag": tag,
            "rank": rank,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        },
        "traceEvents": [*names, *(_event(i, rank, shift) for i in intervals)],
    }


def _event(interval: Interval, rank: int, shift: float) -> dict[str, Any]:
    seconds = interval.ended - interval.began
    about: dict[str, Any] = {"about": interval.about} if interval.about else {}
    if interval.nbytes:
        about |= {"bytes": interval.nbytes, "GB/s": round(interval.nbytes / 1e9 / max(seconds, 1e-9), 3)}
    if interval.files:
        about["files"] = interval.files
    return {
        "name": interval.name,
        "cat": "call" if interval.name in _NO_PHASES else "phase",
        "ph": "X",
        "ts": round(1e6 * (interval.began + shift), 1),
        "dur": round(1e6 * seconds, 1),
        "pid": rank,
        "tid": interval.thread,
        "args": about,
    }


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
