"""Background threads: start one, a worker with a task queue, and a thread pool over a list of tasks.

All of them work without a new thread if the system refuses one: the caller then does the tasks itself. `Worker`
runs tasks in order and becomes idle whatever they raise. `run_tasks` gives each thread an aligned buffer.
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

# Saves need thread pools, and the interpreter closes those before it joins threads or runs atexit functions; only this
# hook, the one that concurrent.futures itself uses, runs before.
register_shutdown: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Register a function that the interpreter calls at its end, while there are threads; the last one first.

RuntimeError if `is_interpreter_ending`.
"""


def is_interpreter_ending() -> bool:
    """Return whether the main thread has ended: nothing may wait for a thread that starts now.

    So it is in functions of `atexit`, and in threads that outlive the main one.
    """
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def is_thread_running(thread: threading.Thread) -> bool:
    """Return whether a thread runs in this process.

    A signal handler that raises within `threading.Thread.is_alive` makes Python 3.11 and 3.12 take a running thread for
    an ended one, for good.
    """
    return thread in threading.enumerate()


def start_thread(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread | None:
    """Start a thread; None if there is none to be had. Then its work has to be done without it.

    So it is where the system refuses further threads, and in Python 3.12 from the end of the main thread on. A save in
    flight would fail then, and the program would have ended well.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        with defer_signals():  # a start that is interrupted does not say whether the thread runs
            thread.start()
    except RuntimeError:
        return None
    return thread


WorkerTask = Callable[[], object]
ErrorHandler = Callable[[BaseException], object]


class Worker:
    """Does tasks on a thread of its own. Safe for several threads.

    It becomes idle whatever a task raises, an exit or a panic of an extension module included, and a thread that waits
    for it goes on if its thread is gone: in a forked process, for instance.

    Args:
        name: Of the thread.
        daemon: Whether the interpreter may end while the thread runs.
    """

    def __init__(self, name: str, *, daemon: bool) -> None:
        self._name, self._daemon = name, daemon
        self._lock = fork_safe_lock()
        self._busy = fork_safe_lock()
        """Held while tasks are done, by a thread of its own or by one that waits for them."""
        self._changed = Notifier()
        self._tasks: deque[tuple[WorkerTask, ErrorHandler]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether a thread does tasks now."""
        return self._has_thread or self._busy.locked()

    @property
    def _has_thread(self) -> bool:
        thread = self._thread
        return thread is not None and is_thread_running(thread)

    @property
    def is_lost(self) -> bool:
        """Whether its thread is gone in the midst of a task: it is that of the process which forked this one."""
        return self._thread is not None and not self.is_running

    def submit(self, task: WorkerTask, on_error: ErrorHandler, *, once: bool = False) -> bool:
        """Have a task done in the background, after those before it.

        Args:
            task: Is called.
            on_error: Is called with whatever it raises.
            once: Whether to leave it out if it is waiting to be done already.

        Returns:
            Whether a thread does it. If none is to be had, the task stays until the next one is submitted, or until
            `run_here`.
        """
        with defer_signals(), self._lock:
            if not once or (task, on_error) not in self._tasks:
                self._tasks.append((task, on_error))
            if not self._has_thread:
                self._thread = start_thread(self._run_tasks, self._name, daemon=self._daemon)
            return self._thread is not None

    def notify(self) -> None:
        """Have waiting threads look whether they have waited long enough."""
        self._changed.notify()

    def wait(self, until: Callable[[], bool] = lambda: False, timeout: float | None = None) -> bool:
        """Wait until no thread does tasks any more, or `until` returns True; False after `timeout` seconds."""
        return self._changed.wait_for(lambda: until() or not self.is_running, timeout)

    def run_here(self) -> None:
        """Do the tasks on this thread that no other one does.

        Raises:
            BaseException: What a signal handler raised meanwhile.
        """
        if not self._has_thread:
            self._run_tasks()

    def clear(self) -> None:
        """Drop the tasks that have not begun."""
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
                    del task, failed, next_  # they are held no longer than they are needed
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._changed.notify()

    def _pop_task(self) -> tuple[WorkerTask, ErrorHandler] | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._thread = None  # under the lock: the next task starts a thread
            return None


Task = TypeVar("Task")


READ_THREADS = 8
"""Threads that read, also on a machine with fewer cores: a disk is fast only with several reads waiting for it."""


def get_worker_count(wanted: int, minimum: int) -> int:
    """How many of the `wanted` threads this machine has a use for.

    I/O threads wait, so `minimum` a few run whatever the number of cores; more than there are cores only fight over
    page tables and locks.
    """
    return max(1, min(wanted, max(minimum, os.cpu_count() or 1)))


HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""Bytes of a huge page. From this size on memory comes in mappings of its own, of huge pages where there are any."""

WORKER_BUFFER_BYTES = 8 * 1024 * 1024
"""Default buffer of one worker: large enough to keep a disk busy, small enough to have several."""


def run_tasks(
    tasks: Iterable[Task],
    work: Callable[[Task, memoryview], None],
    *,
    workers: int,
    buffer_bytes: int = WORKER_BUFFER_BYTES,
    name: str,
) -> None:
    """Call `work(task, buffer)` for every task, on up to `workers` threads (the calling one among them).

    Where no more threads are to be had, those that run do all of it.

    Buffers are page-aligned. The first error stops the crew after the tasks in hand, and is raised here; so does an
    exception of a signal handler. No thread of it runs any more when this has returned or raised.
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
            # Raised below, by the thread that the caller sees.
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
    """Page-aligned memory, of huge pages where the system has them and it is large enough for one.

    A request to a disk may have a few hundred pieces of memory. Of ordinary pages that is about 1 MiB: then the kernel
    sends a dozen requests for a buffer, from a thread of its own that goes before all of the program's, and each one
    ends in an interrupt, on a core that the program computes on (docs/measured/profiles.md).
    """
    # The kernel aligns a mapping to huge pages if its length is a multiple of theirs.
    whole = nbytes if nbytes < HUGE_PAGE_BYTES else -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: ordinary ones do
    return buffer


def _close_buffer(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        pass  # an error's traceback still holds a slice of it; it goes when that does
