"""Work that follows saves and fails none of them, on one thread of this process: one piece after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from xla_ckpt.errors import CheckpointError, from_json
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import process_wide
from xla_ckpt.storage.worker import Worker

logger = get_logger(__name__)


class Errands:
    """The pieces of work of one process. Its thread runs while there are some."""

    def __init__(self) -> None:
        # Not a daemon: the interpreter must not end under a thread that writes.
        self._worker = Worker("xla_ckpt-errands", daemon=False)
        self._errors: list[CheckpointError] = []

    def add(self, doing: str, work: Callable[[], object]) -> None:
        """Have something done in the background. Never fails: an error is logged, and raised by `wait`."""
        self._worker.submit(work, partial(self._failed, doing))

    def _failed(self, doing: str, error: BaseException) -> None:
        problem = as_checkpoint_error(error, doing, 0)  # the save has long returned
        logger.warning("%s failed: %s", doing, problem)
        self._errors.append(problem)

    def wait(self) -> None:
        """Wait until all is done. Where no thread was to be had, do it.

        Raises:
            CheckpointError: Something failed, and nobody has been told yet. The errors of others are logged.
        """
        self._worker.wait()
        self._worker.work_here()
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
            self._worker.clear()


ERRANDS = process_wide(Errands(), Errands.__init__)
"""The work of this process."""
