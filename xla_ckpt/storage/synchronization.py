"""Signal-safe synchronization: condition (`Notifier`), event (`Latch`) and future (`Future`).

If a signal handler raises inside `threading.Condition` or `threading.Event`, their inner lock is never released. Here
each waiter blocks on its own lock in one C call and polls its condition a few times a second, so an interruption loses
at most one wake-up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SIGNAL_POLL_SECONDS = 0.2
"""Maximum time that the main thread waits without checking for signals (s).

Python handles a signal between two instructions. If the system delivers it to another thread, or just before the main
thread begins to wait, nothing wakes the main thread.
"""

POLL_SECONDS = 2.0
"""Maximum time that other threads wait without checking their condition (s), since a wake-up may be lost."""


class Notifier:
    """A condition variable that wakes threads waiting for a predicate."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def notify(self) -> None:
        """Wake all waiting threads to check their conditions. Call it after the change."""
        while True:
            try:
                waiting = self._waiters.popleft()
            except IndexError:
                return
            waiting.release()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, at most `timeout` seconds (None: no limit); return True if it holds."""
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
                if condition():  # it may have changed before `mine` was registered
                    return True
                mine.acquire(timeout=left)
            finally:
                try:
                    self._waiters.remove(mine)
                except ValueError:
                    pass  # notified
        return True


class Latch:
    """An event that is set once and stays set."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed = Notifier()

    def is_set(self) -> bool:
        """Return True if the latch is set."""
        return self._is_set

    def set(self) -> None:
        """Set the latch and wake all waiting threads."""
        self._is_set = True
        self._changed.notify()

    def wait(self, timeout: float | None = None, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the latch is set, at most `timeout` seconds; return True if it is.

        Args:
            timeout: Seconds; None waits without a limit.
            unless: Return True to stop waiting, because nothing can set the latch any more.
        """
        self._changed.wait_for(lambda: self._is_set or unless(), timeout)
        return self._is_set


class Future(Generic[T]):
    """The result or exception of a call on another thread."""

    def __init__(self) -> None:
        self._done = Latch()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self, call: Callable[[], T]) -> None:
        """Make the call and store its result or exception for `result`."""
        try:
            self._value.append(call())
        except BaseException as error:
            # Stored, because otherwise the waiting thread would wait forever.
            self._error = error
        finally:
            self._done.set()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result.

        Raises:
            TimeoutError: The call has not ended within `timeout` seconds.
            BaseException: The exception of the call.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} s")
        try:
            if self._error is not None:
                raise self._error
            return self._value[0]
        finally:
            del self  # otherwise the traceback would keep this frame, and the error, alive
