"""A thread that does tasks one after the other, and runs only while there are any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.threads import is_thread_running, started
from xla_ckpt.storage.undisturbed import comes_from_outside, undisturbed
from xla_ckpt.storage.waiting import Notifier

Task = Callable[[], object]
Failed = Callable[[BaseException], object]


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
        self._lock = process_lock()
        self._busy = process_lock()
        """Held while tasks are done, by a thread of its own or by one that waits for them."""
        self._changed = Notifier()
        self._tasks: deque[tuple[Task, Failed]] = deque()
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

    def submit(self, task: Task, failed: Failed, *, once: bool = False) -> bool:
        """Have a task done in the background, after those before it.

        Args:
            task: Is called.
            failed: Is called with whatever it raises.
            once: Whether to leave it out if it is waiting to be done already.

        Returns:
            Whether a thread does it. If none is to be had, the task stays until the next one is submitted, or until
            `work_here`.
        """
        with undisturbed(), self._lock:
            if not once or (task, failed) not in self._tasks:
                self._tasks.append((task, failed))
            if not self._has_thread:
                self._thread = started(self._work, self._name, daemon=self._daemon)
            return self._thread is not None

    def notify(self) -> None:
        """Have waiting threads look whether they have waited long enough."""
        self._changed.notify()

    def wait(self, enough: Callable[[], bool] = lambda: False, timeout: float | None = None) -> bool:
        """Wait until no thread does tasks any more, or `enough` returns True; False after `timeout` seconds."""
        return self._changed.wait_for(lambda: enough() or not self.is_running, timeout)

    def work_here(self) -> None:
        """Do the tasks on this thread that no other one does.

        Raises:
            BaseException: What a signal handler raised meanwhile.
        """
        if not self._has_thread:
            self._work()

    def clear(self) -> None:
        """Drop the tasks that have not begun."""
        with self._lock:
            self._tasks.clear()

    def _work(self) -> None:
        try:
            with self._busy:
                while (next_ := self._next()) is not None:
                    task, failed = next_
                    try:
                        task()
                    except BaseException as error:
                        failed(error)
                        if comes_from_outside(error):
                            raise
                    del task, failed, next_  # they are held no longer than they are needed
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._changed.notify()

    def _next(self) -> tuple[Task, Failed] | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._thread = None  # under the lock: the next task starts a thread
            return None
