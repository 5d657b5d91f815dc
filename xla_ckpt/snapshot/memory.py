"""Aligned host memory: slab allocator, staging buffers, huge pages and parallel copies.

Reused memory is preferred because page faults on fresh pages cost more than the copy into them. `HugePagePolicy`
measures if huge pages are faster on this machine.
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
"""Alignment that XLA requires of memory that it aliases, in bytes."""

SLAB_BYTES = 4 * 1024 * 1024
"""Size of the slabs that smaller requests share, in bytes."""

SMALL_BUFFER_BYTES = 64 * 1024
"""Maximum size of pieces that are allocated together from one slab, in bytes."""

COPY_THREADS = 2
"""Number of threads that copy within host memory."""

COPY_CHUNK_BYTES = 16 * 1024 * 1024
"""Maximum size of a single copy, so that the copying threads finish together."""

PAGE_FAULT_THREADS = 4
"""Maximum number of threads that populate pages: more were not faster on 16 cores."""

MADV_POPULATE_WRITE = 23
"""`madvise` option that populates pages, for which Python has no constant."""

ByteArray = npt.NDArray[np.uint8]

_PRIVATE_MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Flags for private memory: faster to populate than shared memory, Python's default, and supports huge pages."""


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PageRegion:
    """Complete huge pages that fit into untouched memory."""

    def __init__(self, memory: ByteArray) -> None:
        skip = -memory.ctypes.data % HUGE_PAGE_BYTES
        self.memory = memory[skip : skip + max(len(memory) - skip, 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES]
        self.start = int(self.memory.ctypes.data)
        self.uses_huge_pages = False
        """True if huge pages are used."""

    def advise(self, option: int) -> None:
        """Call `madvise` for the memory.

        Raises:
            OSError: The system does not support the option.
        """
        if _libc.madvise(self.start, len(self.memory), option) != 0:
            raise OSError(ctypes.get_errno(), "madvise")


class HugePagePolicy:
    """Policy that decides for each region if huge pages are used.

    They make fresh memory several times cheaper, except on a virtual machine whose host must find each page first: then
    the first touch of a huge page takes milliseconds, and ordinary pages (which the guest recycles) are faster.
    Therefore each page is touched separately, and after one that took longer than ordinary pages the rest of the region
    uses ordinary pages.
    """

    SKIPPED_REGIONS = 64
    """Number of regions with ordinary pages after a slow huge page, before huge pages are tried again."""

    def __init__(self) -> None:
        self._regions_to_skip = 0

    @cached_property
    def slow_page_seconds(self) -> float:
        """Thread time per page, in seconds, above which ordinary pages are faster."""
        return min(_measure_ordinary_pages() for _ in range(3))

    def advise_region(self, region: PageRegion) -> None:
        """Request huge pages, unless a recent region has shown that they are slow."""
        if self._regions_to_skip > 0:
            self._regions_to_skip -= 1
        elif len(region.memory) and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                region.advise(mmap.MADV_HUGEPAGE)
                region.uses_huge_pages = True
            except OSError:
                self._regions_to_skip = self.SKIPPED_REGIONS  # a kernel without huge pages: use ordinary ones

    def touch(self, region: PageRegion, start: int, stop: int) -> None:
        """Populate the huge pages that contain a byte range of a region. Thread-safe.

        Args:
            region: Region of the pages.
            start: First byte to be written.
            stop: End of the range, exclusive.
        """
        for at in range(start - start % HUGE_PAGE_BYTES, stop, HUGE_PAGE_BYTES):
            if region.uses_huge_pages and self._regions_to_skip:  # another region was slow in the meantime
                region.uses_huge_pages = False
                region.advise(mmap.MADV_NOHUGEPAGE)
            if not region.uses_huge_pages:
                return
            # Thread time, because a thread that waits to be scheduled would look like a slow page.
            began = time.thread_time()
            region.memory[max(at, start)] = 0  # another thread may have written the bytes before
            if time.thread_time() - began > self.slow_page_seconds:
                self._regions_to_skip = self.SKIPPED_REGIONS


def _measure_ordinary_pages() -> float:
    """Return the thread time, in seconds, to populate the size of a huge page, extrapolated from 32 ordinary pages."""
    pages = np.frombuffer(mmap.mmap(-1, 32 * mmap.PAGESIZE, flags=_PRIVATE_MAPPING), np.uint8)
    began = time.thread_time()
    pages[:: mmap.PAGESIZE] = 0
    return (time.thread_time() - began) * HUGE_PAGE_BYTES / len(pages)


HUGE_PAGES = HugePagePolicy()


def allocate(nbytes: int) -> ByteArray:
    """Allocate zeroed, page-aligned memory, which is freed with the last array that refers to it."""
    room = _map_memory(nbytes)
    region = PageRegion(room)
    HUGE_PAGES.advise_region(region)
    HUGE_PAGES.touch(region, 0, min(nbytes, len(region.memory)))
    return room[:nbytes]


def allocate_touched(nbytes: int) -> ByteArray:
    """Allocate memory whose pages are populated by several threads in parallel, for memory that will be pinned."""
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
        pass  # one of them is not supported: pinning the memory populates the pages
    return room[:nbytes]


def _map_memory(nbytes: int) -> ByteArray:
    """Map at least `nbytes` of zeroed, untouched memory, aligned to huge pages if it is large."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if nbytes < HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE_MAPPING), np.uint8)
    whole = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=_PRIVATE_MAPPING), np.uint8)
    return whole[-whole.ctypes.data % HUGE_PAGE_BYTES :]


class SlabAllocator:
    """Allocator of aligned memory; small pieces share a mapping, which lives as long as any of them.

    Large pieces are not populated before `touch_pages` is called by the threads that fill them, while others wait for a
    disk.
    """

    def __init__(self) -> None:
        self._slab = allocate(0)
        self._used_bytes = 0
        self._regions: dict[int, PageRegion] = {}
        self._starts: list[int] = []

    def allocate(self, nbytes: int) -> ByteArray:
        """Allocate `nbytes` bytes of memory, aligned to `MEMORY_ALIGNMENT`."""
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
        """Allocate several pieces; small pieces share slabs, each of which lives as long as any of its pieces."""
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
        """Register untouched memory that was allocated elsewhere for `touch_pages`."""
        region = PageRegion(memory)
        HUGE_PAGES.advise_region(region)
        if region.uses_huge_pages:
            insort(self._starts, region.start)
            self._regions[region.start] = region

    def touch_pages(self, memory: memoryview) -> None:
        """Populate the pages of a piece before it is written for the first time, if it is memory of this allocator."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            region = self._regions[self._starts[place]]
            first = address - region.start
            HUGE_PAGES.touch(region, first, min(first + len(memory), len(region.memory)))


class StagingBuffer:
    """Memory for snapshots that is kept between saves.

    One region is lent at a time; a request while it is lent allocates new memory.
    """

    def __init__(self, allocate: Callable[[int], ByteArray] = allocate) -> None:
        self._allocate = allocate
        self._lock = fork_safe_rlock()  # reentrant, because the garbage collector may release a snapshot meanwhile
        self._kept = allocate(0)
        self._is_lent = False

    def borrow(self, nbytes: int) -> ByteArray:
        """Return at least `nbytes` bytes; release them with `give_back`."""
        with self._lock:
            if self._is_lent:
                return self._allocate(nbytes)
            if len(self._kept) < nbytes:
                self._kept = allocate(0)  # free the old one first
                self._kept = self._allocate(nbytes)
            self._is_lent = True
            return self._kept

    def give_back(self, memory: ByteArray) -> None:
        """Release memory that `borrow` returned."""
        with self._lock:
            if memory is self._kept:
                self._is_lent = False

    def free(self) -> None:
        """Free the kept memory, unless it is lent."""
        with self._lock:
            if not self._is_lent:
                self._kept = allocate(0)


def copy_all(pairs: Iterable[tuple[ByteArray, ByteArray]]) -> None:
    """Copy host memory, as (target, source) pairs of equal length, which the caller keeps alive during the copy."""
    pieces = [
        (target[at : at + COPY_CHUNK_BYTES], source[at : at + COPY_CHUNK_BYTES])
        for target, source in pairs
        for at in range(0, len(source), COPY_CHUNK_BYTES)
    ]
    # Starting a thread takes longer than a few small copies.
    workers = COPY_THREADS if sum(len(target) for target, _ in pieces) > COPY_CHUNK_BYTES else 1
    run_tasks(pieces, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")
