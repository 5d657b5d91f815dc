"""Host memory: aligned, and reused where fresh pages would cost more than the copy into them."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MEMORY_ALIGNMENT = 64
"""What XLA asks of memory that it adopts (bytes)."""

HUGE_BYTES = 2 * 1024 * 1024
"""From this size on, memory comes in mappings of its own, with huge pages where the system has them."""

SLAB_BYTES = 4 * 1024 * 1024
"""Smaller requests share slabs of this size."""

Bytes = npt.NDArray[np.uint8]


class HugePages:
    """Decides, mapping by mapping, whether huge pages pay.

    They make fresh memory several times cheaper, unless the machine is a virtual one whose host has to find each page
    first: then the first touch of a huge page takes milliseconds, and ordinary pages (which the guest recycles) win.
    So pages are touched in steps, and after a slow step the rest of the mapping stays ordinary.
    """

    STEP = HUGE_BYTES
    SLOW = 1e-3
    """Seconds for one step beyond which ordinary pages are better (2 GB/s)."""

    def __init__(self) -> None:
        self._slow = 0
        self._skipped = 0

    def populate(self, advise: Callable[[int], object], piece: Bytes) -> None:
        """Back memory that begins with `piece` with huge pages as far as that pays.

        Args:
            advise: Tells the system what the memory is for, as ``madvise`` does.
            piece: The memory, aligned to `HUGE_BYTES` or a little behind that.
        """
        if self._slow >= 2 and self._skipped < 64:
            self._skipped += 1
            return
        self._skipped = 0
        try:
            advise(mmap.MADV_HUGEPAGE)
            for at in range(0, len(piece), self.STEP):
                began = time.perf_counter()
                piece[at : at + self.STEP : HUGE_BYTES] = 0
                if time.perf_counter() - began > self.SLOW:
                    self._slow += 1
                    advise(mmap.MADV_NOHUGEPAGE)
                    return
            self._slow = 0
        except OSError:
            self._slow = 2  # a kernel without huge pages: ordinary ones do


huge_pages = HugePages()


def allocate(nbytes: int) -> Bytes:
    """Zeroed memory of its own, page-aligned; freed with the last array that refers to it."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    # Private: python's default is shared memory, which is slower to get and has no huge pages on most systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    mapping = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=flags)
    whole = np.frombuffer(mapping, np.uint8)
    skip = -whole.ctypes.data % HUGE_BYTES  # only an aligned region is made of huge pages from its first byte on
    piece = whole[skip : skip + nbytes]
    huge_pages.populate(mapping.madvise, piece)
    return piece


class Slabs:
    """Hands out aligned memory; small pieces share a mapping, which lives as long as any of them."""

    def __init__(self) -> None:
        self._slab = allocate(0)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """`nbytes` bytes of memory, aligned to `MEMORY_ALIGNMENT`."""
        if nbytes >= HUGE_BYTES:
            return allocate(nbytes)
        if self._used + nbytes > len(self._slab) or len(self._slab) == 0:
            self._slab, self._used = allocate(SLAB_BYTES), 0
        piece = self._slab[self._used : self._used + nbytes]
        self._used += -(-nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return piece


class Staging:
    """Memory for snapshots, kept from one save to the next.

    One region is lent at a time; a request while it is lent gets memory of its own.
    """

    def __init__(self, allocate: Callable[[int], Bytes] = allocate) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
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
