"""Process-wide state, and how it is reset in a forked child.

A forked child has one thread and a copy of all locks, queues and caches. Register process-wide objects with
`register_fork_reset`, and create locks with `fork_safe_lock`: one hook resets all of them after a fork.
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

    def create_lock(self) -> threading.Lock:
        """Return a new lock, which is free in a forked process, whichever thread held it."""
        lock = threading.Lock()
        self._locks.add(lock)
        return lock

    def create_rlock(self) -> threading.RLock:
        """Return a new lock that its thread may take again, which is free in a forked process."""
        lock = threading.RLock()
        self._locks.add(lock)
        return lock

    def register(self, value: T, reset: Callable[[T], object]) -> T:
        """Return `value`, on which `reset` is called in each forked process."""
        self._resets.append(lambda: reset(value))
        return value

    def reset_after_fork(self) -> None:
        """In a forked process: free the locks, then reset the state."""
        for lock in list(self._locks):
            lock._at_fork_reinit()  # as `logging` and `threading` do with theirs
        for reset in self._resets:
            reset()


PROCESS_STATE = ProcessState()
"""The state of this process."""

fork_safe_lock = PROCESS_STATE.create_lock
fork_safe_rlock = PROCESS_STATE.create_rlock
register_fork_reset = PROCESS_STATE.register

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS_STATE.reset_after_fork)
