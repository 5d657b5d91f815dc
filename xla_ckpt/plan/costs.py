"""What reading costs in a storage, as far as a plan depends on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How a storage is read fast."""

    batch_bytes: int
    """Bytes that are read in one go, at most, unless a scattered part spans more."""

    piece_bytes: int
    """Bytes of a batch that are read and verified at a time: all of it where each read has a price of its own."""

    straight_bytes: int
    """Contiguous reads from this size on go straight into their destination."""

    max_gap: int
    """Neighbouring reads this close (bytes) are one read: skipping so little would cost more than reading it."""

    in_flight: int
    """Reads at a time that the storage needs to be fast. 0: as many as the caller says."""

    cached: bool
    """Whether what was read is cheap to read again: the page cache has it."""


STRAIGHT_BYTES = 256 * 1024
"""As `Costs.straight_bytes`, for a disk."""

DISK = Costs(
    batch_bytes=8 * 1024 * 1024,
    piece_bytes=2 * 1024 * 1024,
    straight_bytes=STRAIGHT_BYTES,
    max_gap=32 * 1024,
    in_flight=0,
    cached=True,
)
"""A disk of this machine."""
