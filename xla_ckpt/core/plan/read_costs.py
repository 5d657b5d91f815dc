"""Read costs of a storage: batch size, gap and concurrency that read plans depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """Parameters for fast reads from a storage."""

    batch_bytes: int
    """Maximum number of bytes per read batch, unless a scattered part spans more."""

    chunk_bytes: int
    """Number of bytes of a batch that are read and verified at a time. The whole batch if requests are costly."""

    direct_bytes: int
    """Minimum size (bytes) of contiguous reads that go directly into their destination."""

    max_gap: int
    """Maximum gap (bytes) between neighbouring reads that are merged, because a separate read would cost more."""

    concurrent_reads: int
    """Number of concurrent reads that the storage needs to be fast. 0: the caller's setting."""

    is_cached: bool
    """True if rereading is cheap because the page cache contains the bytes."""


DIRECT_BYTES = 256 * 1024
"""`ReadCosts.direct_bytes` of a disk."""

LOCAL_DISK_COSTS = ReadCosts(
    batch_bytes=8 * 1024 * 1024,
    chunk_bytes=2 * 1024 * 1024,
    direct_bytes=DIRECT_BYTES,
    max_gap=32 * 1024,
    concurrent_reads=0,
    is_cached=True,
)
"""Read costs of a local disk."""
