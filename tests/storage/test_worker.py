"""Threads that do tasks, and threads that wait for them: none waits for ever, whatever is raised where."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.crash.instants import MAIN, AskedError, Interrupts, Strike
from tests.no_threads import TOO_LARGE
from xla_ckpt.saving.context import Cancellation
from xla_ckpt.snapshot.snapshot import SnapshotProgress
from xla_ckpt.storage.synchronization import Future, Latch, Notifier
from xla_ckpt.storage.threads import Worker, is_thread_running

SOON = 20.0


class Panic(BaseException):
    """What extension modules raise that are written in Rust."""


@pytest.fixture
def worker() -> Worker:
    return Worker("worker", daemon=True)


@pytest.fixture
def no_threads() -> Iterator[None]:
    threading.stack_size(TOO_LARGE)
    yield
    threading.stack_size(0)


ERRORS = [ValueError("a"), Panic("a"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()]


def raising(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_task_raises_is_told_and_the_next_one_is_done(worker: Worker, error: BaseException) -> None:
    told, done = list[BaseException](), list[int]()
    assert worker.submit(raising(error), told.append)
    assert worker.submit(lambda: done.append(1), told.append)
    assert worker.wait(timeout=SOON)
    assert (told, done, worker.is_running) == ([error], [1], False)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_without_threads_the_caller_does_it_and_hears_of_an_interrupt(
    worker: Worker, no_threads: None, error: BaseException
) -> None:
    told, done = list[BaseException](), list[int]()
    assert not worker.submit(raising(error), told.append)
    worker.submit(lambda: done.append(1), told.append)
    assert worker.wait(timeout=SOON)
    if isinstance(error, Exception):
        worker.run_here()
    else:
        with pytest.raises(type(error)):
            worker.run_here()
    assert not worker.is_running
    worker.run_here()
    assert worker.wait(timeout=SOON)
    assert (told, done) == ([error], [1])


def test_a_task_that_fails_to_tell_its_error_leaves_the_worker_idle(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    worker.submit(raising(ValueError()), lambda error: raising(Panic())())
    assert worker.wait(timeout=SOON)
    done = list[int]()
    worker.submit(lambda: done.append(1), done.append)
    assert worker.wait(timeout=SOON)
    assert done == [1]


def test_a_task_is_queued_once(worker: Worker) -> None:
    go, done = Latch(), list[int]()

    def task() -> None:
        done.append(1)

    def failed(error: BaseException) -> None:
        raise error

    worker.submit(go.wait, failed)
    for _ in range(3):
        worker.submit(task, failed, once=True)
    go.set()
    assert worker.wait(timeout=SOON)
    assert done == [1]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_outcome_has_whatever_the_call_raised(error: BaseException) -> None:
    outcome = Future[int]()
    threading.Thread(target=outcome.run, args=(raising(error),)).start()
    with pytest.raises(type(error)):
        outcome.result(SOON)
    with pytest.raises(TimeoutError):
        Future[int]().result(0)


def waiting_for_a_latch() -> tuple[Callable[[], object], Callable[[], object]]:
    latch = Latch()
    return lambda: latch.wait(0.001), latch.set


def waiting_for_a_notifier() -> tuple[Callable[[], object], Callable[[], object]]:
    notifier = Notifier()
    return lambda: notifier.wait_for(lambda: False, 0.001), notifier.notify


def waiting_for_memory() -> tuple[Callable[[], object], Callable[[], object]]:
    freezing = SnapshotProgress()
    freezing.add_pending()
    return lambda: freezing.wait(0.001), freezing.mark_done


def giving_a_save_up() -> tuple[Callable[[], object], Callable[[], object]]:
    cancellation = Cancellation()

    def close() -> None:
        with pytest.raises(Exception, match="given up") if cancellation._cause else cancellation.track_memory_reads():
            cancellation.begin_commit()

    return lambda: cancellation.cancel(KeyboardInterrupt()), close


def waiting_for_a_worker() -> tuple[Callable[[], object], Callable[[], object]]:
    worker, go = Worker("worker", daemon=True), Latch()
    worker.submit(go.wait, print)

    def ends() -> None:
        go.set()
        assert worker.wait(timeout=SOON)

    return lambda: worker.wait(timeout=0.001), ends


@pytest.mark.parametrize(
    "made", [waiting_for_a_latch, waiting_for_a_notifier, waiting_for_memory, giving_a_save_up, waiting_for_a_worker]
)
def test_at_whatever_instant_a_wait_is_interrupted_others_go_on(made: Any) -> None:
    struck = 0
    while True:
        wait, others = made()
        interrupts, met = Interrupts(Strike(MAIN, struck + 1, "SIGUSR1")), None
        try:
            with interrupts.coming():
                wait()
        except Exception as error:
            met = error
        assert met is interrupts.raised
        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive(), interrupts.where
        if met is None:
            break
        struck += 1
    assert struck > 5


def test_a_running_thread_is_never_taken_for_an_ended_one() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    struck, interrupted = 0, True
    while interrupted:
        interrupts = Interrupts(Strike(MAIN, struck + 1, "SIGUSR1"))
        with contextlib.suppress(AskedError), interrupts.coming():
            is_thread_running(thread)
        interrupted = interrupts.raised is not None
        struck += interrupted
        assert is_thread_running(thread), interrupts.where
    assert struck > 1
    ends.set()
    thread.join()
    assert not is_thread_running(thread)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    former = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, former)
