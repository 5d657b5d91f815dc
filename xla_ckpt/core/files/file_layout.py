"""File layouts: the offsets of regions in a payload file, and the framing bytes around them.

`FileLayout` is the protocol that every file format implements. Sizes and offsets are known before any byte is written;
framing (headers, directories, padding) may depend on digests. `RegionTable` contains regions of arrays as columns.
`ZarrChunk` is an uncompressed chunk of an array of zarr, version 2.
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
"""(offset, bytes) of everything in a file that belongs to no region: headers, directories, padding."""


def merge_framing(pieces: Iterable[tuple[int, bytes]]) -> Framing:
    """The same bytes, with neighbours joined: each piece is a write of its own. The first one begins the file."""
    glue: list[tuple[int, bytes]] = []
    begun, text = 0, bytearray()
    for at, more in pieces:
        if at != begun + len(text):
            glue.append((begun, bytes(text)))
            begun, text = at, bytearray()
        text += more
    return [*glue, (begun, bytes(text))]


class FileLayout(Protocol):
    """The layout of one payload file. Its places are known before its bytes are."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    @property
    def region_ranges(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each region, in file order."""

    @property
    def needs_digests(self) -> bool:
        """Whether `build_framing` needs the digests of all blocks."""

    @property
    def needs_crc32(self) -> bool:
        """Whether `build_framing` needs the CRC-32 of each region."""

    def to_streaming(self) -> FileLayout:
        """The same file as it is written in the order of its bytes: with a glue that is known before the regions are.

        Itself, where that is so already, or cannot be.
        """

    def exclude_regions(self, regions: frozenset[int]) -> FileLayout | None:
        """The same file without these of its regions (indices into `region_ranges`); None if it needs all of them."""

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        """Everything between the regions in file order, from the digests of all blocks and the CRC-32 of each region.

        Both are empty where neither is wanted: the glue is known before any byte of the regions.
        """

    def create_record(self, path: str, framing: Framing, digests: Sequence[int]) -> FileRecord:
        """What the manifest says of the file."""


def get_static_framing(layout: FileLayout) -> Framing | None:
    """Everything between the regions of a file, if it is known before any byte of them; else None."""
    return None if layout.needs_digests or layout.needs_crc32 else layout.build_framing((), ())


def create_record_with_regions(path: str, layout: FileLayout, framing: Framing, digests: Sequence[int]) -> FileRecord:
    """What the manifest says of a file that does not hold the digests of its regions itself."""
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
    """What codecs have in common that know all between the regions without their digests, and have no place for these.

    So the manifest keeps the digests.
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
    """A region of an array as it stands in a payload file."""

    key: str
    """Its key in the file."""

    dtype: DType
    box: Box
    """Region of the global array."""

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.box.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable(ColumnarSequence[Region]):
    """Regions, in file order: a row for each. What those of one type and box have in common is said once."""

    keys: Sequence[str]
    """Their keys in the file."""

    kinds: Sequence[tuple[DType, Box]]
    kind: IntArray
    """The index of each region's form."""

    @classmethod
    def from_regions(cls, regions: Sequence[Region]) -> RegionTable:
        """The columns of some regions."""
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
        """Some of the regions."""
        return RegionTable([self.keys[row] for row in rows.tolist()], self.kinds, self.kind[rows])

    @property
    def nbytes(self) -> IntArray:
        """Bytes of each region."""
        sizes = np.array([box.size * dtype.itemsize for dtype, box in self.kinds], np.int64)
        return np.asarray(sizes[self.kind], np.int64)


@dataclass(frozen=True, slots=True)
class ZarrChunk(StaticFileLayout):
    """The codec of such a file (see `xla_ckpt.core.files.file_layout.FileLayout`).

    All chunks of an array have one size.
    """

    region_ranges: Sequence[tuple[int, int]]
    """See `FileLayout`: the runs of elements of the array in it."""

    size: int
    """Bytes of the file: a chunk at an end of the array is filled up."""

    def exclude_regions(self, regions: frozenset[int]) -> ZarrChunk | None:
        """See `FileLayout`: without all of them the file is not written at all."""
        return self if len(regions) == len(self.region_ranges) else None

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:  # what every codec gets
        gaps, at = [], 0
        for offset, nbytes in (*self.region_ranges, (self.size, 0)):
            if offset > at:
                gaps.append((at, bytes(offset - at)))
            at = offset + nbytes
        return gaps
