"""What a snapshot is taken from: pieces of memory, in the host or on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xla_ckpt.fingerprint import fingerprint
from xla_ckpt.lightweight import Columns, cached_property, lightweight
from xla_ckpt.snapshot.memory import Bytes, allocate

WINDOWS = 16
"""Places in a shard that are looked at."""

WINDOW_BYTES = 256
"""Bytes that are looked at in each place; smaller shards are looked at whole."""


class Link(Protocol):
    """How bytes come from one kind of memory to the host. Copies that are begun may be complete only later."""

    @property
    def name(self) -> str:
        """The kind of memory that it takes bytes from, and of the host memory that it fills: ``"host"``, ``"cuda"``."""

    def allocate(self, nbytes: int) -> Bytes:
        """Host memory into which copies run fastest, page-aligned."""

    def follow(self) -> None:
        """Order the copies that are begun from now on after all that this thread has asked the device for so far."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until all copies that this thread has begun so far are complete."""


@dataclass(frozen=True, slots=True)
class Look:
    """Some bytes of a shard: `count` runs of `nbytes` bytes each, the first at `offset`, one every `stride` bytes."""

    offset: int
    count: int
    stride: int
    nbytes: int

    def of(self, data: memoryview) -> bytes:
        """These bytes of a shard in host memory."""
        starts = (self.offset + i * self.stride for i in range(self.count))
        return b"".join(data[start : start + self.nbytes] for start in starts)


def windows(nbytes: int) -> Look:
    """Where a shard is looked at."""
    if nbytes <= WINDOWS * WINDOW_BYTES:
        return Look(offset=0, count=1, stride=nbytes, nbytes=nbytes)
    return Look(offset=0, count=WINDOWS, stride=(nbytes - WINDOW_BYTES) // (WINDOWS - 1), nbytes=WINDOW_BYTES)


def sample(shards: Sequence[memoryview]) -> int:
    """Fingerprint of spread-out bytes of some shards; equal for equal contents.

    In the place of a shard may be what is looked at of it: of that, all is looked at.
    """
    return fingerprint(b"".join(windows(len(data)).of(data) for data in shards))


@lightweight()
class HostShard:
    """The bytes of one local shard in host memory."""

    data: memoryview
    """Its bytes in C order."""

    keep: Any
    """Whatever owns the memory."""

    immutable: bool
    """Whether nobody will write to the memory while `keep` is held."""

    version: Callable[[], Hashable] | None = None
    """Says something else after the program has written to the memory; None where nobody counts the writes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return len(self.data)

    @property
    def link(self) -> Link:
        """How its bytes are copied."""
        return HOST

    def begin_copy(self, offset: int, target: Bytes) -> None:
        """Copy the bytes from `offset` on, as many as fit into `target`."""
        np.copyto(target, np.frombuffer(self.data, np.uint8)[offset : offset + len(target)])


class DeviceShard(Protocol):
    """The bytes of one local shard in memory of a device, which the host cannot read."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""

    @property
    def immutable(self) -> bool:
        """Whether nobody will write to the memory while this is held."""

    @property
    def version(self) -> Callable[[], Hashable] | None:
        """See `HostShard.version`."""

    @property
    def link(self) -> Link:
        """How its bytes come to the host."""

    def begin_copy(self, offset: int, target: Bytes) -> None:
        """Begin to copy the bytes from `offset` on, as many as fit into `target`; `Link.mark` says when they are there.

        The shard, and the target, are held until then.
        """

    def in_order(self) -> DeviceShard:
        """The same bytes in C order: this shard, or a copy on the device if they are scattered there."""

    def clone(self) -> DeviceShard:
        """A copy on the device that nobody writes to."""

    def look(self, look: Look) -> bytes:
        """Some of its bytes, joined. Waits for them."""


MemoryShard = HostShard | DeviceShard
"""One local shard, wherever it is."""


class Lasting(Columns[Sequence[HostShard]]):
    """The local shards of many arrays, a row for each, in host memory that nobody writes to while this is held.

    A snapshot only holds them. The shards are made when their bytes are written.
    """

    __slots__ = ()


Batch = tuple[Sequence[str], Sequence[Sequence[MemoryShard]]]
"""Leaf paths of some arrays, and the local shards of each."""


@dataclass(frozen=True)
class LocalShards:
    """All local shards of a process, in a batch for each kind of array."""

    batches: Sequence[Batch]

    @property
    def lasting(self) -> list[tuple[Sequence[str], Lasting]]:
        """Those that a snapshot only holds."""
        return [(paths, shards) for paths, shards in self.batches if isinstance(shards, Lasting)]

    @property
    def others(self) -> dict[tuple[str, int], MemoryShard]:
        """The others, by (leaf path, index of the local shard)."""
        return {
            (path, i): shard
            for paths, shards in self.batches
            if not isinstance(shards, Lasting)
            for path, pieces in zip(paths, shards, strict=True)
            for i, shard in enumerate(pieces)
        }

    def of(self, path: str) -> Sequence[MemoryShard]:
        """Those of one leaf."""
        batch, row = self._rows[path]
        return self.batches[batch][1][row]

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        return {path: (n, row) for n, (paths, _) in enumerate(self.batches) for row, path in enumerate(paths)}


class HostLink:
    """Copies within host memory: each is complete when it was begun."""

    name = "host"

    def allocate(self, nbytes: int) -> Bytes:
        return allocate(nbytes)

    def follow(self) -> None:
        """Nothing is queued for the host."""

    def mark(self) -> Callable[[], None]:
        return _nothing_to_wait_for


def _nothing_to_wait_for() -> None:
    """All copies are complete."""


HOST = HostLink()
