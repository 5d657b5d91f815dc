"""Signal handlers of the program wait while something is done that must be whole; and a crew of threads never outlives
its call."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.injection import Fork
from tests.crash.instants import MAIN, Interrupts, Strike
from tests.jobs import run_alone
from xla_ckpt.storage.signals import DeferSignals, defer_signals
from xla_ckpt.storage.threads import run_tasks


class _StopError(Exception):
    pass


def _stop(number: int, frame: object) -> None:
    raise _StopError(signal.Signals(number).name)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    former = {number: signal.signal(number, _stop) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def test_what_a_handler_raises_comes_at_the_end() -> None:
    done = []

    def whole() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            done.append(1)

    with pytest.raises(_StopError, match="SIGUSR1"):
        whole()
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) == _stop


def test_all_handlers_run_although_the_first_raises() -> None:
    def whole() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(_StopError, match="SIGUSR2") as second:
        whole()
    assert isinstance(second.value.__context__, _StopError)
    assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGUSR2) == _stop


def test_before_it_begins_handlers_run_at_once() -> None:
    done = []

    def begins_late() -> None:
        with DeferSignals() as calm:
            signal.raise_signal(signal.SIGUSR1)
            calm.begin()
            done.append(1)

    with pytest.raises(_StopError):
        begins_late()
    assert done == []


def test_one_inside_of_another_waits_for_the_outer_one() -> None:
    done = []

    def whole() -> None:
        with defer_signals():
            with defer_signals():
                signal.raise_signal(signal.SIGUSR1)
            done.append(1)

    with pytest.raises(_StopError):
        whole()
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) == _stop


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    with defer_signals():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_the_own_actions_of_the_system_are_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with defer_signals():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_at_whatever_instant_a_signal_comes_it_is_raised_once_and_the_handlers_work_on() -> None:
    outcomes = list[bool]()
    while not outcomes or outcomes[-1]:
        interrupts, steps, met = Interrupts(Strike(MAIN, len(outcomes) + 1, "SIGUSR1")), list[int](), None
        try:
            with interrupts.coming(), defer_signals():
                steps.extend(map(int, "123"))
        except Exception as error:
            met = error
        assert met is interrupts.raised
        assert steps in ([], [1, 2, 3])
        with pytest.raises(_StopError):
            signal.raise_signal(signal.SIGUSR2)
        outcomes.append(met is not None)
    assert len(outcomes) > 20


def forks_on_another_thread(folder: Path) -> tuple[int, Any]:
    """A child that is forked while handlers wait in the main thread; what it returns."""
    signal.signal(signal.SIGUSR1, _stop)

    def child() -> list[bool]:
        raises = []
        for context in (contextlib.nullcontext, defer_signals):
            try:
                with context():
                    signal.raise_signal(signal.SIGUSR1)
                    raises.append(False)
            except _StopError:
                raises.append(True)
        return raises

    forked = list[Fork]()
    with defer_signals():
        thread = threading.Thread(target=lambda: forked.append(Fork.of(child, folder / "printed")))
        thread.start()
        thread.join()
    return forked[0].wait(20)


def test_in_a_process_that_another_thread_forks_handlers_do_not_wait(tmp_path: Path) -> None:
    assert run_alone(forks_on_another_thread, tmp_path) == (0, [True, False, True])


def test_no_thread_of_a_crew_goes_on_when_its_caller_was_interrupted() -> None:
    both, passed, running = threading.Barrier(3), list[int](), set[int]()

    def work(task: int, buffer: memoryview) -> None:
        me = threading.get_ident()
        running.add(me)
        if me == threading.main_thread().ident:
            both.wait(30)
            passed.append(me)
            return
        both.wait(30)
        while not passed:  # the signal must not come within the barrier, which would pass another exception on
            time.sleep(0.001)
        if threading.current_thread().name == "crew-1":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        threading.Event().wait(0.2)  # it is in the midst of something, and nothing tells it to stop
        running.discard(me)

    with pytest.raises(_StopError):
        run_tasks(range(3), work, workers=3, buffer_bytes=0, name="crew")
    assert running == {threading.main_thread().ident}
