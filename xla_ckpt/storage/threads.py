"""Background threads: start a thread, a worker with a task queue, and a thread pool over a list of tasks.

All of them work without a new thread if the system cannot start one: the caller then runs the tasks itself. `Worker`
runs tasks in order and becomes idle even if they raise. `run_tasks` gives each thread an aligned buffer.
`register_shutdown` registers a function that runs before the interpreter joins threads.
"""

from __future__ import annotations

import atexit
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.storage.signals import defer_signals, is_from_signal_handler
from xla_ckpt.storage.synchronization import Notifier

# Saves need thread pools, which the interpreter shuts down before it joins threads or runs atexit functions. Only this
# hook, which concurrent.futures uses too, runs earlier.
register_shutdown: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Register a function that the interpreter calls at exit while threads still run, in reverse order of registration.

Raises RuntimeError if `is_interpreter_ending`.
"""


def is_interpreter_ending() -> bool:
    """Return True if the main thread has ended, so that nothing may wait for a new thread.

    This is the case in `atexit` functions, and in threads that outlive the main thread.
    """
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def is_thread_running(thread: threading.Thread) -> bool:
    """Return True if a thread is running in this process.

    A signal handler that raises within `threading.Thread.is_alive` makes Python 3.11 and 3.12 permanently treat a
    running thread as ended.
    """
    return thread in threading.enumerate()


def start_thread(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread | None:
    """Start a thread and return it, or None if no thread can be started; the caller must then do the work itself.

    This happens if the system has reached its thread limit, and in Python 3.12 after the main thread has ended.
    Otherwise a save in flight would fail then, although the program exits normally.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        with defer_signals():  # an interrupted start does not show if the thread runs
            thread.start()
    except RuntimeError:
        return None
    return thread


WorkerTask = Callable[[], object]
ErrorHandler = Callable[[BaseException], object]


class Worker:
    """A background thread that runs queued tasks in order. Thread-safe.

    It becomes idle even if a task raises, including an exit or a panic of an extension module. A thread that waits for
    it continues if the worker's thread is gone, for example in a forked process.

    Args:
        name: Name of the thread.
        daemon: True if the interpreter may exit while the thread runs.
    """

    def __init__(self, name: str, *, daemon: bool) -> None:
        self._name, self._daemon = name, daemon
        self._lock = fork_safe_lock()
        self._busy = fork_safe_lock()
        """Held while tasks run, on the worker's thread or on a thread that waits for it."""
        self._changed = Notifier()
        self._tasks: deque[tuple[WorkerTask, ErrorHandler]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """True if a thread is running tasks."""
        return self._has_thread or self._busy.locked()

    @property
    def _has_thread(self) -> bool:
        thread = self._thread
        return thread is not None and is_thread_running(thread)

    @property
    def is_lost(self) -> bool:
        """True if its thread disappeared during a task, because it belongs to the parent of this forked process."""
        return self._thread is not None and not self.is_running

    def submit(self, task: WorkerTask, on_error: ErrorHandler, *, once: bool = False) -> bool:
        """Queue a task to run in the background.

        Args:
            task: Function to call.
            on_error: Function that is called with the exception if the task raises one.
            once: If True, skip the task if it is already queued.

        Returns:
            True if a thread runs it. If no thread can be started, the task stays queued until the next call or
            `run_here`.
        """
        with defer_signals(), self._lock:
            if not once or (task, on_error) not in self._tasks:
                self._tasks.append((task, on_error))
            if not self._has_thread:
                self._thread = start_thread(self._run_tasks, self._name, daemon=self._daemon)
            return self._thread is not None

    def notify(self) -> None:
        """Wake waiting threads to check their conditions."""
        self._changed.notify()

    def wait(self, until: Callable[[], bool] = lambda: False, timeout: float | None = None) -> bool:
        """Wait until no thread runs tasks, or `until` returns True. Return False after `timeout` seconds."""
        return self._changed.wait_for(lambda: until() or not self.is_running, timeout)

    def run_here(self) -> None:
        """Run the queued tasks on the calling thread if no worker thread is running.

        Raises:
            BaseException: An exception raised by a signal handler.
        """
        if not self._has_thread:
            self._run_tasks()

    def clear(self) -> None:
        """Drop the queued tasks that have not started."""
        with self._lock:
            self._tasks.clear()

    def _run_tasks(self) -> None:
        try:
            with self._busy:
                while (next_ := self._pop_task()) is not None:
                    task, failed = next_
                    try:
                        task()
                    except BaseException as error:
                        failed(error)
                        if is_from_signal_handler(error):
                            raise
                    del task, failed, next_  # drop references before waiting for the next task
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._changed.notify()

    def _pop_task(self) -> tuple[WorkerTask, ErrorHandler] | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._thread = None  # under the lock, so that the next task starts a thread
            return None


Task = TypeVar("Task")


READ_THREADS = 8
"""Number of reading threads, even on machines with fewer cores: a disk is only fast with several pending reads."""


def get_worker_count(wanted: int, minimum: int) -> int:
    """Return the number of threads to use, at most `wanted`, on this machine.

    I/O threads mostly wait, so `minimum` threads run regardless of the number of cores. More threads than cores would
    contend for page tables and locks.
    """
    return max(1, min(wanted, max(minimum, os.cpu_count() or 1)))


HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""Size of a huge page (bytes). Allocations of at least this size get their own mapping, with huge pages if
available.
"""

WORKER_BUFFER_BYTES = 8 * 1024 * 1024
"""Default buffer size of one worker (bytes): large enough to keep a disk busy, small enough to have several."""


def run_tasks(
    tasks: Iterable[Task],
    work: Callable[[Task, memoryview], None],
    *,
    workers: int,
    buffer_bytes: int = WORKER_BUFFER_BYTES,
    name: str,
) -> None:
    """Call `work(task, buffer)` for every task, on up to `workers` threads including the calling one.

    If fewer threads can be started, those do all tasks. Buffers are page-aligned, with `buffer_bytes` bytes. After the
    first error, or an exception of a signal handler, the threads finish their current tasks and the error is raised. No
    thread is running when this function returns or raises.
    """
    lock = threading.Lock()
    todo: Iterator[Task] = iter(tasks)
    errors: list[BaseException] = []

    def worker() -> None:
        buffer = _map_buffer(max(buffer_bytes, mmap.PAGESIZE))
        try:
            with memoryview(buffer) as view:
                while not errors:
                    with lock:
                        task = next(todo, None)
                    if task is None:
                        return
                    work(task, view)
        except BaseException as error:
            # Raised below, on the calling thread.
            errors.append(error)
        finally:
            _close_buffer(buffer)

    crew: list[Worker] = []
    try:
        with defer_signals():
            for i in range(1, workers):
                helper = Worker(f"{name}-{i}", daemon=True)
                crew.append(helper)
                if not helper.submit(worker, errors.append):
                    break
        worker()
        for helper in crew:
            helper.wait()
    except BaseException as error:
        errors.append(error)
        with defer_signals():
            for helper in crew:
                helper.wait()
        raise
    if errors:
        raise errors[0]


def _map_buffer(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory, with huge pages if available and `nbytes` is at least one.

    A disk request is limited to a few hundred memory segments, about 1 MiB of ordinary pages. The kernel then sends a
    dozen requests per buffer, from a thread that preempts the program's threads, and each one ends in an interrupt on a
    core that the program computes on (docs/measured/profiles.md).
    """
    # The kernel aligns a mapping to huge pages if its length is a multiple of their size.
    whole = nbytes if nbytes < HUGE_PAGE_BYTES else -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    return buffer


def _close_buffer(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        pass  # the traceback of an error still holds a slice, which keeps the mapping until it is freed
