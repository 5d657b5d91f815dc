"""A process that is forked during an asynchronous save: it has one thread, and nothing in it waits for others.

The forks come at calls of the library on the thread of the save and its helpers, which wait until the child is there.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import queue
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.crash.injection import Fork
from tests.jobs import run_alone
from xla_ckpt import SaveOptions
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.errors import UsageError
from xla_ckpt.saving.background import SAVES
from xla_ckpt.storage.process_state import PROCESS_STATE
from xla_ckpt.tags import orbax_commit

LIBRARY = str(Path(xla_ckpt.__file__).parent)

SECONDS = 30.0
"""A child that takes longer hangs."""


class Forks:
    """Forks of this process at calls of the library on other threads.

    Args:
        work: What each child does.
        at: The numbers of the calls at which they are made.
        folder: Where the children print.
    """

    def __init__(self, work: Callable[[], Any], at: range, folder: Path) -> None:
        self._work, self._at, self._folder = work, at, folder
        self._wanted: queue.SimpleQueue[tuple[str, threading.Event]] = queue.SimpleQueue()
        self._counted = itertools.count()
        self.outcomes: dict[str, Any] = {}
        """What the children returned, by where the other thread was."""

    def _called(self, frame: types.FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(LIBRARY) and (number := next(self._counted)) in self._at:
            forked = threading.Event()
            where = f"{number}: {file.removeprefix(LIBRARY)}:{frame.f_code.co_name}"
            self._wanted.put((f"{where} on {threading.current_thread().name}", forked))
            forked.wait(60)

    def during(self, begin: Callable[[], xla_ckpt.SaveHandle]) -> int:
        """Fork while a save is in flight; how many calls it made."""
        threading.setprofile(self._called)
        try:
            handle = begin()
            thread = handle._thread
            while thread is not None and thread.is_alive():
                try:
                    where, forked = self._wanted.get(timeout=0.01)
                except queue.Empty:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # jax warns of the fork
                    child = Fork.of(self._work_alone, self._folder / f"child-{len(self.outcomes)}")
                self.outcomes[where] = child.wait(SECONDS)
                forked.set()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
        handle.result()
        return next(self._counted)

    def _work_alone(self) -> Any:
        threading.setprofile(None)  # type: ignore[arg-type]
        return self._work()


REFUSED = "this process was forked during the save, which its parent makes"


def in_flight(root: Path, snapshot: Any, count: int) -> tuple[dict[str, Any], bool]:
    """What children find that are forked during a save; whether the collector works in this process afterwards."""
    from tests.helper import InFork

    torch.set_num_threads(1)  # a forked process hangs in OpenMP
    orbax_commit.HelperProcess = InFork  # type: ignore[misc]  # one that imports orbax anew takes two seconds
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(root / "run", "first", model, optimizer)
    options = SaveOptions(snapshot=snapshot)
    handles: list[xla_ckpt.SaveHandle] = []

    def begin() -> xla_ckpt.SaveHandle:
        handles.append(
            xla_ckpt.save_checkpoint(root / "run", "second", model, optimizer, async_save=True, options=options)
        )
        return handles[-1]

    def child() -> Any:
        handle = handles[-1]
        facts = {"gc": gc.isenabled(), "frozen": handle.frozen(), "waits": handle.wait() != handle.done()}
        facts["refused"] = raised(handle.result) if not handle.done() else REFUSED
        model.load_state_dict(model.state_dict())
        optimizer.step()
        into = (root / "run", root / "other", "memory://child")[len(forks.outcomes) % 3]
        xla_ckpt.load_checkpoint(root / "run", "first", model, optimizer)
        xla_ckpt.save_checkpoint(into, f"child-{os.getpid()}", model, optimizer)
        xla_ckpt.save_checkpoint(into, f"later-{os.getpid()}", model, async_save=True)
        xla_ckpt.finalize_checkpoint()
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
        atexit._run_exitfuncs()
        return facts

    calls = Forks(child, range(0), root).during(begin)
    forks = Forks(child, range(3, calls, max(calls // count, 1)), root)
    forks.during(begin)
    return forks.outcomes, gc.isenabled()


def raised(call: Callable[[], object]) -> str | None:
    try:
        call()
    except UsageError as error:
        return error.problem
    return None


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.rest)])
@pytest.mark.parametrize("snapshot", ["overlap", "host"])
def test_a_process_that_is_forked_during_a_save_waits_for_nothing(tmp_path: Path, snapshot: str, count: int) -> None:
    outcomes, collects = run_alone(in_flight, tmp_path, snapshot, count)
    assert collects
    assert len(outcomes) >= count - 1
    for where, (code, facts) in outcomes.items():
        assert (code, facts) == (0, {"gc": True, "frozen": True, "waits": False, "refused": REFUSED}), where
    assert xla_ckpt.verify(tmp_path / "run", "second").ok


def forks_with_everything_taken(root: Path) -> tuple[int, Any]:
    """Fork while other threads hold what the child needs, for as long as it lives; its outcome."""
    from tests.helper import InFork
    from xla_ckpt.garbage_collection import pause_gc

    torch.set_num_threads(1)
    orbax_commit.HelperProcess = InFork  # type: ignore[misc]
    model = torch.nn.Linear(4, 4)
    reported, end = threading.Event(), threading.Event()

    def report(report: object) -> None:
        reported.set()
        end.wait()

    def pauses() -> None:
        with pause_gc():
            end.wait()

    xla_ckpt.save_checkpoint(root / "run", "first", model)
    remove = xla_ckpt.on_report(report)
    xla_ckpt.save_checkpoint(root / "run", "second", model, async_save=True)
    reported.wait()
    turns = threading.Thread(target=lambda: xla_ckpt.save_checkpoint(root / "run", "third", model))
    threads = [turns, threading.Thread(target=pauses)]
    for thread in threads:
        thread.start()
    turn = SAVES.lock_for(str(root / "run"))
    while gc.isenabled() or turn.acquire(blocking=False) and turn.release() is None:
        pass
    locks = [lock for lock in PROCESS_STATE._locks if hasattr(lock, "locked") and lock.acquire(blocking=False)]

    def child() -> bool:
        remove()
        xla_ckpt.load_checkpoint(root / "run", "first", model)
        xla_ckpt.save_checkpoint(root / "run", "of the child", model)
        xla_ckpt.finalize_checkpoint()
        return gc.isenabled()

    forked = Fork.of(child, root / "printed")
    for lock in locks:
        lock.release()
    outcome = forked.wait(SECONDS)
    end.set()
    for thread in threads:
        thread.join()
    return outcome


def test_a_forked_process_has_all_locks_for_itself(tmp_path: Path) -> None:
    assert run_alone(forks_with_everything_taken, tmp_path) == (0, True)
    assert xla_ckpt.list_tags(tmp_path / "run") == ["first", "second", "of the child", "third"]


class Slow:
    """Computes a value for as long as it is told to."""

    def __init__(self, begun: threading.Event, end: threading.Event) -> None:
        self.begun, self.end = begun, end

    @cached_property
    def value(self) -> int:
        self.begun.set()
        self.end.wait()
        return 1


def forks_while_a_property_is_computed() -> tuple[int, Any]:
    begun, end = threading.Event(), threading.Event()
    slow, at_once = Slow(begun, end), threading.Event()
    at_once.set()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    begun.wait()
    outcome = Fork.of(lambda: Slow(begun, at_once).value, Path(os.devnull)).wait(SECONDS)
    end.set()
    thread.join()
    return outcome


def test_a_forked_process_computes_properties_that_a_thread_of_its_parent_computes() -> None:
    assert run_alone(forks_while_a_property_is_computed) == (0, 1)
