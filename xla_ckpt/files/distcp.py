"""Payload files for torch.distributed.checkpoint (DCP): each region is a whole file of `torch.save` of its own.

A file of DCP's is a row of such zips, and DCP's ``.metadata`` says where each one begins. A file of ours is that, and a
safetensors file at the same time: what stands around the elements of a region (a zip's headers and its directory) is a
tensor of bytes in the header of the file. So stock `torch.distributed.checkpoint.load`, its
`HuggingFaceStorageReader`, `safetensors.safe_open` and a plain read at an offset all find the same elements.

The zips have 0 in the place of the CRC-32 of the elements, as torch itself writes them after
`torch.serialization.set_crc32_options(False)`: torch does not look at it, and the manifest has a digest of each block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from xla_ckpt.errors import FormatError
from xla_ckpt.files.codec import Glue, PlainCodec, joined_glue
from xla_ckpt.files.regions import Region
from xla_ckpt.files.safetensors import entry, padded_header, saved_offset
from xla_ckpt.files.torch_file import STORAGE_ALIGNMENT, TorchFile

STEM = "archive"
"""Name of the folder in each zip: torch.save's own, where it writes to a stream."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region, and the pickle that makes a tensor of it."""

    region: Region
    """Its key is that of DCP; each stands once in a file, as safetensors wants it."""

    pickled: bytes
    """A pickle of a contiguous tensor that is the whole storage ``0``."""


@dataclass(frozen=True, slots=True)
class ChunkZip:
    """A zip with one tensor: where its elements lie, and what stands around them."""

    size: int
    """Bytes of the zip."""

    start: int
    """Offset of the first element."""

    nbytes: int
    """Bytes of the elements."""

    around: Glue
    """(offset, bytes) of everything else."""


@lru_cache(maxsize=1024)
def zip_of(pickled: bytes, nbytes: int) -> ChunkZip:
    """The zip of so many bytes of elements. It depends on nothing else, and most arrays of a model have few shapes."""
    codec = TorchFile(stem=STEM, pickled=pickled, storages=((nbytes,),))
    return ChunkZip(codec.size, codec.places[0][0], nbytes, tuple(codec.glue((), [0])))


@dataclass(frozen=True, slots=True)
class Distcp(PlainCodec):
    """The codec of such a file (see `xla_ckpt.files.codec.Codec`)."""

    name: str
    """Begins the names of what stands around the regions. It has to differ from that of the other files of a tag."""

    chunks: tuple[Chunk, ...]
    """In file order."""

    header: bytes = field(init=False, repr=False, compare=False)
    """The safetensors header. It depends on names and sizes alone."""

    _zips: tuple[ChunkZip, ...] = field(init=False, repr=False)
    _starts: tuple[int, ...] = field(init=False, repr=False)
    """Where each zip begins, counted from the end of the header."""

    def __post_init__(self) -> None:
        zips = tuple(zip_of(chunk.pickled, chunk.region.nbytes) for chunk in self.chunks)
        starts, at = [], 0
        for chunk_zip in zips:
            starts.append(at)
            at += -(-chunk_zip.size // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
        object.__setattr__(self, "_zips", zips)
        object.__setattr__(self, "_starts", tuple(starts))
        object.__setattr__(self, "header", self._header())

    @property
    def head(self) -> int:
        """Bytes of the safetensors header."""
        return len(self.header)

    @property
    def size(self) -> int:
        return self.head + self._end

    @property
    def _end(self) -> int:
        """Bytes behind the header."""
        return self._starts[-1] + self._zips[-1].size if self._zips else 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the zip of each region, in file order."""
        return [(self.head + at, chunk_zip.size) for at, chunk_zip in zip(self._starts, self._zips, strict=True)]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(self.head + at, nbytes) for at, nbytes in self._places()]

    def _places(self) -> Iterator[tuple[int, int]]:
        """(offset from the end of the header, bytes) of each region."""
        for start, chunk_zip in zip(self._starts, self._zips, strict=True):
            yield start + chunk_zip.start, chunk_zip.nbytes

    def without(self, regions: frozenset[int]) -> Distcp:
        return replace(self, chunks=tuple(c for i, c in enumerate(self.chunks) if i not in regions))

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:
        return joined_glue(chain([(0, self.header)], self._around()))

    def _around(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all that belongs to no region, behind the header."""
        at = self.head
        for (start, nbytes), chunk_zip in zip(self.spans, self._zips, strict=True):
            yield at, bytes(start - at)  # what fills up the zip before it
            for inside, text in chunk_zip.around:
                yield start + inside, text
            at = start + nbytes

    def _header(self) -> bytes:
        entries: dict[str, object] = {}
        at = 0
        for i, (chunk, (start, nbytes)) in enumerate(zip(self.chunks, self._places(), strict=True)):
            entries[f"{self.name}/{i}"] = _bytes_entry(at, start)
            entries[chunk.region.name] = entry(chunk.region, start)
            at = start + nbytes
        entries[f"{self.name}/{len(self.chunks)}"] = _bytes_entry(at, self._end)
        if len(entries) < 2 * len(self.chunks) + 1:
            raise FormatError("a name stands twice in a payload file", file=self.name)
        # Stock readers want to know of every entry where it begins in its array.
        sharding: dict[str, object] = {name: {"saved_offsets": [0]} for name in entries}
        sharding |= {chunk.region.name: saved_offset(chunk.region) for chunk in self.chunks}
        about = {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        }
        return padded_header(about, json.dumps(entries, separators=(",", ":"))[1:-1])


def _bytes_entry(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
