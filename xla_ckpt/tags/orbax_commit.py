"""orbax commits tags in a process of its own: here is who asks it to, and finds out what became of it.

One that is lost is replaced, and the commit tried once more, unless the directory that was filled has the tag's name:
that alone says whether it is committed, whatever became of the process.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any

from xla_ckpt.errors import NotDurableError, SaveError, from_json
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, Identity, LocalFiles
from xla_ckpt.storage.durable_names import not_durable
from xla_ckpt.storage.program import Program, ProgramEnded
from xla_ckpt.storage.this_process import after_fork
from xla_ckpt.storage.undisturbed import undisturbed

logger = get_logger(__name__)

PROGRAM = "xla_ckpt.tags.orbax_process"


class Committer:
    """What commits the tags of one process, one after the other. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._program: Program | None = None
        after_fork(self._forget)
        atexit.register(self._end)

    def start(self) -> None:
        """Start the process in the background, unless there is one: a commit is to be expected."""
        with undisturbed():
            if self._program is None and self._lock.acquire(blocking=False):
                try:
                    self._started()
                except OSError as error:
                    logger.debug("the commit tries again to start its process: %s", error)
                finally:
                    self._lock.release()

    def await_ready(self, within: float) -> bool:
        """Wait until the process takes jobs, so many seconds at most; whether it was not known to take them.

        Raises:
            SaveError: It does not start, and why.
        """
        with self._lock:
            was_ready = self._program is not None and self._program.is_ready
            self._tried(None, None, within)
        return not was_ready

    def commit(
        self, store: FileSystem, draft: LocalFiles, tag: str, replaced: Identity | None, metadata: Any, within: float
    ) -> str | None:
        """Have a directory take the name of a tag, durably, as `xla_ckpt.tags.placing.place` does.

        Args:
            store: Where it is.
            draft: It is filled, durable, and locked.
            tag: The name that it takes.
            replaced: What had the name when the writing began.
            metadata: What orbax keeps in it: plain JSON.
            within: Seconds to wait at most.

        Returns:
            The name under which the old directory stands now; None if there was none, or if nobody can say it.

        Raises:
            SaveError: It was not committed; the tag is as it was before.
            OSError: Likewise.
            NotDurableError: It was committed, and a loss of power may undo that.
        """
        job = {"root": store.path, "draft": draft.name, "tag": tag, "replaced": replaced, "metadata": metadata}
        with self._lock:
            answer = self._tried(job, draft, within)
        if answer is None:
            try:
                store.sync()
            except OSError as refused:
                raise not_durable(store, tag, refused) from refused
        elif (error := _error_of(answer)) is not None:
            if isinstance(error, NotDurableError) or not draft.is_at(tag):
                raise error
            logger.warning("%s: tag %s is committed; afterwards orbax met an error: %s", store.path, tag, error)
        return None if answer is None else answer.get("old")

    def _tried(self, job: dict[str, Any] | None, draft: LocalFiles | None, within: float) -> dict[str, Any] | None:
        """The answer to a job; None if the process was lost, and had done it. A second one tries what is not done.

        Raises:
            SaveError: That was lost, too, or the time is over, or none can be started.
        """
        deadline = time.monotonic() + within
        for _ in range(2):
            try:
                return (self._program or self._started()).do(job, -1 if draft is None else draft.fd, deadline)
            except OSError as error:
                raise _does_not_work(f"{sys.executable}: {error.strerror or error}") from error
            except ProgramEnded as ended:
                self._program, lost = None, ended
                if job is not None and draft is not None and draft.is_at(job["tag"]):
                    return None
                if time.monotonic() >= deadline:
                    break
        raise _does_not_work(str(lost)) from lost

    def _started(self) -> Program:
        self._program = Program(PROGRAM)  # before it starts: a child that is forked meanwhile has to let go of it
        try:
            self._program.start()
        except OSError:
            self._end()
            raise
        return self._program

    def _forget(self) -> None:
        """In a forked child: the process, and perhaps the lock, are the parent's."""
        self._lock = threading.Lock()
        self._end()

    def _end(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None


def _does_not_work(problem: str) -> SaveError:
    problem, _, output = problem.partition("\n")
    return SaveError(
        "the process in which orbax commits tags does not work",
        found=problem,
        hint=f"The tag is as it was before. {sys.executable} -m {PROGRAM} </dev/null shows whether it starts.",
        details=output or None,
    )


def _error_of(answer: dict[str, Any]) -> Exception | None:
    if "error" in answer:
        return from_json(answer["error"])
    if "errno" in answer:
        return OSError(answer["errno"], answer["strerror"], answer["filename"])
    return SaveError("orbax did not commit the tag", found=answer["problem"]) if "problem" in answer else None


COMMITTER = Committer()
"""That of this process."""
