"""A few bytes of a large memory, as a digest: enough to tell apart what is not the same array."""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt.manifest.digest import digest, to_hex

WINDOWS = 16
"""Places in a shard that are looked at."""

WINDOW_BYTES = 256
"""Bytes that are looked at in each place; smaller shards are looked at whole."""


def sample(shards: Sequence[memoryview]) -> str:
    """Digest of spread-out bytes of some shards; equal for equal contents."""
    taken = bytearray()
    for data in shards:
        if len(data) <= WINDOWS * WINDOW_BYTES:
            taken += data
            continue
        step = (len(data) - WINDOW_BYTES) // (WINDOWS - 1)
        for i in range(WINDOWS):
            taken += data[i * step : i * step + WINDOW_BYTES]
    return to_hex(digest(bytes(taken)))
