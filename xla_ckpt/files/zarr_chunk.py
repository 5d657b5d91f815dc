"""A chunk of an array of zarr, version 2, as a file: its elements in C order, not compressed.

(zarr's specification, version 2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.files.codec import Glue, record_with_regions
from xla_ckpt.manifest.records import FileRecord


@dataclass(frozen=True, slots=True)
class ZarrChunk:
    """The codec of such a file (see `xla_ckpt.files.codec.Codec`). All chunks of an array have one size."""

    nbytes: int
    """Bytes of the elements of the array in it."""

    size: int
    """Bytes of the file: the last chunk of an array is filled up."""

    wants_digests: bool = False
    wants_crc32: bool = False

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """See `Codec`."""
        return [(0, self.nbytes)]

    def streamed(self) -> ZarrChunk:
        """See `Codec`."""
        return self

    def without(self, regions: frozenset[int]) -> ZarrChunk | None:  # what every codec gets
        """See `Codec`."""
        return None

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:  # likewise
        """See `Codec`."""
        return [(self.nbytes, bytes(self.size - self.nbytes))] if self.size > self.nbytes else []

    def record(self, path: str, glue: Glue, digests: Sequence[int]) -> FileRecord:
        """See `Codec`: a chunk has no place for our digests, so the manifest keeps them."""
        return record_with_regions(path, self, glue, digests)
