"""Read costs of a storage: batch size, gap, and concurrency that plans depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """How a storage is read fast."""

    batch_bytes: int
    """Bytes that are read in one go, at most, unless a scattered part spans more."""

    chunk_bytes: int
    """Bytes of a batch that are read and verified at a time: all of it where each read has a price of its own."""

    direct_bytes: int
    """Contiguous reads from this size on go straight into their destination."""

    max_gap: int
    """Neighbouring reads this close (bytes) are one read: skipping so little would cost more than reading it."""

    concurrent_reads: int
    """Reads at a time that the storage needs to be fast. 0: as many as the caller says."""

    is_cached: bool
    """Whether what was read is cheap to read again: the page cache has it."""


DIRECT_BYTES = 256 * 1024
"""As `ReadCosts.direct_bytes`, for a disk."""

LOCAL_DISK_COSTS = ReadCosts(
    batch_bytes=8 * 1024 * 1024,
    chunk_bytes=2 * 1024 * 1024,
    direct_bytes=DIRECT_BYTES,
    max_gap=32 * 1024,
    concurrent_reads=0,
    is_cached=True,
)
"""A disk of this machine."""
