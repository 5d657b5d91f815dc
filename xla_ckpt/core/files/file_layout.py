"""File layouts: the offsets of regions in a payload file, and the framing bytes around them.

`FileLayout` is the protocol that every file format implements. Sizes and offsets are known before any byte is written;
framing (headers, directories, padding) may depend on digests. `RegionTable` contains regions of arrays as columns.
`ZarrChunk` is an uncompressed chunk of a zarr v2 array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from xla_ckpt.core.checksum import compute_digest
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import ColumnarSequence, slots_dataclass
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.sharding.box import Box, IntArray

Framing = Sequence[tuple[int, bytes]]
"""(offset, bytes) of everything in a file that is not part of a region: headers, directories, padding."""


def merge_framing(pieces: Iterable[tuple[int, bytes]]) -> Framing:
    """Merge adjacent pieces, because each piece is a separate write. The first piece must start at offset 0."""
    glue: list[tuple[int, bytes]] = []
    begun, text = 0, bytearray()
    for at, more in pieces:
        if at != begun + len(text):
            glue.append((begun, bytes(text)))
            begun, text = at, bytearray()
        text += more
    return [*glue, (begun, bytes(text))]


class FileLayout(Protocol):
    """Layout of one payload file. Offsets are known before the bytes."""

    @property
    def size(self) -> int:
        """Number of bytes of the file."""

    @property
    def region_ranges(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each region, in file order."""

    @property
    def needs_digests(self) -> bool:
        """True if `build_framing` needs the digests of all blocks."""

    @property
    def needs_crc32(self) -> bool:
        """True if `build_framing` needs the CRC-32 of each region."""

    def to_streaming(self) -> FileLayout:
        """Return the layout of a file that is written sequentially, whose framing is known before the regions.

        Returns the layout itself if its framing is already known, or always depends on the regions.
        """

    def exclude_regions(self, regions: frozenset[int]) -> FileLayout | None:
        """Return the layout without these regions (indices into `region_ranges`), or None if it needs all of them."""

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        """Return the bytes between the regions, in file order.

        Args:
            digests: Digests of all blocks. Empty if not needed.
            crcs: CRC-32 of each region. Empty if not needed.
        """

    def create_record(self, path: str, framing: Framing, digests: Sequence[int]) -> FileRecord:
        """Create the manifest's record of the file."""


def get_static_framing(layout: FileLayout) -> Framing | None:
    """Return the framing of a file if it does not depend on the regions, otherwise None."""
    return None if layout.needs_digests or layout.needs_crc32 else layout.build_framing((), ())


def create_record_with_regions(path: str, layout: FileLayout, framing: Framing, digests: Sequence[int]) -> FileRecord:
    """Create the record of a file that does not contain the digests of its regions."""
    between = b"".join(text for _, text in framing)
    return FileRecord(
        path=path,
        size=layout.size,
        framing_bytes=len(between),
        framing_digest=compute_digest(between),
        regions=tuple((at, nbytes) for at, nbytes in layout.region_ranges if nbytes),
        block_digests=tuple(digests),
    )


class StaticFileLayout:
    """Base class of layouts whose framing does not depend on the regions, and does not contain their digests.

    The manifest contains the digests instead.
    """

    __slots__ = ()

    needs_digests = False
    needs_crc32 = False

    def to_streaming(self) -> Self:
        return self

    def create_record(self: FileLayout, path: str, framing: Framing, digests: Sequence[int]) -> FileRecord:
        return create_record_with_regions(path, self, framing, digests)


@slots_dataclass()
class Region:
    """A region of an array in a payload file."""

    key: str
    """Key in the file."""

    dtype: DType
    box: Box
    """Region of the global array."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the region."""
        return self.box.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable(ColumnarSequence[Region]):
    """Regions in file order: a row per region. Regions with equal dtype and box share one entry of `kinds`."""

    keys: Sequence[str]
    """Keys in the file."""

    kinds: Sequence[tuple[DType, Box]]
    kind: IntArray
    """Index into `kinds`, per region."""

    @classmethod
    def from_regions(cls, regions: Sequence[Region]) -> RegionTable:
        """Create the columns from a sequence of regions."""
        if isinstance(regions, RegionTable):
            return regions
        forms: dict[tuple[DType, Box], int] = {}
        form = [forms.setdefault((region.dtype, region.box), len(forms)) for region in regions]
        return cls([region.key for region in regions], list(forms), np.array(form, np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    def get_row(self, index: int) -> Region:
        return Region(self.keys[index], *self.kinds[self.kind[index]])

    def select(self, rows: IntArray) -> RegionTable:
        """Return some of the regions."""
        return RegionTable([self.keys[row] for row in rows.tolist()], self.kinds, self.kind[rows])

    @property
    def nbytes(self) -> IntArray:
        """Number of bytes of each region."""
        sizes = np.array([box.size * dtype.itemsize for dtype, box in self.kinds], np.int64)
        return np.asarray(sizes[self.kind], np.int64)


@dataclass(frozen=True, slots=True)
class ZarrChunk(StaticFileLayout):
    """Layout of a zarr chunk (see `FileLayout`).

    All chunks of an array have the same size.
    """

    region_ranges: Sequence[tuple[int, int]]
    """(offset, bytes) of each run of array elements in the chunk (see `FileLayout`)."""

    size: int
    """Number of bytes of the file. Chunks at the end of the array are padded."""

    def exclude_regions(self, regions: frozenset[int]) -> ZarrChunk | None:
        """Return self if all regions are excluded, because the file is then not written; otherwise None (see
        `FileLayout`).
        """
        return self if len(regions) == len(self.region_ranges) else None

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:  # arguments of all layouts
        gaps, at = [], 0
        for offset, nbytes in (*self.region_ranges, (self.size, 0)):
            if offset > at:
                gaps.append((at, bytes(offset - at)))
            at = offset + nbytes
        return gaps
