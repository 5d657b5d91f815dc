"""Codecs: how the regions of a payload file lie in it, and what stands between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self

from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.records import FileRecord

Glue = Sequence[tuple[int, bytes]]
"""(offset, bytes) of everything in a file that belongs to no region: headers, directories, padding."""


def joined_glue(pieces: Iterable[tuple[int, bytes]]) -> Glue:
    """The same bytes, with neighbours joined: each piece is a write of its own. The first one begins the file."""
    glue: list[tuple[int, bytes]] = []
    begun, text = 0, bytearray()
    for at, more in pieces:
        if at != begun + len(text):
            glue.append((begun, bytes(text)))
            begun, text = at, bytearray()
        text += more
    return [*glue, (begun, bytes(text))]


class Codec(Protocol):
    """The layout of one payload file. Its places are known before its bytes are."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each region, in file order."""

    @property
    def wants_digests(self) -> bool:
        """Whether `glue` needs the digests of all blocks."""

    @property
    def wants_crc32(self) -> bool:
        """Whether `glue` needs the CRC-32 of each region."""

    def streamed(self) -> Codec:
        """The same file as it is written in the order of its bytes: with a glue that is known before the regions are.

        Itself, where that is so already, or cannot be.
        """

    def without(self, regions: frozenset[int]) -> Codec | None:
        """The same file without these of its regions (indices into `places`); None if it needs all of them."""

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:
        """Everything between the regions in file order, from the digests of all blocks and the CRC-32 of each region.

        Both are empty where neither is wanted: the glue is known before any byte of the regions.
        """

    def record(self, path: str, glue: Glue, digests: Sequence[int]) -> FileRecord:
        """What the manifest says of the file."""


def known_glue(codec: Codec) -> Glue | None:
    """Everything between the regions of a file, if it is known before any byte of them; else None."""
    return None if codec.wants_digests or codec.wants_crc32 else codec.glue((), ())


def record_with_regions(path: str, codec: Codec, glue: Glue, digests: Sequence[int]) -> FileRecord:
    """What the manifest says of a file that does not hold the digests of its regions itself."""
    between = b"".join(text for _, text in glue)
    return FileRecord(
        path=path,
        size=codec.size,
        head=len(between),
        digest=digest(between),
        regions=tuple((at, nbytes) for at, nbytes in codec.places if nbytes),
        digests=tuple(digests),
    )


class PlainCodec:
    """What codecs have in common that know all between the regions without their digests, and have no place for these.

    So the manifest keeps the digests.
    """

    __slots__ = ()

    wants_digests = False
    wants_crc32 = False

    def streamed(self) -> Self:
        return self

    def record(self: Codec, path: str, glue: Glue, digests: Sequence[int]) -> FileRecord:
        return record_with_regions(path, self, glue, digests)
