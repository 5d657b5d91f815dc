"""Parse the central directory of a zip, from its end. Pure: the caller passes a function that reads bytes.

The directory contains the name, size, CRC-32 and location of each record, so that a digest of the directory verifies
the expected content of every record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from xla_ckpt.core.files.torch_file import (
    CENTRAL_HEADER,
    END_OF_DIRECTORY,
    ZIP64_END,
    ZIP64_LIMIT,
    ZIP64_LOCATOR,
)

ReadBytes = Callable[[int, int], bytes | memoryview]
"""Function that reads bytes of a zip, given offset and number. Raises ValueError if the zip ends before them."""


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """Location of the central directory of a zip. It has one entry per record."""

    offset: int
    nbytes: int
    records: int


def find_zip_directory(read_bytes: ReadBytes, nbytes: int) -> ZipDirectory:
    """Locate the central directory of a zip.

    Raises:
        ValueError: The file does not end like a zip without a comment, as written by torch.
        struct.error: `read_bytes` returned fewer bytes than requested.
    """
    end = nbytes - END_OF_DIRECTORY.size
    if end < 0:
        raise ValueError("it is shorter than the end of one")
    signature, *_, count, size, offset, _ = END_OF_DIRECTORY.unpack(read_bytes(end, END_OF_DIRECTORY.size))
    if signature != b"PK\5\6":
        raise ValueError("it does not end like one")
    if end >= ZIP64_LOCATOR.size:
        signature, _, at, _ = ZIP64_LOCATOR.unpack(read_bytes(end - ZIP64_LOCATOR.size, ZIP64_LOCATOR.size))
        if signature == b"PK\6\7":
            signature, *_, count, size, offset = ZIP64_END.unpack(read_bytes(at, ZIP64_END.size))
            if signature != b"PK\6\6":
                raise ValueError("its larger end is missing")
    return ZipDirectory(offset, size, count)


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """Record of a zip, as listed in its central directory."""

    header: int
    """Offset of its local header in the zip."""

    nbytes: int
    crc: int
    is_plain: bool
    """True if its bytes are neither compressed nor encrypted."""


def read_zip_records(read_bytes: ReadBytes, nbytes: int) -> dict[str, ZipRecord]:
    """Read the records of a zip of `nbytes` bytes, by name.

    Raises:
        ValueError, struct.error, IndexError: The zip has no valid central directory.
    """
    where = find_zip_directory(read_bytes, nbytes)
    data = bytes(read_bytes(where.offset, where.nbytes))
    records: dict[str, ZipRecord] = {}
    at = 0
    for _ in range(where.records):
        entry = CENTRAL_HEADER.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, *_, header = entry
        if signature != b"PK\1\2":
            raise ValueError("its directory is damaged")
        at += CENTRAL_HEADER.size
        name = data[at : at + named].decode()
        if ZIP64_LIMIT in (packed, size, header):
            size, packed, header = _read_zip64_sizes(data[at + named : at + named + extra], size, packed, header)
        if name in records:
            raise ValueError(f"it has two records {name}")
        plain = method == 0 and not flags & 1 and packed == size
        records[name] = ZipRecord(header, packed, crc, plain)
        at += named + extra + comment
    if at > len(data):
        raise ValueError("its directory is cut off")
    return records


def _read_zip64_sizes(extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the sizes and offset of an entry, with values from its zip64 extra field.

    Raises:
        ValueError: The field is missing.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            fields = [values.pop(0) if value == ZIP64_LIMIT else value for value in (nbytes, packed, header)]
            return fields[0], fields[1], fields[2]
        at += 4 + size
    raise ValueError("a size is missing in its directory")
