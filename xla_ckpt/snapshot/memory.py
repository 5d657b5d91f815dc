"""Host memory: aligned, and reused where fresh pages would cost more than the copy into them."""

from __future__ import annotations

import ctypes
import mmap
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xla_ckpt.lightweight import cached_property
from xla_ckpt.storage.pool import HUGE_BYTES, threads, work_off
from xla_ckpt.storage.process_state import process_rlock

MEMORY_ALIGNMENT = 64
"""What XLA asks of memory that it adopts (bytes)."""

SLAB_BYTES = 4 * 1024 * 1024
"""Smaller requests share slabs of this size."""

TOGETHER_BYTES = 64 * 1024
"""Of pieces that go together, those up to this size are cut out of one slab."""

COPIERS = 2
"""Threads that copy within host memory."""

COPY_BYTES = 16 * 1024 * 1024
"""Largest single copy: so that the copiers finish together."""

BACKERS = 4
"""Threads that get pages, at most: more were no faster on 16 cores."""

MADV_POPULATE_WRITE = 23
"""Get the pages now. Python has no name for it."""

Bytes = npt.NDArray[np.uint8]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Python's default is shared memory, which is slower to get and has no huge pages on most systems."""


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PageRegion:
    """The whole huge pages that there may be in some memory, which nobody has written yet."""

    def __init__(self, memory: Bytes) -> None:
        skip = -memory.ctypes.data % HUGE_BYTES
        self.memory = memory[skip : skip + max(len(memory) - skip, 0) // HUGE_BYTES * HUGE_BYTES]
        self.start = int(self.memory.ctypes.data)
        self.huge = False
        """Whether huge pages are tried."""

    def advise(self, option: int) -> None:
        """Tell the system what the memory is for.

        Raises:
            OSError: It does not know that.
        """
        if _libc.madvise(self.start, len(self.memory), option) != 0:
            raise OSError(ctypes.get_errno(), "madvise")


class HugePages:
    """Decides, region by region, whether huge pages pay.

    They make fresh memory several times cheaper, unless the machine is a virtual one whose host has to find each page
    first: then the first touch of a huge page takes milliseconds, and ordinary pages (which the guest recycles) win.
    So each page is touched by itself, and after one that took longer than ordinary pages the rest of the region stays
    ordinary.
    """

    SKIPPED = 64
    """Regions that stay ordinary after a slow page, before it is tried again."""

    def __init__(self) -> None:
        self._skip = 0

    @cached_property
    def slow(self) -> float:
        """Seconds of a thread's time for one page beyond which ordinary pages are better."""
        return min(_ordinary_seconds() for _ in range(3))

    def begin(self, region: PageRegion) -> None:
        """Ask for huge pages, unless a recent region has shown that they do not pay."""
        if self._skip > 0:
            self._skip -= 1
        elif len(region.memory) and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                region.advise(mmap.MADV_HUGEPAGE)
                region.huge = True
            except OSError:
                self._skip = self.SKIPPED  # a kernel without huge pages: ordinary ones do

    def touch(self, region: PageRegion, first: int, last: int) -> None:
        """Have the huge pages backed in which these bytes of a region lie. Several threads may do it at once.

        Args:
            region: Which.
            first: The first byte of what is about to be written.
            last: The byte behind it.
        """
        for at in range(first - first % HUGE_BYTES, last, HUGE_BYTES):
            if region.huge and self._skip:  # another region was slow meanwhile
                region.huge = False
                region.advise(mmap.MADV_NOHUGEPAGE)
            if not region.huge:
                return
            # Not by the clock: a thread that waits for its turn would look like a slow page.
            began = time.thread_time()
            region.memory[max(at, first)] = 0  # another thread may have written what lies before
            if time.thread_time() - began > self.slow:
                self._skip = self.SKIPPED


def _ordinary_seconds() -> float:
    """How long ordinary pages take that are as much memory as a huge one, by 32 of them; seconds of this thread."""
    pages = np.frombuffer(mmap.mmap(-1, 32 * mmap.PAGESIZE, flags=_PRIVATE), np.uint8)
    began = time.thread_time()
    pages[:: mmap.PAGESIZE] = 0
    return (time.thread_time() - began) * HUGE_BYTES / len(pages)


huge_pages = HugePages()


def allocate(nbytes: int) -> Bytes:
    """Zeroed memory of its own, page-aligned; freed with the last array that refers to it."""
    room = _mapped(nbytes)
    region = PageRegion(room)
    huge_pages.begin(region)
    huge_pages.touch(region, 0, min(nbytes, len(region.memory)))
    return room[:nbytes]


def backed(nbytes: int) -> Bytes:
    """As `allocate`, with all pages got by several threads at once: for memory that is going to be pinned."""
    room = _mapped(nbytes)
    pieces = [PageRegion(room[at : at + COPY_BYTES]) for at in range(0, len(room), COPY_BYTES)]
    try:
        PageRegion(room).advise(mmap.MADV_HUGEPAGE)
        work_off(
            pieces,
            lambda piece, _: piece.advise(MADV_POPULATE_WRITE),
            workers=min(threads(BACKERS, 1), len(pieces)),
            buffer_bytes=0,
            name="xla_ckpt-pages",
        )
    except (OSError, AttributeError):
        pass  # a system that does not know one of them: who pins the memory gets the pages
    return room[:nbytes]


def _mapped(nbytes: int) -> Bytes:
    """Zeroed memory of its own, none of it touched: at least so much, and aligned to huge pages if it is large."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if nbytes < HUGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), np.uint8)
    whole = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_BYTES, flags=_PRIVATE), np.uint8)
    return whole[-whole.ctypes.data % HUGE_BYTES :]


class Slabs:
    """Hands out aligned memory; small pieces share a mapping, which lives as long as any of them.

    Large pieces are not touched before `back` is called: by the threads that fill them, while others wait for a disk.
    """

    def __init__(self) -> None:
        self._slab = allocate(0)
        self._used = 0
        self._regions: dict[int, PageRegion] = {}
        self._starts: list[int] = []

    def take(self, nbytes: int) -> Bytes:
        """`nbytes` bytes of memory, aligned to `MEMORY_ALIGNMENT`."""
        if nbytes >= HUGE_BYTES:
            room = _mapped(nbytes)
            self.add(room)
            return room[:nbytes]
        if self._used + nbytes > len(self._slab) or len(self._slab) == 0:
            self._slab, self._used = allocate(SLAB_BYTES), 0
        piece = self._slab[self._used : self._used + nbytes]
        self._used += -(-nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return piece

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        """As `take`, for several pieces, of which the small ones of one slab live as long as any of them."""
        views: list[memoryview] = []
        slab, at = self.take(0).data, 0
        for nbytes in sizes:
            if nbytes > TOGETHER_BYTES:
                views.append(self.take(nbytes).data)
                continue
            if at + nbytes > len(slab):
                slab, at = self.take(SLAB_BYTES).data, 0
            views.append(slab[at : at + nbytes])
            at += -(-nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return views

    def add(self, memory: Bytes) -> None:
        """Have `back` know of memory that comes from elsewhere, and that nobody has written yet."""
        region = PageRegion(memory)
        huge_pages.begin(region)
        if region.huge:
            insort(self._starts, region.start)
            self._regions[region.start] = region

    def back(self, memory: memoryview) -> None:
        """Get the pages of a piece that is about to be written for the first time, if it is memory from here."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            region = self._regions[self._starts[place]]
            first = address - region.start
            huge_pages.touch(region, first, min(first + len(memory), len(region.memory)))


class Staging:
    """Memory for snapshots, kept from one save to the next.

    One region is lent at a time; a request while it is lent gets memory of its own.
    """

    def __init__(self, allocate: Callable[[int], Bytes] = allocate) -> None:
        self._allocate = allocate
        self._lock = process_rlock()  # again, where the garbage collector releases a snapshot meanwhile
        self._kept = allocate(0)
        self._lent = False

    def borrow(self, nbytes: int) -> Bytes:
        """At least `nbytes` bytes; give them back with `give_back`."""
        with self._lock:
            if self._lent:
                return self._allocate(nbytes)
            if len(self._kept) < nbytes:
                self._kept = allocate(0)  # free the old one first
                self._kept = self._allocate(nbytes)
            self._lent = True
            return self._kept

    def give_back(self, memory: Bytes) -> None:
        """End the use of what `borrow` returned."""
        with self._lock:
            if memory is self._kept:
                self._lent = False

    def free(self) -> None:
        """Free the kept memory, unless it is lent."""
        with self._lock:
            if not self._lent:
                self._kept = allocate(0)


def copy_all(pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
    """Copy host memory: (target, source) of equal length each, which the caller keeps until then."""
    pieces = [
        (target[at : at + COPY_BYTES], source[at : at + COPY_BYTES])
        for target, source in pairs
        for at in range(0, len(source), COPY_BYTES)
    ]
    # A thread takes longer to start than a few small copies.
    workers = COPIERS if sum(len(target) for target, _ in pieces) > COPY_BYTES else 1
    work_off(pieces, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")
