"""Host memory for bytes on their way from a snapshot to the disk: a budget of it, which is used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from xla_ckpt.snapshot.memory import Bytes, Staging
from xla_ckpt.snapshot.shards import Link
from xla_ckpt.storage.base import BLOCK
from xla_ckpt.storage.process_state import process_lock, process_wide
from xla_ckpt.storage.waiting import Notifier

LARGEST_PIECE = 16 * 1024 * 1024
"""Largest piece. A power of two, because allocators of pinned memory round up to one."""

BUDGET_BYTES = 1024 * 1024 * 1024
"""Host memory that a save takes at most for bytes that are copied in the background, unless it is told otherwise."""


class Pool:
    """Host memory that is kept between saves, by the name of its `Link`: slabs, and a region to stage snapshots in."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._kept: dict[str, list[Bytes]] = {}
        self._staging: dict[str, Staging] = {}
        self._inherited: list[object] = []
        """The memory of the process from which this one was forked."""

    def staging(self, link: Link) -> Staging:
        """The memory that snapshots are copied into which are complete before the program goes on."""
        with self._lock:
            return self._staging.setdefault(link.name, Staging(link.allocate))

    def borrow(self, link: Link) -> Bytes:
        """A slab of host memory; give it back with `give_back`."""
        with self._lock:
            kept = self._kept.get(link.name)
            if kept:
                return kept.pop()
        return link.allocate(LARGEST_PIECE)

    def give_back(self, link: Link, slab: Bytes) -> None:
        """End the use of a slab."""
        with self._lock:
            self._kept.setdefault(link.name, []).append(slab)

    def free(self) -> None:
        """Free what no save uses."""
        with self._lock:
            self._kept.clear()
            for staging in self._staging.values():
                staging.free()

    def reset_after_fork(self) -> None:
        """In a forked process: begin anew. A device's driver frees memory in the process alone that got it."""
        self._inherited += [self._kept, self._staging]
        self._kept, self._staging = {}, {}


POOL = process_wide(Pool(), Pool.reset_after_fork)
"""The pool of this process."""


class _Slab:
    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.used = 0
        self.pieces = 0


@dataclass(frozen=True, slots=True)
class ArenaPiece:
    """Memory from an `Arena`."""

    memory: Bytes
    give_back: Callable[[], None]
    """Ends its use."""


class Arena:
    """The host memory of one save, for one thread that takes and several that give back, about in the same order.

    Args:
        link: What fills it.
        budget: Bytes that it takes at most; one slab in any case.
    """

    def __init__(self, link: Link, budget: int) -> None:
        self._link = link
        self._most = max(1, budget // LARGEST_PIECE)
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._slabs: list[_Slab] = []
        self._current: _Slab | None = None
        self._stopped = False

    def take(self, nbytes: int, *, wait: bool) -> ArenaPiece | None:
        """A piece of memory, aligned for files without page cache. None if stopped, or without `wait` if all is in use.

        `nbytes` is `LARGEST_PIECE` at most.
        """
        size = -(-nbytes // BLOCK) * BLOCK
        assert size <= LARGEST_PIECE, "a piece is a segment at most"
        taken: list[ArenaPiece] = []
        if wait:
            self._changed.wait_for(lambda: self._take(size, taken) or self._stopped)
        else:
            self._take(size, taken)
        return taken[0] if taken else None

    def _take(self, size: int, taken: list[ArenaPiece]) -> bool:
        with self._lock:
            if self._stopped or (slab := self._with_room(size)) is None:
                return False
            memory = slab.memory[slab.used : slab.used + size]
            slab.used += size
            slab.pieces += 1
            taken.append(ArenaPiece(memory, partial(self._give_back, slab)))
            return True

    def stop(self) -> None:
        """Give no more memory out: whoever waits for a piece gets None."""
        self._stopped = True
        self._changed.notify()

    def close(self) -> None:
        """Hand the memory back to the pool. No copy into it may be on its way."""
        for slab in self._slabs:
            POOL.give_back(self._link, slab.memory)
        self._slabs.clear()

    def _with_room(self, size: int) -> _Slab | None:
        if self._current is not None and self._current.used + size <= LARGEST_PIECE:
            return self._current
        self._current = next((slab for slab in self._slabs if slab.pieces == 0), None)
        if self._current is None and len(self._slabs) < self._most:
            self._current = _Slab(POOL.borrow(self._link))
            self._slabs.append(self._current)
        if self._current is not None:
            self._current.used = 0
        return self._current

    def _give_back(self, slab: _Slab) -> None:
        with self._lock:
            slab.pieces -= 1
        self._changed.notify()
