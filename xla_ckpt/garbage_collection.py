"""Pause Python's cyclic garbage collector while many long-lived objects are created.

The collector scans the young objects after every few hundred allocations, and repeatedly all objects of the program,
of which torch accounts for 150,000. For a state of 20,000 arrays these scans took as long as the rest of a save, and
freed nothing. The collector is paused only while this library imports modules, plans, captures a state, or lists tags
and arrays. It runs while files are read and written and while a rank waits for others, because a program that
continues to train creates garbage of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset

_lock = fork_safe_lock()
_pauses: set[object] = set()
_was_enabled = False


def _reset_after_fork(pauses: set[object]) -> None:
    """End the pauses of threads that do not exist in a forked process."""
    if pauses and _was_enabled:
        gc.enable()
    pauses.clear()


register_fork_reset(_pauses, _reset_after_fork)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the collector of the whole process until the last of overlapping pauses has ended.

    If the program has disabled the collector, it stays disabled.

    >>> with pause_gc(), pause_gc():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    global _was_enabled  # noqa: PLW0603  # there is one collector per process
    pause = object()
    try:
        # Inside the `try`, because otherwise an exception of a signal handler could leave the collector disabled.
        with _lock:
            if not _pauses:
                _was_enabled = gc.isenabled()
            _pauses.add(pause)
            gc.disable()
        yield
    finally:
        with _lock:
            _pauses.discard(pause)
            if not _pauses and _was_enabled:
                gc.enable()
