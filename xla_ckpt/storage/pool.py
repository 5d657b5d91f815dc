"""A crew of threads that works off a list of tasks, each thread with an aligned buffer of its own."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.storage.worker import Worker

Task = TypeVar("Task")


READERS = 8
"""Threads that read, also on a machine with fewer cores: a disk is fast only with several reads waiting for it."""


def threads(wanted: int, at_least: int) -> int:
    """How many of the `wanted` threads this machine has a use for.

    I/O threads wait, so `at_least` a few run whatever the number of cores; more than there are cores only fight over
    page tables and locks.
    """
    return max(1, min(wanted, max(at_least, os.cpu_count() or 1)))


HUGE_BYTES = 2 * 1024 * 1024
"""Bytes of a huge page. From this size on memory comes in mappings of its own, of huge pages where there are any."""

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

    Where no more threads are to be had, those that run do all of it.

    Buffers are page-aligned. The first error stops the crew after the tasks in hand, and is raised here; so does an
    exception of a signal handler. No thread of it runs any more when this has returned or raised.
    """
    lock = threading.Lock()
    todo: Iterator[Task] = iter(tasks)
    errors: list[BaseException] = []

    def worker() -> None:
        buffer = _buffer(max(buffer_bytes, mmap.PAGESIZE))
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

    crew: list[Worker] = []
    try:
        with undisturbed():
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
        with undisturbed():
            for helper in crew:
                helper.wait()
        raise
    if errors:
        raise errors[0]


def _buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned memory, of huge pages where the system has them and it is large enough for one.

    A request to a disk may have a few hundred pieces of memory. Of ordinary pages that is about 1 MiB: then the kernel
    sends a dozen requests for a buffer, from a thread of its own that goes before all of the program's, and each one
    ends in an interrupt, on a core that the program computes on (docs/measured/profiles.md).
    """
    # The kernel aligns a mapping to huge pages if its length is a multiple of theirs.
    whole = nbytes if nbytes < HUGE_BYTES else -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: ordinary ones do
    return buffer


def _close(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        pass  # an error's traceback still holds a slice of it; it goes when that does
