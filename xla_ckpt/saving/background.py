"""The registry of background work in this process: saves in flight, and tasks that run after them.

At most one save is in flight for each root directory, on its own thread, and the interpreter waits for all of them at
exit. `BackgroundTasks` runs post-save tasks sequentially on one thread; their failures never fail the save.
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
    """Save that a background thread runs."""

    @property
    def snapshot_progress(self) -> SnapshotProgress | None:
        """Progress of the snapshot; the program may write to the state when it is done. None if it may at once."""

    def run(self) -> SaveReport:
        """Run the save to its end.

        Raises:
            CheckpointError: The save failed.
        """

    def release(self) -> None:
        """Release the state of a save that was not run."""

    def clean_up(self, *, failed: bool) -> None:
        """Remove the leftovers of the save, after the outcome is known."""


class SaveHandle:
    """Handle of a save that may still be in flight."""

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
        """Set when all ranks have begun the save, or the outcome is known."""
        self._is_begun = False
        """True if all ranks have begun the save."""
        self._finished = Latch()
        """Set when the outcome is known."""
        self._cleaned_up = Latch()
        """Set when the leftovers of the save are removed."""
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._error_reported = error_reported
        """True if the error was reported to the caller, or will be reported elsewhere."""
        self._is_raised_by_next_save = in_background and not error_reported
        """True if the next save may have to raise the error, on this rank or on another one."""
        self._traceback: TracebackType | None = None
        """Traceback of the first raise; without resetting it, each further raise would extend it."""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.tag!r} in {self.path!r}: {state}>"

    def done(self) -> bool:
        """Return True if the save has committed or failed. Never waits, never raises."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has committed or failed, and return True if it has. Never raises.

        Does not wait on the thread of the save, which calls the functions of `on_report` and would wait for itself, or
        in a process that was forked during the save, which only its parent runs.

        Args:
            timeout: Maximum number of seconds to wait; None waits without limit.
        """
        if threading.current_thread() is self._thread:
            return self.done()
        return self._finished.wait(timeout, unless=lambda: self._is_orphaned)

    @property
    def error(self) -> BaseException | None:
        """Error of a failed save; None if it has not failed or is in flight. Reading it marks the error as reported."""
        self._error_reported = self._error_reported or self._error is not None
        return self._error

    def frozen(self, timeout: float | None = None) -> bool:
        """Wait until the program may write to all saved memory, even without a guard, and return True if it may.

        This is true at once, unless the save uses ``snapshot="overlap"``. It is also true if the save has failed.

        Args:
            timeout: Maximum number of seconds to wait; None waits without limit, 0 does not wait.
        """
        return self._snapshot_progress is None or self._snapshot_progress.wait(timeout)

    @check_arguments
    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save, and return its report.

        Args:
            timeout: Maximum number of seconds to wait; None waits without limit.

        Raises:
            CheckpointError: The save failed; the same error on every rank.
            TimeoutError: The save is still in flight.
            UsageError: Called on the thread of the save, in a callback of `on_report`, which would wait for itself; or
                this process was forked during the save, which only its parent runs.
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
        """Wait as `result` does, and also until the tag is in the object store, if it was saved with ``local=``.

        The first rank of each disk uploads. On other ranks, and after a save without ``local=``, there is nothing more
        to wait for.

        Args:
            timeout: Maximum number of seconds to wait; None waits without limit.

        Raises:
            CheckpointError: The save failed, or the tag was not uploaded. The next save and `finalize_checkpoint` retry
                the upload.
            TimeoutError: The save or the upload is still in flight.
        """
        began, report = time.monotonic(), self.result(timeout)
        if self._uploader is not None:
            left = None if timeout is None else max(began + timeout - time.monotonic(), 0.0)
            self._uploader.wait_uploaded(report.sequence, left)
        return report

    def finish(self) -> None:
        """Wait until the save has committed or failed.

        Raises:
            CheckpointError: The save failed, and its error has not been reported yet; the same error on every rank.
        """
        self.wait()
        if not self._error_reported:
            self.result()

    def began(self) -> None:
        """Mark this save as begun by all ranks."""
        self._is_begun = True
        self._begun.set()

    def finish_beginning(self) -> None:
        """Wait until all ranks have begun this save.

        Raises:
            CheckpointError: The ranks did not begin the save, and the error has not been reported yet; the same error
                on every rank.
        """
        self.wait_until_begun()
        if not self._is_begun:
            self.finish()

    def wait_until_begun(self) -> None:
        """Wait until all ranks have begun this save, or its outcome is known. Never raises."""
        self._begun.wait(unless=lambda: self._is_orphaned)

    def mark_error_reported(self) -> None:
        """Mark the error as reported to the caller."""
        self._error_reported = True

    def take_error(self, tag: str) -> CheckpointError | None:
        """Return the error if it has not been reported yet, and mark it as reported.

        The caller raises the error instead of saving `tag`.
        """
        if not self._is_unreported:
            return None
        assert self._error is not None
        self._error_reported = True
        return make_deferred_error(self._error, f", and this call has not saved tag {tag}")

    def _fail(self, error: BaseException, on_error: OnError) -> None:
        """Store the error, which `result` or the next call raises, and log it if no caller waits."""
        self._error, self._traceback = error, error.__traceback__
        if self._error_reported:
            return
        self._error_reported = report_error(on_error, error)
        if self._error_reported:
            self._is_raised_by_next_save = False
        elif self._in_background:
            logger.error("the asynchronous save of tag %s in %s failed: %s", self.tag, self.path, error)

    def give_up(self, cause: BaseException) -> None:
        """End the save without a tag, because its caller received an exception, which it raises next.

        If the commit has begun, wait until the save has ended. A second exception from a signal handler ends the wait
        only when the save no longer reads the program's memory. Does nothing if the save has ended.
        """
        too_late = False
        while not (self.done() or self._is_orphaned):
            try:
                if self._cancellation.cancel(cause):
                    self._error_reported = True  # the caller raises the cause, so the error needs no further report
                    return
                too_late = True
                self.wait()
            except BaseException:
                # A second Ctrl-C. The program must not continue while its memory is read.
                if too_late:
                    raise

    def tidied(self) -> SaveReport:
        """Wait as `result` does, and also until the older tags are deleted that the retention policy does not keep.

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
        """True if the save failed, and the next save may have to raise its error."""
        return self._error is not None and self._is_raised_by_next_save

    @property
    def _is_orphaned(self) -> bool:
        """True if the outcome will never be known in this process."""
        return self._thread is not None and not is_thread_running(self._thread) and not self.done()

    def _join(self) -> None:
        """Wait until the thread of the save has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # a save in the foreground
            return
        self._cleaned_up.wait(unless=lambda: not is_thread_running(thread))
        with defer_signals():  # Python marks a thread as ended when a signal handler interrupts the joining thread
            thread.join()

    @property
    def report(self) -> SaveReport | None:
        """Report of the save; None while it is in flight, or if it failed. Never waits, never raises."""
        return self._report


class SaveRegistry:
    """Registry of the saves of one process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._latest: dict[str, SaveHandle] = {}
        self._locks: dict[str, threading.RLock] = {}

    def lock_for(self, path: str) -> threading.RLock:
        """Return the lock that serializes the start of saves on `path`."""
        # A plain lock, which is acquired and released in one instruction each: an exception of a signal handler between
        # a context manager of this library and its `with` would leave the lock held. It is reentrant because a save in
        # the foreground calls functions of the program, which may save.
        with self._lock:
            return self._locks.setdefault(path, threading.RLock())

    def wait_for_previous(self, path: str) -> SaveHandle | None:
        """Return the last save on `path` if it failed; wait until that save has an outcome.

        Deletions after its commit are not waited for here, but by the thread of the next save. The next save raises the
        error on all ranks if it was not reported on one of them; therefore the ranks that reported it wait until all
        have begun.
        """
        with self._lock:
            last = self._latest.get(path)
        if last is not None:
            last.wait()
        return last if last is not None and last._is_failed else None

    def wait_until_begun(self) -> None:
        """Wait until all ranks have begun all saves in flight, so that mismatched calls are detected."""
        with self._lock:
            handles = list(self._latest.values())
        for handle in handles:
            if handle._is_raised_by_next_save and handle._thread is not threading.current_thread():
                handle.wait_until_begun()

    def start(self, handle: SaveHandle, save: BackgroundSave, on_error: OnError = "raise") -> None:
        """Run a save in the background, after the last save on the same path has ended.

        Exceptions of signal handlers are deferred until the save has started. If no thread can be started, or at
        interpreter exit, which does not wait for new threads, the save runs on this thread before the call returns.

        Args:
            handle: Handle of the save, which has not begun.
            save: Save to run.
            on_error: Callback that receives the error of the save first, or ``"raise"``.
        """
        go = Latch()
        with self._lock:
            last = self._latest.get(handle.path)

        def work() -> None:
            # A new thread holds the interpreter lock for its whole slice (5 ms); this one lets its caller run first.
            go.wait()
            try:
                if last is not None:
                    last._join()  # its deletions may free the space that this save needs
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
                # Not a daemon, so that the interpreter does not exit during a save.
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
        """Reset the registry in a forked process; saves continue in the parent, and read the parent's memory."""
        for handle in self._latest.values():
            if handle._snapshot_progress is not None:
                handle._snapshot_progress.finish()
        self.__init__()  # type: ignore[misc]

    def drain(self, path: str | None = None) -> list[SaveHandle]:
        """Wait for the save in flight on `path` (None: all paths), and return failed saves that were not reported."""
        with self._lock:
            handles = [h for p, h in self._latest.items() if path is None or p == path]
        for handle in handles:
            handle._join()
            with self._lock:
                if self._latest.get(handle.path) is handle and not handle._is_unreported:
                    del self._latest[handle.path]
        return [handle for handle in handles if handle._is_unreported]

    def wait(self, path: str | None = None) -> None:
        """Wait for the saves in flight on `path` (None: on all paths).

        Raises:
            CheckpointError: A save failed, and its error has not been reported yet. Errors of further saves were
                logged.
        """
        unreported = self.drain(path)
        if unreported and (error := unreported[0].error) is not None:
            raise make_deferred_error(error)

    def finish_at_exit(self) -> None:
        """Wait for all saves at interpreter exit, and log failures, because there is no caller to raise to."""
        try:
            self.wait()
        except CheckpointError as error:
            # The exit code does not show the failure: no hook of the interpreter can change it.
            text = (
                "a save in flight at exit failed, which the exit code does not show (finalize_checkpoint() would): %s"
            )
            logger.error(text, error)  # noqa: TRY400  # the message says all
        except BaseException:
            # The interpreter is exiting, so logging the traceback is the only option left.
            logger.exception("a save in flight at exit failed")


SAVES = register_fork_reset(SaveRegistry(), SaveRegistry.reset_after_fork)
"""Saves of this process."""


@functools.cache
def _install_exit_hook() -> None:
    # Hooks run newest first, and none can be added once the first runs: modules that a save in flight may still import
    # must register their hooks before this one.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    register_shutdown(_finish_at_exit)


def install_exit_hook() -> None:
    """Register the hook that waits for saves in flight at exit, before the rank leaves the job (`job.shut_down`).

    The hook is registered once. At interpreter exit it is not needed, because saves then run in the foreground.
    """
    if not is_interpreter_ending():
        _install_exit_hook()


def _finish_at_exit() -> None:
    SAVES.finish_at_exit()
    _finish_background_work()


def _finish_background_work() -> None:
    """Wait for the remaining background work of saves in this process, and release the leases."""
    UPLOADS.finish_at_exit()
    BACKGROUND_TASKS.finish_at_exit()
    LEASES.release_all()


class BackgroundTasks:
    """Post-save tasks of one process, run sequentially on a thread that exists while there are tasks."""

    def __init__(self) -> None:
        # Not a daemon, so that the interpreter does not exit while the thread writes.
        self._worker = Worker("xla_ckpt-errands", daemon=False)
        self._errors: list[CheckpointError] = []

    def add(self, description: str, task: Callable[[], object]) -> None:
        """Run a task in the background. Never raises: an error is logged, and raised by `wait`."""
        self._worker.submit(task, partial(self._record_failure, description))

    def _record_failure(self, description: str, error: BaseException) -> None:
        problem = as_checkpoint_error(error, description, 0)  # the save returned long ago
        logger.warning("%s failed: %s", description, problem)
        self._errors.append(problem)

    def wait(self) -> None:
        """Wait until all tasks are done. If no thread could be started, run them here.

        Raises:
            CheckpointError: A task failed, and its error has not been reported yet. Errors of further tasks are logged.
        """
        self._worker.wait()
        self._worker.run_here()
        errors, self._errors = self._errors, []
        if errors:
            raise from_json(errors[0].to_json()) from errors[0]

    def finish_at_exit(self) -> None:
        """Wait for all tasks at exit. If the wait is interrupted, the remaining tasks are dropped."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("what was to follow a save was not done: %s", error)  # noqa: TRY400  # the message says all
        except BaseException:
            logger.exception("what was to follow saves is interrupted")
            self._worker.clear()


BACKGROUND_TASKS = register_fork_reset(BackgroundTasks(), BackgroundTasks.__init__)
"""Post-save tasks of this process."""
