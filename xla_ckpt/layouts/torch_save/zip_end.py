"""Where the directory of a zip lies, from the zip's end. Pure: a caller hands over the bytes.

The directory has the name, the size, the CRC-32 and the place of each record. So who has compared it with a digest
knows what every record has to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xla_ckpt.files.torch_file import END, END_64, END_64_AT

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
