"""One fault: an operation is run in a process of its own, a call of it goes wrong, and its outcome is judged.

The process that calls these functions has the shim (tests/crash/recorder.py), has imported what is needed, and has one
thread: every run is a fork of it, and so begins alike and within milliseconds.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import os
import re
import select
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.operations import NEXT, Found, Lost, Operation
from tests.crash.recorder import Fault, Record, Recorder, read_log

SECONDS = 40.0
"""A run that takes longer hangs."""

HELPER = 100
"""The process in which orbax commits for a rank has the rank's number and this one in records."""


@dataclass(frozen=True)
class End:
    """How one rank's process ended."""

    signal: int = 0
    """Which killed it."""

    error: str | None = None
    """Class of what the call raised; None if it returned."""

    typed: bool = True
    """Whether that is a `CheckpointError`."""

    committed: bool = False
    """Whether the error says that the tag is in place all the same."""

    text: str = ""
    fired: bool = False
    """Whether the fault happened."""


@dataclass(frozen=True)
class Verdict:
    """What became of a fault."""

    reached: bool
    ends: tuple[End, ...] = ()
    lost: tuple[str, ...] = ()
    """What was lost, mixed or torn."""

    wrong: tuple[str, ...] = ()
    """What the call said that is not so."""

    other: tuple[str, ...] = ()
    """Errors without a type, litter, a next call that fails."""

    calls: tuple[Record, ...] = field(default=(), repr=False)

    @property
    def problems(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.lost, *self.wrong, *self.other)


@dataclass(frozen=True)
class Fork:
    """A fork of this process that calls a function."""

    pid: int
    answer: int
    """Descriptor from which what the function returned can be read, as JSON."""

    printed: Path

    @classmethod
    def of(cls, work: Callable[[], Any], printed: Path) -> Fork:
        """Start one."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            code = 1
            try:
                out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                faulthandler.enable()  # SIGABRT shows where a run hangs
                text = json.dumps(work()).encode()
                with open(write, "wb", buffering=0) as file:
                    file.write(text)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        return cls(pid, read, printed)

    def wait(self, seconds: float = SECONDS) -> tuple[int, Any]:
        """The exit code (negative: a signal), and what the function returned; if it hangs, the members of an `End`."""
        end = os.pidfd_open(self.pid)
        try:
            hangs = not select.select([end], [], [], seconds)[0]
            if hangs:
                os.kill(self.pid, signal.SIGABRT)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            with open(self.answer, "rb") as file:
                answer = json.loads(file.read() or b"null")
        finally:
            os.close(end)
        return (
            (0, {"error": "hangs", "typed": False, "text": self.printed.read_text()[-9000:]})
            if hangs
            else (code, answer)
        )


def forked(work: Callable[[], Any], printed: Path, seconds: float = SECONDS) -> tuple[int, Any]:
    """Call a function in a fork of this process, and wait for it (see `Fork.wait`)."""
    return Fork.of(work, printed).wait(seconds)


def perform(
    operation: Operation, root: Path, log: Path, fault: Fault, rank: int = 0, of_helper: Fault | None = None
) -> dict[str, Any]:
    """Run an operation with the shim, in a process that is only for that; how it ended, as the members of `End`."""
    import torch.distributed as dist

    import xla_ckpt
    from tests.helper import InFork
    from xla_ckpt.tags import orbax_commit

    helper_faults = [] if of_helper is None else [of_helper]

    class Helper(InFork):
        """It has a fault of its own, and its successor has none."""

        def start(self) -> None:
            which = helper_faults.pop() if helper_faults else Fault()
            self.first = lambda: Recorder().arm(root, log, rank + HELPER, which)
            super().start()

    orbax_commit.HelperProcess = Helper  # type: ignore[misc]

    if operation.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{log.parent}/meeting", rank=rank, world_size=operation.ranks
        )
    recorder = Recorder()
    end: dict[str, Any] = {}
    recorder.arm(root, log, rank, fault)
    try:
        operation.run(root)
    except BaseException as error:
        traceback.print_exc()
        end = {
            "error": type(error).__name__,
            "typed": isinstance(error, xla_ckpt.CheckpointError) or operation.of_peer,
            "committed": bool(getattr(error, "committed", False)),
            "text": str(error)[:400],
        }
    recorder.mark("told")
    try:
        xla_ckpt.finalize_checkpoint()
    except BaseException as error:
        traceback.print_exc()
        end = end or {"error": type(error).__name__, "typed": False, "text": f"finalize_checkpoint: {error}"}
    return {**end, "fired": recorder.disarm()}


Seen = dict[str, Any]
"""What is found in a directory, and what the next call makes of it."""


def inject(
    operation: Operation, start: Path, work: Path, fault: Fault, known: dict[str, Seen], rank: int = 0
) -> Verdict:
    """Repeat an operation on a copy of its starting directory, with a fault on one rank, and judge what becomes of it.

    `known` has what was seen in directories that were left before: two that hold the same are looked at once.
    """
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    root, log, printed = work / "root", work / "log", work / "printed"
    shutil.copytree(start, root, symlinks=True)
    ranks = [
        Fork.of(
            functools.partial(
                perform, operation, root, log, fault if n == rank else Fault(), n, fault if n + HELPER == rank else None
            ),
            printed,
        )
        for n in range(operation.ranks)
    ]
    ends = tuple(_end(*fork.wait(), printed) for fork in ranks)
    calls = tuple(read_log(log))
    if rank >= HELPER:
        fired = any(call.rank == rank and call.number == fault.position for call in calls)
    else:
        fired = fault.position < 0 or ends[rank].fired or ends[rank].error == "hangs"
    if not fired:
        return Verdict(reached=False, ends=ends, calls=calls)
    return judged(operation, ends, seen_in(operation, root, printed, known), calls)


def _end(code: int, told: dict[str, Any] | None, printed: Path) -> End:
    if code < 0:
        return End(signal=-code, fired=True)
    if told is None:
        raise RuntimeError(f"a run itself failed\n{printed.read_text()[-4000:]}")
    return End(**told)


def seen_in(operation: Operation, root: Path, printed: Path, known: dict[str, Seen]) -> Seen:
    """What a process that knows nothing of the fault finds."""
    key = fingerprint(root)
    if key not in known:
        code, seen = forked(lambda: looked_at(operation, root), printed)
        lost = {"lost": f"looking at the directory ends with {code}: {printed.read_text()[-600:]}"}
        known[key] = lost if code or seen is None else seen
    return known[key]


_TEXTS = re.compile(r"manifest\.json|_CHECKPOINT_METADATA|\.metadata|digests.*\.json")
"""Files that hold times and random names, which differ from run to run and which nothing depends on."""


def fingerprint(root: Path) -> str:
    """What a directory holds: names and bytes, but for times of day."""
    held = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        data = path.read_bytes() if path.is_file() else b"/"
        if _TEXTS.fullmatch(path.name):
            data = re.sub(rb"[0-9a-f]+", b"#", data) + b"%d" % len(data)
        held.update(f"{path.relative_to(root)} {len(data)} ".encode() + data)
    return held.hexdigest()


def looked_at(operation: Operation, root: Path) -> Seen:
    """What is there, and what the next call makes of it; in a process that is only for that."""
    try:
        found = operation.read(root)
    except Lost as lost:
        return {"lost": str(lost)}
    seen: Seen = {"found": list(found.items())}
    try:
        operation.again(root)
        seen["then"] = list(operation.read(root).items())
    except Lost as lost:
        return {"lost": f"after the next call: {lost}"}
    except Exception as error:
        traceback.print_exc()
        return {**seen, "again": f"{type(error).__name__}: {error}"}
    seen["names"] = sorted(operation.names(root))
    return seen


def judged(operation: Operation, ends: Sequence[End], seen: Seen, calls: tuple[Record, ...] = ()) -> Verdict:
    """The verdict on what is there, beside what the call said."""
    if "lost" in seen:
        return Verdict(True, tuple(ends), lost=(seen["lost"],), calls=calls)
    lost, other = [], []
    found: Found = dict(seen["found"])
    state = is_of(operation, found)
    if state is None:
        lost.append(f"found {found}, which is neither {operation.before} nor {operation.after}")
    killed = any(end.signal for end in ends)
    wrong = [text for end in ends if state is not None and (text := false_word(end, state, killed)) is not None]
    other += [f"an error without a type: {end.error}: {end.text}" for end in ends if not end.typed]
    if "again" in seen:
        other.append(f"the next call fails: {seen['again']}")
    else:
        then: Found = dict(seen["then"])
        # What it makes has the number 99, and may have replaced something.
        if {name for name, number in found.items() if then.get(name) not in (number, NEXT)}:
            lost.append(f"there is {then} after the next call, and there was {found}")
        if NEXT not in then.values():
            other.append(f"the next call has saved nothing: {then}")
        litter = set(seen["names"]) - set(then)
        if litter and not operation.of_peer:
            other.append(f"litter after the next call: {sorted(litter)}")
    return Verdict(True, tuple(ends), tuple(lost), tuple(wrong), tuple(other), calls)


def is_of(operation: Operation, found: Found) -> bool | None:
    """Whether what is there is what the operation makes (True), what was there before (False), or neither (None).

    A tag that retention gives up may be there still.
    """
    before, after = operation.before, operation.after
    if found == before and list(found) == list(before):
        return False
    retired = {name: number for name, number in before.items() if name not in after}
    rest = {name: number for name, number in found.items() if retired.get(name) != number}
    return True if rest == after and list(rest) == list(after) else None


def false_word(end: End, done: bool, killed: bool) -> str | None:
    """What is wrong in what a call said of its outcome.

    Whoever waits for a rank that was killed says only that, and cannot know what that rank had done.
    """
    if end.signal or (killed and end.error == "RankFailedError"):
        return None
    if end.error is None:
        return None if done else "the call returned, and nothing was committed"
    if end.committed != done:
        return f"the call raised {end.error}, and {'it is committed' if done else 'nothing is'}: {end.text}"
    return None
