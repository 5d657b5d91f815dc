"""Client of the helper process in which orbax commits tags: start, requests, retries.

If the process is lost, it is replaced and the commit retried once, unless the draft already has the tag's name, which
alone determines if it is committed.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

from xla_ckpt.errors import NotDurableError, SaveError, from_json
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, FileSystemDirectory, Identity, make_not_durable_error
from xla_ckpt.storage.helper_process import HelperExited, HelperProcess
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.storage.synchronization import Notifier

logger = get_logger(__name__)

HELPER_MODULE = "xla_ckpt.tags.orbax_process"

SECOND_PROCESS_AFTER_SECONDS = 5.0
"""Seconds that a commit waits for the busy process before it starts a second one.

A commit takes milliseconds and starting a process takes a second, but a hanging file system may take minutes, during
which commits to other file systems must not wait.
"""


class OrbaxCommitter:
    """Pool of helper processes that commit the tags of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._freed = Notifier()
        self._processes: list[HelperProcess] = []
        """All running or starting processes."""
        self._idle_processes: list[HelperProcess] = []
        """Processes without a request."""
        atexit.register(self._stop_processes)

    def start(self) -> None:
        """Start the helper process in the background, if there is none, because a commit is expected."""
        with defer_signals(), self._lock:
            try:
                if not self._processes:
                    self._idle_processes.append(self._start_process())
            except OSError as error:
                logger.debug("the commit tries again to start its process: %s", error)

    def wait_ready(self, within: float) -> bool:
        """Wait until the helper process is ready, at most `within` seconds. Return True if it was not known to be
        ready.

        Raises:
            SaveError: The process does not start.
        """
        was_ready = any(program.is_ready for program in self._processes)
        if not was_ready:
            self._run_with_retry(None, None, within)
        return not was_ready

    def commit(
        self,
        store: FileSystem,
        draft: FileSystemDirectory,
        tag: str,
        replaced: Identity | None,
        metadata: Any,
        within: float,
    ) -> str | None:
        """Rename a draft to a tag durably, like `xla_ckpt.tags.directory_operations.replace_directory`.

        Args:
            store: Store of the root.
            draft: Complete, durable and locked draft directory.
            tag: Name of the tag.
            replaced: Identity of the directory with this name when the write began.
            metadata: JSON that orbax stores with the tag.
            within: Maximum seconds to wait.

        Returns:
            The new name of the replaced directory; None if there was none or it is unknown.

        Raises:
            SaveError: The commit failed; the tag is unchanged.
            OSError: The storage failed; the tag is unchanged.
            NotDurableError: The commit succeeded, but a power loss may undo it.
        """
        job = {"root": store.path, "draft": draft.name, "tag": tag, "replaced": replaced, "metadata": metadata}
        answer = self._run_with_retry(job, draft, within)
        if answer is None:
            try:
                store.sync()
            except OSError as refused:
                raise make_not_durable_error(store, tag, refused) from refused
        elif (error := _parse_error(answer)) is not None:
            if isinstance(error, NotDurableError) or not draft.is_at(tag):
                raise error
            logger.warning("%s: tag %s is committed; afterwards orbax met an error: %s", store.path, tag, error)
        return None if answer is None else answer.get("old")

    def _run_with_retry(
        self, job: dict[str, Any] | None, draft: FileSystemDirectory | None, within: float
    ) -> dict[str, Any] | None:
        """Return the response to a request, or None if the process was lost after completing it. Retries once
        otherwise.

        Raises:
            SaveError: The second process was lost too, the time is over, or no process can be started.
        """
        deadline = time.monotonic() + within
        for _ in range(2):
            try:
                program = self._acquire_process()
            except OSError as error:
                raise _make_process_error(f"{sys.executable}: {error.strerror or error}") from error
            try:
                answer = program.run(job, -1 if draft is None else draft.fd, deadline)
            except BaseException as error:
                self._drop_process(program)
                if not isinstance(error, HelperExited):
                    raise
                lost = error
                if job is not None and draft is not None and draft.is_at(job["tag"]):
                    return None
                if time.monotonic() >= deadline:
                    break
            else:
                self._release_process(program)
                return answer
        raise _make_process_error(str(lost)) from lost

    def _acquire_process(self) -> HelperProcess:
        """Return an idle process, reserved until `_release_process` or `_drop_process`.

        Raises:
            OSError: No process can be started.
        """
        taken: list[HelperProcess] = []
        if not self._freed.wait_for(lambda: self._try_acquire(taken), SECOND_PROCESS_AFTER_SECONDS):
            self._freed.wait_for(lambda: self._try_acquire(taken, or_another=True))
        return taken[0]

    def _try_acquire(self, taken: list[HelperProcess], *, or_another: bool = False) -> bool:
        with self._lock:
            if self._idle_processes:
                taken.append(self._idle_processes.pop())
            # Wait for a process that is still starting: another one would take as long.
            elif not self._processes or (or_another and all(program.is_ready for program in self._processes)):
                taken.append(self._start_process())
            return bool(taken)

    def _start_process(self) -> HelperProcess:
        program = HelperProcess(HELPER_MODULE)
        self._processes.append(program)  # before it starts, because a child forked meanwhile has to close it
        try:
            program.start()
        except OSError:
            self._processes.remove(program)
            program.close()
            raise
        return program

    def _release_process(self, program: HelperProcess) -> None:
        with self._lock:
            if is_kept := program in self._processes and not self._idle_processes:
                self._idle_processes.append(program)
        if is_kept:
            self._freed.notify()
        else:
            self._drop_process(program)  # one process is enough until a commit takes long again

    def _drop_process(self, program: HelperProcess) -> None:
        with self._lock:
            self._processes = [other for other in self._processes if other is not program]
        program.close()
        self._freed.notify()

    def _stop_processes(self) -> None:
        """Close all processes at exit, or in a forked child, in which they belong to the parent."""
        programs, self._processes, self._idle_processes = self._processes, [], []
        for program in programs:
            program.close()


def _make_process_error(problem: str) -> SaveError:
    problem, _, output = problem.partition("\n")
    return SaveError(
        "the process in which orbax commits tags does not work",
        found=problem,
        hint=f"The tag is as it was before. {sys.executable} -m {HELPER_MODULE} </dev/null shows whether it starts.",
        details=output or None,
    )


def _parse_error(answer: dict[str, Any]) -> Exception | None:
    if "error" in answer:
        return from_json(answer["error"])
    if "errno" in answer:
        return OSError(answer["errno"], answer["strerror"], answer["filename"])
    return SaveError("orbax did not commit the tag", found=answer["problem"]) if "problem" in answer else None


ORBAX_COMMITTER = register_fork_reset(OrbaxCommitter(), OrbaxCommitter._stop_processes)
"""Committer of this process."""
