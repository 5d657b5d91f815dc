"""orbax commits tags in a process of its own: here is who asks it to, and finds out what became of it.

One that is lost is replaced, and the commit tried once more, unless the directory that was filled has the tag's name:
that alone says whether it is committed, whatever became of the process.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

from xla_ckpt.errors import NotDurableError, SaveError, from_json
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, Identity, LocalFiles
from xla_ckpt.storage.durable_names import not_durable
from xla_ckpt.storage.process_state import process_lock, process_wide
from xla_ckpt.storage.program import Program, ProgramEnded
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.storage.waiting import Notifier

logger = get_logger(__name__)

PROGRAM = "xla_ckpt.tags.orbax_process"

PATIENCE = 5.0
"""Seconds that a commit waits for the process, while that does another one, before it starts a second process.

A commit takes milliseconds, and a process a second to start; but a file system that does not answer may take minutes,
and commits to others go on meanwhile.
"""


class Committer:
    """What commits the tags of one process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._freed = Notifier()
        self._programs: list[Program] = []
        """All that run, or are started."""
        self._idle: list[Program] = []
        """Those of them that do no job."""
        atexit.register(self._end)

    def start(self) -> None:
        """Start the process in the background, unless there is one: a commit is to be expected."""
        with undisturbed(), self._lock:
            try:
                if not self._programs:
                    self._idle.append(self._started())
            except OSError as error:
                logger.debug("the commit tries again to start its process: %s", error)

    def await_ready(self, within: float) -> bool:
        """Wait until the process takes jobs, so many seconds at most; whether it was not known to take them.

        Raises:
            SaveError: It does not start, and why.
        """
        was_ready = any(program.is_ready for program in self._programs)
        if not was_ready:
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
                program = self._taken()
            except OSError as error:
                raise _does_not_work(f"{sys.executable}: {error.strerror or error}") from error
            try:
                answer = program.do(job, -1 if draft is None else draft.fd, deadline)
            except BaseException as error:
                self._drop(program)
                if not isinstance(error, ProgramEnded):
                    raise
                lost = error
                if job is not None and draft is not None and draft.is_at(job["tag"]):
                    return None
                if time.monotonic() >= deadline:
                    break
            else:
                self._free(program)
                return answer
        raise _does_not_work(str(lost)) from lost

    def _taken(self) -> Program:
        """A process that does no other job, until it is given to `_free` or `_drop`. OSError if none can be started."""
        taken: list[Program] = []
        if not self._freed.wait_for(lambda: self._take(taken), PATIENCE):
            self._freed.wait_for(lambda: self._take(taken, or_another=True))
        return taken[0]

    def _take(self, taken: list[Program], *, or_another: bool = False) -> bool:
        with self._lock:
            if self._idle:
                taken.append(self._idle.pop())
            # One that is still starting is waited for: another one would take as long.
            elif not self._programs or (or_another and all(program.is_ready for program in self._programs)):
                taken.append(self._started())
            return bool(taken)

    def _started(self) -> Program:
        program = Program(PROGRAM)
        self._programs.append(program)  # before it starts: a child that is forked meanwhile has to let go of it
        try:
            program.start()
        except OSError:
            self._programs.remove(program)
            program.end()
            raise
        return program

    def _free(self, program: Program) -> None:
        with self._lock:
            if is_kept := program in self._programs and not self._idle:
                self._idle.append(program)
        if is_kept:
            self._freed.notify()
        else:
            self._drop(program)  # one is enough until a commit takes long again

    def _drop(self, program: Program) -> None:
        with self._lock:
            self._programs = [other for other in self._programs if other is not program]
        program.end()
        self._freed.notify()

    def _end(self) -> None:
        """Let go of all processes: this one ends, or was forked from the one that they belong to."""
        programs, self._programs, self._idle = self._programs, [], []
        for program in programs:
            program.end()


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


COMMITTER = process_wide(Committer(), Committer._end)
"""That of this process."""
