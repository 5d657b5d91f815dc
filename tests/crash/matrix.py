"""Every operation, with every kind of fault at every call that changes files; `make crash` runs all of it.

python -m tests.crash.matrix [--operation NAME ...] [--share 0.1] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import errno
import functools
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash import report
from tests.crash.recorder import Fault, Kind, Record, run_with_shim, why_not
from tests.runs import environment
from tests.xla import HAS_XLA

if TYPE_CHECKING:
    from tests.crash.injection import Seen
    from tests.crash.operations import Operation

KINDS = {
    "SIGKILL before": Fault(kind=Kind.KILL_BEFORE),
    "SIGKILL after": Fault(kind=Kind.KILL_AFTER),
    "ENOSPC once": Fault(kind=Kind.FAIL, error=errno.ENOSPC),
    "ENOSPC from then on": Fault(kind=Kind.FAIL, error=errno.ENOSPC, stays=True),
    "EIO once": Fault(kind=Kind.FAIL, error=errno.EIO),
    "EIO from then on": Fault(kind=Kind.FAIL, error=errno.EIO, stays=True),
    "short write": Fault(kind=Kind.SHORT),
}
"""Kinds of faults, by their names."""

ATTEMPTS = 5
"""How often a fault is tried that does not happen: orbax's threads do not make their calls in the same order each time,
and the call at that position may be none that this fault concerns. It is tried where the last run had the call."""

SHARE_OF_RANKS = 0.3
"""The share of the faults of an operation of several ranks: each rank that is killed costs a timeout of the others."""

NEEDS_SPACE = frozenset("create truncate-open write fsync fallocate rename exchange mkdir link symlink".split())
"""Calls that a full disk can refuse; shim.c says it, too."""


REPLAY_SECONDS = 600.0
"""For all states that losses of power may leave of one operation, on a busy machine."""


@dataclass(frozen=True)
class Case:
    """One fault, and what became of it."""

    operation: str
    kind: str
    position: int
    call: str
    """The call, and the file that it concerned."""

    reached: bool
    lost: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


def faults_at(call: Record) -> Iterator[str]:
    """The kinds of faults that a call can meet."""
    for name, fault in KINDS.items():
        if fault.kind is Kind.SHORT:
            possible = call.call == "write" and call.size > 1
        else:
            possible = fault.error != errno.ENOSPC or call.call in NEEDS_SPACE
        if possible:
            yield name


def number_in(calls: Sequence[Record], first: Sequence[Record], call: Record) -> int | None:
    """The number that a call of a first run has in another one."""

    def like(other: Record) -> bool:
        return (other.rank, other.call, other.path, other.other) == (call.rank, call.call, call.path, call.other)

    before = sum(map(like, first[: first.index(call)]))
    return next((c.number for c in [c for c in calls if like(c)][before:]), None)


@dataclass(frozen=True)
class PowerLost:
    """What was looked at after losses of power in one operation."""

    operation: str
    points: int
    states: int
    problems: tuple[str, ...]
    late: tuple[str, ...]


Result = Case | PowerLost


def operation_named(name: str) -> Operation:
    """An operation of this library, or of another one."""
    from tests.crash.operations import OPERATIONS
    from tests.crash.peers import PEERS

    return OPERATIONS[name] if name in OPERATIONS else PEERS[name]


def run_operation(name: str, folder: Path, share: float) -> Iterator[Result]:
    """All faults of an operation, and losses of power after each of its calls; or a share of both."""
    from tests.crash.injection import forked, inject
    from tests.crash.power import lose_power

    operation, start, work, printed = operation_named(name), folder / "start", folder / "work", folder / "printed"
    start.mkdir(parents=True)
    code, _ = forked(lambda: operation.prepare(start), printed)
    if code:
        raise RuntimeError(f"{name} cannot be prepared\n{printed.read_text()}")
    known: dict[str, Seen] = {}
    whole = inject(operation, start, work, Fault(), known)
    if whole.problems or whole.ends[0].error is not None:
        raise RuntimeError(f"{name} does not work without a fault: {whole.problems} {whole.ends}")
    if operation.ranks == 1:
        lost = functools.partial(lose_power, operation, start, work / "root", whole.calls, folder / "states", share)
        code, told = forked(lambda: asdict(lost()), printed, seconds=REPLAY_SECONDS)
        if code or "error" in told:
            raise RuntimeError(f"{name} cannot be replayed\n{printed.read_text()}")
        yield PowerLost(name, **told)
    faults = [(call, kind) for call in whole.calls if call.number >= 0 for kind in faults_at(call)]
    share *= SHARE_OF_RANKS if operation.ranks > 1 else 1
    if share < 1:
        faults = random.Random(name).sample(faults, max(1, round(share * len(faults))))
    for call, kind in faults:
        yield one(operation, start, work, known, whole.calls, call, kind)
    shutil.rmtree(folder)


def one(
    operation: Operation, start: Path, work: Path, known: dict[str, Seen], first: Sequence[Record], call: Record,
    kind: str,
) -> Case:  # fmt: skip
    """One fault at a call that a first run has made."""
    from tests.crash.injection import HELPER, inject

    number: int | None = call.number
    for _ in range(ATTEMPTS):
        fault = replace(KINDS[kind], position=call.number if number is None else number)
        verdict = inject(operation, start, work, fault, known, call.rank)
        if verdict.reached:
            break
        number = number_in(verdict.calls, first, call)
    names = [path.partition("/root")[2].lstrip("/") for path in (call.path, call.other)]
    text = f"{call.call} {names[0] or '.'}" + (f" -> {names[1]}" if names[1] else "")
    text += f" on rank {call.rank % HELPER}" if operation.ranks > 1 else ""
    text += " in the process in which orbax commits" if call.rank >= HELPER else ""
    return Case(
        operation.name, kind, call.number, text, verdict.reached, verdict.lost, verdict.wrong, verdict.other
    )  # fmt: skip


def run_all(
    names: Sequence[str], run: Callable[[str, Path], Iterator[object]], workers: int, folder: Path
) -> list[str]:
    """The results of some operations, as lines of JSON, on several processes; each takes the next when it has done one.

    `run` gives the results of an operation, each a dataclass; it has a directory of its own.
    """
    queue, fill = os.pipe()
    os.write(fill, bytes(range(len(names))))
    os.close(fill)
    pids = []
    for worker in range(workers):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                with open(folder / f"results.{worker}", "w") as file:
                    while byte := os.read(queue, 1):
                        for result in run(names[byte[0]], folder / f"of.{byte[0]}"):
                            print(json.dumps(asdict(result)), file=file, flush=True)  # type: ignore[call-overload]
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(queue)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise SystemExit(f"a worker has failed: {codes}")
    return [line for worker in range(workers) for line in (folder / f"results.{worker}").read_text().splitlines()]


def result_of(line: str) -> Result:
    """A result from its line of JSON."""
    facts: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()
    }
    return Case(**facts) if "kind" in facts else PowerLost(**facts)


def ready(*, xla: bool) -> None:
    """Import what the forks need. A process with threads must not fork."""
    from tests.nursed import import_all
    from tests.nursery import LIGHT

    crash = [f"tests.crash.{name}" for name in ("operations", "injection", "power", "peers", "scenes")]
    import_all(
        (
            *LIGHT,
            *(("torch_xla",) if xla else ()),
            "xla_ckpt.dcp",
            "xla_ckpt.tags.orbax_process",
            "orbax.checkpoint",
            *crash,
        )
    )
    from tests.helper import InFork
    from xla_ckpt.tags import orbax_commit

    orbax_commit.HelperProcess = InFork  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if anything was lost, said wrongly, or left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", help="only these; by default all")
    parser.add_argument(
        "--share", type=float, default=1.0, help="the share of faults and losses of power that is tried"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="a file for the results, one a line")
    parser.add_argument("--write", action="store_true", help="write docs/measured/reliability.md")
    parser.add_argument("--peers", action="store_true", help="what other libraries do, in place of this one")
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    if "CRASH_FSYNC" not in os.environ:
        return run_with_shim("tests.crash.matrix", arguments, environment({"OMP_NUM_THREADS": "1"}))
    began = time.monotonic()
    ready(xla=given.peers and HAS_XLA)
    from tests.crash.operations import OPERATIONS
    from tests.crash.peers import PEERS

    peers = [name for name in PEERS if HAS_XLA or not name.startswith("torch_xla")]
    names = given.operation or (peers if given.peers else list(OPERATIONS))
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        run = functools.partial(run_operation, share=given.share)
        results = [result_of(line) for line in run_all(names, run, given.workers, Path(folder))]
    if given.json:
        given.json.write_text("\n".join(json.dumps(asdict(result)) for result in results))
    problems = report.problems(results)
    print("\n".join([*problems, *report.table(results)]))
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s")
    if given.write:
        report.write(results, seconds, given.share, peers=given.peers)
    return int(bool(problems) and not given.peers)


if __name__ == "__main__":
    # The module of this name, and not this one, is what is imported elsewhere.
    import importlib

    sys.exit(importlib.import_module("tests.crash.matrix").main(sys.argv[1:]))
