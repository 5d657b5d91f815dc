"""Read torch.save zips as byte ranges: the pickle, and the location of each tensor. Storages are not read.

A zip may be a part of a larger file with other zips before and after it: `ReadAheadFile` then reads neighbors together.
"""

from __future__ import annotations

import struct
import types
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.core import dtypes
from xla_ckpt.core.checksum import check_crc32
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.torch_file import LOCAL_HEADER
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import compute_strides
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UntrustedObjectError
from xla_ckpt.formats.torch_save.pickle_stubs import (
    CompositeTensor,
    NestedTensorStub,
    OpaqueStub,
    TensorView,
    parse_sizes,
)
from xla_ckpt.formats.torch_save.unpickler import load_pickle, load_single_tensor, replace_tensors
from xla_ckpt.formats.torch_save.zip_directory import read_zip_records
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT
from xla_ckpt.storage.base import FileReader, ReadDirectory

SMALL_READ_AHEAD_BYTES = 4096
"""Bytes per read from a file with one zip, where only a header precedes a large storage."""

READ_AHEAD_BYTES = 64 * 1024
"""Bytes per read from a file with many zips, most of which are small or adjacent to a small one."""


class ReadAheadFile:
    """File from which small pieces are read, usually in ascending order. Each read also fetches the following bytes.

    Args:
        read_ahead: Minimum number of bytes per read.
    """

    def __init__(self, source: FileReader, file: str, read_ahead: int = READ_AHEAD_BYTES) -> None:
        self.source = source
        self.file = file
        self.size = source.size
        self._read_ahead = read_ahead
        self._buffer_start = 0
        self._buffer = memoryview(b"")

    def read_at(self, offset: int, nbytes: int) -> memoryview:
        """Read bytes of the file.

        Raises:
            CorruptCheckpointError: The file ends before them.
        """
        at = offset - self._buffer_start
        if at < 0 or at + nbytes > len(self._buffer):
            wanted = bytearray(max(min(max(nbytes, self._read_ahead), self.size - offset), 0))
            got = self.source.read_into(memoryview(wanted), offset)
            self._buffer_start, self._buffer, at = offset, memoryview(wanted)[:got], 0
            if got < nbytes:
                raise CorruptCheckpointError(
                    "the file is cut off", file=self.file, expected=f"{offset + nbytes} bytes", found=self.size
                )
        return self._buffer[at : at + nbytes]


_EDGE_BYTES = 4096
"""Bytes at either end of a zip that usually contain its directory and its pickle."""

MIN_CLAIMED_BYTES, CLAIMED_BYTES_PER_BYTE = 1 << 30, 16
"""Maximum bytes of all tensors in a file, plus a number for each byte of the file. Several tensors may share a storage,
and a tensor may repeat elements of its storage, so that a small file could request any amount of memory."""

COMPOSITE_TENSOR_LABEL = "tensor of the kind"
"""Label of a tensor that consists of several tensors, if it is not a plain value."""

_MAX_SIZES_BYTES = 1 << 20
"""Maximum bytes of the sizes of the parts of a nested tensor. More would mean a part for every few elements."""

_LEGACY_MAGIC, _LEGACY_MAGIC_END = bytes.fromhex("6cfc9c46f9206aa85019"), 32
"""Number at the beginning of a torch.save file that is not a zip, and the offset by which it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Tensor in a file: in C order, unless it has strides."""

    file: str
    """Path relative to the tag directory."""

    offset: int
    """Offset of its first byte."""

    dtype: DType
    shape: tuple[int, ...]

    crc: int | None = None
    """CRC-32 of its bytes; None if the zip has no CRC-32 of exactly this tensor."""

    strides: tuple[int, ...] | None = None
    """Strides (elements), if the tensor is not in C order."""

    part: Any = None
    """See `TensorView`."""


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Storage in a file."""

    offset: int
    """Offset of its first byte."""

    nbytes: int
    crc: int
    """CRC-32 of its bytes; 0 if torch did not compute it."""

    key: str
    """Key in the pickle."""


def read_torch_file(
    directory: ReadDirectory,
    file: str,
    resolve_reference: Callable[[Any], Any] | None = None,
    storages: defaultdict[str, list[StorageLocation]] | None = None,
) -> Any:
    """Read the content of a torch.save file, with a `TensorLocation` for each tensor.

    Args:
        directory: Directory that contains the file.
        file: Path of the file.
        resolve_reference: Function that replaces each reference, given its number. None refuses references.
        storages: Receives the storages that contain the tensors, by file.

    Raises:
        CorruptCheckpointError: The file is missing, truncated, or not a torch.save file.
        UntrustedObjectError: It names classes other than tensors, containers and plain values.
        UnsupportedStateError: A tensor is not contiguous, or of another byte order.
    """
    with closing(_open_file(directory, file)) as source:
        archive = TorchZip(ReadAheadFile(source, file, _EDGE_BYTES), 0, source.size)
        value = archive.read_value(resolve_reference)
    if storages is not None:
        storages[file] += archive.list_used_storages()
    return value


def check_zip_file(directory: ReadDirectory, file: str) -> int:
    """Read a complete zip, and check all records against their CRC-32s. Return its size in bytes.

    Raises:
        CorruptCheckpointError: It is missing or truncated, or a record is corrupt.
    """
    with closing(_open_file(directory, file)) as source:
        TorchZip(ReadAheadFile(source, file, _EDGE_BYTES), 0, source.size).check()
        return source.size


def _open_file(directory: ReadDirectory, file: str) -> FileReader:
    try:
        return directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("a file is missing", file=file, hint=DAMAGED_FILE_HINT) from None


class TorchZip:
    """torch.save zip inside a file.

    Args:
        ahead: File that contains the zip.
        start: Offset of the zip in the file.
        nbytes: Size of the zip.

    Raises (on construction):
        CorruptCheckpointError: The zip is incomplete or invalid.
        UnsupportedStateError: The file has the torch format from before zips.
    """

    def __init__(self, ahead: ReadAheadFile, start: int, nbytes: int) -> None:
        self.ahead = ahead
        self.file = ahead.file
        self.start = start
        self.nbytes = nbytes
        if nbytes < 1 or start < 0 or start + nbytes > ahead.size:
            expected = f"{start + nbytes} bytes" if start + nbytes > 0 else "a zip of torch.save"
            raise CorruptCheckpointError(
                "the file is cut off", file=self.file, expected=expected, found=ahead.size, hint=DAMAGED_FILE_HINT
            )
        # The first bytes are read before the last, because the last are read together with the first of the next zip.
        head = min(nbytes, READ_AHEAD_BYTES if nbytes <= READ_AHEAD_BYTES else _EDGE_BYTES)
        self._head = ahead.read_at(start, head)
        edge = min(nbytes, _EDGE_BYTES)
        self._tail = self._head[head - edge :] if head == nbytes else ahead.read_at(start + nbytes - edge, edge)
        try:
            self.records = read_zip_records(self._read_bytes, nbytes)
        except (struct.error, ValueError, IndexError) as error:
            raise self._make_broken_error(str(error)) from error
        self._record_locations: dict[str, tuple[int, int, int]] = {}

    def read_value(
        self,
        resolve_reference: Callable[[Any], Any] | None = None,
        *,
        allow_strided: bool = False,
        tolerant: bool = False,
        convert_tensor: Callable[[TensorLocation], Any] = lambda place: place,
        convert_parts: Callable[[CompositeTensor], Any] | None = None,
        extra_names: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> Any:
        """Read the saved value, with a `TensorLocation` for each tensor (see `read_torch_file`).

        Args:
            resolve_reference: Function that replaces each reference, given its number. None refuses references.
            allow_strided: True to allow tensors that are not in C order.
            tolerant: True to return an `OpaqueStub` for each value that is not plain, instead of raising an error.
            convert_tensor: Function that converts each tensor.
            convert_parts: Function that converts a tensor that consists of several converted tensors. None makes such a
                tensor a value that is not plain.
            extra_names: Additional names that the pickle may contain, with the replacement of each.
        """
        if f"{self.prefix}byteorder" in self.records and self._read_small_record("byteorder") != b"little":
            raise UnsupportedStateError("the file is not in little-endian order", file=self.file)

        left = MIN_CLAIMED_BYTES + CLAIMED_BYTES_PER_BYTE * self.nbytes

        def leaf(value: Any) -> Any:
            nonlocal left
            if isinstance(value, NestedTensorStub):
                value = CompositeTensor(
                    "torch:nested", {k: leaf(v) for k, v in self._expand_nested(value).items()}, None
                )
            if isinstance(value, CompositeTensor):
                if convert_parts is not None:
                    return convert_parts(value)
                if tolerant:
                    return OpaqueStub.for_name(f"{COMPOSITE_TENSOR_LABEL} {value.kind}")()
                raise UntrustedObjectError(
                    f"the file holds a {COMPOSITE_TENSOR_LABEL} {value.kind}, which is neither an array nor a plain "
                    "value; it was not loaded, and nothing ran",
                    file=self.file,
                    hint="Have the program that wrote it save plain tensors.",
                )
            if isinstance(value, TensorView):
                place = self._locate_tensor(value, allow_strided)
                left -= Box.from_shape(place.shape).size * place.dtype.itemsize
                if left < 0:
                    raise CorruptCheckpointError("the tensors of a file claim many times its bytes", file=self.file)
                return convert_tensor(place)
            if resolve_reference is None or type(value.tid) is not int or value.tid < 0:
                raise CorruptCheckpointError(
                    "a reference to a tensor where none can be",
                    file=self.file,
                    hint="torch_xla's serialization.save has the tensors in <file>.tensors: put that directory beside "
                    "the file."
                    if resolve_reference is None
                    else None,
                )
            return resolve_reference(value.tid)

        data = self._read_small_record("data.pkl")
        if not extra_names and (alone := load_single_tensor(data)) is not None:
            return leaf(alone)
        return replace_tensors(load_pickle(data, self.file, extra_names, tolerant=tolerant), leaf, self.file, len(data))

    @property
    def pickle_bytes(self) -> bytes:
        """Bytes of the pickle."""
        return self._read_small_record("data.pkl")

    def list_storages(self) -> list[StorageLocation]:
        """Return all storages, in file order."""
        for name in self.records:
            if name.startswith(f"{self.prefix}data/"):
                self._locate_stored_record(name.removeprefix(self.prefix))
        return self.list_used_storages()

    def list_used_storages(self) -> list[StorageLocation]:
        """Return the storages of all tensors that were located so far, in file order."""
        places = self._record_locations.items()
        met = [
            StorageLocation(*place, name.removeprefix("data/")) for name, place in places if name.startswith("data/")
        ]
        return sorted(met, key=lambda storage: storage.offset)

    def check(self) -> None:
        """Read the complete zip, and check each record against its CRC-32, if it has one.

        Raises:
            CorruptCheckpointError: A record is corrupt, or is packed in a way that torch.save does not use.
        """
        for name, record in self.records.items():
            if not record.is_plain:  # a load would refuse such a record; torch.save never compresses
                raise CorruptCheckpointError(
                    f"the zip's directory says of the record {name} that it is compressed or encrypted", file=self.file
                )
            start, size, crc = self._read_local_header(name)
            # torch writes 0 if CRC-32s are disabled.
            check_crc32(self.ahead.source.read_into, self.file, f"the record {name}", start, size, crc or None)

    def _make_broken_error(self, why: str) -> CheckpointError:
        if _LEGACY_MAGIC in bytes(self._head[:_LEGACY_MAGIC_END]):  # even if the file is incomplete
            return UnsupportedStateError(
                "the file was written without torch's zip format (torch before 1.6, or "
                "_use_new_zipfile_serialization=False), and is not read",
                file=self.file,
                hint="Load it with torch.load, and save it anew: torch.save writes the zip format by default.",
            )
        hint = DAMAGED_FILE_HINT if bytes(self._head[:2]) == b"PK" else None
        return CorruptCheckpointError(f"the file is no whole zip of torch.save: {why}"[:300], file=self.file, hint=hint)

    def _read_bytes(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the zip.

        Raises:
            ValueError: The zip ends before them.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError("it points to behind its end")
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if (at := offset - (self.nbytes - len(self._tail))) >= 0:
            return self._tail[at : at + nbytes]
        return self.ahead.read_at(self.start + offset, nbytes)

    @cached_property
    def prefix(self) -> str:
        """Prefix of the names of all records."""
        pickles = [n for n in self.records if n == "data.pkl" or n.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CorruptCheckpointError("the zip is none of torch.save's: it has no data.pkl", file=self.file)
        return pickles[0].removesuffix("data.pkl")

    def _read_small_record(self, name: str) -> bytes:
        """Read the bytes of a record that is not a storage."""
        start, size, crc = self._locate_stored_record(name)
        data = bytes(self._read_bytes(start - self.start, size))
        if crc and zlib.crc32(data) != crc:
            raise CorruptCheckpointError(f"the record {name} is not what its CRC-32 says", file=self.file)
        return data

    def _locate_stored_record(self, name: str) -> tuple[int, int, int]:
        """Return (offset of the first byte in the file, bytes, CRC-32) of an uncompressed, unencrypted record.

        Raises:
            CorruptCheckpointError: The record is missing.
            UnsupportedStateError: The record is compressed or encrypted.
        """
        if (known := self._record_locations.get(name)) is None:
            record = self.records.get(self.prefix + name)
            if record is None:
                raise CorruptCheckpointError(f"the record {name} is missing in the zip", file=self.file)
            if not record.is_plain:
                raise UnsupportedStateError(
                    f"the record {name} is compressed or encrypted, or the file is damaged",
                    file=self.file,
                    hint="torch.save compresses nothing: restore it from a copy, unless another program packed it.",
                )
            known = self._record_locations[name] = self._read_local_header(self.prefix + name)
        return known

    def _read_local_header(self, name: str) -> tuple[int, int, int]:
        """Return (offset of the first byte in the file, stored bytes, CRC-32) of a record.

        Raises:
            CorruptCheckpointError: The record is not inside the zip.
        """
        record = self.records[name]
        try:
            head = self._read_bytes(record.header, LOCAL_HEADER.size)
            signature, *_, named, extra = LOCAL_HEADER.unpack(head)
            start = record.header + len(head) + named + extra
            if signature != b"PK\3\4" or start + record.nbytes > self.nbytes:
                raise ValueError("no record is there")
        except ValueError as error:
            raise CorruptCheckpointError(f"the record {name} does not lie in the zip", file=self.file) from error
        return self.start + start, record.nbytes, record.crc

    def _expand_nested(self, nested: NestedTensorStub) -> dict[str, TensorView]:
        """Return the parts of a nested tensor."""
        about = (nested.sizes, nested.strides, nested.offsets)
        sizes, steps, offsets = (self._read_integers(view) for view in about)
        return {
            str(i): TensorView(
                storage=nested.buffer.storage,
                dtype=nested.buffer.dtype,
                offset=nested.buffer.offset + offset,
                shape=parse_sizes(size),
                strides=parse_sizes(step),
            )
            for i, (size, step, offset) in enumerate(zip(sizes, steps, offsets, strict=True))
        }

    def _read_integers(self, view: TensorView) -> Any:
        """Return the elements of a small integer tensor as nested lists.

        Raises:
            CorruptCheckpointError: It is another kind of tensor, or corrupt.
        """
        at = self._locate_tensor(view, False)
        data = self._read_small_record(f"data/{view.storage.key}")
        first, nbytes = view.offset * at.dtype.itemsize, Box.from_shape(at.shape).size * at.dtype.itemsize
        if at.dtype.name != "int64" or nbytes > _MAX_SIZES_BYTES:
            raise CorruptCheckpointError("a nested tensor has no list of its sizes", file=self.file)
        numbers = np.frombuffer(data[first : first + nbytes], np.int64).reshape(at.shape)
        if (numbers < 0).any():
            raise CorruptCheckpointError("a nested tensor has negative sizes", file=self.file)
        return numbers.tolist()

    def _locate_tensor(self, view: TensorView, allow_strided: bool) -> TensorLocation:
        """Locate a tensor that the pickle describes as a part of a storage.

        Raises:
            UnsupportedStateError: The tensor is not contiguous, and `allow_strided` is False.
            CorruptCheckpointError: The tensor exceeds its storage.
        """
        dtype, count = dtypes.get_dtype(view.dtype), Box.from_shape(view.shape).size
        start, size, crc = self._locate_stored_record(f"data/{view.storage.key}")
        ordered = not count or _is_contiguous(view.shape, view.strides)
        if not ordered and not allow_strided:
            raise UnsupportedStateError(
                "a tensor is not contiguous",
                file=self.file,
                found=f"shape {view.shape}, strides {view.strides}",
                hint="Load it with torch, make it contiguous, and save it anew.",
            )
        span = count if ordered else 1 + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        first, nbytes = view.offset * dtype.itemsize, span * dtype.itemsize
        storage_bytes = view.storage.count * (1 if view.storage.dtype is None else dtype.itemsize)
        # A pickle may claim any size of a storage. Without this check, a load would read the bytes that follow it.
        if storage_bytes > size or (count and first + nbytes > storage_bytes):
            raise CorruptCheckpointError(
                "a tensor reaches past the end of its storage",
                file=self.file,
                expected=f"{first + nbytes} bytes",
                found=min(size, storage_bytes),
            )
        alone = ordered and (first, nbytes) == (0, size)  # a part of a storage has no CRC-32 of its own
        return TensorLocation(
            file=self.file,
            offset=start + (first if count else 0),
            dtype=dtype,
            shape=view.shape,
            crc=crc if alone and (crc or not size) else None,
            strides=None if ordered else view.strides,
            part=view.part,
        )


def _is_contiguous(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Return True if the strides correspond to C order. The stride of a dim of size 1 is ignored."""
    return all(
        actual == step for actual, step, n in zip(steps, compute_strides(shape, 1), shape, strict=True) if n != 1
    )
