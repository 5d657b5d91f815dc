"""Snapshots: the bytes of a state, frozen at one instant.

Immutable memory (XLA buffers, jax arrays) is only held. Memory that its owner will change is copied into staging
memory that is kept between saves, unless the caller waits until everything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.snapshot.memory import STAGING, Bytes
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


@dataclass(slots=True)
class Snapshot:
    """A frozen state: bytes by (leaf path, local shard). `release` it when it is written."""

    memory: dict[tuple[str, int], memoryview]
    keep: list[Any] = field(default_factory=list)
    staging: Bytes | None = None

    def release(self) -> None:
        """Let go of all memory."""
        self.memory.clear()
        self.keep.clear()
        if self.staging is not None:
            STAGING.give_back(self.staging)
            self.staging = None


def take(shards: Mapping[tuple[str, int], HostShard], *, freeze: bool) -> Snapshot:
    """Hold, or copy where that is not enough and `freeze` is wanted."""
    moving = [(key, s) for key, s in shards.items() if freeze and not s.immutable and len(s.data)]
    snapshot = Snapshot({key: s.data for key, s in shards.items()}, [s.keep for s in shards.values()])
    if moving:
        places = _places([len(s.data) for _, s in moving])
        snapshot.staging = staging = STAGING.borrow(places[-1])
        copies = []
        for (key, shard), at in zip(moving, places, strict=False):
            target = staging[at : at + len(shard.data)]
            snapshot.memory[key] = target.data
            source = np.frombuffer(shard.data, np.uint8)
            copies += [
                (target[i : i + COPY_BYTES], source[i : i + COPY_BYTES]) for i in range(0, len(source), COPY_BYTES)
            ]
        total = places[-1]
        workers = COPIERS if total > COPY_BYTES else 1
        work_off(copies, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")
    return snapshot


def _places(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets for pieces of these sizes, and the end of the last."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // 64) * 64)
    return places
