"""The files of a directory of DCP's: what `.metadata` says, where each chunk lies, and the digests of all of it.

Digests stand in a manifest (in tags of ours), or in a file beside `.metadata` (`xla_ckpt.layouts.digests`). With
them the zips of tensors are not even looked at; a directory of stock DCP's has none, and its zips say where in them
the elements lie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.tag_reader import DAMAGED, MAX_MANIFEST, absent, head_of
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, naming
from xla_ckpt.fingerprint import text_fingerprint
from xla_ckpt.layouts import digests
from xla_ckpt.layouts.dcp.metadata import (
    MAX_METADATA,
    METADATA,
    Contents,
    DcpChunk,
    DcpTensor,
    KeyPath,
    Span,
    parse_metadata,
)
from xla_ckpt.layouts.dcp.tags import ranks_metadata
from xla_ckpt.layouts.digests import DIGESTS, MAX_DIGESTS
from xla_ckpt.layouts.scanned import ScannedFiles
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.stand_ins import TensorParts
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, Zip
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import BlockDigester, BlockTable
from xla_ckpt.manifest.records import FileRecord, UnknownArray
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Directory, Source
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import COMMITTED, MANIFEST


class DcpFiles(ScannedFiles):
    """The files of a directory: by name, and by number for a manifest."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self.directory = directory
        self.digested: Mapping[str, FileRecord] = {}
        """The records of the digests, by path; empty where there are none."""
        self.digests_in = DIGESTS
        """The file that these are from."""
        self.identity = ""
        """The same for all ranks that have opened the same version of the directory; empty where nothing tells it."""
        self._tables: dict[str, BlockTable] = {}
        self._sound_heads: set[str] = set()

    @cached_property
    def names(self) -> frozenset[str]:
        """All files."""
        return frozenset(self.directory.files())

    @property
    def saved_over(self) -> str:
        """What to do about digests that contradict what they lie beside."""
        files = f"{MANIFEST} and {COMMITTED}" if self.digests_in == MANIFEST else self.digests_in
        return (
            f"The directory is damaged, or another program has saved over it. If one has, remove {files}: "
            "then it is read without digests, as DCP reads it."
        )

    def contents(self) -> Contents | None:
        """What `.metadata` says, compared with the digests where there are any; None if there is no metadata at all.

        Raises:
            CorruptCheckpointError: It is damaged, or the digests contradict it.
        """
        data = self.small(METADATA, MAX_METADATA)
        if data is None:
            of_ranks = ((name, self.small(name, MAX_METADATA)) for name in ranks_metadata(self.names))
            parts = [self._parsed(name, part) for name, part in of_ranks if part is not None]
            return _merged(parts) if parts else None
        self._find_digests()
        contents = self._parsed(METADATA, data)
        # The metadata of two saves of one program may be equal. Their digests are not, unless all bytes are.
        known = sorted((r.path, r.digest, r.digests) for r in self.digested.values() or self.records)
        self.identity = text_fingerprint(repr(known))
        return contents

    def _find_digests(self) -> None:
        if (data := self.small(MANIFEST, MAX_MANIFEST)) is not None:
            with naming(file=MANIFEST):
                records = manifest_json.parse(data).files
            self.digests_in = MANIFEST
        elif (data := self.small(DIGESTS, MAX_DIGESTS)) is not None:
            records = digests.parse_digests(data)
        else:
            return
        self.digested = {record.path: record for record in records}

    def _parsed(self, name: str, data: bytes) -> Contents:
        record = digests.record_of(name, data)
        if self.digested and self.digested.get(name) != record:
            raise CorruptCheckpointError(
                f"{name} is not the one that {self.digests_in} was written for", file=name, hint=self.saved_over
            )
        self.add(record)
        return parse_metadata(data, name)

    def small(self, name: str, limit: int) -> bytes | None:
        """All of a small file; None if there is none.

        Raises:
            FormatError: It is larger than `limit` bytes.
        """
        try:
            return read_whole(self.directory, name, limit=limit)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def open(self, name: str) -> Source:
        """A file for reading.

        Raises:
            CorruptCheckpointError: There is none; or the digests do not know it, or say that it has another size.
            ChangedTagError: There is none, since the directory has been removed.
        """
        try:
            source = self.directory.open(name)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise absent(self.directory, "a file is missing", file=name, hint=DAMAGED) from None
        record = self.digested.get(name)
        if self.digested and (record is None or record.size != source.size):
            size = source.size
            source.close()
            raise CorruptCheckpointError(
                f"a file is not as {self.digests_in} says",
                file=name,
                expected="no such file" if record is None else f"{record.size} bytes",
                found=f"{size} bytes",
                hint=self.saved_over,
            )
        return source

    def number(self, name: str, size: int) -> int:
        """The number in the manifest of a file of so many bytes."""
        if name not in self.numbers:
            self.add(self.digested.get(name) or FileRecord(path=name, size=size))
        return self.numbers[name]

    def number_inside(self, name: str) -> int:
        """The number of a file for arrays inside of its values.

        The digests are those of whole values, and have been compared with all of them when this is called. Arrays in
        them are read later without any.
        """
        number = self.numbers[name]
        if self.records[number].regions:
            self.records[number] = FileRecord(path=name, size=self.records[number].size)
        return number

    def check_value(self, ahead: Ahead, span: Span) -> None:
        """Compare a value with its digests, where there are any.

        Raises:
            CorruptCheckpointError: It is not what was saved.
        """
        record = self.digested.get(span.file)
        if record is None:
            return
        last = bisect_left(record.regions, (span.offset + span.nbytes, 0)) - 1  # the last that begins before its end
        if last < 0 or sum(record.regions[last]) <= span.offset:  # it lies in no region
            if span.file not in self._sound_heads:
                head_of(ahead.source, record, lambda: self.saved_over)
                self._sound_heads.add(span.file)
            return
        if span.file not in self._tables:
            self._tables[span.file] = record.block_table()
        expected = self._tables[span.file].of(span.offset, span.nbytes)
        digester = BlockDigester(span.nbytes)
        digester.update(ahead.take(span.offset, span.nbytes))
        if tuple(digester.digests) != expected:
            raise CorruptCheckpointError("a value is damaged", file=span.file, hint=self.saved_over)

    def zipped(
        self,
        ahead: Ahead,
        span: Span,
        tensor: Callable[[TensorAt], Any] = lambda place: place,
        parts: Callable[[TensorParts], Any] | None = None,
    ) -> Any:
        """What the zip in a span holds, with what `tensor` and `parts` make of each tensor (see `Zip.value`).

        Raises:
            CheckpointError: There is no whole zip, or it is of a kind that is not read.
        """
        archive = Zip(ahead, span.offset, span.nbytes)
        value = archive.value(strided=True, tensor=tensor, parts=parts)
        self.storages[span.file] += archive.met_storages()
        return value

    def tensor_at(self, ahead: Ahead, span: Span, dtype: DType, box: Box) -> TensorAt:
        """Where the elements of a chunk lie: in the region that the digests say, or as its zip says.

        Raises:
            CorruptCheckpointError: Its zip is none, or holds something else, or there is no such region.
            UnsupportedStateError: It is no zip, but a file of safetensors.
        """
        if self.digested:
            offset = self._region_in(span, box.size * dtype.itemsize)
            return TensorAt(file=span.file, offset=offset, dtype=dtype, shape=box.shape)
        if span.nbytes and bytes(ahead.take(span.offset, 9)[8:]) == b"{":
            raise UnsupportedStateError(
                "this FileSystemWriter has written tensors as safetensors, which DCP itself does not read back: "
                ".metadata gives all of a file one place",
                file=span.file,
                hint="Save with the default serialization_format, or with HuggingFaceStorageWriter.",
            )
        value = self.zipped(ahead, span)
        if not isinstance(value, TensorAt) or (value.dtype, value.shape) != (dtype, box.shape):
            is_tensor = isinstance(value, TensorAt)
            raise CorruptCheckpointError(
                f"a chunk is not what {METADATA} says",
                file=span.file,
                expected=f"{dtype.name} {list(box.shape)} at {list(box.start)}",
                found=f"{value.dtype.name} {list(value.shape)}" if is_tensor else type(value).__name__,
            )
        return value

    def _region_in(self, span: Span, nbytes: int) -> int:
        """Offset of the region of so many bytes that lies in a span, as the digests say."""
        regions = self.digested[span.file].regions
        at = bisect_left(regions, (span.offset, 0))
        offset, size = regions[at] if at < len(regions) else (0, 0)
        if size != nbytes or offset + size > span.offset + span.nbytes:
            raise CorruptCheckpointError(
                f"{self.digests_in} has no digests of a chunk",
                file=span.file,
                expected=f"{nbytes} bytes within {span.offset} to {span.offset + span.nbytes}",
                hint=self.saved_over,
            )
        return offset


def _merged(parts: Sequence[Contents]) -> Contents:
    """What all ranks stored that did not tell each other: the chunks of all, and what several have of the first.

    Raises:
        CorruptCheckpointError: A tensor has not the same type and shape on all ranks that have it.
    """
    tensors: dict[str, dict[Box, DcpChunk]] = {}
    first: dict[str, DcpTensor] = {}
    objects: dict[str, Span] = {}
    paths: dict[str, KeyPath] = {}
    undescribed: dict[str, UnknownArray] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            known = first.setdefault(key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CorruptCheckpointError(
                    "the ranks have stored different tensors under one key",
                    leaf=key,
                    expected=f"{known.dtype.name} {list(known.shape)}",
                    found=f"{tensor.dtype.name} {list(tensor.shape)}",
                )
            chunks = tensors.setdefault(key, {})
            for chunk in tensor.chunks:
                chunks.setdefault(chunk.box, chunk)
        objects = {**part.objects, **objects}
        paths = {**part.paths, **paths}
        undescribed = {**part.undescribed, **undescribed}
    whole = {key: DcpTensor(t.dtype, t.shape, tuple(tensors[key].values())) for key, t in first.items()}
    return Contents(whole, objects, paths, undescribed)


def check_unchanged(span: Span) -> None:
    """Refuse what an extension of DCP has changed.

    Raises:
        UnsupportedStateError: One has.
    """
    if span.transforms:
        raise UnsupportedStateError(
            f"an extension of DCP has changed what is stored: {', '.join(span.transforms)}",
            file=span.file,
            hint="Load the directory with torch.distributed.checkpoint, and save it anew without _extensions=.",
        )
