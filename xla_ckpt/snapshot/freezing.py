"""Snapshots whose bytes are copied while the program goes on: what is still only in the program's memory."""

from __future__ import annotations

import time

from xla_ckpt.errors import ChangedStateError
from xla_ckpt.snapshot.memory import Bytes
from xla_ckpt.snapshot.shards import Link, MemoryShard
from xla_ckpt.storage.process_state import process_rlock
from xla_ckpt.storage.waiting import Latch


class Freezing:
    """How far a snapshot has come: it is frozen when nothing of it is only in the program's memory any more."""

    def __init__(self) -> None:
        self._lock = process_rlock()  # again, where the garbage collector releases a snapshot of this very save
        self._left = 0
        self._waits: list[float] = []
        self._waited = 0.0
        self._frozen = Latch()
        self._frozen_at = 0.0

    @property
    def frozen(self) -> bool:
        """Whether the program may write to all of its memory."""
        return self._frozen.is_set()

    def begun(self) -> None:
        """One more piece of memory that the program must not write to yet."""
        with self._lock:
            self._left += 1

    def complete(self) -> None:
        """No piece comes on top of those that have begun."""
        with self._lock:
            none = self._left == 0
        if none:
            self.over()

    def settled(self) -> None:
        """One such piece less."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.over()

    def over(self) -> None:
        """Let everybody go on who waits: all is copied, or the save has failed."""
        with self._lock:
            if not self._frozen.is_set():
                self._frozen_at = time.monotonic()
                self._frozen.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the program may write to its memory; False after `timeout` seconds. Counts as a stall."""
        began = time.monotonic()
        with self._lock:
            if self._frozen.is_set() or timeout == 0:
                return self._frozen.is_set()
            self._waits.append(began)
        if self._frozen.wait(timeout):
            return True
        with self._lock:
            self._waits.remove(began)
            self._waited += time.monotonic() - began
        return False

    @property
    def stall(self) -> float:
        """Seconds that callers of `wait` have waited, all in all. Known when the snapshot is frozen."""
        with self._lock:
            # Not measured by those who wait: the save may report before they have run again.
            return self._waited + sum(max(0.0, self._frozen_at - began) for began in self._waits)


class Deferred:
    """A shard whose bytes are copied when the writer has a use for them.

    Args:
        leaf: Its leaf path.
        shard: Where the bytes are. It is held until they are copied.
        freezing: The snapshot that has it.
        changes: Whether the program may write to the memory as soon as the bytes are copied.
    """

    def __init__(self, leaf: str, shard: MemoryShard, freezing: Freezing, *, changes: bool) -> None:
        self.leaf = leaf
        self.link: Link = shard.link
        self._shard: MemoryShard | None = shard
        self._freezing = freezing
        self.changes = changes
        self._version = shard.version() if changes and shard.version is not None else None
        if changes:
            freezing.begun()

    def begin_copy(self, offset: int, target: Bytes) -> None:
        """Begin to copy bytes from `offset` on, as many as fit into `target`.

        Raises:
            ChangedStateError: The program has written to the memory.
        """
        assert self._shard is not None, "copied after it was settled"
        self._check(self._shard)
        self._shard.begin_copy(offset, target)

    def settle(self) -> None:
        """All copies are complete: let go of the memory.

        Raises:
            ChangedStateError: The program has written to the memory meanwhile.
        """
        shard, self._shard = self._shard, None
        if shard is not None and self.changes:
            self._check(shard)
            self._freezing.settled()

    def drop(self) -> None:
        """Nobody needs the bytes, or needs them any more."""
        shard, self._shard = self._shard, None
        if shard is not None and self.changes:
            self._freezing.settled()

    def _check(self, shard: MemoryShard) -> None:
        if self.changes and shard.version is not None and shard.version() != self._version:
            raise ChangedStateError(
                "the program wrote to this tensor before it was saved",
                leaf=self.leaf,
                hint='With snapshot="overlap" only the step of a torch optimizer and load_state_dict wait for the '
                'save: call handle.frozen() before other writes, or use options=SaveOptions(snapshot="host").',
            )
