"""Giving a save up from outside: by Ctrl-C, or by whatever else a signal handler raises in the call that waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xla_ckpt.errors import SaveError
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.waiting import Notifier


class Cancellation:
    """Whether one rank's part of a save is to end without a tag. The first word counts: a request, or `close`.

    The caller of a save may write to its memory once it has an exception in its hands. So the save says when it reads
    that memory, and a request waits for the end of that.
    """

    def __init__(self) -> None:
        self._lock = process_lock()
        self._changed = Notifier()
        self._cause: BaseException | None = None
        self._closed = False
        self._reads = False

    def request(self, cause: BaseException) -> bool:
        """Have the save end without a tag; whether it does. A second request is the same as the first.

        When it returns, the save reads no memory of the program's, and will read none any more.
        """
        with self._lock:
            if not self._closed:
                self._cause = self._cause or cause
        self._changed.wait_for(lambda: not self._reads)
        return self._cause is not None

    def check(self) -> None:
        """Go on only if nobody has given the save up.

        Raises:
            SaveError: Somebody has.
        """
        if self._cause is not None:
            raise SaveError(
                f"the save was given up: its caller was interrupted by {type(self._cause).__name__}",
                hint="The tag is as it was before. Save again.",
            ) from self._cause

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block that reads the program's memory, and calls `check` from time to time.

        Raises:
            SaveError: The save was given up before it began to read.
        """
        with self._lock:
            self.check()
            self._reads = True
        try:
            yield
        finally:
            self._reads = False
            self._changed.notify()

    def close(self) -> None:
        """From here on it is too late to give the save up: it is about to be committed.

        Raises:
            SaveError: Somebody has given it up before.
        """
        with self._lock:
            self.check()
            self._closed = True
