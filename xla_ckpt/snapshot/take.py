"""Snapshots: the bytes of a state, frozen at one instant.

Immutable memory (XLA buffers, jax arrays) is only held. Memory that its owner will change is copied before the caller
goes on, into memory that is kept between saves; or it is deferred, and copied while the caller goes on (see `Mode`).
Where the caller waits until everything is written, host memory is only held, and a device's is copied bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from xla_ckpt.fingerprint import fingerprint
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.record import Sample
from xla_ckpt.snapshot.arena import BUDGET_BYTES, POOL
from xla_ckpt.snapshot.freezing import Deferred, Freezing
from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, Bytes, Staging, copy_all
from xla_ckpt.snapshot.shards import HostShard, Lasting, Link, LocalShards, MemoryShard, sample, windows
from xla_ckpt.storage.undisturbed import undisturbed

SMALL_BYTES = 16 * 1024
"""Host memory up to this size is copied at once: to defer it would take longer."""

Mode = Literal["host", "device", "overlap"]
"""How the memory that a program writes to is frozen: in host memory, before the caller goes on; as clones on the
device, which are copied later; or not at all, where somebody sees to it that it is not written to before it is copied.
"""

Key = tuple[str, int]
"""(leaf path, local shard)."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A frozen state, or one that freezes while it is written. `release` it when it is written."""

    memory: dict[Key, memoryview | Deferred] = field(default_factory=dict)
    """The bytes that this rank may have to write, but for those of `lasting`."""

    lasting: list[tuple[Sequence[str], Lasting]] = field(default_factory=list)
    """What is only held, and looked at when it is written."""

    keep: list[Any] = field(default_factory=list)
    staged: list[tuple[Staging, Bytes]] = field(default_factory=list)
    budget: int = BUDGET_BYTES
    """Host memory for what is deferred (bytes)."""

    freezing: Freezing = field(default_factory=Freezing)
    """When the program may write to its memory."""

    sampled: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Samples of leaves whose memory may have changed since."""

    watched: list[tuple[str, Callable[[], Hashable], Hashable]] = field(default_factory=list)
    """Leaf, what counts the writes to its memory, and what that said before. Nothing keeps the program from them."""

    torn: dict[str, None] = field(default_factory=dict)
    """Leaves that were written to while they were copied or held: their bytes may be of several instants."""

    unsampled: list[tuple[Leaf, list[HostShard]]] = field(default_factory=list)
    """Leaves of which samples can still be taken."""

    loose: frozenset[str] = frozenset()
    """Leaves whose replicas need not be equal (buffers)."""

    def __del__(self) -> None:
        # What a signal handler raises may take a snapshot from who has just made it, before anybody can release it.
        self.release()

    def to_write(self) -> dict[Key, memoryview | Deferred]:
        """The bytes that this rank may have to write."""
        for paths, shards in self.lasting:
            for path, pieces in zip(paths, shards, strict=True):
                for i, shard in enumerate(pieces):
                    self.memory[path, i] = shard.data
                    self.keep.append(shard.keep)
        self.lasting.clear()
        return self.memory

    def samples(self) -> dict[str, tuple[Sample, ...]]:
        """Samples of the leaves that other ranks hold, too, by leaf path."""
        return self.sampled | _samples(self.unsampled, self.loose)

    def watch(self, leaf: str, shard: HostShard) -> None:
        """Begin to watch memory that another thread may write to. What is small is copied in an instant."""
        if shard.nbytes > SMALL_BYTES and shard.version is not None and not shard.immutable:
            self.watched.append((leaf, shard.version, shard.version()))

    def end_watch(self) -> None:
        """All bytes that were watched are copied or written: find out which of them are `torn`."""
        self.torn |= {leaf: None for leaf, version, before in self.watched if version() != before}
        self.watched.clear()

    @contextlib.contextmanager
    def released_on_failure(self) -> Iterator[None]:
        """Release it if the block raises: nobody may wait for a save that is not begun."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go of all memory, and let the program write to its own."""
        self.freezing.over()
        self.memory.clear()
        self.lasting.clear()
        self.keep.clear()
        self.unsampled.clear()
        self.watched.clear()
        for staging, memory in self.staged:
            staging.give_back(memory)
        self.staged.clear()


def lasts(shard: MemoryShard, *, waits: bool) -> bool:
    """Whether a shard is in host memory that stays as it is until the save is done. `waits`: the caller waits."""
    return isinstance(shard, HostShard) and (shard.immutable or waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """How memory is frozen that the program writes to."""

    waits: bool
    """The caller waits until the save is done, so nothing changes and nothing in host memory is copied."""

    mode: Mode = "host"
    stepped: Collection[str] = ()
    """Leaves whose memory is written to only when `Snapshot.freezing` says so. "overlap" defers these."""

    budget: int = BUDGET_BYTES
    """Host memory for what is copied later (bytes)."""

    def defers(self, shard: MemoryShard, leaf: str) -> bool:
        """Whether a shard that does not last in host memory is copied while the caller goes on."""
        guarded = self.mode == "overlap" and leaf in self.stepped and shard.version is not None
        if isinstance(shard, HostShard):
            return guarded and shard.nbytes > SMALL_BYTES
        return self.waits or guarded or (shard.immutable and self.mode != "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Of what samples are taken, for the sake of other ranks that hold it, too."""

    leaves: Sequence[Leaf] = ()
    loose: frozenset[str] = frozenset()
    """Leaves whose replicas need not be equal."""

    apart: Mapping[str, list[HostShard]] = field(default_factory=dict)
    """The shards of leaves that a snapshot takes as one, where other ranks hold some of them and not the rest."""


def take(
    shards: LocalShards,
    freeze: Freeze,
    sampling: Sampling,
    written: Mapping[Key, tuple[int, int]] | None = None,
) -> Snapshot:
    """Freeze a state: hold its memory, or copy it where that is not enough, or see to it that it is copied later.

    Args:
        shards: All local shards.
        freeze: What is done with memory that the program writes to.
        sampling: What other ranks hold, too.
        written: First byte that this rank writes of each shard, and the one behind the last; None for all of them. What
            others write is only sampled here.
    """
    kept = {key: s for key, s in shards.others.items() if written is None or key in written}
    snapshot = Snapshot(loose=sampling.loose, budget=freeze.budget, lasting=shards.lasting)
    changing: list[tuple[Leaf, list[HostShard]]] = []
    for leaf in sampling.leaves:
        if not any(s.replicas > 1 for s in leaf.shards):
            continue
        pieces: Sequence[MemoryShard] = sampling.apart.get(leaf.path) or shards.of(leaf.path)
        host_pieces = [_near(shard) for shard in pieces]
        if all(lasts(shard, waits=freeze.waits) for shard in host_pieces):
            snapshot.unsampled.append((leaf, host_pieces))  # sampled in the background: it stays as it is
        else:
            changing.append((leaf, host_pieces))  # sampled before the caller may change it
    snapshot.sampled = _samples(changing, sampling.loose)
    with snapshot.released_on_failure():
        _fill(snapshot, kept, written or {}, freeze)
    return snapshot


def _fill(
    snapshot: Snapshot,
    kept: Mapping[Key, MemoryShard],
    written: Mapping[Key, tuple[int, int]],
    freeze: Freeze,
) -> None:
    """Fill a snapshot with what is held, deferred or copied of these shards."""
    deferred: list[tuple[Key, MemoryShard]] = []
    moving: list[tuple[Key, MemoryShard]] = []
    for key, source in kept.items():
        if not source.nbytes:
            snapshot.memory[key] = memoryview(b"")
            continue
        shard: MemoryShard = source
        if isinstance(source, HostShard):
            if lasts(source, waits=freeze.waits):
                snapshot.memory[key] = source.data
                snapshot.keep.append(source.keep)
                snapshot.watch(key[0], source)
                continue
        else:
            shard = source.clone() if freeze.mode == "device" and not freeze.waits else source.in_order()
        (deferred if freeze.defers(shard, key[0]) else moving).append((key, shard))
    for link in {shard.link for _, shard in (*deferred, *moving)}:
        link.follow()
    for key, shard in deferred:
        changes = not freeze.waits and not shard.immutable
        snapshot.memory[key] = Deferred(key[0], shard, snapshot.freezing, changes=changes)
    snapshot.freezing.complete()
    if moving:
        _copy(moving, snapshot, written)


def _near(shard: MemoryShard) -> HostShard:
    """What a sample looks at of a shard, in host memory."""
    if isinstance(shard, HostShard):
        return shard
    sample = shard.look(windows(shard.nbytes)) if shard.nbytes else b""
    return HostShard(memoryview(sample), None, immutable=True)


def _samples(leaves: Sequence[tuple[Leaf, list[HostShard]]], loose: frozenset[str]) -> dict[str, tuple[Sample, ...]]:
    """Samples of leaves: one for the shards of each set of holders, because others hold only those of that set."""
    samples = {}
    for leaf, pieces in leaves:
        sets: dict[Any, list[int]] = {}
        for i, shard in enumerate(leaf.shards):
            sets.setdefault((shard.group, shard.replicas), []).append(i)
        of_leaf = []
        for (_, replicas), numbers in sets.items():
            if replicas > 1:
                boxes = " ".join(str(leaf.shards[i].box) for i in numbers)
                place = fingerprint(f"{leaf.dtype.name} {leaf.shape} {boxes}".encode())
                # A layout may take the whole tensor in one: then all of its shards have the same holders.
                shards = [pieces[i] for i in numbers] if len(pieces) == len(leaf.shards) else pieces
                data = [shard.data for shard in shards]
                of_leaf.append(Sample(place, sample(data), leaf.path in loose))
        samples[leaf.path] = tuple(of_leaf)
    return samples


def _copy(
    moving: Sequence[tuple[Key, MemoryShard]], snapshot: Snapshot, written: Mapping[Key, tuple[int, int]]
) -> None:
    """Copy shards into staging memory, and have the snapshot refer to the copies. All of a device's are one batch.

    Of a shard in `written` only those bytes are copied.
    """
    by_link: dict[Link, list[tuple[Key, MemoryShard]]] = {}
    for key, shard in moving:
        by_link.setdefault(shard.link, []).append((key, shard))
    in_host: list[tuple[Bytes, Bytes]] = []
    try:
        for link, batch in by_link.items():
            for key, shard, target in _staged(link, batch, snapshot):
                low, high = written.get(key, (0, shard.nbytes))
                if isinstance(shard, HostShard):
                    snapshot.watch(key[0], shard)
                    in_host.append((target[low:high], np.frombuffer(shard.data, np.uint8)[low:high]))
                else:
                    shard.begin_copy(low, target[low:high])
        if in_host:  # while the devices are at work
            copy_all(in_host)
            snapshot.end_watch()
    finally:
        # After an error, too: the memory must not be lent to others while a copy into it is on its way.
        for link in by_link:
            link.mark()()


def _staged(
    link: Link, batch: Sequence[tuple[Key, MemoryShard]], snapshot: Snapshot
) -> Iterator[tuple[Key, MemoryShard, Bytes]]:
    """Each shard, and where in staging memory it goes."""
    places = _places([shard.nbytes for _, shard in batch])
    staging = POOL.staging(link)
    with undisturbed():  # what is borrowed, and is in no snapshot, would never be given back
        memory = staging.borrow(places[-1])
        snapshot.staged.append((staging, memory))
    for (key, shard), at in zip(batch, places, strict=False):
        target = memory[at : at + shard.nbytes]
        snapshot.memory[key] = target.data
        yield key, shard, target


def _places(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets for pieces of these sizes, and the end of the last."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT)
    return places
