"""Signal-safe synchronization: condition (`Notifier`), event (`Latch`) and future (`Future`).

If a signal handler raises inside `threading.Condition` or `threading.Event`, their inner lock is never released.
Here each waiter blocks on a lock of its own in one C call and polls its condition a few times a second, so an
interruption loses at most one wake-up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SIGNAL_POLL_SECONDS = 0.2
"""Longest wait of the main thread without a look for signals (s).

Python sees a signal between two instructions. If the system has delivered it to another thread, or just before the
main thread begins to wait, nothing wakes that thread.
"""

POLL_SECONDS = 2.0
"""Longest wait of other threads without a look at their condition (s): a wake-up may be lost."""


class Notifier:
    """Wakes threads that wait for a condition."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def notify(self) -> None:
        """Have all waiting threads check their conditions. Call it after the change."""
        while True:
            try:
                waiting = self._waiters.popleft()
            except IndexError:
                return
            waiting.release()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, at most `timeout` seconds; return whether it does."""
        end = None if timeout is None else time.monotonic() + timeout
        most = SIGNAL_POLL_SECONDS if threading.current_thread() is threading.main_thread() else POLL_SECONDS
        while not condition():
            left = most if end is None else min(end - time.monotonic(), most)
            if left <= 0:
                return False
            mine = threading.Lock()
            mine.acquire()
            self._waiters.append(mine)
            try:
                if condition():  # it may have changed before `mine` was there to be released
                    return True
                mine.acquire(timeout=left)
            finally:
                try:
                    self._waiters.remove(mine)
                except ValueError:
                    pass  # notified
        return True


class Latch:
    """Is set once, and stays so."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed = Notifier()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and let all waiting threads go on."""
        self._is_set = True
        self._changed.notify()

    def wait(self, timeout: float | None = None, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it is set, at most `timeout` seconds; return whether it is.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            unless: Returns whether nothing can set it any more, which ends the wait.
        """
        self._changed.wait_for(lambda: self._is_set or unless(), timeout)
        return self._is_set


class Future(Generic[T]):
    """What a call returns or raises on another thread."""

    def __init__(self) -> None:
        self._done = Latch()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self, call: Callable[[], T]) -> None:
        """Make the call. Whatever it raises is raised by `result`."""
        try:
            self._value.append(call())
        except BaseException as error:
            # Nobody else hears of it, and the thread that waits would do so for ever.
            self._error = error
        finally:
            self._done.set()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call, and return what it returned.

        Raises:
            TimeoutError: It has not ended in `timeout` seconds.
            BaseException: What it raised.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} s")
        try:
            if self._error is not None:
                raise self._error
            return self._value[0]
        finally:
            del self  # or the error's traceback would keep it, and the error with it
