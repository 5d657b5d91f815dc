"""An open directory of DCP's: what it holds by key, where the bytes are, and their digests as far as there are any."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import torch

from xla_ckpt.engine.tag_reader import DAMAGED, TagReader
from xla_ckpt.errors import CorruptCheckpointError, NoCheckpointError, UntrustedObjectError, naming
from xla_ckpt.files.crc32 import check_crc32
from xla_ckpt.layouts.dcp.files import DcpFiles, check_unchanged
from xla_ckpt.layouts.dcp.metadata import METADATA, DcpTensor
from xla_ckpt.layouts.no_tag import path_meant
from xla_ckpt.layouts.scanned import foreign_head
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.strided import shards_at
from xla_ckpt.layouts.torch_save.whole import ZipTensors, composed
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, Zip
from xla_ckpt.manifest.arrays import Arrays, array_record
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.door import above
from xla_ckpt.storage.pool import READERS, threads, work_off
from xla_ckpt.tags.entry import MANIFEST
from xla_ckpt.tags.roots import root_of

TRUST_PICKLE = "Pass trust_pickle=True to xla_ckpt.dcp.load, or to StorageReader"
"""How values of any class are loaded."""

Start = tuple[int, ...]
"""The first element of a chunk: its name among the chunks of its key."""


class Opened(DcpFiles):
    """An open checkpoint.

    Raises (on construction):
        NoCheckpointError: There is none in the directory.
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UntrustedObjectError: Its metadata names something else than DCP's own classes. Nothing of it has run.
    """

    def __init__(self, directory: Directory, path: str) -> None:
        super().__init__(directory)
        self.path = path
        stored = self.contents()
        if stored is None:
            raise NoCheckpointError("there is no checkpoint of DCP's", hint=_other_than_dcp(self.names))
        self.stored = stored
        self._ahead: dict[str, Ahead] = {}
        self._unverified: list[tuple[str, TensorAt]] = []
        """(key, chunk) of the chunks that were located and have no digests: their zips may have CRC-32s."""

    def close(self) -> None:
        """Release all files, and the directory."""
        for ahead in self._ahead.values():
            ahead.source.close()
        self._ahead.clear()
        self.directory.close()

    def tensor(self, key: str) -> DcpTensor:
        """What is stored of a tensor.

        Raises:
            CorruptCheckpointError: There is no such tensor.
            IncompatibleCheckpointError: It cannot be described.
        """
        self._check_described(key)
        if key not in self.stored.tensors:
            raise CorruptCheckpointError("the checkpoint has no such tensor", leaf=key, path=self.path)
        return self.stored.tensors[key]

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
        span = self.stored.objects.get(key)
        if span is None:
            raise CorruptCheckpointError("the checkpoint has no such value", leaf=key, path=self.path)
        with naming(leaf=key, file=span.file, path=self.path):
            check_unchanged(span)
            ahead = self.held(span.file)
            if self.digested:
                self.check_value(ahead, span)
            else:
                Zip(ahead, span.offset, span.nbytes).check()
            if trust:
                return bytes(ahead.take(span.offset, span.nbytes))
            buffer = io.BytesIO()
            try:
                zipped = Zip(ahead, span.offset, span.nbytes)
                tensors = ZipTensors(zipped, ahead.source)
                torch.save(zipped.value(strided=True, tensor=tensors.of, parts=composed), buffer)
            except UntrustedObjectError as error:
                error.hint = f"{TRUST_PICKLE}, if you trust whoever wrote it."
                raise
            return buffer.getvalue()

    def _check_described(self, key: str) -> None:
        if key in self.stored.undescribed:
            raise self.stored.undescribed[key].error(key).at(file=METADATA, path=self.path)

    def held(self, file: str) -> Ahead:
        """A file, opened once.

        Raises:
            CorruptCheckpointError: It is missing, or has another size than was saved.
            ChangedTagError: It is missing, since the checkpoint has been removed.
        """
        if file not in self._ahead:
            with naming(path=self.path):
                self._ahead[file] = Ahead(self.open(file), file)
        return self._ahead[file]

    def locate(self, wanted: Mapping[str, Iterable[Start]]) -> TagReader:
        """What reads these chunks, by key: the leaf paths of its manifest are the keys.

        Raises:
            CorruptCheckpointError: They are not where the metadata says, or the chunks of a key are not all of it.
            UnsupportedStateError: They are stored in a way that is not read here.
        """

        def number(file: str) -> int:
            return self.number(file, self.held(file).size)

        arrays = {}
        for key, starts in wanted.items():
            tensor = self.tensor(key)
            asked = set(starts)
            shards: list[Shard] = []
            with naming(leaf=key, path=self.path):
                for chunk in tensor.chunks:
                    if chunk.at is None or not chunk.box.size:
                        continue
                    if chunk.box.start not in asked:
                        # Nobody reads it. It counts for the proof that the chunks are all of the tensor.
                        shards.append(Shard(chunk.box, number(chunk.at.file), chunk.at.offset))
                        continue
                    with naming(file=chunk.at.file):
                        check_unchanged(chunk.at)
                        at = self.tensor_at(self.held(chunk.at.file), chunk.at, tensor.dtype, chunk.box)
                    if not self.digested:
                        self._unverified.append((key, at))
                    shards += shards_at(at, chunk.box, number(at.file))
                arrays[key] = array_record(tensor.dtype, tensor.shape, shards)
        manifest = Manifest(head=foreign_head(""), skeleton=None, arrays=Arrays.of(arrays), files=tuple(self.records))
        root, _, name = self.path.rpartition("/")
        return TagReader(self.directory, root, name, manifest, foreign_objects=())

    def check_crcs(self) -> None:
        """Compare the chunks without digests with the CRC-32s of their zips, as far as these have any.

        Raises:
            CorruptCheckpointError: A chunk is not what was saved.
        """
        chunks = [(key, at) for key, at in self._unverified if at.crc is not None]

        def check(one: tuple[str, TensorAt], _: memoryview) -> None:
            key, at = one
            nbytes = Box.whole(at.shape).size * at.dtype.itemsize
            with naming(leaf=key, path=self.path, hint=DAMAGED):
                read_into = self.held(at.file).source.read_into
                check_crc32(read_into, at.file, "a tensor", at.offset, nbytes, at.crc)

        workers = min(threads(READERS, 2), len(chunks)) or 1
        work_off(chunks, check, workers=workers, buffer_bytes=0, name="xla_ckpt-crc")


def open_source(path: str) -> Opened:
    """Open a directory of DCP's.

    Raises:
        NoCheckpointError: There is none.
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UntrustedObjectError: Its metadata names something else than DCP's own classes. Nothing of it has run.
        OSError: The storage refused.
    """
    store, name = above(path)
    directory = _found(store, name)
    try:
        return Opened(directory, path)
    except BaseException:
        directory.close()
        raise


def _found(store: Store, name: str) -> Directory:
    for _ in range(3):  # it may be replaced between two looks
        try:
            return store.open(root_of(store).place_of(name))
        except (FileNotFoundError, NotADirectoryError):
            continue
    if store.has(name):
        raise NoCheckpointError(
            "there is a file, and a checkpoint of DCP's is a directory",
            hint="If torch.save wrote it, use torch.load or xla_ckpt.load_checkpoint.",
        )
    raise NoCheckpointError(f"there is no such checkpoint{path_meant(f'{store.path}/{name}')}", hint=_beside(store))


def _beside(store: Store) -> str | None:
    """What checkpoints of DCP's lie in a directory, if there are any."""
    try:
        checkpoints = [name for name in sorted(store.names()) if store.has(f"{name}/{METADATA}")]
    except OSError:
        return None
    return f"Checkpoints beside it: {', '.join(checkpoints[-10:])}." if checkpoints else None


def _other_than_dcp(names: frozenset[str]) -> str:
    """What a directory without metadata may be."""
    below = sorted(f.removesuffix(f"/{METADATA}") for f in names if f.count("/") == 1 and f.endswith(f"/{METADATA}"))
    if below:
        return f"Checkpoints lie in it: pass the path of one, {', '.join(below[-10:])}."
    tags = sorted(f.removesuffix(f"/{MANIFEST}") for f in names if f.count("/") == 1 and f.endswith(f"/{MANIFEST}"))
    if tags:
        names_of_tags = ", ".join(tags[-10:])
        return f"Tags of this library lie in it, {names_of_tags}: use load_checkpoint, or xla-ckpt convert --to dcp."
    if MANIFEST in names:
        return "It is a tag of this library in another layout: use load_checkpoint, or xla-ckpt convert --to dcp."
    return f"It has no {METADATA}: its save did not end, or it is no checkpoint of DCP's."
