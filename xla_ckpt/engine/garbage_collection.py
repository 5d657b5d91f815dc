"""Python's collector of cyclic garbage, paused while many objects are made that all are needed.

Whenever some hundred objects have been made, the collector looks through the young ones, and again and again through
all objects of the program, of which torch alone has 150,000. For a state of 20,000 arrays that took as long as the rest
of a save, and found nothing. It is paused only where modules of this library are loaded, where plans are made, where a
state is frozen, which takes a second for some ten thousand arrays, and where a command lists tags or arrays. It runs
while files are written and read and while other ranks are waited for, but for those that plan with this one in a call
of DCP's: a program that goes on training meanwhile makes garbage of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from xla_ckpt.storage.process_state import process_lock, process_wide

_lock = process_lock()
_pauses: set[object] = set()
_was_enabled = False


def _reset_after_fork(pauses: set[object]) -> None:
    """In a forked process: end the pauses of threads that do not exist there."""
    if pauses and _was_enabled:
        gc.enable()
    pauses.clear()


process_wide(_pauses, _reset_after_fork)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of the whole process until the last of the pauses that overlap has ended.

    A program that has disabled it itself finds it disabled.

    >>> with collector_paused(), collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    global _was_enabled  # noqa: PLW0603  # the collector is one for the process
    pause = object()
    try:
        # Within the block that ends it: else an exception of a signal handler could leave the collector disabled.
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
