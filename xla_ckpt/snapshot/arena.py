"""Bounded host memory for bytes in transit from a snapshot to storage.

An `Arena` is the staging memory of one save: the copying thread allocates blocks, and writer threads release them.
Slabs come from the process-wide `HOST_MEMORY_POOL`, which keeps them between saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from xla_ckpt.snapshot.memory import ByteArray, StagingBuffer
from xla_ckpt.snapshot.shards import CopyEngine
from xla_ckpt.storage.base import BLOCK_BYTES
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.synchronization import Notifier

MAX_BLOCK_BYTES = 16 * 1024 * 1024
"""Maximum block size. A power of two, because allocators of pinned memory round up to one."""

BUDGET_BYTES = 1024 * 1024 * 1024
"""Default maximum of host memory that a save uses for background copies, in bytes."""


class HostMemoryPool:
    """Host memory kept between saves, by the name of its `CopyEngine`: slabs, and a staging buffer for snapshots."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._free_slabs: dict[str, list[ByteArray]] = {}
        self._staging: dict[str, StagingBuffer] = {}
        self._inherited: list[object] = []
        """Memory of the parent process, kept after a fork."""

    def get_staging(self, engine: CopyEngine) -> StagingBuffer:
        """Return the staging buffer for snapshots that are complete before the program continues."""
        with self._lock:
            return self._staging.setdefault(engine.name, StagingBuffer(engine.allocate))

    def borrow(self, engine: CopyEngine) -> ByteArray:
        """Return a slab of host memory; release it with `give_back`."""
        with self._lock:
            kept = self._free_slabs.get(engine.name)
            if kept:
                return kept.pop()
        return engine.allocate(MAX_BLOCK_BYTES)

    def give_back(self, engine: CopyEngine, slab: ByteArray) -> None:
        """Release a slab."""
        with self._lock:
            self._free_slabs.setdefault(engine.name, []).append(slab)

    def free(self) -> None:
        """Free memory that no save uses."""
        with self._lock:
            self._free_slabs.clear()
            for staging in self._staging.values():
                staging.free()

    def reset_after_fork(self) -> None:
        """Start with an empty pool in a forked process, because drivers free memory only in its own process."""
        self._inherited += [self._free_slabs, self._staging]
        self._free_slabs, self._staging = {}, {}


HOST_MEMORY_POOL = register_fork_reset(HostMemoryPool(), HostMemoryPool.reset_after_fork)
"""Pool of this process."""


class _Slab:
    def __init__(self, memory: ByteArray) -> None:
        self.memory = memory
        self.used_bytes = 0
        self.block_count = 0


@dataclass(frozen=True, slots=True)
class ArenaBlock:
    """Block of memory from an `Arena`."""

    memory: ByteArray
    release: Callable[[], None]
    """Function that releases the block."""


class Arena:
    """Host memory of one save, allocated by one thread and released by several, in about the same order.

    Args:
        engine: Copy engine that fills the memory.
        budget: Maximum number of bytes; at least one slab is used.
    """

    def __init__(self, engine: CopyEngine, budget: int) -> None:
        self._engine = engine
        self._max_slabs = max(1, budget // MAX_BLOCK_BYTES)
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._slabs: list[_Slab] = []
        self._current: _Slab | None = None
        self._stopped = False

    def allocate(self, nbytes: int, *, wait: bool) -> ArenaBlock | None:
        """Allocate a block aligned for direct I/O. None if stopped, or, without `wait`, if all memory is in use.

        `nbytes` is at most `MAX_BLOCK_BYTES`.
        """
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        assert size <= MAX_BLOCK_BYTES, "a piece is a segment at most"
        taken: list[ArenaBlock] = []
        if wait:
            self._changed.wait_for(lambda: self._try_allocate(size, taken) or self._stopped)
        else:
            self._try_allocate(size, taken)
        return taken[0] if taken else None

    def _try_allocate(self, size: int, blocks: list[ArenaBlock]) -> bool:
        with self._lock:
            if self._stopped or (slab := self._find_slab(size)) is None:
                return False
            memory = slab.memory[slab.used_bytes : slab.used_bytes + size]
            slab.used_bytes += size
            slab.block_count += 1
            blocks.append(ArenaBlock(memory, partial(self._release_block, slab)))
            return True

    def stop(self) -> None:
        """Stop allocating: waiting threads get None."""
        self._stopped = True
        self._changed.notify()

    def close(self) -> None:
        """Return the memory to the pool. No copy into it may be in flight."""
        for slab in self._slabs:
            HOST_MEMORY_POOL.give_back(self._engine, slab.memory)
        self._slabs.clear()

    def _find_slab(self, size: int) -> _Slab | None:
        if self._current is not None and self._current.used_bytes + size <= MAX_BLOCK_BYTES:
            return self._current
        self._current = next((slab for slab in self._slabs if slab.block_count == 0), None)
        if self._current is None and len(self._slabs) < self._max_slabs:
            self._current = _Slab(HOST_MEMORY_POOL.borrow(self._engine))
            self._slabs.append(self._current)
        if self._current is not None:
            self._current.used_bytes = 0
        return self._current

    def _release_block(self, slab: _Slab) -> None:
        with self._lock:
            slab.block_count -= 1
        self._changed.notify()
