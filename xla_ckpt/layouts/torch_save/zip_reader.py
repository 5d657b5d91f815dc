"""Files that torch.save wrote, as byte ranges: a zip whose records are a pickle and the storages, uncompressed.

Only the zip's directory and the pickle are read. Each tensor is replaced by the place where it lies.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.layouts.torch_save.restricted_pickle import View, loads, replaced
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import strides
from xla_ckpt.storage.base import Directory, Source

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, length of the name, length of the extra field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAt:
    """A tensor that lies in a file: contiguous, in C order."""

    file: str
    """Relative to the tag directory."""

    offset: int
    """Of its first byte."""

    dtype: DType
    shape: tuple[int, ...]

    crc: int | None = None
    """CRC-32 of its bytes; None if the zip has none of this tensor alone."""


class _Readable(io.RawIOBase):
    """A source as the file object that `zipfile` wants."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("a seek to before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        left = max(self._source.size - self._at, 0)
        got = self._source.read_into(view[:left], self._at)
        self._at += got
        return got


def read(directory: Directory, file: str, reference: Callable[[Any], Any] | None = None) -> Any:
    """What a file of torch.save holds, with a `TensorAt` for every tensor; `reference` of the number of each reference.

    Raises:
        CorruptCheckpointError: It is missing, cut off, or no such file.
        UntrustedObjectError: It names anything but tensors, containers and plain values.
        UnsupportedStateError: A tensor is not contiguous, or of another byte order.
    """
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("a file is missing", file=file) from None
    try:
        with zipfile.ZipFile(io.BufferedReader(_Readable(source), 4096)) as archive:
            return _Archive(archive, source, file).read(reference)
    except CheckpointError:
        raise
    except Exception as error:
        # zipfile raises errors of many kinds over damaged files.
        raise CorruptCheckpointError(
            f"the file is no whole zip of torch.save: {error}"[:300],
            file=file,
            hint=None if _begins(source, b"PK") else "Files of torch before 1.6 are not read: load and save them anew.",
        ) from error
    finally:
        source.close()


def check_zip(directory: Directory, file: str) -> int:
    """Read a whole zip, and compare each record with its CRC-32; its size in bytes.

    Raises:
        CorruptCheckpointError: It is missing, cut off, or a record is not what was written.
    """
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("a file is missing", file=file) from None
    try:
        with zipfile.ZipFile(io.BufferedReader(_Readable(source), 1 << 20)) as archive:
            bad = archive.testzip()
    except Exception as error:
        # zipfile raises errors of many kinds over damaged files.
        raise CorruptCheckpointError(f"the file is no whole zip: {error}"[:300], file=file) from error
    finally:
        source.close()
    if bad is not None:
        raise CorruptCheckpointError(f"the record {bad} is not what its CRC-32 says", file=file)
    return source.size


def _begins(source: Source, text: bytes) -> bool:
    start = bytearray(len(text))
    source.read_into(memoryview(start), 0)
    return bytes(start) == text


class _Archive:
    """An open zip."""

    def __init__(self, archive: zipfile.ZipFile, source: Source, file: str) -> None:
        self.archive = archive
        self.source = source
        self.file = file
        pickles = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CorruptCheckpointError("the zip is none of torch.save's: it has no data.pkl", file=file)
        self.prefix = pickles[0].removesuffix("data.pkl")
        self.offsets: dict[str, tuple[int, int, int]] = {}

    def read(self, reference: Callable[[Any], Any] | None) -> Any:
        if f"{self.prefix}byteorder" in self.archive.namelist() and self._small("byteorder") != b"little":
            raise UnsupportedStateError("the file is not in little-endian order", file=self.file)

        def leaf(value: Any) -> Any:
            if isinstance(value, View):
                return self._place(value)
            if reference is None or type(value.tid) is not int or value.tid < 0:
                raise CorruptCheckpointError("a reference to a tensor where none can be", file=self.file)
            return reference(value.tid)

        return replaced(loads(self._small("data.pkl"), self.file), leaf, self.file)

    def _small(self, name: str) -> bytes:
        """The bytes of a record that is no storage."""
        self._record(name)  # raises if it is compressed: a small record could become any number of bytes
        return self.archive.read(self.prefix + name)

    def _record(self, name: str) -> tuple[int, int, int]:
        """(offset of the first byte, bytes, CRC-32) of a record."""
        if (known := self.offsets.get(name)) is not None:
            return known
        try:
            info = self.archive.getinfo(self.prefix + name)
        except KeyError:
            raise CorruptCheckpointError(f"the record {name} is missing in the zip", file=self.file) from None
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise UnsupportedStateError(f"the record {name} is compressed or encrypted", file=self.file)
        head = bytearray(_LOCAL_HEADER.size)
        got = self.source.read_into(memoryview(head), info.header_offset)
        signature, name_size, extra_size = _LOCAL_HEADER.unpack(head)
        start = info.header_offset + len(head) + name_size + extra_size
        if got < len(head) or signature != b"PK\3\4" or start + info.file_size > self.source.size:
            raise CorruptCheckpointError(f"the record {name} does not lie in the zip", file=self.file)
        self.offsets[name] = start, info.file_size, info.CRC
        return self.offsets[name]

    def _place(self, view: View) -> TensorAt:
        """Where a tensor lies that the pickle describes as a part of a storage."""
        dtype, count = dtypes.dtype(view.dtype), Box.whole(view.shape).size
        start, size, crc = self._record(f"data/{view.storage.key}")
        if count and not _is_contiguous(view.shape, view.strides):
            raise UnsupportedStateError(
                "a tensor is not contiguous",
                file=self.file,
                found=f"shape {view.shape}, strides {view.strides}",
                hint="Load it with torch, make it contiguous, and save it anew.",
            )
        first, nbytes = view.offset * dtype.itemsize, count * dtype.itemsize
        held = view.storage.count * (1 if view.storage.dtype is None else dtype.itemsize)
        # A pickle may claim anything of a storage: unchecked, a load would read what lies behind it in the file.
        if held > size or (count and first + nbytes > held):
            raise CorruptCheckpointError(
                "a tensor reaches past the end of its storage",
                file=self.file,
                expected=f"{first + nbytes} bytes",
                found=min(size, held),
            )
        alone = (first, nbytes) == (0, size)  # a part of a storage has no CRC-32 of its own
        return TensorAt(
            file=self.file,
            offset=start + (first if count else 0),
            dtype=dtype,
            shape=view.shape,
            crc=crc if alone else None,
        )


def _is_contiguous(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether elements with these strides lie in C order. The stride of a dim of one element says nothing."""
    return all(given == step for given, step, n in zip(steps, strides(shape, 1), shape, strict=True) if n != 1)
