"""The registry of background work in this process: saves in flight, and tasks that run after them.

At most one save is in flight for each root directory, on a thread of its own, and the interpreter waits for all of
them at exit. `BackgroundTasks` runs post-save tasks one after the other on one thread; their failures never fail the
save.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol

from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.errors import CheckpointError, UsageError, from_json
from xla_ckpt.features.local_first.upload import UPLOADS, Uploader
from xla_ckpt.keywords import check_arguments
from xla_ckpt.logs import get_logger
from xla_ckpt.options import OnError
from xla_ckpt.reports import SaveReport, make_deferred_error, report_error
from xla_ckpt.saving.context import Cancellation
from xla_ckpt.snapshot.snapshot import SnapshotProgress
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.storage.synchronization import Latch
from xla_ckpt.storage.threads import Worker, is_interpreter_ending, is_thread_running, register_shutdown, start_thread
from xla_ckpt.tags.lease import LEASES

logger = get_logger(__name__)


class BackgroundSave(Protocol):
    """What the thread of a save runs."""

    @property
    def snapshot_progress(self) -> SnapshotProgress | None:
        """When the program may write to what is saved; None if it may at once."""

    def run(self) -> SaveReport:
        """Do all of it.

        Raises:
            CheckpointError: It failed.
        """

    def release(self) -> None:
        """Let go of what is saved. It was not run."""

    def clean_up(self, *, failed: bool) -> None:
        """Remove what it left behind, now that the outcome is known."""


class SaveHandle:
    """A save that may still be in flight."""

    def __init__(
        self,
        path: str,
        tag: str,
        cancellation: Cancellation,
        *,
        error_reported: bool = False,
        in_background: bool = False,
        uploader: Uploader | None = None,
    ) -> None:
        self._cancellation, self._uploader, self._in_background = cancellation, uploader, in_background
        self._snapshot_progress: SnapshotProgress | None = None
        self.path = path
        """Root directory."""
        self.tag = tag
        self._begun = Latch()
        """All ranks have begun the save, or the outcome is known."""
        self._is_begun = False
        """Whether all ranks have begun it."""
        self._finished = Latch()
        """The outcome is known."""
        self._cleaned_up = Latch()
        """What the save left behind is removed."""
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._error_reported = error_reported
        """Whether somebody has heard of the error, or will hear of it elsewhere."""
        self._is_raised_by_next_save = in_background and not error_reported
        """Whether the next save may have to raise the error, on this rank or on another one."""
        self._traceback: TracebackType | None = None
        """Where the error was raised first: each further raise would add to it."""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.tag!r} in {self.path!r}: {state}>"

    def done(self) -> bool:
        """Whether the save has committed or failed; never waits, never raises."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has committed or failed, at most so many seconds; whether it has. Never raises.

        The thread of the save, which calls the functions of `on_report`, does not wait: it would do so for itself. Nor
        does a process that was forked during the save, which its parent makes.
        """
        if threading.current_thread() is self._thread:
            return self.done()
        return self._finished.wait(timeout, unless=lambda: self._is_orphaned)

    @property
    def error(self) -> BaseException | None:
        """Why the save failed; None if it did not, or is in flight. Asking counts as being told."""
        self._error_reported = self._error_reported or self._error is not None
        return self._error

    def frozen(self, timeout: float | None = None) -> bool:
        """Wait until the program may write to whatever is saved, even where no guard sees it; whether it may.

        That is so at once, unless the save was told ``snapshot="overlap"``. It is so, too, when the save has failed.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes, 0 only asks.
        """
        return self._snapshot_progress is None or self._snapshot_progress.wait(timeout)

    @check_arguments
    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save, and say what it did.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            CheckpointError: The save failed; the same error on every rank.
            TimeoutError: It is still in flight.
            UsageError: The thread of the save asks, in a function that `on_report` was given: it would wait for itself.
                Or this process was forked during the save, which its parent makes.
        """
        if threading.current_thread() is self._thread and not self.done():
            raise UsageError("a function that on_report was given waits for the save that calls it", tag=self.tag)
        if not self.wait(timeout):
            if self._is_orphaned:
                raise UsageError(
                    "this process was forked during the save, which its parent makes",
                    path=self.path,
                    tag=self.tag,
                    hint="Wait for the save in the process that began it.",
                )
            raise TimeoutError(f"the save of tag {self.tag} in {self.path} is still in flight after {timeout} s")
        if self._error is not None:
            self._error_reported = True
            raise self._error.with_traceback(self._traceback)
        assert self._report is not None
        return self._report

    @check_arguments
    def uploaded(self, timeout: float | None = None) -> SaveReport:
        """As `result`; and wait until the tag is in the object store, too, if it was saved with ``local=``.

        The first rank of each disk uploads. On other ranks, and after a save without ``local=``, there is nothing more
        to wait for.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            CheckpointError: The save failed, or the tag did not go up. The next save tries that again, and so does
                `finalize_checkpoint`.
            TimeoutError: It is still on its way.
        """
        began, report = time.monotonic(), self.result(timeout)
        if self._uploader is not None:
            left = None if timeout is None else max(began + timeout - time.monotonic(), 0.0)
            self._uploader.wait_uploaded(report.sequence, left)
        return report

    def finish(self) -> None:
        """Wait until the save has committed or failed.

        Raises:
            CheckpointError: It failed, and nobody has been told yet; the same error on every rank.
        """
        self.wait()
        if not self._error_reported:
            self.result()

    def began(self) -> None:
        """Note that all ranks have begun this save."""
        self._is_begun = True
        self._begun.set()

    def finish_beginning(self) -> None:
        """Wait until all ranks have begun this save.

        Raises:
            CheckpointError: They did not, and nobody has been told yet; the same error on every rank.
        """
        self.wait_until_begun()
        if not self._is_begun:
            self.finish()

    def wait_until_begun(self) -> None:
        """Wait until all ranks have begun this save, or its outcome is known. Never raises."""
        self._begun.wait(unless=lambda: self._is_orphaned)

    def mark_told(self) -> None:
        """Note that the caller is told why the save fails."""
        self._error_reported = True

    def take_error(self, tag: str) -> CheckpointError | None:
        """Return the error if nobody has been told yet, for a call to raise that does not save `tag` because of it."""
        if not self._is_unreported:
            return None
        assert self._error is not None
        self._error_reported = True
        return make_deferred_error(self._error, f", and this call has not saved tag {tag}")

    def _fail(self, error: BaseException, on_error: OnError) -> None:
        """Keep the error, which `handle.result()` raises, or the next call; and log it if no caller waits."""
        self._error, self._traceback = error, error.__traceback__
        if self._error_reported:
            return
        self._error_reported = report_error(on_error, error)
        if self._error_reported:
            self._is_raised_by_next_save = False
        elif self._in_background:
            logger.error("the asynchronous save of tag %s in %s failed: %s", self.tag, self.path, error)

    def give_up(self, cause: BaseException) -> None:
        """End the save without a tag, because its caller met an exception, which it raises next.

        If it is too late for that, this waits until the save has ended. A second exception from outside ends the wait
        only when the save no longer reads the program's memory. Does nothing if the save has ended.
        """
        too_late = False
        while not (self.done() or self._is_orphaned):
            try:
                if self._cancellation.cancel(cause):
                    self._error_reported = True  # the caller has the cause, and nobody else is to be told of it
                    return
                too_late = True
                self.wait()
            except BaseException:
                # Somebody presses Ctrl-C once more. As long as its memory is read, the program must not go on.
                if too_late:
                    raise

    def tidied(self) -> SaveReport:
        """As `result`; and wait until the older tags are deleted that the save has given up.

        Raises:
            CheckpointError: The save failed; the same error on every rank.
        """
        report = self.result()
        self._join()
        return report

    @property
    def _is_unreported(self) -> bool:
        return self._error is not None and not self._error_reported

    @property
    def _is_failed(self) -> bool:
        """Whether it failed, and the next save may have to raise its error."""
        return self._error is not None and self._is_raised_by_next_save

    @property
    def _is_orphaned(self) -> bool:
        """Whether nobody will ever know the outcome here."""
        return self._thread is not None and not is_thread_running(self._thread) and not self.done()

    def _join(self) -> None:
        """Wait until the thread of the save has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # it was made in the foreground
            return
        self._cleaned_up.wait(unless=lambda: not is_thread_running(thread))
        with defer_signals():  # Python takes a thread for ended when a signal handler interrupts who joins it
            thread.join()

    @property
    def report(self) -> SaveReport | None:
        """What the save did, phase by phase; None while it is in flight, or if it failed. Never waits, never raises."""
        return self._report


class SaveRegistry:
    """The saves of one process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._latest: dict[str, SaveHandle] = {}
        self._locks: dict[str, threading.RLock] = {}

    def lock_for(self, path: str) -> threading.RLock:
        """The lock of who begins a save on `path`."""
        # A lock itself, which is taken and given back in one instruction each: an exception of a signal handler that
        # arrived between a context manager of ours and its `with` would keep it for ever. And one that a thread may
        # take again: a save in the foreground calls functions of the program, which may save.
        with self._lock:
            return self._locks.setdefault(path, threading.RLock())

    def wait_for_previous(self, path: str) -> SaveHandle | None:
        """Return the last save on `path` if it failed; wait until that save has an outcome.

        What it deletes afterwards is left to the thread of the next save to wait for. The next save raises its error on
        all ranks if one of them has not been told: so the ranks whose callers were told wait until all have begun.
        """
        with self._lock:
            last = self._latest.get(path)
        if last is not None:
            last.wait()
        return last if last is not None and last._is_failed else None

    def wait_until_begun(self) -> None:
        """Wait until all ranks have begun all saves in flight: then it is known which of their calls differed."""
        with self._lock:
            handles = list(self._latest.values())
        for handle in handles:
            if handle._is_raised_by_next_save and handle._thread is not threading.current_thread():
                handle.wait_until_begun()

    def start(self, handle: SaveHandle, save: BackgroundSave, on_error: OnError = "raise") -> None:
        """Run a save in the background, after all that the last one on the same path has left to do.

        What a signal handler raises meanwhile is raised when it has begun. Where no further thread is to be had, and at
        the end of the program, which waits for no thread any more that starts then, it is done when this returns.

        Args:
            handle: Of the save, which has not begun.
            save: Is run.
            on_error: Hears of its error before all others.
        """
        go = Latch()
        with self._lock:
            last = self._latest.get(handle.path)

        def work() -> None:
            # A fresh thread holds the interpreter lock for its whole slice (5 ms); this one lets its caller go first.
            go.wait()
            try:
                if last is not None:
                    last._join()  # what it deletes may be the room that this save needs
                handle._report = save.run()
            except BaseException as error:
                handle._fail(error, on_error)
            finally:
                handle._finished.set()
                handle._begun.set()
                try:
                    save.clean_up(failed=handle._error is not None)
                finally:
                    handle._cleaned_up.set()

        with defer_signals():
            thread = None
            if not is_interpreter_ending():
                # Not a daemon: the interpreter must not end under a save.
                thread = start_thread(work, f"xla_ckpt-save-{handle.tag}", daemon=False)
            handle._thread, handle._snapshot_progress = thread or threading.current_thread(), save.snapshot_progress
            with self._lock:
                self._latest[handle.path] = handle
            go.set()
            if thread is None:
                work()
                handle._thread = None
                if is_interpreter_ending():
                    _finish_background_work()

    def reset_after_fork(self) -> None:
        """In a forked process: the saves are made by its parent, and the memory that they read is the parent's."""
        for handle in self._latest.values():
            if handle._snapshot_progress is not None:
                handle._snapshot_progress.finish()
        self.__init__()  # type: ignore[misc]

    def drain(self, path: str | None = None) -> list[SaveHandle]:
        """Wait for the save in flight on `path` (None: on all paths); those that failed, and nobody has been told."""
        with self._lock:
            handles = [h for p, h in self._latest.items() if path is None or p == path]
        for handle in handles:
            handle._join()
            with self._lock:
                if self._latest.get(handle.path) is handle and not handle._is_unreported:
                    del self._latest[handle.path]
        return [handle for handle in handles if handle._is_unreported]

    def wait(self, path: str | None = None) -> None:
        """As `drain`.

        Raises:
            CheckpointError: One of them failed, and nobody has been told yet. The errors of others were logged.
        """
        untold = self.drain(path)
        if untold and (error := untold[0].error) is not None:
            raise make_deferred_error(error)

    def finish_at_exit(self) -> None:
        """Wait for all saves, and log what failed: nobody is left to raise to."""
        try:
            self.wait()
        except CheckpointError as error:
            # The exit code is that of a program that ended well: no hook of the interpreter can change it.
            text = (
                "a save in flight at exit failed, which the exit code does not show (finalize_checkpoint() would): %s"
            )
            logger.error(text, error)  # noqa: TRY400  # the message says all
        except BaseException:
            # The interpreter is going down; a traceback is the best that can be left behind.
            logger.exception("a save in flight at exit failed")


SAVES = register_fork_reset(SaveRegistry(), SaveRegistry.reset_after_fork)
"""The saves of this process."""


@functools.cache
def _install_exit_hook() -> None:
    # Hooks run newest first, and none can be added once the first runs: whatever a save in flight may still import
    # has to have its hooks in place before ours.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    register_shutdown(_finish_at_exit)


def install_exit_hook() -> None:
    """Have the interpreter wait for saves in flight, before it leaves the other ranks (`job.shut_down`). Does it once.

    At the end of the program there are none: saves are made in the foreground then.
    """
    if not is_interpreter_ending():
        _install_exit_hook()


def _finish_at_exit() -> None:
    SAVES.finish_at_exit()
    _finish_background_work()


def _finish_background_work() -> None:
    """Wait for what saves of this process have left to do, and give the leases back."""
    UPLOADS.finish_at_exit()
    BACKGROUND_TASKS.finish_at_exit()
    LEASES.release_all()


class BackgroundTasks:
    """The pieces of work of one process. Its thread runs while there are some."""

    def __init__(self) -> None:
        # Not a daemon: the interpreter must not end under a thread that writes.
        self._worker = Worker("xla_ckpt-errands", daemon=False)
        self._errors: list[CheckpointError] = []

    def add(self, description: str, task: Callable[[], object]) -> None:
        """Have something done in the background. Never fails: an error is logged, and raised by `wait`."""
        self._worker.submit(task, partial(self._record_failure, description))

    def _record_failure(self, description: str, error: BaseException) -> None:
        problem = as_checkpoint_error(error, description, 0)  # the save has long returned
        logger.warning("%s failed: %s", description, problem)
        self._errors.append(problem)

    def wait(self) -> None:
        """Wait until all is done. Where no thread was to be had, do it.

        Raises:
            CheckpointError: Something failed, and nobody has been told yet. The errors of others are logged.
        """
        self._worker.wait()
        self._worker.run_here()
        errors, self._errors = self._errors, []
        if errors:
            raise from_json(errors[0].to_json()) from errors[0]

    def finish_at_exit(self) -> None:
        """Wait for all that was begun, unless somebody interrupts that: then nothing else is begun."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("what was to follow a save was not done: %s", error)  # noqa: TRY400  # the message says all
        except BaseException:
            logger.exception("what was to follow saves is interrupted")
            self._worker.clear()


BACKGROUND_TASKS = register_fork_reset(BackgroundTasks(), BackgroundTasks.__init__)
"""The work of this process."""
