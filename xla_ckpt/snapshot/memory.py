"""Aligned host memory: slab allocator, staging buffers, huge pages and parallel copies.

Reused memory is preferred because page faults on fresh pages cost more than the copy into them. `HugePagePolicy`
measures whether huge pages pay on this machine.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.storage.process_state import fork_safe_rlock
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES, get_worker_count, run_tasks

MEMORY_ALIGNMENT = 64
"""What XLA asks of memory that it adopts (bytes)."""

SLAB_BYTES = 4 * 1024 * 1024
"""Smaller requests share slabs of this size."""

SMALL_BUFFER_BYTES = 64 * 1024
"""Of pieces that go together, those up to this size are cut out of one slab."""

COPY_THREADS = 2
"""Threads that copy within host memory."""

COPY_CHUNK_BYTES = 16 * 1024 * 1024
"""Largest single copy: so that the copiers finish together."""

PAGE_FAULT_THREADS = 4
"""Threads that get pages, at most: more were no faster on 16 cores."""

MADV_POPULATE_WRITE = 23
"""Get the pages now. Python has no name for it."""

ByteArray = npt.NDArray[np.uint8]

_PRIVATE_MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Python's default is shared memory, which is slower to get and has no huge pages on most systems."""


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PageRegion:
    """The whole huge pages that there may be in some memory, which nobody has written yet."""

    def __init__(self, memory: ByteArray) -> None:
        skip = -memory.ctypes.data % HUGE_PAGE_BYTES
        self.memory = memory[skip : skip + max(len(memory) - skip, 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES]
        self.start = int(self.memory.ctypes.data)
        self.uses_huge_pages = False
        """Whether huge pages are tried."""

    def advise(self, option: int) -> None:
        """Tell the system what the memory is for.

        Raises:
            OSError: It does not know that.
        """
        if _libc.madvise(self.start, len(self.memory), option) != 0:
            raise OSError(ctypes.get_errno(), "madvise")


class HugePagePolicy:
    """Decides, region by region, whether huge pages pay.

    They make fresh memory several times cheaper, unless the machine is a virtual one whose host has to find each page
    first: then the first touch of a huge page takes milliseconds, and ordinary pages (which the guest recycles) win.
    So each page is touched by itself, and after one that took longer than ordinary pages the rest of the region stays
    ordinary.
    """

    SKIPPED_REGIONS = 64
    """Regions that stay ordinary after a slow page, before it is tried again."""

    def __init__(self) -> None:
        self._regions_to_skip = 0

    @cached_property
    def slow_page_seconds(self) -> float:
        """Seconds of a thread's time for one page beyond which ordinary pages are better."""
        return min(_measure_ordinary_pages() for _ in range(3))

    def advise_region(self, region: PageRegion) -> None:
        """Ask for huge pages, unless a recent region has shown that they do not pay."""
        if self._regions_to_skip > 0:
            self._regions_to_skip -= 1
        elif len(region.memory) and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                region.advise(mmap.MADV_HUGEPAGE)
                region.uses_huge_pages = True
            except OSError:
                self._regions_to_skip = self.SKIPPED_REGIONS  # a kernel without huge pages: ordinary ones do

    def touch(self, region: PageRegion, start: int, stop: int) -> None:
        """Have the huge pages backed in which these bytes of a region lie. Several threads may do it at once.

        Args:
            region: Which.
            start: The first byte of what is about to be written.
            stop: The byte behind it.
        """
        for at in range(start - start % HUGE_PAGE_BYTES, stop, HUGE_PAGE_BYTES):
            if region.uses_huge_pages and self._regions_to_skip:  # another region was slow meanwhile
                region.uses_huge_pages = False
                region.advise(mmap.MADV_NOHUGEPAGE)
            if not region.uses_huge_pages:
                return
            # Not by the clock: a thread that waits for its turn would look like a slow page.
            began = time.thread_time()
            region.memory[max(at, start)] = 0  # another thread may have written what lies before
            if time.thread_time() - began > self.slow_page_seconds:
                self._regions_to_skip = self.SKIPPED_REGIONS


def _measure_ordinary_pages() -> float:
    """How long ordinary pages take that are as much memory as a huge one, by 32 of them; seconds of this thread."""
    pages = np.frombuffer(mmap.mmap(-1, 32 * mmap.PAGESIZE, flags=_PRIVATE_MAPPING), np.uint8)
    began = time.thread_time()
    pages[:: mmap.PAGESIZE] = 0
    return (time.thread_time() - began) * HUGE_PAGE_BYTES / len(pages)


HUGE_PAGES = HugePagePolicy()


def allocate(nbytes: int) -> ByteArray:
    """Zeroed memory of its own, page-aligned; freed with the last array that refers to it."""
    room = _map_memory(nbytes)
    region = PageRegion(room)
    HUGE_PAGES.advise_region(region)
    HUGE_PAGES.touch(region, 0, min(nbytes, len(region.memory)))
    return room[:nbytes]


def allocate_touched(nbytes: int) -> ByteArray:
    """As `allocate`, with all pages got by several threads at once: for memory that is going to be pinned."""
    room = _map_memory(nbytes)
    pieces = [PageRegion(room[at : at + COPY_CHUNK_BYTES]) for at in range(0, len(room), COPY_CHUNK_BYTES)]
    try:
        PageRegion(room).advise(mmap.MADV_HUGEPAGE)
        run_tasks(
            pieces,
            lambda piece, _: piece.advise(MADV_POPULATE_WRITE),
            workers=min(get_worker_count(PAGE_FAULT_THREADS, 1), len(pieces)),
            buffer_bytes=0,
            name="xla_ckpt-pages",
        )
    except (OSError, AttributeError):
        pass  # a system that does not know one of them: who pins the memory gets the pages
    return room[:nbytes]


def _map_memory(nbytes: int) -> ByteArray:
    """Zeroed memory of its own, none of it touched: at least so much, and aligned to huge pages if it is large."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if nbytes < HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE_MAPPING), np.uint8)
    whole = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=_PRIVATE_MAPPING), np.uint8)
    return whole[-whole.ctypes.data % HUGE_PAGE_BYTES :]


class SlabAllocator:
    """Hands out aligned memory; small pieces share a mapping, which lives as long as any of them.

    Large pieces are not touched before `touch_pages` is called: by the threads that fill them, while others wait for a
    disk.
    """

    def __init__(self) -> None:
        self._slab = allocate(0)
        self._used_bytes = 0
        self._regions: dict[int, PageRegion] = {}
        self._starts: list[int] = []

    def allocate(self, nbytes: int) -> ByteArray:
        """`nbytes` bytes of memory, aligned to `MEMORY_ALIGNMENT`."""
        if nbytes >= HUGE_PAGE_BYTES:
            room = _map_memory(nbytes)
            self.add_region(room)
            return room[:nbytes]
        if self._used_bytes + nbytes > len(self._slab) or len(self._slab) == 0:
            self._slab, self._used_bytes = allocate(SLAB_BYTES), 0
        piece = self._slab[self._used_bytes : self._used_bytes + nbytes]
        self._used_bytes += -(-nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return piece

    def allocate_views(self, sizes: Sequence[int]) -> list[memoryview]:
        """As `allocate`, for several pieces, of which the small ones of one slab live as long as any of them."""
        views: list[memoryview] = []
        slab, at = self.allocate(0).data, 0
        for nbytes in sizes:
            if nbytes > SMALL_BUFFER_BYTES:
                views.append(self.allocate(nbytes).data)
                continue
            if at + nbytes > len(slab):
                slab, at = self.allocate(SLAB_BYTES).data, 0
            views.append(slab[at : at + nbytes])
            at += -(-nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return views

    def add_region(self, memory: ByteArray) -> None:
        """Have `touch_pages` know of memory that comes from elsewhere, and that nobody has written yet."""
        region = PageRegion(memory)
        HUGE_PAGES.advise_region(region)
        if region.uses_huge_pages:
            insort(self._starts, region.start)
            self._regions[region.start] = region

    def touch_pages(self, memory: memoryview) -> None:
        """Get the pages of a piece that is about to be written for the first time, if it is memory from here."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            region = self._regions[self._starts[place]]
            first = address - region.start
            HUGE_PAGES.touch(region, first, min(first + len(memory), len(region.memory)))


class StagingBuffer:
    """Memory for snapshots, kept from one save to the next.

    One region is lent at a time; a request while it is lent gets memory of its own.
    """

    def __init__(self, allocate: Callable[[int], ByteArray] = allocate) -> None:
        self._allocate = allocate
        self._lock = fork_safe_rlock()  # again, where the garbage collector releases a snapshot meanwhile
        self._kept = allocate(0)
        self._is_lent = False

    def borrow(self, nbytes: int) -> ByteArray:
        """At least `nbytes` bytes; give them back with `give_back`."""
        with self._lock:
            if self._is_lent:
                return self._allocate(nbytes)
            if len(self._kept) < nbytes:
                self._kept = allocate(0)  # free the old one first
                self._kept = self._allocate(nbytes)
            self._is_lent = True
            return self._kept

    def give_back(self, memory: ByteArray) -> None:
        """End the use of what `borrow` returned."""
        with self._lock:
            if memory is self._kept:
                self._is_lent = False

    def free(self) -> None:
        """Free the kept memory, unless it is lent."""
        with self._lock:
            if not self._is_lent:
                self._kept = allocate(0)


def copy_all(pairs: Iterable[tuple[ByteArray, ByteArray]]) -> None:
    """Copy host memory: (target, source) of equal length each, which the caller keeps until then."""
    pieces = [
        (target[at : at + COPY_CHUNK_BYTES], source[at : at + COPY_CHUNK_BYTES])
        for target, source in pairs
        for at in range(0, len(source), COPY_CHUNK_BYTES)
    ]
    # A thread takes longer to start than a few small copies.
    workers = COPY_THREADS if sum(len(target) for target, _ in pieces) > COPY_CHUNK_BYTES else 1
    run_tasks(pieces, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")
