"""The files of one DCP directory: metadata, the location of each chunk, and digests.

Digests are stored in a manifest (in tags of this library), or in a file next to `.metadata`
(`xla_ckpt.formats.digests`). With digests, the zips of tensors are not opened. A directory of stock DCP has no digests,
and the zips are opened to locate the elements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_ckpt.core.checksum import BlockDigester, BlockTable
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.fingerprint import compute_text_fingerprint
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import FileRecord, UnreadableArray
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats import digests
from xla_ckpt.formats.dcp.metadata import (
    MAX_METADATA_BYTES,
    METADATA_FILE,
    DcpContents,
    DcpTensor,
    KeyPath,
    StorageSpan,
    TensorChunk,
    list_rank_metadata,
    parse_metadata,
)
from xla_ckpt.formats.digests import DIGESTS, MAX_DIGESTS_BYTES
from xla_ckpt.formats.scan import ScannedFiles
from xla_ckpt.formats.torch_save.pickle_stubs import CompositeTensor
from xla_ckpt.formats.torch_save.zip_reader import ReadAheadFile, TensorLocation, TorchZip
from xla_ckpt.loading.tag_reader import (
    DAMAGED_FILE_HINT,
    MAX_MANIFEST_BYTES,
    make_absent_error,
    read_verified_head,
)
from xla_ckpt.storage.base import Directory, FileReader, read_file
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE


class DcpFiles(ScannedFiles):
    """Files of a directory: by name, and by their number in a manifest."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self.directory = directory
        self.digest_records: Mapping[str, FileRecord] = {}
        """File records with digests, by path; empty without digests."""
        self.digest_source = DIGESTS
        """File that contains the digests."""
        self.identity = ""
        """Fingerprint that is equal on all ranks that opened the same version of the directory; empty if unknown."""
        self._block_tables: dict[str, BlockTable] = {}
        self._verified_heads: set[str] = set()

    @cached_property
    def file_names(self) -> frozenset[str]:
        """Names of all files."""
        return frozenset(self.directory.list_files())

    @property
    def digest_mismatch_hint(self) -> str:
        """Hint for digests that contradict the files."""
        files = (
            f"{MANIFEST_FILE} and {ORBAX_COMMITTED_FILE}" if self.digest_source == MANIFEST_FILE else self.digest_source
        )
        return (
            f"The directory is damaged, or another program has saved over it. If one has, remove {files}: "
            "then it is read without digests, as DCP reads it."
        )

    def read_contents(self) -> DcpContents | None:
        """Read `.metadata`, and check it against the digests if there are any; None if there is no metadata.

        Raises:
            CorruptCheckpointError: It is corrupt, or the digests contradict it.
        """
        data = self.read_small_file(METADATA_FILE, MAX_METADATA_BYTES)
        if data is None:
            of_ranks = (
                (name, self.read_small_file(name, MAX_METADATA_BYTES)) for name in list_rank_metadata(self.file_names)
            )
            parts = [self._parse_metadata_file(name, part) for name, part in of_ranks if part is not None]
            return _merge_contents(parts) if parts else None
        self._find_digests()
        contents = self._parse_metadata_file(METADATA_FILE, data)
        # The metadata of two saves of one program may be equal. Their digests differ, unless all bytes are equal.
        known = sorted(
            (r.path, r.framing_digest, r.block_digests) for r in self.digest_records.values() or self.records
        )
        self.identity = compute_text_fingerprint(repr(known))
        return contents

    def _find_digests(self) -> None:
        if (data := self.read_small_file(MANIFEST_FILE, MAX_MANIFEST_BYTES)) is not None:
            with annotate_errors(file=MANIFEST_FILE):
                records = manifest_json.parse_manifest(data).files
            self.digest_source = MANIFEST_FILE
        elif (data := self.read_small_file(DIGESTS, MAX_DIGESTS_BYTES)) is not None:
            records = digests.parse_digests(data)
        else:
            return
        self.digest_records = {record.path: record for record in records}

    def _parse_metadata_file(self, name: str, data: bytes) -> DcpContents:
        record = digests.make_file_record(name, data)
        if self.digest_records and self.digest_records.get(name) != record:
            raise CorruptCheckpointError(
                f"{name} is not the one that {self.digest_source} was written for",
                file=name,
                hint=self.digest_mismatch_hint,
            )
        self.add(record)
        return parse_metadata(data, name)

    def read_small_file(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file; None if it does not exist.

        Raises:
            FormatError: The file is larger than `limit` bytes.
        """
        try:
            return read_file(self.directory, name, limit=limit)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def open(self, name: str) -> FileReader:
        """Open a file for reading.

        Raises:
            CorruptCheckpointError: The file does not exist; or the digests do not list it, or list another size.
            ChangedTagError: The file does not exist because the directory has been removed.
        """
        try:
            source = self.directory.open(name)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise make_absent_error(self.directory, "a file is missing", file=name, hint=DAMAGED_FILE_HINT) from None
        record = self.digest_records.get(name)
        if self.digest_records and (record is None or record.size != source.size):
            size = source.size
            source.close()
            raise CorruptCheckpointError(
                f"a file is not as {self.digest_source} says",
                file=name,
                expected="no such file" if record is None else f"{record.size} bytes",
                found=f"{size} bytes",
                hint=self.digest_mismatch_hint,
            )
        return source

    def get_file_number(self, name: str, size: int) -> int:
        """Return the number in the manifest of a file of `size` bytes."""
        if name not in self.file_numbers:
            self.add(self.digest_records.get(name) or FileRecord(path=name, size=size))
        return self.file_numbers[name]

    def get_inner_file_number(self, name: str) -> int:
        """Return the number of a file for arrays inside its values.

        Digests cover complete values, and have been checked for all values before this is called. Arrays inside of
        values are later read without digests.
        """
        number = self.file_numbers[name]
        if self.records[number].regions:
            self.records[number] = FileRecord(path=name, size=self.records[number].size)
        return number

    def check_value(self, ahead: ReadAheadFile, span: StorageSpan) -> None:
        """Check a value against its digests, if there are any.

        Raises:
            CorruptCheckpointError: The bytes differ from those that were saved.
        """
        record = self.digest_records.get(span.file)
        if record is None:
            return
        last = bisect_left(record.regions, (span.offset + span.nbytes, 0)) - 1  # the last that begins before its end
        if last < 0 or sum(record.regions[last]) <= span.offset:  # outside of all regions
            if span.file not in self._verified_heads:
                read_verified_head(ahead.source, record, lambda: self.digest_mismatch_hint)
                self._verified_heads.add(span.file)
            return
        if span.file not in self._block_tables:
            self._block_tables[span.file] = record.build_block_table()
        expected = self._block_tables[span.file].get_digests(span.offset, span.nbytes)
        digester = BlockDigester(span.nbytes)
        digester.update(ahead.read_at(span.offset, span.nbytes))
        if tuple(digester.digests) != expected:
            raise CorruptCheckpointError("a value is damaged", file=span.file, hint=self.digest_mismatch_hint)

    def read_zip(
        self,
        ahead: ReadAheadFile,
        span: StorageSpan,
        tensor: Callable[[TensorLocation], Any] = lambda place: place,
        parts: Callable[[CompositeTensor], Any] | None = None,
    ) -> Any:
        """Read the zip in a span, with tensors converted by `tensor` and `parts` (see `TorchZip.read_value`).

        Raises:
            CheckpointError: The zip is incomplete, or of an unsupported kind.
        """
        archive = TorchZip(ahead, span.offset, span.nbytes)
        value = archive.read_value(allow_strided=True, convert_tensor=tensor, convert_parts=parts)
        self.storages[span.file] += archive.list_used_storages()
        return value

    def locate_tensor(self, ahead: ReadAheadFile, span: StorageSpan, dtype: DType, box: Box) -> TensorLocation:
        """Locate the elements of a chunk: by the region in the digests, or by its zip.

        Raises:
            CorruptCheckpointError: The zip is invalid or has other content, or the digests contain no such region.
            UnsupportedStateError: It is a safetensors file.
        """
        if self.digest_records:
            offset = self._find_region(span, box.size * dtype.itemsize)
            return TensorLocation(file=span.file, offset=offset, dtype=dtype, shape=box.shape)
        if span.nbytes and bytes(ahead.read_at(span.offset, 9)[8:]) == b"{":
            raise UnsupportedStateError(
                "this FileSystemWriter has written tensors as safetensors, which DCP itself does not read back: "
                ".metadata gives all of a file one place",
                file=span.file,
                hint="Save with the default serialization_format, or with HuggingFaceStorageWriter.",
            )
        value = self.read_zip(ahead, span)
        if not isinstance(value, TensorLocation) or (value.dtype, value.shape) != (dtype, box.shape):
            is_tensor = isinstance(value, TensorLocation)
            raise CorruptCheckpointError(
                f"a chunk is not what {METADATA_FILE} says",
                file=span.file,
                expected=f"{dtype.name} {list(box.shape)} at {list(box.start)}",
                found=f"{value.dtype.name} {list(value.shape)}" if is_tensor else type(value).__name__,
            )
        return value

    def _find_region(self, span: StorageSpan, nbytes: int) -> int:
        """Return the offset of the region of `nbytes` bytes in a span, according to the digests.

        Raises:
            CorruptCheckpointError: The digests contain no such region.
        """
        regions = self.digest_records[span.file].regions
        at = bisect_left(regions, (span.offset, 0))
        offset, size = regions[at] if at < len(regions) else (0, 0)
        if size != nbytes or offset + size > span.offset + span.nbytes:
            raise CorruptCheckpointError(
                f"{self.digest_source} has no digests of a chunk",
                file=span.file,
                expected=f"{nbytes} bytes within {span.offset} to {span.offset + span.nbytes}",
                hint=self.digest_mismatch_hint,
            )
        return offset


def _merge_contents(parts: Sequence[DcpContents]) -> DcpContents:
    """Merge the contents of ranks that saved without communication: all chunks, and the first of equal keys.

    Raises:
        CorruptCheckpointError: A tensor has different dtypes or shapes on two ranks.
    """
    tensors: dict[str, dict[Box, TensorChunk]] = {}
    first: dict[str, DcpTensor] = {}
    objects: dict[str, StorageSpan] = {}
    paths: dict[str, KeyPath] = {}
    undescribed: dict[str, UnreadableArray] = {}
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
        undescribed = {**part.unsupported, **undescribed}
    whole = {key: DcpTensor(t.dtype, t.shape, tuple(tensors[key].values())) for key, t in first.items()}
    return DcpContents(whole, objects, paths, undescribed)


def check_no_transforms(span: StorageSpan) -> None:
    """Check that no DCP extension transformed the stored bytes.

    Raises:
        UnsupportedStateError: An extension did.
    """
    if span.transforms:
        raise UnsupportedStateError(
            f"an extension of DCP has changed what is stored: {', '.join(span.transforms)}",
            file=span.file,
            hint="Load the directory with torch.distributed.checkpoint, and save it anew without _extensions=.",
        )
