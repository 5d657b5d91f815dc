"""A few bytes of a large memory, as a digest: enough to tell apart what is not the same array."""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt.manifest.digest import digest
from xla_ckpt.snapshot.shards import Look

WINDOWS = 16
"""Places in a shard that are looked at."""

WINDOW_BYTES = 256
"""Bytes that are looked at in each place; smaller shards are looked at whole."""


def windows(nbytes: int) -> Look:
    """Where a shard is looked at."""
    if nbytes <= WINDOWS * WINDOW_BYTES:
        return Look(offset=0, count=1, stride=nbytes, nbytes=nbytes)
    return Look(offset=0, count=WINDOWS, stride=(nbytes - WINDOW_BYTES) // (WINDOWS - 1), nbytes=WINDOW_BYTES)


def sample(shards: Sequence[memoryview]) -> int:
    """Digest of spread-out bytes of some shards; equal for equal contents.

    In the place of a shard may be what is looked at of it: of that, all is looked at.
    """
    return digest(b"".join(windows(len(data)).of(data) for data in shards))
