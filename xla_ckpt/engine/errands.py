"""Work that follows saves and fails none of them, on one thread of this process: one piece after the other."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from functools import partial

from xla_ckpt.errors import CheckpointError, from_json
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.this_process import after_fork
from xla_ckpt.storage.threads import started
from xla_ckpt.storage.undisturbed import undisturbed, waited

logger = get_logger(__name__)


class Errands:
    """The pieces of work of one process. Its thread runs while there are some."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue = collections.deque[tuple[str, Callable[[], object]]]()
        self._thread: threading.Thread | None = None
        self._errors: list[CheckpointError] = []

    def add(self, doing: str, work: Callable[[], object]) -> None:
        """Have something done in the background. Never fails: an error is logged, and raised by `wait`."""
        with undisturbed(), self._changed:
            self._queue.append((doing, work))
            if self._thread is None:
                # Not a daemon: the interpreter must not end under a thread that writes. Where there is no thread to be
                # had, `wait` does it.
                self._thread = started(self._work, "xla_ckpt-errands", daemon=False)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                doing, work = self._queue.popleft()
            try:
                work()
            except Exception as error:
                self._failed(doing, error)  # the save has long returned

    def _failed(self, doing: str, error: Exception) -> None:
        problem = as_checkpoint_error(error, doing, 0)
        logger.warning("%s failed: %s", doing, problem)
        with self._changed:
            self._errors.append(problem)

    def wait(self) -> None:
        """Wait until all is done.

        Raises:
            CheckpointError: Something failed, and nobody has been told yet. The errors of others are logged.
        """
        with self._changed:
            waited(partial(self._changed.wait_for, lambda: self._thread is None))
            if alone := bool(self._queue):
                self._thread = threading.current_thread()
        if alone:
            self._work()
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            raise from_json(errors[0].to_json()) from errors[0]

    def at_exit(self) -> None:
        """Wait for all that was begun, unless somebody interrupts that: then nothing else is begun."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("what was to follow a save was not done: %s", error)  # noqa: TRY400  # the message says all
        except BaseException:
            logger.exception("what was to follow saves is interrupted")
            with self._changed:
                self._queue.clear()


ERRANDS = Errands()
"""The work of this process."""

after_fork(ERRANDS.__init__)  # type: ignore[misc]  # the thread, and what it does, are the parent's
