"""An open directory of DCP's: what it holds by key, where the bytes are, and their digests as far as there are any."""

from __future__ import annotations

import copy
import io
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from xla_ckpt.arrays.torch_host import torch_dtype
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.tag_reader import DAMAGED, MAX_MANIFEST, TagReader, absent
from xla_ckpt.errors import (
    CorruptCheckpointError,
    FormatError,
    NoCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    naming,
)
from xla_ckpt.layouts.dcp import digests
from xla_ckpt.layouts.dcp.digests import DIGESTS, MAX_DIGESTS
from xla_ckpt.layouts.dcp.metadata import (
    MAX_METADATA,
    METADATA,
    Contents,
    Span,
    StoredChunk,
    StoredTensor,
    merged,
    parse,
)
from xla_ckpt.layouts.dcp.scan import shards_of
from xla_ckpt.layouts.dcp.tags import ranks_metadata
from xla_ckpt.layouts.torch_save.zip_reader import Ahead, TensorAt, Zip
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import BlockTable, block_size, digest, to_hex
from xla_ckpt.manifest.records import FileRecord, Head, Manifest, Shard, array_record
from xla_ckpt.storage.base import Directory, Source, Store
from xla_ckpt.storage.door import above
from xla_ckpt.storage.pool import BUFFER_BYTES, threads, work_off
from xla_ckpt.tags import replacement
from xla_ckpt.tags.directory import MANIFEST

Start = tuple[int, ...]
"""The first element of a chunk: its name among the chunks of its key."""


def saved_over(file: str) -> str:
    """What to do about a directory whose digests, in this file, are not those of its other files."""
    return (
        f"The file is damaged, or another program has saved into this directory since. In that case remove {file}: "
        "then the directory is read without digests, as DCP reads it."
    )


@dataclass(slots=True)
class Opened:
    """An open checkpoint."""

    directory: Directory
    path: str
    contents: Contents
    records: Mapping[str, FileRecord] | None
    """What is known of each file, by name; None in a directory of stock DCP's, which has no digests."""

    digests_in: str
    """The file that these are from."""

    identity: str = ""
    """The same for all ranks that have opened the same version of it."""

    _ahead: dict[str, Ahead] = field(default_factory=dict)

    def close(self) -> None:
        """Release all files, and the directory."""
        for held in self._ahead.values():
            held.source.close()
        self._ahead.clear()
        self.directory.close()

    def tensor(self, key: str) -> StoredTensor:
        """What is stored of a tensor.

        Raises:
            CorruptCheckpointError: There is no such tensor.
            IncompatibleCheckpointError: It cannot be described.
        """
        self._check_described(key)
        if key not in self.contents.tensors:
            raise CorruptCheckpointError("the checkpoint has no such tensor", leaf=key, path=self.path)
        return self.contents.tensors[key]

    def value(self, key: str, *, trust: bool) -> bytes:
        """A value that is no tensor, as bytes that `torch.load` takes.

        Without `trust` they are not the stored ones: those are read by a parser that runs nothing, and what it finds is
        saved anew. So DCP's planners, which load without asking, never see a file that somebody else wrote.

        Raises:
            UntrustedObjectError: It needs a class, and `trust` is False. Nothing of it has run.
            CorruptCheckpointError: It is damaged.
            IncompatibleCheckpointError: It is a tensor that cannot be described.
        """
        self._check_described(key)
        span = self.contents.objects.get(key)
        if span is None:
            raise CorruptCheckpointError("the checkpoint has no such value", leaf=key, path=self.path)
        with naming(leaf=key, file=span.file, path=self.path):
            _check_plain(span)
            self._check_value(span)
            if trust:
                return self._bytes(span)
            made = io.BytesIO()
            try:
                torch.save(self._loaded(span), made)
            except UntrustedObjectError as error:
                error.hint = "Pass trust_pickle=True if you trust whoever wrote this checkpoint."
                raise
            return made.getvalue()

    def _check_described(self, key: str) -> None:
        if key in self.contents.undescribed:
            raise self.contents.undescribed[key].error(key).at(file=METADATA, path=self.path)

    def places(self, wanted: Mapping[str, Iterable[Start]]) -> Places:
        """Where these chunks are, by key.

        Raises:
            CorruptCheckpointError: They are not where the metadata says, or the chunks of a key are not all of it.
            UnsupportedStateError: They are stored in a way that is not read here.
        """
        return Places.of(self, wanted)

    def held(self, file: str) -> Ahead:
        """A file, opened once.

        Raises:
            CorruptCheckpointError: It is missing, or has another size than was saved.
            ChangedTagError: It is missing, since the checkpoint has been removed.
        """
        if file not in self._ahead:
            try:
                source = self.directory.open(file)
            except FileNotFoundError:
                problem = "a file of the checkpoint is missing"
                raise absent(self.directory, problem, file=file, path=self.path) from None
            self._ahead[file] = Ahead(source, file)
            record = None if self.records is None else self.records.get(file)
            if record is not None and source.size != record.size:
                raise CorruptCheckpointError(
                    "a file does not have its size",
                    file=file,
                    path=self.path,
                    expected=f"{record.size} bytes",
                    found=source.size,
                    hint=DAMAGED,
                )
        return self._ahead[file]

    def _check_value(self, span: Span) -> None:
        """Compare what holds a value with its digests, where there are any; else with what the zip says of itself."""
        if self.records is None:
            source = self.held(span.file)
            Zip(source, span.offset, span.nbytes).check()
            return
        record = self._record(span)
        pieces = [(span.offset, span.nbytes)] if record.regions else [(0, record.size)]
        for offset, nbytes in pieces:
            data = self.held(span.file).take(offset, nbytes)
            step = block_size(nbytes) if record.regions else nbytes
            expected = (
                BlockTable.of_regions(record.regions, record.digests).of(offset, nbytes)
                if record.regions
                else (record.digest,)
            )
            found = tuple(digest(data[at : at + step]) for at in range(0, nbytes, step))
            if found != expected:
                raise CorruptCheckpointError("stored bytes are damaged", hint=DAMAGED)

    def _record(self, span: Span) -> FileRecord:
        assert self.records is not None
        record = self.records.get(span.file)
        if record is None:
            raise CorruptCheckpointError(
                f"{METADATA} names a file without digests", file=span.file, hint=saved_over(self.digests_in)
            )
        return record

    def _bytes(self, span: Span) -> bytes:
        return bytes(self.held(span.file).take(span.offset, span.nbytes))

    def _loaded(self, span: Span) -> Any:
        """A value, read by a parser that runs nothing."""
        found = Zip(self.held(span.file), span.offset, span.nbytes).value(strided=True)
        return _with_tensors(found, self.stored)

    def stored(self, at: TensorAt) -> torch.Tensor:
        """A tensor that lies in a file, as a new one in C order."""
        dtype = torch_dtype(at.dtype)
        if dtype is None:
            raise UnsupportedStateError(f"torch has no element type {at.dtype.name}", file=at.file)
        count = int(np.prod(at.shape, dtype=np.int64))
        if not count:
            return torch.empty(at.shape, dtype=dtype)
        steps = at.strides
        span = count if steps is None else 1 + sum((n - 1) * s for n, s in zip(at.shape, steps, strict=True))
        data = bytearray(span * at.dtype.itemsize)
        source = self.held(at.file).source
        if source.read_into(memoryview(data), at.offset) < len(data):
            raise CorruptCheckpointError("the file ends too early", file=at.file, path=self.path)
        flat = torch.frombuffer(data, dtype=dtype)
        return flat.reshape(at.shape) if steps is None else flat.as_strided(at.shape, steps).contiguous()


@dataclass(slots=True)
class Places:
    """Where some chunks are."""

    opened: Opened
    tag: TagReader
    """Reads their files. The leaf paths of its manifest are the keys."""

    unverified: Sequence[tuple[str, TensorAt]]
    """(key, chunk) of those that have no digests: their zips may have CRC-32s."""

    @classmethod
    def of(cls, opened: Opened, wanted: Mapping[str, Iterable[Start]]) -> Places:
        """See `Opened.places`."""
        files: dict[str, int] = {}
        records: list[FileRecord] = []

        def number(file: str) -> int:
            if file not in files:
                files[file] = len(records)
                record = None if opened.records is None else opened.records.get(file)
                size = opened.held(file).size
                records.append(record or FileRecord(path=file, size=size, head=size, digest=0))
            return files[file]

        arrays, unverified = {}, []
        for key, starts in wanted.items():
            tensor = opened.tensor(key)
            asked = set(starts)
            shards: list[Shard] = []
            with naming(leaf=key, path=opened.path):
                for chunk in tensor.chunks:
                    if chunk.at is None or not chunk.box.size:
                        continue
                    if chunk.box.start not in asked:
                        # Nobody reads it. It counts for the proof that the chunks are all of the tensor.
                        shards.append(Shard(chunk.box, number(chunk.at.file), chunk.at.offset))
                        continue
                    at = _place(opened, tensor, chunk)
                    if opened.records is None:
                        unverified.append((key, at))
                    shards += shards_of(at, chunk.box, number(at.file))
                arrays[key] = array_record(tensor.dtype, tensor.shape, shards)
        manifest = Manifest(
            head=Head(tag="", sequence=0, pinned=False, created=""), skeleton=None, arrays=arrays, files=tuple(records)
        )
        root, _, name = opened.path.rpartition("/")
        tag = TagReader(opened.directory, root, name, manifest, foreign_objects=())
        return cls(opened, tag, unverified)

    def check_crcs(self) -> None:
        """Compare the chunks without digests with the CRC-32s of their zips, as far as these have any.

        Raises:
            CorruptCheckpointError: A chunk is not what was saved.
        """
        chunks = [(key, at) for key, at in self.unverified if at.crc is not None]

        def check(one: tuple[str, TensorAt], buffer: memoryview) -> None:
            key, at = one
            source, crc = self.opened.held(at.file).source, 0
            nbytes = int(np.prod(at.shape, dtype=np.int64)) * at.dtype.itemsize
            for low in range(0, nbytes, len(buffer)):
                part = buffer[: min(len(buffer), nbytes - low)]
                if source.read_into(part, at.offset + low) < len(part):
                    raise CorruptCheckpointError(
                        "the file ends too early", leaf=key, file=at.file, path=self.opened.path
                    )
                crc = zlib.crc32(part, crc)
            if crc != at.crc:
                raise CorruptCheckpointError(
                    "stored bytes are damaged: they are not what the CRC-32 of their zip says",
                    leaf=key,
                    file=at.file,
                    path=self.opened.path,
                    expected=f"{at.crc:08x}",
                    found=f"{crc:08x}",
                    hint=DAMAGED,
                )

        work_off(
            chunks, check, workers=min(threads(READERS, 2), len(chunks)) or 1, buffer_bytes=BUFFER_BYTES,
            name="xla_ckpt-crc",
        )  # fmt: skip

    def close(self) -> None:
        """Release the files that were opened for it."""
        self.tag.close_files()


def open_source(path: str) -> Opened:
    """Open a directory of DCP's.

    Raises:
        NoCheckpointError: There is none.
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UntrustedObjectError: Its metadata names something else than DCP's own classes. Nothing of it has run.
        OSError: The storage refused.
    """
    store, name = above(path, follow=True)
    directory = _found(store, name)
    try:
        return _opened(directory, path)
    except BaseException:
        directory.close()
        raise


def _found(store: Store, name: str) -> Directory:
    for _ in range(3):  # it may be replaced between two looks
        try:
            return store.open(replacement.where(store, name))
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise NoCheckpointError("there is no such checkpoint", hint=_beside(store))


def _beside(store: Store) -> str | None:
    """What checkpoints of DCP's lie in a directory, if there are any."""
    try:
        found = [there for there in sorted(store.names()) if store.has(f"{there}/{METADATA}")]
    except OSError:
        return None
    return f"Checkpoints beside it: {', '.join(found[-10:])}." if found else None


def _opened(directory: Directory, path: str) -> Opened:
    data = _small(directory, METADATA, MAX_METADATA)
    if data is None:
        return Opened(directory, path, _of_ranks(directory), None, DIGESTS)
    digests_in, listed = _listed(directory)
    records = None if listed is None else {record.path: record for record in listed}
    if records is not None:
        said = records.get(METADATA)
        if said is None or (said.size, said.digest) != (len(data), digest(data)):
            raise CorruptCheckpointError(
                f"{METADATA} is not the one that its digest is of", file=METADATA, hint=saved_over(digests_in)
            )
    # The metadata of two saves of one program may be equal. Their digests are not, unless all bytes are.
    told = data if records is None else repr(sorted((r.path, r.digest, r.digests) for r in records.values())).encode()
    return Opened(directory, path, parse(data), records, digests_in, to_hex(digest(told)))


def _of_ranks(directory: Directory) -> Contents:
    """What each rank has written of its own, where DCP was told to use no collectives.

    Raises:
        NoCheckpointError: There is nothing of the kind.
    """
    there = directory.files()
    parts = [(name, _small(directory, name, MAX_METADATA)) for name in ranks_metadata(there)]
    if parts:
        return merged([parse(data, name) for name, data in parts if data is not None])
    below = [f.removesuffix(f"/{METADATA}") for f in there if f.count("/") == 1 and f.endswith(f"/{METADATA}")]
    if below:
        hint = f"Checkpoints lie in it: pass the path of one, {', '.join(below[-10:])}."
    elif MANIFEST in there:
        hint = "It is a tag of this library in another layout: use load_checkpoint, or xla-ckpt convert --to dcp."
    else:
        hint = f"It has no {METADATA}: its save did not end, or it is no checkpoint of DCP's."
    raise NoCheckpointError("there is no checkpoint of DCP's", hint=hint)


def _listed(directory: Directory) -> tuple[str, Sequence[FileRecord] | None]:
    """What is known of the files: from a manifest, from the digests beside the metadata, or nothing."""
    data = _small(directory, MANIFEST, MAX_MANIFEST)
    if data is not None:
        with naming(file=MANIFEST):
            return MANIFEST, manifest_json.parse(data).files
    data = _small(directory, DIGESTS, MAX_DIGESTS)
    return DIGESTS, None if data is None else digests.parse(data).files


def _small(directory: Directory, file: str, limit: int) -> bytes | None:
    """The bytes of a file; None if there is none."""
    try:
        source: Source = directory.open(file)
    except FileNotFoundError:
        return None
    try:
        if source.size > limit:
            raise FormatError("the file is too large", file=file, expected=f"at most {limit} bytes", found=source.size)
        data = bytearray(source.size)
        return bytes(data[: source.read_into(memoryview(data), 0)])
    finally:
        source.close()


def _check_plain(span: Span) -> None:
    if span.transforms:
        raise UnsupportedStateError(
            "what is stored went through an extension of DCP's, and is not read here",
            file=span.file,
            found=", ".join(span.transforms),
            hint="Load it with torch.distributed.checkpoint, and save it without the extension.",
        )


def _place(opened: Opened, tensor: StoredTensor, chunk: StoredChunk) -> TensorAt:
    """Where the elements of a chunk are."""
    span = chunk.at
    assert span is not None
    with naming(file=span.file):
        _check_plain(span)
        if opened.records is None:
            at = Zip(opened.held(span.file), span.offset, span.nbytes).value(strided=True)
        else:
            at = _recorded(opened, tensor, chunk, span)
        if not isinstance(at, TensorAt) or (at.dtype, at.shape) != (tensor.dtype, chunk.box.shape):
            found = f"{at.dtype.name} {list(at.shape)}" if isinstance(at, TensorAt) else type(at).__name__
            raise CorruptCheckpointError(
                "a stored chunk is not what the metadata says of it",
                expected=f"{tensor.dtype.name} {list(chunk.box.shape)}",
                found=found,
            )
        return at


def _recorded(opened: Opened, tensor: StoredTensor, chunk: StoredChunk, span: Span) -> TensorAt:
    """The same from the digests: the region of the file that lies in the zip."""
    record, nbytes = opened._record(span), chunk.box.size * tensor.dtype.itemsize
    i = bisect_left(record.regions, (span.offset, 0))
    if i == len(record.regions) or record.regions[i][1] != nbytes or sum(record.regions[i]) > span.offset + span.nbytes:
        raise CorruptCheckpointError(
            f"the digests do not fit to {METADATA}", expected=f"{nbytes} bytes at {span.offset}",
            hint=saved_over(opened.digests_in),
        )  # fmt: skip
    return TensorAt(file=span.file, offset=record.regions[i][0], dtype=tensor.dtype, shape=chunk.box.shape)


def _with_tensors(value: Any, tensor: Callable[[TensorAt], torch.Tensor]) -> Any:
    """The same containers, of the same classes, with tensors in the places of their descriptions."""
    if isinstance(value, TensorAt):
        return tensor(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, member in value.items():
            made[key] = _with_tensors(member, tensor)  # `update` of a Counter adds
        return made
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v, tensor) for v in value)
    return value
