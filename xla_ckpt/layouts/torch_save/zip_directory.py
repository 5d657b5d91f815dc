"""The directory of a zip, which is found from the zip's end. Pure: a caller hands over the bytes.

The directory has the name, the size, the CRC-32 and the place of each record. So who has compared it with a digest
knows what every record has to be.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from xla_ckpt.files.torch_file import CENTRAL_ENTRY, END, END_64, END_64_AT, LARGE

Take = Callable[[int, int], bytes | memoryview]
"""Bytes of a zip, from their offset and their number. ValueError where the zip ends before them."""


@dataclass(frozen=True, slots=True)
class DirectoryAt:
    """The directory of a zip: one entry for each record."""

    offset: int
    nbytes: int
    records: int


def directory_at(take: Take, nbytes: int) -> DirectoryAt:
    """Where the directory of a zip lies.

    Raises:
        ValueError: It does not end like a zip without a comment, which is how torch ends it.
        struct.error: `take` returned fewer bytes than it was asked for.
    """
    end = nbytes - END.size
    if end < 0:
        raise ValueError("it is shorter than the end of one")
    signature, *_, count, size, offset, _ = END.unpack(take(end, END.size))
    if signature != b"PK\5\6":
        raise ValueError("it does not end like one")
    if end >= END_64_AT.size:
        signature, _, at, _ = END_64_AT.unpack(take(end - END_64_AT.size, END_64_AT.size))
        if signature == b"PK\6\7":
            signature, *_, count, size, offset = END_64.unpack(take(at, END_64.size))
            if signature != b"PK\6\6":
                raise ValueError("its larger end is missing")
    return DirectoryAt(offset, size, count)


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of a zip, as the zip's directory has it."""

    header: int
    """Offset of its local header in the zip."""

    nbytes: int
    crc: int
    plain: bool
    """Whether its bytes stand there as they are: neither compressed nor encrypted."""


def records_of(take: Take, nbytes: int) -> dict[str, ZipRecord]:
    """The records of a zip of so many bytes, by name.

    Raises:
        ValueError, struct.error, IndexError: There is no directory of a zip at its end.
    """
    where = directory_at(take, nbytes)
    data = bytes(take(where.offset, where.nbytes))
    records: dict[str, ZipRecord] = {}
    at = 0
    for _ in range(where.records):
        entry = CENTRAL_ENTRY.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, *_, header = entry
        if signature != b"PK\1\2":
            raise ValueError("its directory is damaged")
        at += CENTRAL_ENTRY.size
        name = data[at : at + named].decode()
        if LARGE in (packed, size, header):
            size, packed, header = _large(data[at + named : at + named + extra], size, packed, header)
        if name in records:
            raise ValueError(f"it has two records {name}")
        plain = method == 0 and not flags & 1 and packed == size
        records[name] = ZipRecord(header, packed, crc, plain)
        at += named + extra + comment
    if at > len(data):
        raise ValueError("its directory is cut off")
    return records


def _large(extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes and offset of an entry, of which some are in its extra field.

    Raises:
        ValueError: They are not there.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            fields = [values.pop(0) if value == LARGE else value for value in (nbytes, packed, header)]
            return fields[0], fields[1], fields[2]
        at += 4 + size
    raise ValueError("a size is missing in its directory")
