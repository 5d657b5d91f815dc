"""Payload files for torch.distributed.checkpoint (DCP) that are also valid safetensors files.

A DCP file is a sequence of `torch.save` zips, whose offsets are in DCP's ``.metadata``. In these files the bytes around
the elements of each region (zip headers and directory) are byte tensors in the safetensors header. Therefore stock
`torch.distributed.checkpoint.load`, its `HuggingFaceStorageReader`, `safetensors.safe_open` and a plain read at an
offset all find the same elements.

The zips contain 0 as the CRC-32 of the elements, like those that torch writes after
`torch.serialization.set_crc32_options(False)`. torch ignores the value, and the manifest has a checksum of each block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from xla_ckpt.core.files.file_layout import Framing, Region, StaticFileLayout, merge_framing
from xla_ckpt.core.files.safetensors import build_entry, build_saved_offset, pad_header
from xla_ckpt.core.files.torch_file import STORAGE_ALIGNMENT, TorchFile
from xla_ckpt.errors import FormatError

ARCHIVE_NAME = "archive"
"""Name of the folder in each zip, as `torch.save` uses for streams."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A region, and the pickle that creates a tensor from it."""

    region: Region
    """Region with its DCP key. Keys are unique in a file, as safetensors requires."""

    pickled: bytes
    """Pickle of a contiguous tensor that is the whole storage ``0``."""


@dataclass(frozen=True, slots=True)
class ChunkZip:
    """A zip with one tensor: the offset of its elements, and the framing around them."""

    size: int
    """Number of bytes of the zip."""

    data_offset: int
    """Offset of the first element."""

    nbytes: int
    """Number of bytes of the elements."""

    framing: Framing
    """(offset, bytes) of the rest of the zip."""


@lru_cache(maxsize=1024)
def create_chunk_zip(pickled: bytes, nbytes: int) -> ChunkZip:
    """Create the zip for `nbytes` bytes of elements. Cached, because most arrays of a model have few shapes."""
    codec = TorchFile(archive_name=ARCHIVE_NAME, pickled=pickled, storages=((nbytes,),))
    return ChunkZip(codec.size, codec.region_ranges[0][0], nbytes, tuple(codec.build_framing((), [0])))


@dataclass(frozen=True, slots=True)
class DcpFile(StaticFileLayout):
    """Layout of a DCP file (see `xla_ckpt.core.files.file_layout.FileLayout`)."""

    name: str
    """Prefix of the names of the framing tensors. Must differ between the files of a checkpoint."""

    chunks: tuple[DcpChunk, ...]
    """Chunks in file order."""

    header: bytes = field(init=False, repr=False, compare=False)
    """The safetensors header. Depends only on names and sizes."""

    _zips: tuple[ChunkZip, ...] = field(init=False, repr=False)
    _starts: tuple[int, ...] = field(init=False, repr=False)
    """Offset of each zip from the end of the header."""

    def __post_init__(self) -> None:
        zips = tuple(create_chunk_zip(chunk.pickled, chunk.region.nbytes) for chunk in self.chunks)
        starts, at = [], 0
        for chunk_zip in zips:
            starts.append(at)
            at += -(-chunk_zip.size // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
        object.__setattr__(self, "_zips", zips)
        object.__setattr__(self, "_starts", tuple(starts))
        object.__setattr__(self, "header", self._build_header())

    @property
    def header_nbytes(self) -> int:
        """Number of bytes of the safetensors header."""
        return len(self.header)

    @property
    def size(self) -> int:
        return self.header_nbytes + self._data_bytes

    @property
    def _data_bytes(self) -> int:
        """Number of bytes after the header."""
        return self._starts[-1] + self._zips[-1].size if self._zips else 0

    @property
    def zip_ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the zip of each region, in file order."""
        return [
            (self.header_nbytes + at, chunk_zip.size) for at, chunk_zip in zip(self._starts, self._zips, strict=True)
        ]

    @property
    def region_ranges(self) -> list[tuple[int, int]]:
        return [(self.header_nbytes + at, nbytes) for at, nbytes in self._iterate_ranges()]

    def _iterate_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (offset from the end of the header, bytes) of each region."""
        for start, chunk_zip in zip(self._starts, self._zips, strict=True):
            yield start + chunk_zip.data_offset, chunk_zip.nbytes

    def exclude_regions(self, regions: frozenset[int]) -> DcpFile:
        return replace(self, chunks=tuple(c for i, c in enumerate(self.chunks) if i not in regions))

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        return merge_framing(chain([(0, self.header)], self._iterate_framing()))

    def _iterate_framing(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of the framing after the header."""
        at = self.header_nbytes
        for (start, nbytes), chunk_zip in zip(self.zip_ranges, self._zips, strict=True):
            yield at, bytes(start - at)  # padding after the previous zip
            for inside, text in chunk_zip.framing:
                yield start + inside, text
            at = start + nbytes

    def _build_header(self) -> bytes:
        entries: dict[str, object] = {}
        at = 0
        for i, (chunk, (start, nbytes)) in enumerate(zip(self.chunks, self._iterate_ranges(), strict=True)):
            entries[f"{self.name}/{i}"] = _build_bytes_entry(at, start)
            entries[chunk.region.key] = build_entry(chunk.region, start)
            at = start + nbytes
        entries[f"{self.name}/{len(self.chunks)}"] = _build_bytes_entry(at, self._data_bytes)
        if len(entries) < 2 * len(self.chunks) + 1:
            raise FormatError("a name stands twice in a payload file", file=self.name)
        # DCP's reader expects the offset in the global array for every entry.
        sharding: dict[str, object] = {name: {"saved_offsets": [0]} for name in entries}
        sharding |= {chunk.region.key: build_saved_offset(chunk.region) for chunk in self.chunks}
        about = {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        }
        return pad_header(about, json.dumps(entries, separators=(",", ":"))[1:-1])


def _build_bytes_entry(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
