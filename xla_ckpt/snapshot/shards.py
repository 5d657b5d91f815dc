"""Local shards in host or device memory, and the copy engines that bring their bytes to the host.

`HostShard` and `DeviceShard` describe one shard each; `LocalShards` holds all shards of a process. A `CopyEngine`
allocates host memory, orders copies behind a device's stream and waits for them. Sampled fingerprints compare
replicas cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xla_ckpt.core.fingerprint import compute_fingerprint
from xla_ckpt.core.lightweight import ColumnarSequence, cached_property, slots_dataclass
from xla_ckpt.snapshot.memory import ByteArray, allocate

SAMPLE_WINDOWS = 16
"""Places in a shard that are looked at."""

SAMPLE_WINDOW_BYTES = 256
"""Bytes that are looked at in each place; smaller shards are looked at whole."""


class CopyEngine(Protocol):
    """How bytes come from one kind of memory to the host. Copies that are begun may be complete only later."""

    @property
    def name(self) -> str:
        """The kind of memory that it takes bytes from, and of the host memory that it fills: ``"host"``, ``"cuda"``."""

    def allocate(self, nbytes: int) -> ByteArray:
        """Host memory into which copies run fastest, page-aligned."""

    def wait_for_stream(self) -> None:
        """Order the copies that are begun from now on after all that this thread has asked the device for so far."""

    def record_event(self) -> Callable[[], None]:
        """A function that waits until all copies that this thread has begun so far are complete."""


@dataclass(frozen=True, slots=True)
class SampleWindows:
    """Some bytes of a shard: `count` runs of `nbytes` bytes each, the first at `offset`, one every `stride` bytes."""

    offset: int
    count: int
    stride: int
    nbytes: int

    def read(self, data: memoryview) -> bytes:
        """These bytes of a shard in host memory."""
        starts = (self.offset + i * self.stride for i in range(self.count))
        return b"".join(data[start : start + self.nbytes] for start in starts)


def choose_sample_windows(nbytes: int) -> SampleWindows:
    """Where a shard is looked at."""
    if nbytes <= SAMPLE_WINDOWS * SAMPLE_WINDOW_BYTES:
        return SampleWindows(offset=0, count=1, stride=nbytes, nbytes=nbytes)
    return SampleWindows(
        offset=0,
        count=SAMPLE_WINDOWS,
        stride=(nbytes - SAMPLE_WINDOW_BYTES) // (SAMPLE_WINDOWS - 1),
        nbytes=SAMPLE_WINDOW_BYTES,
    )


def compute_sample_fingerprint(shards: Sequence[memoryview]) -> int:
    """Fingerprint of spread-out bytes of some shards; equal for equal contents.

    In the place of a shard may be what is looked at of it: of that, all is looked at.
    """
    return compute_fingerprint(b"".join(choose_sample_windows(len(data)).read(data) for data in shards))


@slots_dataclass()
class HostShard:
    """The bytes of one local shard in host memory."""

    data: memoryview
    """Its bytes in C order."""

    owner: Any
    """Whatever owns the memory."""

    immutable: bool
    """Whether nobody will write to the memory while `owner` is held."""

    version: Callable[[], Hashable] | None = None
    """Says something else after the program has written to the memory; None where nobody counts the writes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return len(self.data)

    @property
    def copy_engine(self) -> CopyEngine:
        """How its bytes are copied."""
        return HOST_COPY_ENGINE

    def begin_copy(self, offset: int, target: ByteArray) -> None:
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
    def copy_engine(self) -> CopyEngine:
        """How its bytes come to the host."""

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        """Begin to copy the bytes from `offset` on, as many as fit into `target`; `CopyEngine.record_event` says when
        they are there.

        The shard, and the target, are held until then.
        """

    def make_contiguous(self) -> DeviceShard:
        """The same bytes in C order: this shard, or a copy on the device if they are scattered there."""

    def clone(self) -> DeviceShard:
        """A copy on the device that nobody writes to."""

    def read_sample(self, windows: SampleWindows) -> bytes:
        """Some of its bytes, joined. Waits for them."""


LocalShard = HostShard | DeviceShard
"""One local shard, wherever it is."""


class ImmutableShards(ColumnarSequence[Sequence[HostShard]]):
    """The local shards of many arrays, a row for each, in host memory that nobody writes to while this is held.

    A snapshot only holds them. The shards are made when their bytes are written.
    """

    __slots__ = ()


ShardBatch = tuple[Sequence[str], Sequence[Sequence[LocalShard]]]
"""Leaf paths of some arrays, and the local shards of each."""


@dataclass(frozen=True)
class LocalShards:
    """All local shards of a process, in a batch for each kind of array."""

    batches: Sequence[ShardBatch]

    @property
    def immutable_shards(self) -> list[tuple[Sequence[str], ImmutableShards]]:
        """Those that a snapshot only holds."""
        return [(paths, shards) for paths, shards in self.batches if isinstance(shards, ImmutableShards)]

    @property
    def other_shards(self) -> dict[tuple[str, int], LocalShard]:
        """The others, by (leaf path, index of the local shard)."""
        return {
            (path, i): shard
            for paths, shards in self.batches
            if not isinstance(shards, ImmutableShards)
            for path, pieces in zip(paths, shards, strict=True)
            for i, shard in enumerate(pieces)
        }

    def get_shards(self, path: str) -> Sequence[LocalShard]:
        """Those of one leaf."""
        batch, row = self._rows[path]
        return self.batches[batch][1][row]

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        return {path: (n, row) for n, (paths, _) in enumerate(self.batches) for row, path in enumerate(paths)}


class HostCopyEngine:
    """Copies within host memory: each is complete when it was begun."""

    name = "host"

    def allocate(self, nbytes: int) -> ByteArray:
        return allocate(nbytes)

    def wait_for_stream(self) -> None:
        """Nothing is queued for the host."""

    def record_event(self) -> Callable[[], None]:
        return _wait_for_nothing


def _wait_for_nothing() -> None:
    """All copies are complete."""


HOST_COPY_ENGINE = HostCopyEngine()
