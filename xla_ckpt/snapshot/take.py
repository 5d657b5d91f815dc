"""Snapshots: the bytes of a state, frozen at one instant.

Immutable memory (XLA buffers, jax arrays) is only held. Memory that its owner will change is copied into staging
memory that is kept between saves, unless the caller waits until everything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.manifest.digest import digest, to_hex
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.merge import Sample
from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, STAGING, Bytes
from xla_ckpt.snapshot.sample import sample
from xla_ckpt.storage.pool import work_off

COPIERS = 2
"""Threads that copy into staging memory."""

COPY_BYTES = 16 * 1024 * 1024
"""Largest single copy: so that the copiers finish together."""


@dataclass(frozen=True, slots=True)
class HostShard:
    """The bytes of one local shard in host memory."""

    data: memoryview
    """Its bytes in C order."""

    keep: Any
    """Whatever owns the memory."""

    immutable: bool
    """Whether nobody will write to the memory while `keep` is held."""


Key = tuple[str, int]
"""(leaf path, local shard)."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A frozen state. `release` it when it is written."""

    memory: dict[Key, memoryview]
    """The bytes that this rank may have to write."""

    keep: list[Any] = field(default_factory=list)
    staging: Bytes | None = None
    sampled: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Samples of leaves whose memory may have changed since."""

    unsampled: list[tuple[Leaf, list[HostShard]]] = field(default_factory=list)
    """Leaves of which samples can still be taken."""

    loose: frozenset[str] = frozenset()
    """Leaves whose replicas need not be equal (buffers)."""

    def samples(self) -> dict[str, tuple[Sample, ...]]:
        """Samples of the leaves that other ranks hold, too, by leaf path."""
        return self.sampled | _samples(self.unsampled, self.loose)

    def release(self) -> None:
        """Let go of all memory."""
        self.memory.clear()
        self.keep.clear()
        self.unsampled.clear()
        if self.staging is not None:
            STAGING.give_back(self.staging)
            self.staging = None


def lasts(shard: HostShard, *, waits: bool) -> bool:
    """Whether the memory of a shard stays as it is until the save is done. `waits`: whether the caller waits for it."""
    return shard.immutable or waits


def take(
    shards: Mapping[Key, HostShard],
    leaves: Sequence[Leaf] = (),
    *,
    waits: bool,
    written: Collection[Key] | None = None,
    loose: frozenset[str] = frozenset(),
    apart: Mapping[str, list[HostShard]] | None = None,
) -> Snapshot:
    """Freeze a state: hold its memory, or copy it where that is not enough.

    Args:
        shards: The bytes of all local shards.
        leaves: Array leaves of which samples are wanted, for the sake of other ranks that hold them, too.
        waits: The caller waits until the save is done, so nothing changes and nothing is copied.
        written: What this rank writes; None for all of it. What others write is only sampled here.
        loose: Leaves whose replicas need not be equal.
        apart: The shards of leaves that `shards` has as one, where other ranks hold some of them and not the rest.
    """
    kept = {key: s for key, s in shards.items() if written is None or key in written}
    moving = [(key, s) for key, s in kept.items() if not lasts(s, waits=waits) and len(s.data)]
    snapshot = Snapshot(
        memory={key: s.data for key, s in kept.items()}, keep=[s.keep for s in kept.values()], loose=loose
    )
    changing: list[tuple[Leaf, list[HostShard]]] = []
    for leaf in leaves:
        if not any(s.replicas > 1 for s in leaf.shards):
            continue
        held = (apart or {}).get(leaf.path) or _of_leaf(leaf.path, shards)
        if all(lasts(shard, waits=waits) for shard in held):
            snapshot.unsampled.append((leaf, held))  # sampled in the background: it stays as it is
        else:
            changing.append((leaf, held))  # sampled before the caller may change it
    snapshot.sampled = _samples(changing, loose)
    if moving:
        _copy(moving, snapshot)
    return snapshot


def _of_leaf(path: str, shards: Mapping[Key, HostShard]) -> list[HostShard]:
    """All shards of one leaf, which are numbered from 0."""
    found: list[HostShard] = []
    while (path, len(found)) in shards:
        found.append(shards[path, len(found)])
    return found


def _samples(leaves: Sequence[tuple[Leaf, list[HostShard]]], loose: frozenset[str]) -> dict[str, tuple[Sample, ...]]:
    """Samples of leaves: one for the shards of each set of holders, because others hold only those of that set."""
    found = {}
    for leaf, held in leaves:
        sets: dict[Any, list[int]] = {}
        for i, shard in enumerate(leaf.shards):
            sets.setdefault((shard.group, shard.replicas), []).append(i)
        made = []
        for (_, replicas), numbers in sets.items():
            if replicas > 1:
                boxes = " ".join(str(leaf.shards[i].box) for i in numbers)
                place = to_hex(digest(f"{leaf.dtype.name} {leaf.shape} {boxes}".encode()))
                # A layout may take the whole tensor in one: then all of its shards have the same holders.
                data = [held[i].data for i in numbers] if len(held) == len(leaf.shards) else [s.data for s in held]
                made.append(Sample(place, sample(data), leaf.path in loose))
        found[leaf.path] = tuple(made)
    return found


def _copy(moving: Sequence[tuple[Key, HostShard]], snapshot: Snapshot) -> None:
    """Copy shards into staging memory, and have the snapshot refer to the copies."""
    places = _places([len(s.data) for _, s in moving])
    total = places[-1]
    snapshot.staging = staging = STAGING.borrow(total)
    copies = []
    for (key, shard), at in zip(moving, places, strict=False):
        target = staging[at : at + len(shard.data)]
        snapshot.memory[key] = target.data
        source = np.frombuffer(shard.data, np.uint8)
        copies += [(target[i : i + COPY_BYTES], source[i : i + COPY_BYTES]) for i in range(0, len(source), COPY_BYTES)]
    workers = COPIERS if total > COPY_BYTES else 1
    work_off(copies, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")


def _places(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets for pieces of these sizes, and the end of the last."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT)
    return places
