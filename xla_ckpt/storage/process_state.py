"""Process-wide state and its reset in forked children.

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
    """Locks and objects of a process that are reset after a fork."""

    def __init__(self) -> None:
        self._locks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._resets: list[Callable[[], object]] = []

    def create_lock(self) -> threading.Lock:
        """Return a new lock, which is released in a forked child even if a thread of the parent held it."""
        lock = threading.Lock()
        self._locks.add(lock)
        return lock

    def create_rlock(self) -> threading.RLock:
        """Return a new reentrant lock, which is released in a forked child."""
        lock = threading.RLock()
        self._locks.add(lock)
        return lock

    def register(self, value: T, reset: Callable[[T], object]) -> T:
        """Return `value`, after registering `reset` to be called with it in each forked child."""
        self._resets.append(lambda: reset(value))
        return value

    def reset_after_fork(self) -> None:
        """Release the locks and reset the state in a forked child."""
        for lock in list(self._locks):
            lock._at_fork_reinit()  # as `logging` and `threading` do with their locks
        for reset in self._resets:
            reset()


PROCESS_STATE = ProcessState()
"""State of this process."""

fork_safe_lock = PROCESS_STATE.create_lock
fork_safe_rlock = PROCESS_STATE.create_rlock
register_fork_reset = PROCESS_STATE.register

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS_STATE.reset_after_fork)
