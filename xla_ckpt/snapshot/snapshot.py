"""Take a snapshot of a state: hold immutable memory, copy mutable memory, or defer the copy.

Immutable memory (XLA buffers, jax arrays) is only kept alive. Mutable memory is copied into staging buffers before the
caller continues, or deferred as a `LazyShard` and copied in the background (see `SnapshotMode`). A blocking save
copies nothing in host memory. `SnapshotProgress` counts the shards that are still only in the program's memory;
once it is done, the program may write to that memory again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from xla_ckpt.core.fingerprint import compute_fingerprint
from xla_ckpt.core.plan.leaf import ArrayLeaf
from xla_ckpt.core.plan.rank_record import ReplicaSample
from xla_ckpt.errors import ChangedStateError
from xla_ckpt.snapshot.arena import BUDGET_BYTES, HOST_MEMORY_POOL
from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, ByteArray, StagingBuffer, copy_all
from xla_ckpt.snapshot.shards import (
    CopyEngine,
    HostShard,
    ImmutableShards,
    LocalShard,
    LocalShards,
    choose_sample_windows,
    compute_sample_fingerprint,
)
from xla_ckpt.storage.process_state import fork_safe_rlock
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.storage.synchronization import Latch


class SnapshotProgress:
    """Progress of a snapshot, complete once all bytes have been copied out of memory that the program may modify."""

    def __init__(self) -> None:
        self._lock = fork_safe_rlock()  # reentrant: the garbage collector may release a snapshot of this save
        self._pending = 0
        self._wait_starts: list[float] = []
        self._waited_seconds = 0.0
        self._done = Latch()
        self._done_at = 0.0

    @property
    def is_frozen(self) -> bool:
        """True if the program may write to all of its memory."""
        return self._done.is_set()

    def add_pending(self) -> None:
        """Add a piece of memory that the program must not write to yet."""
        with self._lock:
            self._pending += 1

    def seal(self) -> None:
        """Mark the set of pending pieces as complete."""
        with self._lock:
            none = self._pending == 0
        if none:
            self.finish()

    def mark_done(self) -> None:
        """Mark one pending piece as copied."""
        with self._lock:
            self._pending -= 1
            last = self._pending == 0
        if last:
            self.finish()

    def finish(self) -> None:
        """Release all waiting threads, because everything is copied or the save has failed."""
        with self._lock:
            if not self._done.is_set():
                self._done_at = time.monotonic()
                self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the program may write to its memory; False after `timeout` seconds. The time counts as a stall."""
        began = time.monotonic()
        with self._lock:
            if self._done.is_set() or timeout == 0:
                return self._done.is_set()
            self._wait_starts.append(began)
        if self._done.wait(timeout):
            return True
        with self._lock:
            self._wait_starts.remove(began)
            self._waited_seconds += time.monotonic() - began
        return False

    @property
    def stall_seconds(self) -> float:
        """Seconds that callers of `wait` have waited in total. Known when the snapshot is frozen."""
        with self._lock:
            # Not measured by the waiting threads, because the save may report before they run again.
            return self._waited_seconds + sum(max(0.0, self._done_at - began) for began in self._wait_starts)


class LazyShard:
    """Shard whose bytes are copied when the writer needs them.

    Args:
        leaf: Leaf path.
        shard: Source of the bytes, which is kept alive until they are copied.
        progress: Progress of the snapshot that contains it.
        is_mutable: True if the program may write to the memory as soon as the bytes are copied.
    """

    def __init__(self, leaf: str, shard: LocalShard, progress: SnapshotProgress, *, is_mutable: bool) -> None:
        self.leaf = leaf
        self.engine: CopyEngine = shard.copy_engine
        self._shard: LocalShard | None = shard
        self._progress = progress
        self.is_mutable = is_mutable
        self._version = shard.version() if is_mutable and shard.version is not None else None
        if is_mutable:
            progress.add_pending()

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        """Begin to copy bytes from `offset` on, as many as fit into `target`.

        Raises:
            ChangedStateError: The program has written to the memory.
        """
        assert self._shard is not None, "copied after it was settled"
        self._check_unmodified(self._shard)
        self._shard.begin_copy(offset, target)

    def finish_copy(self) -> None:
        """Release the memory after all copies are complete.

        Raises:
            ChangedStateError: The program has written to the memory in the meantime.
        """
        shard, self._shard = self._shard, None
        if shard is not None and self.is_mutable:
            self._check_unmodified(shard)
            self._progress.mark_done()

    def discard(self) -> None:
        """Release the memory without a copy, because the bytes are not needed."""
        shard, self._shard = self._shard, None
        if shard is not None and self.is_mutable:
            self._progress.mark_done()

    def _check_unmodified(self, shard: LocalShard) -> None:
        if self.is_mutable and shard.version is not None and shard.version() != self._version:
            raise ChangedStateError(
                "the program wrote to this tensor before it was saved",
                leaf=self.leaf,
                hint='With snapshot="overlap" only the step of a torch optimizer and load_state_dict wait for the '
                'save: call handle.frozen() before other writes, or use options=SaveOptions(snapshot="host").',
            )


SMALL_COPY_BYTES = 16 * 1024
"""Maximum size of host memory that is always copied at once, because deferring it would take longer."""

SnapshotMode = Literal["host", "device", "overlap"]
"""Handling of memory that the program modifies: copy it to host memory before the caller continues; clone it on the
device and copy the clones later; or defer the copy, if a guard ensures that it is not modified before.
"""

ShardKey = tuple[str, int]
"""(leaf path, local shard)."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Snapshot of a state, possibly still being copied while it is written. Call `release` when it is written."""

    memory: dict[ShardKey, memoryview | LazyShard] = field(default_factory=dict)
    """Bytes that this rank may have to write, except those of `immutable_shards`."""

    immutable_shards: list[tuple[Sequence[str], ImmutableShards]] = field(default_factory=list)
    """Shards that are only kept alive, and read when they are written."""

    owners: list[Any] = field(default_factory=list)
    staging_buffers: list[tuple[StagingBuffer, ByteArray]] = field(default_factory=list)
    budget: int = BUDGET_BYTES
    """Host memory for deferred copies, in bytes."""

    progress: SnapshotProgress = field(default_factory=SnapshotProgress)
    """Progress of the copies; the program must not write to its memory before they are done."""

    computed_samples: dict[str, tuple[ReplicaSample, ...]] = field(default_factory=dict)
    """Samples of leaves whose memory may have changed since."""

    watched: list[tuple[str, Callable[[], Hashable], Hashable]] = field(default_factory=list)
    """(leaf, version getter, version at snapshot time) for memory that the program may still modify."""

    torn: dict[str, None] = field(default_factory=dict)
    """Leaves that were modified while they were copied or kept alive: their bytes may mix several versions."""

    unsampled_leaves: list[tuple[ArrayLeaf, list[HostShard]]] = field(default_factory=list)
    """Leaves that can still be sampled."""

    unchecked_replicas: frozenset[str] = frozenset()
    """Leaves whose replicas need not be equal (buffers)."""

    def __del__(self) -> None:
        # A signal handler's exception may interrupt the creator of a snapshot before it can be released.
        self.release()

    def materialize(self) -> dict[ShardKey, memoryview | LazyShard]:
        """Return the bytes that this rank may have to write."""
        for paths, shards in self.immutable_shards:
            for path, pieces in zip(paths, shards, strict=True):
                for i, shard in enumerate(pieces):
                    self.memory[path, i] = shard.data
                    self.owners.append(shard.owner)
        self.immutable_shards.clear()
        return self.memory

    def compute_samples(self) -> dict[str, tuple[ReplicaSample, ...]]:
        """Compute samples of the leaves that other ranks have, too, by leaf path."""
        return self.computed_samples | _compute_samples(self.unsampled_leaves, self.unchecked_replicas)

    def watch_writes(self, leaf: str, shard: HostShard) -> None:
        """Begin to watch memory that another thread may write to, except small shards, which are copied instantly."""
        if shard.nbytes > SMALL_COPY_BYTES and shard.version is not None and not shard.immutable:
            self.watched.append((leaf, shard.version, shard.version()))

    def detect_torn_writes(self) -> None:
        """Add watched leaves that were modified to `torn`, after their bytes were copied or written."""
        self.torn |= {leaf: None for leaf, version, before in self.watched if version() != before}
        self.watched.clear()

    @contextlib.contextmanager
    def release_on_failure(self) -> Iterator[None]:
        """Release the snapshot if the block raises, so that no thread waits for a save that does not begin."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release all memory, and let the program write to its own."""
        self.progress.finish()
        self.memory.clear()
        self.immutable_shards.clear()
        self.owners.clear()
        self.unsampled_leaves.clear()
        self.watched.clear()
        for staging, memory in self.staging_buffers:
            staging.give_back(memory)
        self.staging_buffers.clear()


def is_stable(shard: LocalShard, *, blocking: bool) -> bool:
    """Return True if a shard is in host memory that cannot change until the save is done.

    `blocking` is True if the caller waits for the save.
    """
    return isinstance(shard, HostShard) and (shard.immutable or blocking)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """Handling of memory that the program may modify."""

    blocking: bool
    """True if the caller waits until the save is done, so that nothing changes and nothing in host memory is copied."""

    mode: SnapshotMode = "host"
    optimizer_written: Collection[str] = ()
    """Leaves that are modified only when `Snapshot.progress` allows it. "overlap" defers these."""

    budget: int = BUDGET_BYTES
    """Host memory for deferred copies, in bytes."""

    def should_defer(self, shard: LocalShard, leaf: str) -> bool:
        """Return True if a shard that is not stable in host memory is copied after the caller continues."""
        guarded = self.mode == "overlap" and leaf in self.optimizer_written and shard.version is not None
        if isinstance(shard, HostShard):
            return guarded and shard.nbytes > SMALL_COPY_BYTES
        return self.blocking or guarded or (shard.immutable and self.mode != "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSampling:
    """Selection of the leaves that are sampled, to compare them with other ranks."""

    leaves: Sequence[ArrayLeaf] = ()
    unchecked_replicas: frozenset[str] = frozenset()
    """Leaves whose replicas need not be equal."""

    per_holder_shards: Mapping[str, list[HostShard]] = field(default_factory=dict)
    """Shards of leaves that a snapshot captures as one, of which other ranks have only some."""


def take_snapshot(
    shards: LocalShards,
    policy: SnapshotPolicy,
    sampling: ReplicaSampling,
    written_ranges: Mapping[ShardKey, tuple[int, int]] | None = None,
) -> Snapshot:
    """Take a snapshot of a state: keep its memory alive, copy it if that is not sufficient, or defer the copy.

    Args:
        shards: All local shards.
        policy: Handling of memory that the program may modify.
        sampling: Leaves that other ranks have, too.
        written_ranges: Byte range (start, end) of each shard that this rank writes; None if it writes all of them.
            Shards that others write are only sampled here.
    """
    kept = {key: s for key, s in shards.other_shards.items() if written_ranges is None or key in written_ranges}
    snapshot = Snapshot(
        unchecked_replicas=sampling.unchecked_replicas, budget=policy.budget, immutable_shards=shards.immutable_shards
    )
    changing: list[tuple[ArrayLeaf, list[HostShard]]] = []
    for leaf in sampling.leaves:
        if not any(s.replicas > 1 for s in leaf.shards):
            continue
        pieces: Sequence[LocalShard] = sampling.per_holder_shards.get(leaf.path) or shards.get_shards(leaf.path)
        host_pieces = [_read_host_sample(shard) for shard in pieces]
        if all(is_stable(shard, blocking=policy.blocking) for shard in host_pieces):
            snapshot.unsampled_leaves.append((leaf, host_pieces))  # stable, so sampled in the background
        else:
            changing.append((leaf, host_pieces))  # sampled before the caller may modify it
    snapshot.computed_samples = _compute_samples(changing, sampling.unchecked_replicas)
    with snapshot.release_on_failure():
        _fill_snapshot(snapshot, kept, written_ranges or {}, policy)
    return snapshot


def _fill_snapshot(
    snapshot: Snapshot,
    kept: Mapping[ShardKey, LocalShard],
    written_ranges: Mapping[ShardKey, tuple[int, int]],
    policy: SnapshotPolicy,
) -> None:
    """Fill a snapshot with shards that are kept alive, deferred or copied."""
    deferred: list[tuple[ShardKey, LocalShard]] = []
    moving: list[tuple[ShardKey, LocalShard]] = []
    for key, source in kept.items():
        if not source.nbytes:
            snapshot.memory[key] = memoryview(b"")
            continue
        shard: LocalShard = source
        if isinstance(source, HostShard):
            if is_stable(source, blocking=policy.blocking):
                snapshot.memory[key] = source.data
                snapshot.owners.append(source.owner)
                snapshot.watch_writes(key[0], source)
                continue
        else:
            shard = source.clone() if policy.mode == "device" and not policy.blocking else source.make_contiguous()
        (deferred if policy.should_defer(shard, key[0]) else moving).append((key, shard))
    for link in {shard.copy_engine for _, shard in (*deferred, *moving)}:
        link.wait_for_stream()
    for key, shard in deferred:
        changes = not policy.blocking and not shard.immutable
        snapshot.memory[key] = LazyShard(key[0], shard, snapshot.progress, is_mutable=changes)
    snapshot.progress.seal()
    if moving:
        _copy_to_staging(moving, snapshot, written_ranges)


def _read_host_sample(shard: LocalShard) -> HostShard:
    """Return the sampled bytes of a shard in host memory."""
    if isinstance(shard, HostShard):
        return shard
    sample = shard.read_sample(choose_sample_windows(shard.nbytes)) if shard.nbytes else b""
    return HostShard(memoryview(sample), None, immutable=True)


def _compute_samples(
    leaves: Sequence[tuple[ArrayLeaf, list[HostShard]]], unchecked_replicas: frozenset[str]
) -> dict[str, tuple[ReplicaSample, ...]]:
    """Compute one sample per leaf and set of holders, because other ranks have only the shards of one set."""
    samples = {}
    for leaf, pieces in leaves:
        sets: dict[Any, list[int]] = {}
        for i, shard in enumerate(leaf.shards):
            sets.setdefault((shard.group, shard.replicas), []).append(i)
        of_leaf = []
        for (_, replicas), numbers in sets.items():
            if replicas > 1:
                boxes = " ".join(str(leaf.shards[i].box) for i in numbers)
                place = compute_fingerprint(f"{leaf.dtype.name} {leaf.shape} {boxes}".encode())
                # If a layout stores the whole tensor, all of its shards have the same holders.
                shards = [pieces[i] for i in numbers] if len(pieces) == len(leaf.shards) else pieces
                data = [shard.data for shard in shards]
                of_leaf.append(ReplicaSample(place, compute_sample_fingerprint(data), leaf.path in unchecked_replicas))
        samples[leaf.path] = tuple(of_leaf)
    return samples


def _copy_to_staging(
    moving: Sequence[tuple[ShardKey, LocalShard]],
    snapshot: Snapshot,
    written_ranges: Mapping[ShardKey, tuple[int, int]],
) -> None:
    """Copy shards into staging memory, in one batch per device, and let the snapshot refer to the copies.

    Of a shard in `written_ranges` only those bytes are copied.
    """
    by_link: dict[CopyEngine, list[tuple[ShardKey, LocalShard]]] = {}
    for key, shard in moving:
        by_link.setdefault(shard.copy_engine, []).append((key, shard))
    in_host: list[tuple[ByteArray, ByteArray]] = []
    try:
        for link, batch in by_link.items():
            for key, shard, target in _allocate_staging(link, batch, snapshot):
                low, high = written_ranges.get(key, (0, shard.nbytes))
                if isinstance(shard, HostShard):
                    snapshot.watch_writes(key[0], shard)
                    in_host.append((target[low:high], np.frombuffer(shard.data, np.uint8)[low:high]))
                else:
                    shard.begin_copy(low, target[low:high])
        if in_host:  # while the device copies run
            copy_all(in_host)
            snapshot.detect_torn_writes()
    finally:
        # Also after an error, because the memory must not be reused while a copy into it is in flight.
        for link in by_link:
            link.record_event()()


def _allocate_staging(
    engine: CopyEngine, batch: Sequence[tuple[ShardKey, LocalShard]], snapshot: Snapshot
) -> Iterator[tuple[ShardKey, LocalShard, ByteArray]]:
    """Yield each shard with its part of the staging memory."""
    places = _compute_offsets([shard.nbytes for _, shard in batch])
    staging = HOST_MEMORY_POOL.get_staging(engine)
    with defer_signals():  # otherwise memory that is borrowed, but not part of the snapshot yet, would leak
        memory = staging.borrow(places[-1])
        snapshot.staging_buffers.append((staging, memory))
    for (key, shard), at in zip(batch, places, strict=False):
        target = memory[at : at + shard.nbytes]
        snapshot.memory[key] = target.data
        yield key, shard, target


def _compute_offsets(sizes: Sequence[int]) -> list[int]:
    """Return aligned offsets for pieces of these sizes, and the end of the last."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT)
    return places
