"""A chunk of an array of zarr, version 2, as a file: its elements in C order, not compressed.

(zarr's specification, version 2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.files.codec import Glue, PlainCodec


@dataclass(frozen=True, slots=True)
class ZarrChunk(PlainCodec):
    """The codec of such a file (see `xla_ckpt.files.codec.Codec`). All chunks of an array have one size."""

    places: Sequence[tuple[int, int]]
    """See `Codec`: the runs of elements of the array in it."""

    size: int
    """Bytes of the file: a chunk at an end of the array is filled up."""

    def without(self, regions: frozenset[int]) -> ZarrChunk | None:
        """See `Codec`: without all of them the file is not written at all."""
        return self if len(regions) == len(self.places) else None

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:  # what every codec gets
        gaps, at = [], 0
        for offset, nbytes in (*self.places, (self.size, 0)):
            if offset > at:
                gaps.append((at, bytes(offset - at)))
            at = offset + nbytes
        return gaps
