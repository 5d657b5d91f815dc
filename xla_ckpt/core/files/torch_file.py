"""torch.save files: the layout of the uncompressed zip with a pickle and storages.

The bytes of a storage begin at a multiple of 64, as in torch >= 2.6. A storage may consist of several regions with
digests of their own: for a tensor of one rank these are the parts that are contiguous in the global array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_ckpt.core.checksum import combine_crc32, compute_crc32
from xla_ckpt.core.files.file_layout import Framing, StaticFileLayout, merge_framing

STORAGE_ALIGNMENT = 64
"""The bytes of each record begin at a multiple of this, as torch >= 2.6 writes them."""

ZIP64_LIMIT = 0xFFFFFFFF
"""What stands in a field of 32 bits for a number that does not fit into it: the number is in an extra field then."""

_ZIP64_MAX_RECORDS = 0xFFFF
"""Likewise in a field of 16 bits."""

_UTF8 = 0x0800
"""Flag of a record: its name is UTF-8."""

_DATE = 0x0021
"""1 January 1980. Equal states give equal files, so no time is written."""

_STORED = 0
"""Compression method of all records: none."""

_VERSION = 20
_VERSION_64 = 45
"""Version of the format that a reader has to understand, with zip64's extra fields and without."""

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""Local header, in front of each record."""

CENTRAL_HEADER = struct.Struct("<4s6H3L5H2L")
"""Entry of the central directory, one for each record: signature, two versions, flags, method, time, date, CRC-32,
sizes packed and unpacked, lengths of name, extra field and comment, disk, attributes within and without, offset of the
local header."""

ZIP64_END = struct.Struct("<4sQ2H2L4Q")
"""End of the central directory in zip64: signature, size, versions, disks, records here and in all, size and offset of
the directory."""

ZIP64_LOCATOR = struct.Struct("<4sLQL")
"""Where that end lies: signature, disk, its offset, number of disks."""

END_OF_DIRECTORY = struct.Struct("<4s4H2LH")
"""End of the file: signature, this disk, the directory's disk, records here and in all, size and offset of the
directory, length of a comment."""

_EXTRA_HEADER_BYTES = 4
"""Bytes of an extra field before its content: its name and its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ZipRecord:
    """A member of the zip, and where it lies."""

    name: bytes
    content: bytes | None
    """Its bytes; None for a storage."""

    nbytes: int
    header_offset: int
    """Offset of its local header."""

    data_offset: int
    """Offset of its first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(StaticFileLayout):
    """The layout of one file."""

    archive_name: str
    """Name of the folder inside of the zip: torch.save takes the file's own, without its ending."""

    pickled: bytes
    """The pickle, which names storage ``0``, ``1``..."""

    storages: tuple[tuple[int, ...], ...] = ()
    """Bytes of each region of each storage."""

    _records: tuple[_ZipRecord, ...] = field(init=False, repr=False)

    needs_crc32 = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", tuple(self._build_records()))

    def _build_records(self) -> Iterator[_ZipRecord]:
        """The records in the order of torch.save, each with its place."""
        members: list[tuple[str, bytes | None, int]] = [
            ("data.pkl", self.pickled, len(self.pickled)),
            # No ".format_version": by it torch takes storages to lie as its own writer places them, and reads others
            # where these do not lie, with map_location="meta" or calculate_storage_offsets.
            (".storage_alignment", b"64", 2),
            ("byteorder", b"little", 6),
            *((f"data/{i}", None, sum(parts)) for i, parts in enumerate(self.storages)),
            ("version", b"3\n", 2),
        ]
        at = 0
        for name, small, nbytes in members:
            called = f"{self.archive_name}/{name}".encode()
            # The header ends with an extra field that fills it up to the alignment.
            head = at + LOCAL_HEADER.size + len(called) + len(_build_zip64_sizes(nbytes)) + _EXTRA_HEADER_BYTES
            start = -(-head // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
            yield _ZipRecord(name=called, content=small, nbytes=nbytes, header_offset=at, data_offset=start)
            at = start + nbytes

    @property
    def size(self) -> int:
        last = self._records[-1]
        # The sizes of all headers follow from names and sizes alone: the file is made before its CRCs are known.
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
        """None: the file needs all of its regions, because they are the storages that the pickle names."""

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        return merge_framing(self._iterate_framing(crcs))

    def _iterate_framing(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all that belongs to no region."""
        sums = iter(self._compute_storage_crcs(crcs))
        checks = [compute_crc32(r.content) if r.content is not None else next(sums) for r in self._records]
        for record, check in zip(self._records, checks, strict=True):
            yield record.header_offset, _build_local_header(record, check)
            if record.content is not None:
                yield record.data_offset, record.content
        last = self._records[-1]
        yield last.data_offset + last.nbytes, self._build_directory(checks)

    def _compute_storage_crcs(self, crcs: Sequence[int]) -> Iterator[int]:
        """The CRC-32 of each storage, from those of its regions."""
        at = 0
        for parts in self.storages:
            yield combine_crc32(zip(crcs[at : at + len(parts)], parts, strict=True))
            at += len(parts)

    def _build_directory(self, checks: Sequence[int]) -> bytes:
        """What lies behind the last record: the central directory, and the ends of it in zip64 and in zip."""
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
        # The size that the end of zip64 names is without its signature and without the field of that size.
        text += ZIP64_END.pack(
            b"PK\6\6", ZIP64_END.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start
        )
        text += ZIP64_LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        few = min(count, _ZIP64_MAX_RECORDS)
        return bytes(
            text + END_OF_DIRECTORY.pack(b"PK\5\6", 0, 0, few, few, min(size, ZIP64_LIMIT), min(start, ZIP64_LIMIT), 0)
        )


def _build_zip64_sizes(nbytes: int) -> bytes:
    """The extra field of a local header, for a size that 32 bits do not hold."""
    return struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= ZIP64_LIMIT else b""


def _build_zip64_extra(record: _ZipRecord) -> bytes:
    """The extra field of an entry in the directory, for whatever 32 bits do not hold: its sizes, its offset."""
    values: list[int] = []
    if record.nbytes >= ZIP64_LIMIT:
        values += [record.nbytes, record.nbytes]
    if record.header_offset >= ZIP64_LIMIT:
        values.append(record.header_offset)
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _build_local_header(record: _ZipRecord, check: int) -> bytes:
    """The header in front of a record, filled up to where its bytes begin."""
    sizes = _build_zip64_sizes(record.nbytes)
    fill = (
        record.data_offset
        - record.header_offset
        - LOCAL_HEADER.size
        - len(record.name)
        - len(sizes)
        - _EXTRA_HEADER_BYTES
    )
    extra = sizes + struct.pack("<2s1H", b"FB", fill) + b"Z" * fill  # torch's own name for padding, and its content
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
