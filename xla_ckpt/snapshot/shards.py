"""Local shards in host or device memory, and the copy engines that copy their bytes to the host.

`HostShard` and `DeviceShard` describe one shard each; `LocalShards` contains all shards of a process. A `CopyEngine`
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
"""Number of sampled windows per shard."""

SAMPLE_WINDOW_BYTES = 256
"""Size of each window in bytes; smaller shards are sampled completely."""


class CopyEngine(Protocol):
    """Copies from one kind of memory to the host, which may complete asynchronously."""

    @property
    def name(self) -> str:
        """Kind of the source memory, and of the host memory for its copies: ``"host"``, ``"cuda"``."""

    def allocate(self, nbytes: int) -> ByteArray:
        """Allocate page-aligned host memory into which copies are fastest."""

    def wait_for_stream(self) -> None:
        """Order the following copies behind all work that this thread has queued on the device so far."""

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits until all copies that this thread has begun so far are complete."""


@dataclass(frozen=True, slots=True)
class SampleWindows:
    """Sampled bytes of a shard: `count` runs of `nbytes` bytes each, from `offset`, one every `stride` bytes."""

    offset: int
    count: int
    stride: int
    nbytes: int

    def read(self, data: memoryview) -> bytes:
        """Return these bytes of a shard in host memory."""
        starts = (self.offset + i * self.stride for i in range(self.count))
        return b"".join(data[start : start + self.nbytes] for start in starts)


def choose_sample_windows(nbytes: int) -> SampleWindows:
    """Return the sampled windows of a shard of `nbytes` bytes."""
    if nbytes <= SAMPLE_WINDOWS * SAMPLE_WINDOW_BYTES:
        return SampleWindows(offset=0, count=1, stride=nbytes, nbytes=nbytes)
    return SampleWindows(
        offset=0,
        count=SAMPLE_WINDOWS,
        stride=(nbytes - SAMPLE_WINDOW_BYTES) // (SAMPLE_WINDOWS - 1),
        nbytes=SAMPLE_WINDOW_BYTES,
    )


def compute_sample_fingerprint(shards: Sequence[memoryview]) -> int:
    """Compute a fingerprint of spread-out bytes of some shards; equal for equal contents.

    A shard may be replaced by its sampled bytes, all of which are used.
    """
    return compute_fingerprint(b"".join(choose_sample_windows(len(data)).read(data) for data in shards))


@slots_dataclass()
class HostShard:
    """Bytes of one local shard in host memory."""

    data: memoryview
    """Bytes of the shard in C order."""

    owner: Any
    """Object that owns the memory."""

    immutable: bool
    """True if the memory cannot be modified while `owner` is kept alive."""

    version: Callable[[], Hashable] | None = None
    """Version getter, whose value changes when the program writes to the memory; None if writes are not counted."""

    @property
    def nbytes(self) -> int:
        """Size of the shard in bytes."""
        return len(self.data)

    @property
    def copy_engine(self) -> CopyEngine:
        """Engine that copies the bytes."""
        return HOST_COPY_ENGINE

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        """Copy the bytes from `offset` on, as many as fit into `target`."""
        np.copyto(target, np.frombuffer(self.data, np.uint8)[offset : offset + len(target)])


class DeviceShard(Protocol):
    """Bytes of one local shard in device memory, which the host cannot read."""

    @property
    def nbytes(self) -> int:
        """Size of the shard in bytes."""

    @property
    def immutable(self) -> bool:
        """True if the memory cannot be modified while this shard is kept alive."""

    @property
    def version(self) -> Callable[[], Hashable] | None:
        """Version getter, as `HostShard.version`."""

    @property
    def copy_engine(self) -> CopyEngine:
        """Engine that copies the bytes to the host."""

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        """Begin to copy the bytes from `offset` on, as many as fit into `target`.

        Wait for the copy with `CopyEngine.record_event`. The shard and the target must be kept alive until then.
        """

    def make_contiguous(self) -> DeviceShard:
        """Return the same bytes in C order: this shard, or a copy on the device if it is not contiguous."""

    def clone(self) -> DeviceShard:
        """Return a copy on the device that is never modified."""

    def read_sample(self, windows: SampleWindows) -> bytes:
        """Wait for the sampled bytes, and return them joined."""


LocalShard = HostShard | DeviceShard
"""Local shard, in host or device memory."""


class ImmutableShards(ColumnarSequence[Sequence[HostShard]]):
    """Local shards of many arrays, one row per array, in host memory that is not modified while this exists.

    A snapshot only keeps them alive. The shards are created when their bytes are written.
    """

    __slots__ = ()


ShardBatch = tuple[Sequence[str], Sequence[Sequence[LocalShard]]]
"""Leaf paths of some arrays, and the local shards of each."""


@dataclass(frozen=True)
class LocalShards:
    """All local shards of a process, in one batch per kind of array."""

    batches: Sequence[ShardBatch]

    @property
    def immutable_shards(self) -> list[tuple[Sequence[str], ImmutableShards]]:
        """Shards that a snapshot only keeps alive."""
        return [(paths, shards) for paths, shards in self.batches if isinstance(shards, ImmutableShards)]

    @property
    def other_shards(self) -> dict[tuple[str, int], LocalShard]:
        """Other shards, by (leaf path, index of the local shard)."""
        return {
            (path, i): shard
            for paths, shards in self.batches
            if not isinstance(shards, ImmutableShards)
            for path, pieces in zip(paths, shards, strict=True)
            for i, shard in enumerate(pieces)
        }

    def get_shards(self, path: str) -> Sequence[LocalShard]:
        """Return the shards of one leaf."""
        batch, row = self._rows[path]
        return self.batches[batch][1][row]

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        return {path: (n, row) for n, (paths, _) in enumerate(self.batches) for row, path in enumerate(paths)}


class HostCopyEngine:
    """Copy engine within host memory, which copies synchronously."""

    name = "host"

    def allocate(self, nbytes: int) -> ByteArray:
        return allocate(nbytes)

    def wait_for_stream(self) -> None:
        """Do nothing, because no work is queued for host memory."""

    def record_event(self) -> Callable[[], None]:
        return _wait_for_nothing


def _wait_for_nothing() -> None:
    """Do nothing, because all copies are complete."""


HOST_COPY_ENGINE = HostCopyEngine()
