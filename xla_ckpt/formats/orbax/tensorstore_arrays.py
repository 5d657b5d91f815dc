"""Decode the arrays of an orbax item with tensorstore: each array is a virtual file of its chunks.

A chunk is compressed, so that reading a part of it decodes all of it. The engine reads ranges of files: an array is
presented as one file with the elements of its chunks in C order, and each chunk is a region. tensorstore needs neither
JAX nor the devices that saved the array. Only this module imports it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import tensorstore

from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ShardTable
from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.core.sharding.box import Box, BoxArray
from xla_ckpt.errors import CorruptCheckpointError, FormatError, annotate_errors
from xla_ckpt.formats.orbax.layout import OCDBT_MANIFEST
from xla_ckpt.formats.orbax.name_rules import Renaming
from xla_ckpt.formats.orbax.virtual_files import (
    ChunkCache,
    VirtualDirectory,
    compute_chunk_costs,
    slice_elements,
)
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT
from xla_ckpt.storage.base import BucketLocation, FileSystemDirectory, ReadDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_CHUNKS = 1 << 22
"""Maximum number of chunks of an array, because a malicious file may describe any number."""

SMALL_CHUNK_BYTES = 1 << 16
"""Size (bytes) that a chunk may have even if its array is smaller."""

CACHE_BYTES = 1 << 28
"""Decoded chunks (bytes) that tensorstore caches for reads of other parts."""

_STORAGE_ERRORS = ("PERMISSION_DENIED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL")
"""Prefixes of tensorstore messages about failed storage operations; all others mean that the files are corrupt."""


_PROC_FD_PATH = re.compile(r'/proc/self/fd/\d+/([^"]*)')
"""Path of a file in a checkpoint in tensorstore messages, if the directory is given by `make_file_kvstore`."""


@contextmanager
def convert_tensorstore_errors(name: str) -> Iterator[None]:
    """Convert tensorstore exceptions to errors of this library.

    Raises:
        CorruptCheckpointError: The files are corrupt.
        OSError: A storage operation failed.
    """
    try:
        with annotate_errors(file=name):
            yield
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        text = str(error).partition(" [tensorstore_spec=")[0]
        named = _PROC_FD_PATH.search(text)
        text = _PROC_FD_PATH.sub(r"\1", text)[:300]
        if text.startswith(_STORAGE_ERRORS):
            raise OSError(text) from error
        file = named[1] if named else name
        problem = f"an array of orbax's cannot be read: {text}"
        raise CorruptCheckpointError(problem, file=file, hint=DAMAGED_FILE_HINT) from error


class DecodedArray:
    """Array as a virtual file of its decoded chunks. A `FileReader`."""

    def __init__(self, name: str, array: Any, chunks: int, kept: ChunkCache) -> None:
        self.name = name
        self._array = array
        self._chunk_cache = kept
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: DType = dtypes.get_dtype(array.dtype.name)
        self.renaming: Renaming | None = None
        """Mapping to a model. If set, the elements of each chunk are in the order of `Renaming.axis_order`."""
        self.chunk_shape: tuple[int, ...] = tuple(
            array.chunk_layout.read_chunk.shape or ()
        )  # None for an array without dims
        """Shape of its chunks."""
        grid = self.chunk_shape
        # tensorstore aborts the process if it cannot allocate a chunk, and a malicious file may declare any size. orbax
        # chunks are not larger than their arrays.
        largest = max(math.prod(self.shape), 1) * self.dtype.itemsize
        if math.prod(grid) * self.dtype.itemsize > max(2 * largest, SMALL_CHUNK_BYTES):
            raise FormatError(
                "a chunk is larger than its array", file=name, expected=f"at most {self.shape}", found=grid
            )
        count = math.prod(-(-n // max(chunk, 1)) for n, chunk in zip(self.shape, grid, strict=True))
        if count > MAX_CHUNKS:
            raise FormatError("an array has too many chunks", file=name, expected=f"at most {MAX_CHUNKS}")
        # In zarr version 3, a store entry may contain several chunks. Memory is allocated only for existing ones.
        entries = array.chunk_layout.write_chunk.shape or ()
        expected = math.prod(-(-n // max(size, 1)) for n, size in zip(self.shape, entries, strict=True))
        if chunks < expected:
            raise CorruptCheckpointError(
                "chunks of an array are missing", file=name, expected=f"{expected} chunks", found=chunks
            )
        cuts = [np.append(np.arange(0, n, max(chunk, 1)), n) for n, chunk in zip(self.shape, grid, strict=True)]
        start, stop = ([*itertools.product(*some)] for some in ([c[:-1] for c in cuts], [c[1:] for c in cuts]))
        self._start, self._stop = (np.array(ends, np.int64).reshape(count, len(cuts)) for ends in (start, stop))
        sizes = (self._stop - self._start).prod(axis=1) * self.dtype.itemsize
        self._ends = np.cumsum(sizes)
        self.largest = int(sizes.max(initial=0))
        """Bytes of the largest chunk."""

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def list_shards(self, file: int) -> ShardTable:
        """Return the chunks as shards of the file with this number."""
        offset = np.concatenate([np.zeros(1, np.int64), self._ends])[: len(self._ends)]
        return ShardTable(
            box=BoxArray(self._start, self._stop), file=np.full(len(offset), file, np.int64), offset=offset
        )

    @property
    def chunks(self) -> list[Box]:
        """All chunks, in the order of the file."""
        return [self._get_chunk_box(row) for row in range(len(self._ends))]

    def _get_chunk_box(self, row: int) -> Box:
        return Box(tuple(self._start[row].tolist()), tuple(self._stop[row].tolist()))

    def read_scalar(self) -> Any:
        """Return the only element, as a Python value."""
        with convert_tensorstore_errors(self.name):
            return self._array.read().result().reshape(()).item()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on. All chunks in the range are decoded concurrently, unless they are cached."""
        wanted = min(len(buffer), self.size - offset)
        into = np.frombuffer(buffer, np.uint8)[:wanted]
        first = int(np.searchsorted(self._ends, offset, side="right"))
        last = int(np.searchsorted(self._ends, offset + wanted, side="left")) + 1
        with convert_tensorstore_errors(self.name):
            waiting = []
            for row in range(first, last):
                begin = int(self._ends[row - 1]) if row else 0
                low, high = max(offset - begin, 0), min(offset + wanted, int(self._ends[row])) - begin
                part = into[begin + low - offset : begin + high - offset]
                if self.renaming is not None:
                    part[:] = self._read_reordered(self.renaming, row, low, high)
                else:
                    waiting.append(self._start_decoding(row, low, part))
            for future, copy in waiting:
                copy(future.result())
        return wanted

    def _start_decoding(self, row: int, low: int, into: npt.NDArray[np.uint8]) -> tuple[Any, Callable[[Any], object]]:
        """Start to decode the bytes of a chunk from byte `low` into `into`.

        tensorstore can only read boxes, so this reads the fewest slices along the first dim longer than 1 that cover
        the bytes. If they are exactly that box, and `into` is aligned, it decodes into `into` directly.

        Returns:
            A future, and a function that copies its result into `into`.
        """
        start, stop = self._start[row].tolist(), self._stop[row].tolist()
        dim = next((d for d, (a, b) in enumerate(zip(start, stop, strict=True)) if b - a > 1), None)
        if dim is not None:
            step = (
                self.dtype.itemsize
                * math.prod(b - a for a, b in zip(start, stop, strict=True))
                // (stop[dim] - start[dim])
            )
            first, last = low // step, -(-(low + len(into)) // step)
            start[dim], stop[dim] = start[dim] + first, start[dim] + last
            low -= first * step
        part = self._array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        kind, shape = self._array.dtype.numpy_dtype, tuple(b - a for a, b in zip(start, stop, strict=True))
        aligned = into.ctypes.data % kind.itemsize == 0
        if aligned and len(into) == math.prod(shape) * kind.itemsize:
            return tensorstore.array(into.view(kind).reshape(shape)).write(part), lambda _: None

        def copy(elements: Any) -> None:
            into[:] = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)[low : low + len(into)]

        return part.read(), copy

    def _read_reordered(self, renaming: Renaming, row: int, low: int, high: int) -> Any:
        """Read bytes of a chunk in the order of the model. Only the decoded chunk is cached."""
        chunk, itemsize = self._get_chunk_box(row), self.dtype.itemsize
        part = self._array[tuple(slice(a, b) for a, b in zip(chunk.start, chunk.stop, strict=True))]
        ordered = self._chunk_cache.get(
            (self.name, row), chunk.size * itemsize, lambda: renaming.to_model_order(part.read().result(), chunk)
        )
        first, last = low // itemsize, -(-high // itemsize)
        elements = renaming.to_model_values(slice_elements(ordered, first, last))
        return elements.view(np.uint8)[low - first * itemsize : high - first * itemsize]

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        """Same as `read_into`. `scratch` is unused, because tensorstore allocates its own memory."""
        return self.read_into(buffer, offset)

    def close(self) -> None:
        """Do nothing: no file is open between reads."""


class DecodedDirectory(VirtualDirectory[DecodedArray]):
    """Arrays of an orbax checkpoint, one file per array. A `ReadDirectory`."""

    def __init__(self, directory: ReadDirectory, place: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self._kvstore = place
        """tensorstore key-value store of the directory."""
        self._chunk_cache = ChunkCache()
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def open_arrays(
        self, item: str, chunks: Mapping[str, int], *, zarr3: bool, ocdbt: bool
    ) -> Mapping[str, tuple[str, DecodedArray]]:
        """Open arrays of an item concurrently.

        Args:
            item: Item; ``""`` is the checkpoint itself.
            chunks: Name of each array in orbax -> number of its chunks.
            zarr3: True if they are zarr version 3.
            ocdbt: True if they are stored in one database (OCDBT); otherwise each has a directory of its own.

        Returns:
            Name of each array -> its path here, and the array.

        Raises:
            CorruptCheckpointError: An array is missing or corrupt.
            UnsupportedStateError: The dtype of an array is unknown.
        """
        base = self._get_item_kvstore(item)
        opened = []
        for name in chunks:
            if ocdbt:
                place: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            else:
                place = {**base, "path": f"{base['path']}{name}/"}
            # Otherwise a missing chunk would be read as zeros.
            spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": place, "fill_missing_data_reads": False}
            opened.append((name, tensorstore.open(spec, open=True, read=True, context=self._context)))
        arrays = {}
        for name, future in opened:
            path = quote(f"{item}/{name}" if item else name, safe="/")
            path = path.replace("//", "/%2F").strip("/") or "%2F"
            with convert_tensorstore_errors(path):
                self.arrays[path] = DecodedArray(path, future.result(), chunks[name], self._chunk_cache)
            arrays[name] = path, self.arrays[path]
        return arrays

    def list_keys(self, item: str, files: Sequence[str]) -> list[str]:
        """List the keys that an item stores for its arrays, in one database (OCDBT) or in a directory for each array.

        Args:
            item: Item; ``""`` is the checkpoint itself.
            files: All files in the directory.

        Raises:
            CorruptCheckpointError: The database is corrupt.
        """
        below = f"{item}/" if item else ""
        if below + OCDBT_MANIFEST not in files:
            return [path.removeprefix(below) for path in files if path.startswith(below)]
        with convert_tensorstore_errors(below + OCDBT_MANIFEST):
            spec = {"driver": "ocdbt", "base": self._get_item_kvstore(item)}
            keys = tensorstore.KvStore.open(spec, context=self._context).result().list().result()
        return [key.decode(errors="surrogateescape") for key in keys]

    def _get_item_kvstore(self, item: str) -> dict[str, Any]:
        """Return the tensorstore key-value store of an item."""
        return {**self._kvstore, "path": f"{self._kvstore['path']}{item}/" if item else self._kvstore["path"]}

    @cached_property
    def costs(self) -> ReadCosts:
        """Read costs, queried for each batch."""
        arrays = self.arrays.values()
        return compute_chunk_costs(
            (array.largest for array in arrays if array.renaming is None),
            (array.largest for array in arrays if array.renaming is not None),
        )

    def close(self) -> None:
        self._chunk_cache.clear()
        super().close()


def make_file_kvstore(directory: FileSystemDirectory) -> dict[str, Any]:
    """Return the tensorstore key-value store of a directory. It stays valid if the directory is moved."""
    return {"driver": "file", "path": f"/proc/self/fd/{directory.fd}/"}


def make_bucket_kvstore(place: BucketLocation) -> dict[str, Any] | None:
    """Return the tensorstore key-value store of a directory in a bucket; None if tensorstore lacks support.

    Credentials are found by the AWS SDK for S3, and by tensorstore for Google Cloud Storage. Another server than
    Google's can only be set by the environment variable ``TENSORSTORE_GCS_HTTP_URL``.
    """
    at = {"bucket": place.bucket, "path": place.prefix}
    if not place.tensorstore_driver:
        return None
    options = {"endpoint": place.endpoint, "aws_region": place.region}
    known = {name: value for name, value in options.items() if value is not None}
    return {"driver": place.tensorstore_driver, **at, **known}
