"""Ranks that are lost or fail at a message: a job of real processes, and what all of them say of it.

The clock is the victim's messages to the job's store, and the collectives of torch's in the calls of `xla_ckpt.dcp`:
before the k-th one the fault happens. A disk that is full has another clock, the victim's new files and directories:
from the k-th one on they are refused. `make crash-ranks` goes through all messages and files of all ranks:

python -m tests.crash.ranks [--mesh dp=2 ...] [--operation NAME ...] [--fault NAME ...] [--each 6] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import xla_ckpt
from tests.crash import report
from tests.jobs import finish, start_on_ranks, store_of_torchrun
from tests.nursery import ProcessError
from tests.runs import names_in
from xla_ckpt import dcp
from xla_ckpt.distributed.torch_store import TorchCommunicator
from xla_ckpt.storage.local import LocalDirectory, LocalStore

TIMEOUT = 3.0
"""Given to the call in which a rank is lost, in seconds."""

PATIENT = 8.0
"""The same where a rank is only slow."""

SLOW = 0.4
"""The part of the timeout for which a slow rank sleeps."""

BUSY = 3.0
"""Seconds by which a busy machine may be late."""

LONG = 60.0
"""The timeout of calls in which nothing happens."""

BEGAN = "began to commit"
"""What the error says if nobody can know whether the tag is there."""

KILLED, STOPPED, NAPS, RAISES, FULL, CTRL_C, ALL_CTRL_C = FAULTS = (
    "killed", "stopped", "slow", "raises", "disk full", "Ctrl-C", "Ctrl-C on all",
)  # fmt: skip
INTERRUPTS = (CTRL_C, ALL_CTRL_C)
"""The program goes on afterwards, with other weights."""

HANDLES = 1.0
"""Seconds that a thread waits, at most, until the main one has handled the signal that it was sent."""

MESHES = ("dp=2", "pp=2", "pp=2,dp=2")

COLLECTIVES = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object")
"""Those of torch's that its own orchestration of a save or load makes."""

Told = dict[str, Any]


def _save(
    options: Mapping[str, Any], root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float,
    parity: Literal["file"] | None = None,
) -> None:  # fmt: skip
    how = xla_ckpt.SaveOptions(timeout=timeout, stale="ignore", parity=parity)
    xla_ckpt.save_checkpoint(root, tag, model, mesh=mesh, options=how, **options).result()


def _load(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    xla_ckpt.load_checkpoint(root, tag, model=model, mesh=mesh, options=xla_ckpt.LoadOptions(timeout=timeout))


def _save_tree(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    tree = {"model": dict(model.named_parameters())}
    xla_ckpt.save(root, tag, tree, mesh=mesh, options=xla_ckpt.SaveOptions(timeout=timeout, stale="ignore")).result()


def _load_tree(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    tree = xla_ckpt.restore(root, tag, mesh=mesh, options=xla_ckpt.LoadOptions(timeout=timeout)).tree
    model.load_state_dict(tree["model"])


def _save_dcp(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    root.mkdir(exist_ok=True)
    state = {"model": dict(model.named_parameters())}
    dcp.save(state, checkpoint_id=root / tag, process_group=_group(timeout))


def _save_dcp_async(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    state = {"model": dict(model.named_parameters())}
    saved: Any = dcp.async_save(state, checkpoint_id=root / tag, process_group=_group(timeout))
    saved.result()


def _load_dcp(root: Path, tag: str, model: torch.nn.Module, mesh: str, timeout: float) -> None:
    state = {"model": {name: value.detach() for name, value in model.named_parameters()}}
    dcp.load(state, checkpoint_id=root / tag, process_group=_group(timeout))


def _group(timeout: float) -> Any:
    """All ranks, as a group of torch's with a timeout of its own; None in a process alone."""
    if not torch.distributed.is_initialized():
        return None
    return torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What all ranks do: the call in which the fault happens, and the tags beside it."""

    call: Callable[[Path, str, torch.nn.Module, str, float], None]
    """Saves or loads the model under a tag."""

    prepare: Callable[[Path, str, torch.nn.Module, str, float], None]
    """Saves the tag that is there before."""

    look: Callable[[Path, str, torch.nn.Module, str, float], None]
    """Loads it in a process alone."""

    loads: bool = False
    suffix: str = ""
    """End of the names of its tags."""

    @property
    def old(self) -> str:
        """The tag that is there before."""
        return f"old{self.suffix}"

    @property
    def new(self) -> str:
        """The tag that is saved."""
        return f"new{self.suffix}"


def _saving(suffix: str = "", **options: Any) -> Operation:
    save = functools.partial(_save, options)
    return Operation(call=save, prepare=functools.partial(_save, {}), look=_load, suffix=suffix)


def _saving_with_parity() -> Operation:
    return replace(_saving(), call=functools.partial(_save, {}, parity="file"))


def _loading(suffix: str = "", **options: Any) -> Operation:
    return Operation(call=_load, prepare=functools.partial(_save, options), look=_load, loads=True, suffix=suffix)


OPERATIONS: Mapping[str, Operation] = {
    "save": _saving(),
    "async save": _saving(async_save=True),
    "save, parity": _saving_with_parity(),
    "save, xser": _saving(layout="xser"),
    "save, dcp": _saving(layout="dcp"),
    "save, smp": _saving("_partial", layout="smp"),
    "save of a tree": Operation(call=_save_tree, prepare=_save_tree, look=_load_tree),
    "dcp.save": Operation(call=_save_dcp, prepare=_save_dcp, look=_load_dcp),
    "dcp.async_save": Operation(call=_save_dcp_async, prepare=_save_dcp, look=_load_dcp),
    "load": _loading(),
    "load, xser": _loading(layout="xser"),
    "load, dcp": _loading(layout="dcp"),
    "load, smp": _loading("_partial", layout="smp"),
    "restore of a tree": Operation(call=_load_tree, prepare=_save_tree, look=_load_tree, loads=True),
    "dcp.load": Operation(call=_load_dcp, prepare=_save_dcp, look=_load_dcp, loads=True),
}
"""What is tried, by its name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault."""

    operation: str
    victim: int
    fault: str
    """One of `FAULTS`."""

    at: int
    """The message of the victim before which it happens, or the new file from which on the disk is full, from 1."""

    mesh: str
    timeout: float = TIMEOUT
    """Of the call in which it happens (s)."""

    def __str__(self) -> str:
        clock = "from file" if self.fault == FULL else "before message"
        return f"{self.operation} over {self.mesh}, rank {self.victim} {self.fault} {clock} {self.at}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return ranks_of(self.mesh)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault."""

    happened: bool
    wrong: list[str]
    """What of the promise was broken."""

    told: list[Told]
    """What each rank told that lived to the end."""


def ranks_of(mesh: str) -> int:
    """Number of ranks of a mesh.

    >>> ranks_of("pp=2,dp=2")
    4
    """
    world = 1
    for axis in mesh.split(","):
        world *= int(axis.partition("=")[2])
    return world


def model_of(number: int) -> torch.nn.Module:
    """A model all of whose numbers are one: a mixture of two is seen."""
    model = torch.nn.Linear(64, 64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, number)
    return model


def numbers_in(model: torch.nn.Module) -> list[float]:
    """The different numbers in a model."""
    return sorted({float(n) for parameter in model.parameters() for n in parameter.detach().unique()})


# --- in the ranks --------------------------------------------------------------------------------------------------


class _Clock:
    """Counts some calls of this process, and says to each which one it is."""

    def __init__(self, methods: Sequence[tuple[Any, str]], before: Callable[[int], None]) -> None:
        self.count = 0
        for owner, name in methods:
            setattr(owner, name, self._counted(getattr(owner, name), before))

    def _counted(self, original: Callable[..., Any], before: Callable[[int], None]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            before(self.count)
            return original(*args, **options)

        return call


def _strike(case: Case) -> tuple[_Clock, _Clock]:
    """Have the fault happen in this process; the clocks of messages and of new files."""

    def at_message(number: int) -> None:
        if number != case.at or (case.fault == RAISES and _CALL_ENDED.is_set()):
            return
        if case.fault == NAPS:
            time.sleep(SLOW * case.timeout)
        elif case.fault == RAISES:
            raise MemoryError("no memory is left")
        elif case.fault in INTERRUPTS:
            interrupt()
        elif case.fault != FULL:
            os.kill(os.getpid(), signal.SIGKILL if case.fault == KILLED else signal.SIGSTOP)

    def at_file(number: int) -> None:
        if case.fault == FULL and number >= case.at > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    signal.signal(signal.SIGINT, _handle)
    messages: list[tuple[Any, str]] = [(TorchCommunicator, name) for name in ("put", "put_if_absent", "get", "has")]
    messages += [(torch.distributed, name) for name in COLLECTIVES]
    return _Clock(messages, at_message), _Clock([(LocalDirectory, "create"), (LocalStore, "make_directory")], at_file)


def interrupt() -> None:
    """Have Ctrl-C come to the main thread, whichever thread this is."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    _HANDLED.wait(HANDLES)


_HANDLED = threading.Event()

_CALL_ENDED = threading.Event()
"""Set once the call of `takes_part` returned: the message that the process sends when it exits does not raise."""


def _handle(number: int, frame: object) -> None:
    _HANDLED.set()
    raise KeyboardInterrupt


def takes_part(rank: int, root: Path, case: Case) -> Told:
    """What a rank does: a good save, and then the call in which the victim is struck. `at` 0: nobody is."""
    operation = OPERATIONS[case.operation]
    operation.prepare(root, operation.old, model_of(1), case.mesh, LONG)
    xla_ckpt.finalize_checkpoint()
    clocks = _strike(case) if rank == case.victim or case.at == 0 or case.fault == ALL_CTRL_C else None
    model, told, began = model_of(2), Told(error=None, text=""), time.monotonic()
    try:
        try:
            operation.call(root, operation.old if operation.loads else operation.new, model, case.mesh, case.timeout)
        finally:
            # A thread of the call may send a message when the call has ended, and nothing here would catch Ctrl-C then.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _CALL_ENDED.set()
    except xla_ckpt.CheckpointError as error:
        told |= {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    except (MemoryError, KeyboardInterrupt) as error:
        told |= {"error": type(error).__name__, "rank": rank, "text": str(error)}
    told |= {"self": rank, "seconds": time.monotonic() - began, "numbers": numbers_in(model)}
    if case.fault in INTERRUPTS and not operation.loads:
        _goes_on(model)
    return told | {"clocks": [clock.count for clock in clocks] if clocks else [0, 0]}


def _goes_on(model: torch.nn.Module) -> None:
    """What a program does that was interrupted, or whose peers were: it trains, and waits for its saves."""
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 9)
    with contextlib.suppress(xla_ckpt.CheckpointError):
        xla_ckpt.finalize_checkpoint()


# --- outside of them -----------------------------------------------------------------------------------------------


def outcome_of(case: Case, root: Path) -> Outcome:
    """Run the job, have the fault happen, and look at what all say and at what is there."""
    _store, env = store_of_torchrun()
    ranks = start_on_ranks(takes_part, case.world, root, case, env=env)
    others = [process for rank, process in enumerate(ranks) if rank != case.victim]
    try:
        finish(others, timeout=LONG)
    except AssertionError:
        ranks[case.victim].kill()  # it may be stopped, and nobody would ever let it go on
        raise
    if case.fault == STOPPED:
        ranks[case.victim].send_signal(signal.SIGCONT)
    ((code, _, _),) = finish([ranks[case.victim]], timeout=LONG)
    told: list[Told] = [process.value() for process in others]
    victim: Told | None = None if code == -signal.SIGKILL else ranks[case.victim].value()
    happened = victim is None or victim["clocks"][case.fault == FULL] >= case.at > 0
    everyone = told if victim is None else [*told, victim]
    return Outcome(
        happened,
        [*_of_errors(case, told, victim), *_of_directory(OPERATIONS[case.operation], root, everyone)],
        everyone,
    )


def _of_errors(case: Case, told: list[Told], victim: Told | None) -> list[str]:
    same = [*told, victim] if victim is not None and case.fault in (NAPS, FULL) else told
    if case.fault == ALL_CTRL_C:
        same = [t for t in same if t["error"] != "KeyboardInterrupt"]
    if len({(t["error"], t.get("rank"), BEGAN in t["text"]) for t in same}) > 1:
        return [f"the ranks say different things: {same}"]
    if case.fault == NAPS and told[0]["error"] is not None:
        return [f"a slow rank is taken for a lost one: {told[0]}"]
    if case.fault == FULL and told[0]["error"] not in (None, "StorageError"):
        return [f"the disk of rank {case.victim} is full, and all say: {told[0]}"]
    late = (1 + SLOW if case.fault == NAPS else 1.2) * case.timeout + BUSY
    return [f"a rank was late: {t}" for t in told if t["seconds"] > late]


def _of_directory(operation: Operation, root: Path, told: list[Told]) -> list[str]:
    wrong = []
    tags = xla_ckpt.list_tags(root)
    for tag, number in ((operation.old, 1), (operation.new, 2)):
        model = model_of(0)
        if tag in tags:
            operation.look(root, tag, model, "dp=1", LONG)
            wrong += [f"{tag} holds {numbers_in(model)}"] if numbers_in(model) != [number] else []
    wrong += [] if operation.old in tags else [f"{operation.old} is lost"]
    if operation.loads:
        wrong += [f"a torn model: {t}" for t in told if len(t["numbers"]) > 1]
        return wrong + [f"loaded, and has other numbers: {t}" for t in told if not t["error"] and t["numbers"] != [1]]
    known = [t for t in told if BEGAN not in t["text"] and t["error"] not in ("MemoryError", "KeyboardInterrupt")]
    wrong += [f"tags {tags}, and a rank says: {t}" for t in known if (t["error"] is None) != (operation.new in tags)]
    operation.prepare(root, operation.new, model_of(3), "dp=1", LONG)  # the next job
    xla_ckpt.finalize_checkpoint()
    left = [name for name in names_in(root) if name.startswith(".")]
    return wrong + [f"left behind: {left}"] * bool(left)


def one(case: Case) -> Outcome:
    """A case in a directory of its own. A job that hangs or breaks is something wrong, too."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return outcome_of(case, Path(folder) / "root")
        except (ProcessError, AssertionError, xla_ckpt.CheckpointError) as error:
            return Outcome(True, [f"{type(error).__name__}: {error}"], [])


def cases_of(operation: str, mesh: str, faults: Sequence[str], each: int | None) -> list[Case]:
    """All faults of an operation, as many as a run without one makes messages and files; or `each` of them."""
    outcome = one(Case(operation, 0, KILLED, 0, mesh, LONG))
    if outcome.wrong or any(told["error"] for told in outcome.told):
        raise RuntimeError(f"{operation} over {mesh} does not work without a fault: {outcome}")
    cases = [
        Case(operation, told["self"], fault, at, mesh, PATIENT if fault == NAPS else TIMEOUT)
        for told in outcome.told
        for fault in faults
        for at in range(1, told["clocks"][fault == FULL] + 1)
    ]
    return cases if each is None else random.Random(f"{operation} {mesh}").sample(cases, min(each, len(cases)))


def table(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """The lines of a table: operation by fault."""
    lines = [f"| operation | {' | '.join(FAULTS)} | wrong |", "|---|" + "--:|" * (len(FAULTS) + 1)]
    results = [(case, outcome) for case, outcome in zip(cases, outcomes, strict=True) if outcome.happened]
    for name in [*sorted({case.operation for case in cases}), None]:
        of = [(c, o) for c, o in results if name in (c.operation, None)]
        numbers = [sum(c.fault == fault for c, _ in of) for fault in FAULTS] + [sum(bool(o.wrong) for _, o in of)]
        lines.append(f"| {name or '**all**'} | {' | '.join(f'{n:,}' for n in numbers)} |")
    missed = len(cases) - len(results)
    end = f"{missed} more did not happen, since the call made fewer messages." if missed else "All faults happened."
    return [*lines, "", end]


def main(arguments: Sequence[str]) -> int:
    """Go through all messages; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="over which ranks; by default dp=2, pp=2, and pp=2,dp=2")
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="only these; by default all")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only these; by default all")
    parser.add_argument("--each", type=int, help="how many faults are tried of each operation over each mesh")
    parser.add_argument("--workers", type=int, default=5, help="jobs at a time, which wait most of their time")
    parser.add_argument("--write", action="store_true", help="write docs/measured/reliability.md")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        pairs = [(name, mesh) for mesh in given.mesh or MESHES for name in given.operation or OPERATIONS]
        of = pool.map(
            functools.partial(cases_of, faults=given.fault or FAULTS, each=given.each), *zip(*pairs, strict=True)
        )
        cases = [case for cases in of for case in cases]
        outcomes = []
        for case, outcome in zip(cases, pool.map(one, cases), strict=True):
            outcomes.append(outcome)
            for line in outcome.wrong:
                print(f"{case}: {line}", file=sys.stderr, flush=True)
    lines, seconds = table(cases, outcomes), time.monotonic() - began
    print("\n".join([*lines, f"{seconds:.0f} s"]))
    if given.write:
        text = (
            f"{len(cases):,} faults over {'; '.join(given.mesh or MESHES)}, in {seconds / 60:.0f} minutes on two cores."
        )
        some = f" (Of each operation over each mesh {given.each} are tried, chosen at random.)" if given.each else ""
        report.put("make crash-ranks", [text + some, "", *lines])
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    # The module of this name, and not this one, is what the ranks and the workers import.
    import importlib

    sys.exit(importlib.import_module("tests.crash.ranks").main(sys.argv[1:]))
