"""State of this process as a whole, and what becomes of it in a process that is forked.

A forked process has one thread, and a copy of the memory of all others at the instant of the fork: locks that they
hold, queues of threads that do not exist, saves that another process makes. All of that is registered here, and reset
by one hook before the forked process runs on.

Modules register what they keep for the life of the process, and use `process_lock` for the locks of objects that a
forked process may go on using.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessState:
    """The state of one process."""

    def __init__(self) -> None:
        self._locks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._resets: list[Callable[[], object]] = []

    def lock(self) -> threading.Lock:
        """Return a new lock, which is free in a forked process, whichever thread held it."""
        lock = threading.Lock()
        self._locks.add(lock)
        return lock

    def rlock(self) -> threading.RLock:
        """Return a new lock that its thread may take again, which is free in a forked process."""
        lock = threading.RLock()
        self._locks.add(lock)
        return lock

    def add(self, value: T, reset: Callable[[T], object]) -> T:
        """Return `value`, on which `reset` is called in each forked process."""
        self._resets.append(lambda: reset(value))
        return value

    def reset_after_fork(self) -> None:
        """In a forked process: free the locks, then reset the state."""
        for lock in list(self._locks):
            lock._at_fork_reinit()  # as `logging` and `threading` do with theirs
        for reset in self._resets:
            reset()


PROCESS = ProcessState()
"""The state of this process."""

process_lock = PROCESS.lock
process_rlock = PROCESS.rlock
process_wide = PROCESS.add

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS.reset_after_fork)
