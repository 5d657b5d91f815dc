"""Files as torch.save writes them: a zip of a pickle and of storages, uncompressed. Only their layout: pure.

The bytes of a storage begin at a multiple of 64, as in torch >= 2.6, and a storage may consist of several regions,
each with digests of its own: of a tensor of one rank they are the parts that are neighbours in the global array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_ckpt.files.codec import Glue, PlainCodec, joined_glue
from xla_ckpt.files.crc32 import crc32, joined_crc32

STORAGE_ALIGNMENT = 64
"""The bytes of each record begin at a multiple of this, as torch >= 2.6 writes them."""

LARGE = 0xFFFFFFFF
"""What stands in a field of 32 bits for a number that does not fit into it: the number is in an extra field then."""

_MANY = 0xFFFF
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

LOCAL_ENTRY = struct.Struct("<4s5H3L2H")
"""Local header, in front of each record."""

CENTRAL_ENTRY = struct.Struct("<4s6H3L5H2L")
"""Entry of the central directory, one for each record: signature, two versions, flags, method, time, date, CRC-32,
sizes packed and unpacked, lengths of name, extra field and comment, disk, attributes within and without, offset of the
local header."""

END_64 = struct.Struct("<4sQ2H2L4Q")
"""End of the central directory in zip64: signature, size, versions, disks, records here and in all, size and offset of
the directory."""

END_64_AT = struct.Struct("<4sLQL")
"""Where that end lies: signature, disk, its offset, number of disks."""

END = struct.Struct("<4s4H2LH")
"""End of the file: signature, this disk, the directory's disk, records here and in all, size and offset of the
directory, length of a comment."""

_FILL_HEAD = 4
"""Bytes of an extra field before its content: its name and its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A member of the zip, and where it lies."""

    name: bytes
    small: bytes | None
    """Its bytes; None for a storage."""

    nbytes: int
    header: int
    """Offset of its local header."""

    start: int
    """Offset of its first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(PlainCodec):
    """The layout of one file."""

    stem: str
    """Name of the folder inside of the zip: torch.save takes the file's own, without its ending."""

    pickled: bytes
    """The pickle, which names storage ``0``, ``1``..."""

    storages: tuple[tuple[int, ...], ...] = ()
    """Bytes of each region of each storage."""

    _records: tuple[_Record, ...] = field(init=False, repr=False)

    wants_crc32 = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", tuple(self._laid_out()))

    def _laid_out(self) -> Iterator[_Record]:
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
            called = f"{self.stem}/{name}".encode()
            # The header ends with an extra field that fills it up to the alignment.
            head = at + LOCAL_ENTRY.size + len(called) + len(_sizes64(nbytes)) + _FILL_HEAD
            start = -(-head // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
            yield _Record(name=called, small=small, nbytes=nbytes, header=at, start=start)
            at = start + nbytes

    @property
    def size(self) -> int:
        last = self._records[-1]
        # The sizes of all headers follow from names and sizes alone: the file is made before its CRCs are known.
        directory = sum(CENTRAL_ENTRY.size + len(r.name) + len(_directory64(r)) for r in self._records)
        return last.start + last.nbytes + directory + END_64.size + END_64_AT.size + END.size

    @property
    def places(self) -> list[tuple[int, int]]:
        regions = []
        storages = (record for record in self._records if record.small is None)
        for record, parts in zip(storages, self.storages, strict=True):
            at = record.start
            for nbytes in parts:
                regions.append((at, nbytes))
                at += nbytes
        return regions

    def without(self, regions: frozenset[int]) -> None:
        """None: the file needs all of its regions, because they are the storages that the pickle names."""

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:
        return joined_glue(self._around(crcs))

    def _around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all that belongs to no region."""
        sums = iter(self._sums(crcs))
        checks = [crc32(r.small) if r.small is not None else next(sums) for r in self._records]
        for record, check in zip(self._records, checks, strict=True):
            yield record.header, _local_header(record, check)
            if record.small is not None:
                yield record.start, record.small
        last = self._records[-1]
        yield last.start + last.nbytes, self._directory(checks)

    def _sums(self, crcs: Sequence[int]) -> Iterator[int]:
        """The CRC-32 of each storage, from those of its regions."""
        at = 0
        for parts in self.storages:
            yield joined_crc32(zip(crcs[at : at + len(parts)], parts, strict=True))
            at += len(parts)

    def _directory(self, checks: Sequence[int]) -> bytes:
        """What lies behind the last record: the central directory, and the ends of it in zip64 and in zip."""
        text = bytearray()
        for record, check in zip(self._records, checks, strict=True):
            extra = _directory64(record)
            version = _VERSION_64 if extra else _VERSION
            nbytes = min(record.nbytes, LARGE)
            text += CENTRAL_ENTRY.pack(
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
                min(record.header, LARGE),
            )
            text += record.name + extra
        last, count, size = self._records[-1], len(self._records), len(text)
        start = last.start + last.nbytes
        # The size that the end of zip64 names is without its signature and without the field of that size.
        text += END_64.pack(b"PK\6\6", END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start)
        text += END_64_AT.pack(b"PK\6\7", 0, start + size, 1)
        few = min(count, _MANY)
        return bytes(text + END.pack(b"PK\5\6", 0, 0, few, few, min(size, LARGE), min(start, LARGE), 0))


def _sizes64(nbytes: int) -> bytes:
    """The extra field of a local header, for a size that 32 bits do not hold."""
    return struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= LARGE else b""


def _directory64(record: _Record) -> bytes:
    """The extra field of an entry in the directory, for whatever 32 bits do not hold: its sizes, its offset."""
    values: list[int] = []
    if record.nbytes >= LARGE:
        values += [record.nbytes, record.nbytes]
    if record.header >= LARGE:
        values.append(record.header)
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _local_header(record: _Record, check: int) -> bytes:
    """The header in front of a record, filled up to where its bytes begin."""
    sizes = _sizes64(record.nbytes)
    fill = record.start - record.header - LOCAL_ENTRY.size - len(record.name) - len(sizes) - _FILL_HEAD
    extra = sizes + struct.pack("<2s1H", b"FB", fill) + b"Z" * fill  # torch's own name for padding, and its content
    nbytes = min(record.nbytes, LARGE)
    head = LOCAL_ENTRY.pack(
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
