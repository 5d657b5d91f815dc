"""Instants of a call at which a signal comes: they are counted, and so the n-th is the same one in each run.

A handler of python's runs in the main thread, where the interpreter looks for signals: when a function begins, after a
call, and at the end of each turn of a loop. A wait for a lock ends at once for it. So there are three kinds of
instants: the n-th look of the main thread within this library, the n-th call within this library of any other thread
while the main one waits or works, and a time.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xla_ckpt

MAIN, BACKGROUND, TIME = CLOCKS = ("main thread", "background", "time")

LIBRARY = str(Path(xla_ckpt.__file__).parent)
BESIDE = tuple(module.__file__ or "" for module in (threading, sys.modules["contextlib"]))
"""Modules of python's in which the library waits and begins its blocks."""

LETS_HANDLE = 0.2
"""Seconds that a background thread waits, at most, until the main thread has handled the signal it was sent."""

LETS_CHANGE = 0.05
"""Seconds that it then waits, at most, until the program goes on and has changed its weights."""


class AskedError(Exception):
    """What a program's handler of SIGUSR1 raises."""


def _raise(error: BaseException) -> None:
    raise error


SIGNALS: dict[str, tuple[signal.Signals, Callable[[], BaseException]]] = {
    "SIGINT": (signal.SIGINT, KeyboardInterrupt),
    "SIGTERM": (signal.SIGTERM, lambda: SystemExit(143)),
    "SIGUSR1": (signal.SIGUSR1, lambda: AskedError("the program's handler")),
}
"""Signals, and what the program's handlers of them raise."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal at an instant."""

    clock: str = MAIN
    """One of `CLOCKS`."""

    at: float = 0
    """The number of the instant, from 1, or seconds; 0 is never."""

    signal: str = "SIGINT"
    """One of `SIGNALS`."""


class Interrupts:
    """The interrupt of one call, and what became of it."""

    def __init__(self, strike: Strike) -> None:
        self._strike = strike
        self._counts = {clock: itertools.count(1) for clock in (MAIN, BACKGROUND)}
        self.counted = dict.fromkeys((MAIN, BACKGROUND), 0)
        """How many instants there were."""
        self.raised: BaseException | None = None
        """What the program's handler has raised."""
        self.ignored: list[BaseException | None] = []
        """What python could raise nowhere: in a destructor, for instance."""
        self.where = ""
        self.changed = threading.Event()
        """Set when the program has gone on, and has changed its weights."""
        self._handled = threading.Event()
        self._begun = threading.Event()
        self._armed = False
        self._pid = os.getpid()

    def _tick(self, clock: str) -> bool:
        if os.getpid() != self._pid:  # the process in which orbax commits, which is forked from this one here
            return False
        count = self.counted[clock] = next(self._counts[clock])
        return self._armed and self._strike.clock == clock and count == self._strike.at

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self._handled.set()
        if not self._armed:
            return
        self._armed = False
        sys.settrace(None)
        self.raised = SIGNALS[self._strike.signal][1]()
        raise self.raised

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Around the call."""
        number = SIGNALS[self._strike.signal][0]
        signal.signal(number, self._handle)
        sys.unraisablehook = lambda args: self.ignored.append(args.exc_value)
        self._armed = True
        threading.setprofile(self._elsewhere)
        if self._strike.clock == TIME and self._strike.at:
            threading.Thread(target=self._in_time, args=(number,), daemon=True).start()
        self._begun.set()
        sys.settrace(self._enter if self._strike.clock == MAIN else None)
        try:
            yield
        finally:
            sys.settrace(None)
            self._armed = False
            threading.setprofile(None)  # type: ignore[arg-type]

    def _in_time(self, number: int) -> None:
        self._begun.wait()
        time.sleep(self._strike.at)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if not (file.startswith(LIBRARY) or file in BESIDE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _looks(frame.f_code) and self._tick(MAIN):
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            signal.raise_signal(SIGNALS[self._strike.signal][0])
        return self._step

    def _elsewhere(self, frame: types.FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(LIBRARY) and self._tick(BACKGROUND):
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in the background"
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNALS[self._strike.signal][0])
            # What the program does next is done before this thread goes on, unless it waits for this thread.
            if self._handled.wait(LETS_HANDLE):
                self.changed.wait(LETS_CHANGE)

    def swallowed(self, error: BaseException | None) -> bool:
        """Whether what the handler raised has reached nobody. DCP's exceptions have no causes, but tell of them."""
        told = str(error)
        while error is not None and error is not self.raised:
            error = error.__cause__ or error.__context__
        by_text = isinstance(self.raised, AskedError) and str(self.raised) in told
        return error is not self.raised and self.raised not in self.ignored and not by_text


@functools.cache
def _looks(code: types.CodeType) -> frozenset[int]:
    """The instructions of a function before which the interpreter looks for signals."""
    steps = list(dis.get_instructions(code))
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handlers(offset: int) -> list[int]:
        return [entry.target for entry in table if entry.start <= offset < entry.end]

    # The interpreter checks for signals at the end of a call, which may be the last instruction of a block. Here the
    # exception is raised before the next instruction, so instants are left out where other handlers cover that one.
    after = {
        step.offset
        for last, step in itertools.pairwise(steps)
        if last.opname in _LOOK and handlers(last.offset) == handlers(step.offset)
    }
    turns = {int(step.argval) for step in steps if step.opname.startswith("JUMP_BACKWARD")}
    return frozenset(after | turns)


_LOOK = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")


def chosen(counted: dict[str, int], seconds: float, each: int, seed: str) -> Iterator[Strike]:
    """So many strikes of a call, spread over its instants: half of them in the main thread."""
    dice = random.Random(seed)
    there = [MAIN, MAIN, MAIN, BACKGROUND, BACKGROUND, TIME] if counted[BACKGROUND] else [MAIN, MAIN, MAIN, TIME]
    clocks = [there[i % len(there)] for i in range(each)]
    turns = {clock: iter(range(clocks.count(clock))) for clock in CLOCKS}
    names = ["SIGINT", "SIGINT", "SIGTERM", "SIGINT", "SIGUSR1"]
    for i, clock in enumerate(clocks):
        part = (next(turns[clock]) + dice.random()) / clocks.count(clock)
        at = seconds * 1.2 * part if clock == TIME else 1 + int(part * counted[clock])
        yield Strike(clock, at, names[i % len(names)])
