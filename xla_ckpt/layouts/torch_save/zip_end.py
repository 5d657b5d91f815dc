"""Where the directory of a zip lies, from the zip's end. Pure: a caller hands over the bytes.

The directory has the name, the size, the CRC-32 and the place of each record. So who has compared it with a digest
knows what every record has to be.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

END = struct.Struct("<4s4H2LH")
"""Signature, this disk, the directory's disk, records here and in all, size and offset of the directory, comment."""

_END_64_AT = struct.Struct("<4sLQL")
"""Signature, disk, offset of the larger end, number of disks."""

_END_64 = struct.Struct("<4sQ2H2L4Q")
"""Signature, size, versions, disks, records here and in all, size and offset of the directory."""

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

    Args:
        take: See `Take`.
        nbytes: Bytes of the zip.

    Raises:
        ValueError: It does not end like a zip without a comment, which is how torch ends it.
        struct.error: `take` returned fewer bytes than it was asked for.
    """
    end = nbytes - END.size
    signature, *_, count, size, offset, _ = END.unpack(take(end, END.size))
    if signature != b"PK\5\6":
        raise ValueError("it does not end like one")
    if end >= _END_64_AT.size:
        signature, _, at, _ = _END_64_AT.unpack(take(end - _END_64_AT.size, _END_64_AT.size))
        if signature == b"PK\6\7":
            signature, *_, count, size, offset = _END_64.unpack(take(at, _END_64.size))
            if signature != b"PK\6\6":
                raise ValueError("its larger end is missing")
    return DirectoryAt(offset, size, count)
