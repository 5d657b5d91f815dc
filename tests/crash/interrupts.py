"""Ctrl-C, and other exceptions of signal handlers, at the instants of a call in a program that goes on.

The clock is the interpreter's: tests/crash/instants.py says which instants there are. After the interrupt the program
changes its weights, waits for its saves, looks at all that is there, saves again, and ends. `make interrupts` tries 300
instants of each call:

python -m tests.crash.interrupts [--operation NAME ...] [--each 300] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash import report
from tests.xla import HAS_XLA

SECONDS = 25.0
"""A run that takes longer hangs."""

ENDS = 10.0
"""Seconds that a thread may take to its end once nothing is in flight any more."""


@dataclass(frozen=True)
class Case:
    """One interrupt, and what became of it."""

    operation: str
    clock: str
    """Whose instants are counted."""

    at: float
    signal: str
    reached: bool
    """Whether the program's handler has raised."""

    where: str
    returned: bool
    """Whether the call returned all the same."""

    lost: tuple[str, ...] = ()
    """Tags that are gone, damaged or mixed; objects that are half loaded."""

    wrong: tuple[str, ...] = ()
    """An interrupt that nobody hears of; a call that returns and has done nothing."""

    other: tuple[str, ...] = ()
    """Processes that hang, threads and files that are left, a next call that fails."""

    def __str__(self) -> str:
        at = f"{self.at:.4f} s" if self.clock == "time" else f"{self.at:.0f}"
        return f"{self.operation}, {self.signal} at {at} ({self.clock}; {self.where or 'nowhere'})"

    @property
    def problems(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.lost, *self.wrong, *self.other)


def perform(name: str, root: Path, strike: Any) -> dict[str, Any]:
    """Run a scene with an interrupt, go on, and end, in a process that is only for that; what was met."""
    import xla_ckpt
    from tests.crash.injection import looked_at
    from tests.crash.instants import Interrupts
    from tests.crash.operations import LIVE
    from tests.crash.scenes import PROGRAM, SCENES

    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of the process that this one is a fork of, such as its temporary directory's
    warnings.simplefilter("ignore")  # Python drops an exception that it meets while it prints a warning
    scene, interrupts = SCENES[name], Interrupts(strike)
    returned, error, began = False, None, time.perf_counter()
    try:
        with interrupts.coming():
            scene.operation.run(root)
            returned = True
    except BaseException as raised:  # a program that goes on, as a notebook does, which keeps the last error
        sys.last_value = error = raised
    seconds = time.perf_counter() - began
    if PROGRAM.changes:
        for array in LIVE:
            array.detach().fill_(-1)
    interrupts.changed.set()
    wrong, other = [], []
    if interrupts.raised is None and error is not None:
        wrong.append(f"raised without an interrupt: {type(error).__name__}: {error}")
    returned = returned and not PROGRAM.code
    if interrupts.raised is not None and interrupts.swallowed(error) and scene.heard and not PROGRAM.code:
        wrong.append(f"the interrupt was swallowed; the call {'returned' if returned else f'raised {error!r}'}")
    lost = scene.judge(returned, strike.signal)
    PROGRAM.waits()
    try:
        xla_ckpt.finalize_checkpoint()
    except xla_ckpt.CheckpointError:
        pass  # that of the save that was interrupted
    for thread in threading.enumerate():
        if thread.name.startswith(IN_FLIGHT):
            thread.join(ENDS)
            other += [f"the thread {thread.name} does not end"] * thread.is_alive()
    lost += scene.judge(returned, strike.signal) if not lost else []  # nothing has been overwritten meanwhile
    seen = looked_at(scene.operation, root)
    if any(name.startswith(".") for name in seen.get("names", ())):
        # The traceback of the interrupt may keep a directory open, which is then in use. It goes with the next one.
        sys.last_value = error = None
        if interrupts.raised is not None:
            interrupts.raised.__traceback__ = None
        gc.collect()
        with contextlib.suppress(xla_ckpt.UsageError):
            scene.operation.again(root)
        seen["names"] = sorted(scene.operation.names(root))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return {
        "reached": interrupts.raised is not None, "where": interrupts.where, "counted": interrupts.counted,
        "returned": returned, "promised": PROGRAM.promised, "seconds": seconds, "seen": seen,
        "lost": lost, "wrong": wrong, "other": other,
    }  # fmt: skip


IN_FLIGHT = tuple(f"xla_ckpt-{doing}" for doing in ("save", "read", "copy", "write", "stream", "repair", "parity"))
"""Beginnings of the names of threads that are there only as long as a call takes."""


def tried(name: str, start: Path, work: Path, strike: Any) -> tuple[Case, dict[str, Any]]:
    """One interrupt of a scene, in a copy of its directory."""
    from tests.crash.injection import Fork
    from tests.crash.scenes import SCENES

    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(start, work / "root", symlinks=True)
    printed = work / "printed"
    code, told = Fork.of(functools.partial(perform, name, work / "root", strike), printed).wait(SECONDS)
    if code or told is None or "seen" not in told:
        how = "hangs" if told else f"ends with {code}"
        text = f"the process {how}: {printed.read_text()[-3000:]}"
        return Case(name, strike.clock, strike.at, strike.signal, True, "", False, other=(text,)), {}
    lost, wrong, other = judged(SCENES[name].operation, told)
    case = Case(
        name, strike.clock, strike.at, strike.signal, told["reached"], told["where"], told["returned"],
        (*told["lost"], *lost), (*told["wrong"], *wrong), (*told["other"], *other),
    )  # fmt: skip
    return case, told


def judged(operation: Any, told: dict[str, Any]) -> tuple[tuple[str, ...], list[str], tuple[str, ...]]:
    """What is lost, said wrongly and left in the directory."""
    from tests.crash.injection import End, is_of
    from tests.crash.injection import judged as of_directory

    verdict = of_directory(operation, [End(signal=1)], told["seen"])
    wrong = []
    if (told["returned"] or told["promised"]) and operation.before != operation.after:
        done = is_of(operation, dict(told["seen"].get("found", ())))
        wrong += [] if done or verdict.lost else ["the call returned, and nothing was committed"]
    return verdict.lost, wrong, verdict.other


def run_scene(name: str, folder: Path, each: int) -> Iterator[Case]:
    """So many interrupts of a scene."""
    from tests.crash.injection import forked
    from tests.crash.instants import Strike, chosen
    from tests.crash.scenes import SCENES

    start, work = folder / "start", folder / "work"
    start.mkdir(parents=True)
    code, _ = forked(lambda: SCENES[name].operation.prepare(start), folder / "printed")
    if code:
        raise RuntimeError(f"{name} cannot be prepared\n{(folder / 'printed').read_text()}")
    whole, told = tried(name, start, work, Strike())
    if whole.problems:
        raise RuntimeError(f"{name} does not work without an interrupt: {whole}: {whole.problems}")
    _, plain = tried(name, start, work, Strike(clock="background"))  # the trace takes its time
    for strike in chosen(told["counted"], plain["seconds"], each, name):
        yield tried(name, start, work, strike)[0]
    shutil.rmtree(folder)


def table(cases: Sequence[Case]) -> list[str]:
    """The lines of a table: operation by clock, and what was wrong."""
    from tests.crash.instants import CLOCKS

    heads = ["operation", *CLOCKS, "returned all the same", "lost", "said wrongly", "left or hangs"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name in [*sorted({case.operation for case in cases}), None]:
        of = [c for c in cases if c.reached and name in (c.operation, None)]
        numbers = [sum(c.clock == clock for c in of) for clock in CLOCKS] + [sum(c.returned for c in of)]
        numbers += [sum(bool(texts) for texts in column) for column in zip(*((c.lost, c.wrong, c.other) for c in of))]
        lines.append(f"| {name or '**all**'} | {' | '.join(f'{number:,}' for number in numbers)} |")
    missed = sum(not case.reached for case in cases)
    return [*lines, "", f"{missed:,} more came when the call was over." if missed else "All came in time."]


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if anything was lost, said wrongly, or left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", help="only these; by default all")
    parser.add_argument("--each", type=int, default=300, help="interrupts of each operation")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="a file for the results, one a line")
    parser.add_argument("--write", action="store_true", help="write docs/measured/reliability.md")
    given = parser.parse_args(arguments)
    from tests.crash.matrix import ready, run_all

    began = time.monotonic()
    ready(xla=HAS_XLA)
    from tests.crash.scenes import SCENES

    with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
        run = functools.partial(run_scene, each=given.each)
        lines = run_all(given.operation or list(SCENES), run, given.workers, Path(folder))
    cases = [case_of(line) for line in lines]
    if given.json:
        given.json.write_text("\n".join(lines))
    seconds = time.monotonic() - began
    problems = [f"{case}: {problem}" for case in cases for problem in case.problems]
    print("\n".join([*problems, *table(cases), f"{seconds:.0f} s"]))
    if given.write:
        text = f"{len(cases):,} interrupts, in {seconds / 60:.0f} minutes on two cores."
        report.put("make interrupts", [text, "", *table(cases)])
    return int(bool(problems))


def case_of(line: str) -> Case:
    """A result from its line of JSON."""
    facts = json.loads(line)
    return Case(**{key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()})


if __name__ == "__main__":
    # The module of this name, and not this one, is what is imported elsewhere.
    import importlib

    sys.exit(importlib.import_module("tests.crash.interrupts").main(sys.argv[1:]))
