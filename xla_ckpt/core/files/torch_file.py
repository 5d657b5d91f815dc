"""torch.save files: layout of the uncompressed zip with a pickle and storages.

The bytes of a storage start at a multiple of 64, as in torch >= 2.6. A storage may consist of several regions with
separate digests: for one rank's tensor these are the parts that are contiguous in the global array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_ckpt.core.checksum import combine_crc32, compute_crc32
from xla_ckpt.core.files.file_layout import Framing, StaticFileLayout, merge_framing

STORAGE_ALIGNMENT = 64
"""Alignment of the bytes of each record, as in torch >= 2.6."""

ZIP64_LIMIT = 0xFFFFFFFF
"""Value of a 32-bit field whose number does not fit. The number is then in an extra field."""

_ZIP64_MAX_RECORDS = 0xFFFF
"""Value of a 16-bit field whose number does not fit."""

_UTF8 = 0x0800
"""Flag of a record with a UTF-8 name."""

_DATE = 0x0021
"""1 January 1980. Equal states give equal files, so no time is stored."""

_STORED = 0
"""Compression method of all records: none."""

_VERSION = 20
_VERSION_64 = 45
"""Zip versions required to read the file, with (`_VERSION_64`) and without (`_VERSION`) zip64 extra fields."""

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""Local header before each record."""

CENTRAL_HEADER = struct.Struct("<4s6H3L5H2L")
"""Entry of the central directory, one per record: signature, two versions, flags, method, time, date, CRC-32,
compressed and uncompressed size, lengths of name, extra field and comment, disk, internal and external attributes,
offset of the local header."""

ZIP64_END = struct.Struct("<4sQ2H2L4Q")
"""End of the central directory in zip64: signature, size, versions, disks, records on this disk and in total, size and
offset of the directory."""

ZIP64_LOCATOR = struct.Struct("<4sLQL")
"""Location of that end: signature, disk, its offset, number of disks."""

END_OF_DIRECTORY = struct.Struct("<4s4H2LH")
"""End of the file: signature, this disk, the directory's disk, records on this disk and in total, size and offset of
the directory, length of the comment."""

_EXTRA_HEADER_BYTES = 4
"""Number of bytes of an extra field before its content: its id and its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ZipRecord:
    """A member of the zip, and its location."""

    name: bytes
    content: bytes | None
    """Bytes of the member, or None for a storage."""

    nbytes: int
    header_offset: int
    """Offset of the local header."""

    data_offset: int
    """Offset of the first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(StaticFileLayout):
    """Layout of one torch.save file."""

    archive_name: str
    """Name of the folder inside the zip. `torch.save` uses the file name without its extension."""

    pickled: bytes
    """The pickle, which refers to storages as ``0``, ``1``..."""

    storages: tuple[tuple[int, ...], ...] = ()
    """Number of bytes of each region of each storage."""

    _records: tuple[_ZipRecord, ...] = field(init=False, repr=False)

    needs_crc32 = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", tuple(self._build_records()))

    def _build_records(self) -> Iterator[_ZipRecord]:
        """Yield the records in torch.save's order, with their locations."""
        members: list[tuple[str, bytes | None, int]] = [
            ("data.pkl", self.pickled, len(self.pickled)),
            # Without ".format_version", because with it torch assumes its own writer's storage offsets and reads at
            # wrong offsets with map_location="meta" or calculate_storage_offsets.
            (".storage_alignment", b"64", 2),
            ("byteorder", b"little", 6),
            *((f"data/{i}", None, sum(parts)) for i, parts in enumerate(self.storages)),
            ("version", b"3\n", 2),
        ]
        at = 0
        for name, small, nbytes in members:
            called = f"{self.archive_name}/{name}".encode()
            # The header ends with an extra field that pads it to the alignment.
            head = at + LOCAL_HEADER.size + len(called) + len(_build_zip64_sizes(nbytes)) + _EXTRA_HEADER_BYTES
            start = -(-head // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
            yield _ZipRecord(name=called, content=small, nbytes=nbytes, header_offset=at, data_offset=start)
            at = start + nbytes

    @property
    def size(self) -> int:
        last = self._records[-1]
        # The sizes of all headers depend only on names and sizes, because the file is created before its CRCs are
        # known.
        directory = sum(CENTRAL_HEADER.size + len(r.name) + len(_build_zip64_extra(r)) for r in self._records)
        return last.data_offset + last.nbytes + directory + ZIP64_END.size + ZIP64_LOCATOR.size + END_OF_DIRECTORY.size

    @property
    def region_ranges(self) -> list[tuple[int, int]]:
        regions = []
        storages = (record for record in self._records if record.content is None)
        for record, parts in zip(storages, self.storages, strict=True):
            at = record.data_offset
            for nbytes in parts:
                regions.append((at, nbytes))
                at += nbytes
        return regions

    def exclude_regions(self, regions: frozenset[int]) -> None:
        """Return None, because the pickle refers to all regions as its storages."""

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        return merge_framing(self._iterate_framing(crcs))

    def _iterate_framing(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of everything outside of the regions."""
        sums = iter(self._compute_storage_crcs(crcs))
        checks = [compute_crc32(r.content) if r.content is not None else next(sums) for r in self._records]
        for record, check in zip(self._records, checks, strict=True):
            yield record.header_offset, _build_local_header(record, check)
            if record.content is not None:
                yield record.data_offset, record.content
        last = self._records[-1]
        yield last.data_offset + last.nbytes, self._build_directory(checks)

    def _compute_storage_crcs(self, crcs: Sequence[int]) -> Iterator[int]:
        """Yield the CRC-32 of each storage, combined from its regions."""
        at = 0
        for parts in self.storages:
            yield combine_crc32(zip(crcs[at : at + len(parts)], parts, strict=True))
            at += len(parts)

    def _build_directory(self, checks: Sequence[int]) -> bytes:
        """Build the bytes after the last record: the central directory, and its zip64 and zip end records."""
        text = bytearray()
        for record, check in zip(self._records, checks, strict=True):
            extra = _build_zip64_extra(record)
            version = _VERSION_64 if extra else _VERSION
            nbytes = min(record.nbytes, ZIP64_LIMIT)
            text += CENTRAL_HEADER.pack(
                b"PK\1\2",
                version,  # made by
                version,  # needed
                _UTF8,
                _STORED,
                0,  # time
                _DATE,
                check,
                nbytes,  # compressed
                nbytes,
                len(record.name),
                len(extra),
                0,  # length of a comment
                0,  # number of a disk
                0,  # internal attributes
                0,  # external attributes
                min(record.header_offset, ZIP64_LIMIT),
            )
            text += record.name + extra
        last, count, size = self._records[-1], len(self._records), len(text)
        start = last.data_offset + last.nbytes
        # The size field of the zip64 end record excludes the signature and the size field itself.
        text += ZIP64_END.pack(
            b"PK\6\6", ZIP64_END.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start
        )
        text += ZIP64_LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        few = min(count, _ZIP64_MAX_RECORDS)
        return bytes(
            text + END_OF_DIRECTORY.pack(b"PK\5\6", 0, 0, few, few, min(size, ZIP64_LIMIT), min(start, ZIP64_LIMIT), 0)
        )


def _build_zip64_sizes(nbytes: int) -> bytes:
    """Return the zip64 extra field of a local header if the size exceeds 32 bits, otherwise no bytes."""
    return struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= ZIP64_LIMIT else b""


def _build_zip64_extra(record: _ZipRecord) -> bytes:
    """Return the zip64 extra field of a directory entry for sizes and offsets that exceed 32 bits."""
    values: list[int] = []
    if record.nbytes >= ZIP64_LIMIT:
        values += [record.nbytes, record.nbytes]
    if record.header_offset >= ZIP64_LIMIT:
        values.append(record.header_offset)
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _build_local_header(record: _ZipRecord, check: int) -> bytes:
    """Build the local header of a record, padded up to the record's first byte."""
    sizes = _build_zip64_sizes(record.nbytes)
    fill = (
        record.data_offset
        - record.header_offset
        - LOCAL_HEADER.size
        - len(record.name)
        - len(sizes)
        - _EXTRA_HEADER_BYTES
    )
    extra = sizes + struct.pack("<2s1H", b"FB", fill) + b"Z" * fill  # torch's id and content of padding
    nbytes = min(record.nbytes, ZIP64_LIMIT)
    head = LOCAL_HEADER.pack(
        b"PK\3\4",
        _VERSION_64 if sizes else _VERSION,
        _UTF8,
        _STORED,
        0,  # time
        _DATE,
        check,
        nbytes,  # compressed
        nbytes,
        len(record.name),
        len(extra),
    )
    return head + record.name + extra
