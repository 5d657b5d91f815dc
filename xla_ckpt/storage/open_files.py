"""Descriptors of this process, of which it may have few: 1,024 by default on Linux. A checkpoint may have more files.

A file that is being read is open only while somebody reads it, and then as long as there is room: those that were read
longest ago are closed, and opened again when they are wanted.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from typing import Protocol

from xla_ckpt.storage.process_state import process_lock, process_wide

SHARE = 8
"""One part in so many of the descriptors that the process may have is for files that nobody reads at the moment. Each
takes up to three: one more reads around the page cache, and one belongs to a mapping."""

FEWEST = 4
"""So many files stay open whatever the limit is."""

_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class Suspendable(Protocol):
    """A file that can be closed while nobody reads it."""

    def suspend(self) -> None:
        """Close it, unless somebody has begun to read it."""


class IdleFiles:
    """The files of this process that are open and that nobody reads."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._files: OrderedDict[Suspendable, None] = OrderedDict()

    def reset_after_fork(self) -> None:
        """Forget all of them in a forked process. They stay open: a thread of the parent may hold the lock of one."""
        self._files.clear()

    def add(self, file: Suspendable) -> None:
        """Keep a file that nobody reads any more, as the one that was read last."""
        with self._lock:
            self._files[file] = None

    def discard(self, file: Suspendable) -> None:
        """Leave a file alone: it is being read, or closed."""
        with self._lock:
            self._files.pop(file, None)

    def suspend(self, most: int | None = None) -> bool:
        """Close those that were read longest ago until there are `most`; whether any was closed.

        By default so many stay open as the limit of the process allows. No lock of a file may be held.
        """
        most = _most() if most is None else most
        closed = False
        while len(self._files) > most:
            with self._lock:
                if len(self._files) <= most:
                    break
                file, _ = self._files.popitem(last=False)
            file.suspend()
            closed = True
        return closed


IDLE = process_wide(IdleFiles(), IdleFiles.reset_after_fork)


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # each time: a program may lower it
    return max(soft // SHARE, FEWEST) if soft != resource.RLIM_INFINITY else 1 << 20


def open_descriptor(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """As `os.open`, which makes room for it where this process has too many files open."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _TOO_MANY or not IDLE.suspend(0):
            raise
    return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)


class Descriptor:
    """A descriptor that several objects share. The last one that forgets it closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)
