"""A crew of threads that works off a list of tasks, each thread with an aligned buffer of its own."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Task = TypeVar("Task")


def threads(wanted: int, at_least: int) -> int:
    """How many of the `wanted` threads this machine has a use for.

    I/O threads wait, so `at_least` a few run whatever the number of cores; more than there are cores only fight over
    page tables and locks.
    """
    return max(1, min(wanted, max(at_least, os.cpu_count() or 1)))


BUFFER_BYTES = 8 * 1024 * 1024
"""Default buffer of one worker: large enough to keep a disk busy, small enough to have several."""


def work_off(
    tasks: Iterable[Task],
    work: Callable[[Task, memoryview], None],
    *,
    workers: int,
    buffer_bytes: int = BUFFER_BYTES,
    name: str,
) -> None:
    """Call `work(task, buffer)` for every task, on up to `workers` threads (the calling one among them).

    Buffers are page-aligned. The first error stops the crew after the tasks in hand, and is raised here.
    """
    lock = threading.Lock()
    todo: Iterator[Task] = iter(tasks)
    errors: list[BaseException] = []

    def worker() -> None:
        buffer = mmap.mmap(-1, max(buffer_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
            _close(buffer)

    crew = [threading.Thread(target=worker, name=f"{name}-{i}", daemon=True) for i in range(1, workers)]
    for thread in crew:
        thread.start()
    worker()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]


def _close(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        pass  # an error's traceback still holds a slice of it; it goes when that does
