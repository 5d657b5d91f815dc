"""A whole layout of its own: each stored box is a file of numpy's, ``<tag>/<part>/<leaf>.<n>.npy``.

The library does not know it. A test that registers `Npy` (see `registered`) saves, loads, converts and verifies in it
like in any other layout. docs/adding-a-layout.md explains it step by step.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.files.codec import Glue
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.layouts.new_ranks import leaves_of_ranks
from xla_ckpt.layouts.registry import register_layout, remove_layout
from xla_ckpt.layouts.scanned import directory_to_scan
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays, array_record
from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.records import FileRecord, Head, Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.save_plan import SavePlan, item_and_name, own_boxes
from xla_ckpt.sharding.box import Box
from xla_ckpt.state.describe import Description
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree import path as paths


@dataclass(frozen=True)
class NpyFile:
    """The codec of a .npy file (see `xla_ckpt.files.codec.Codec`): numpy's header, then one region."""

    dtype: DType
    shape: tuple[int, ...]
    wants_digests: bool = False
    wants_crc32: bool = False

    @cached_property
    def head(self) -> bytes:
        """What stands before the elements. Types that numpy does not have are bytes to it (``|V2``)."""
        try:
            descr = np.dtype(self.dtype.name).str
        except TypeError:
            descr = f"|V{self.dtype.itemsize}"
        text = io.BytesIO()
        about = {"descr": descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(text, about)
        return text.getvalue()

    @property
    def size(self) -> int:
        (at, nbytes), *_ = self.places
        return at + nbytes

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(len(self.head), Box.whole(self.shape).size * self.dtype.itemsize)]

    def streamed(self) -> NpyFile:
        return self

    def without(self, regions: frozenset[int]) -> NpyFile:
        return self  # a file without its only region is not written at all

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:
        return [(0, self.head)]

    def record(self, path: str, glue: Glue, digests: Sequence[int]) -> FileRecord:
        # numpy has no place for our digests, so the manifest keeps them.
        kept = {"regions": tuple(self.places), "digests": tuple(digests)}
        return FileRecord(path=path, size=self.size, head=len(self.head), digest=digest(self.head), **kept)


def parse(directory: Directory, path: str) -> tuple[DType, tuple[int, ...], FileRecord]:
    """Type, shape and record of a .npy file that somebody else wrote. Its elements are not read.

    Raises:
        CorruptCheckpointError: It is no .npy file.
        UnsupportedStateError: Its elements are of another type, or in another order, than ours.
    """
    source = directory.open(path)
    try:
        start = bytearray(min(source.size, 4096))
        source.read_into(memoryview(start), 0)
        size = source.size
    finally:
        source.close()
    file = io.BytesIO(start)
    try:
        np.lib.format.read_magic(file)
        shape, fortran, kind = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise CorruptCheckpointError("this is no .npy file", file=path) from error
    if fortran or kind.byteorder == ">" or not dtypes.known(kind.name):
        raise UnsupportedStateError("its elements are stored in another way", leaf=path, found=str(kind))
    head = bytes(start[: file.tell()])
    return dtypes.dtype(kind.name), shape, FileRecord(path=path, size=size, head=len(head), digest=digest(head))


def files_of(leaves: Sequence[Leaf], rank: int, world: int) -> tuple[FilePlan, ...]:
    """The files of one rank: one for each box that it writes, under names that no other rank uses."""
    files, boxes = [], dict[str, int]()
    for mine in own_boxes(leaves):
        part, name = item_and_name(mine.leaf.path)
        nth = boxes[mine.leaf.path] = boxes.get(mine.leaf.path, -1) + 1
        path = f"{part}/{quote(name, safe='')}.{rank + world * nth}.npy"
        codec = NpyFile(mine.leaf.dtype, mine.box.shape)
        entry = Entry(leaf=mine.leaf.path, box=mine.box, region=0)
        files.append(FilePlan(path=path, codec=codec, sources=(mine.source,), entries=(entry,)))
    return tuple(files)


@dataclass(frozen=True)
class NpyWriting(Writing):
    """How one rank writes its state."""

    description: Description

    @cached_property
    def plan(self) -> SavePlan:
        at = self.description.placement
        return SavePlan(files_of(self.description.leaves, at.rank, at.world))


class Npy(Layout):
    """A directory of .npy files. Without our manifest it holds whole arrays only, each under ``<leaf>.0.npy``."""

    name = "toy"
    origin = "numpy"
    saves = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path.endswith(".npy") for file in manifest.files)

    def writing(self, description: Description) -> NpyWriting:
        return NpyWriting(description)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        ranks, specs = leaves_of_ranks(stored.manifest, stored.manifest.arrays, to)
        return Rewriting([files_of(leaves, rank, to.mesh.size) for rank, leaves in enumerate(ranks)], specs)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if not any(name.endswith(".npy") for part in store.names(tag) for name in store.names(f"{tag}/{part}")):
            return None
        return TagEntry(tag=tag, created=time_text(store.modified(tag) or 0), directory=tag)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        with directory_to_scan(store, entry.tag, lambda: store.open(entry.tag)) as directory:
            return TagReader(directory, store.path, entry.tag, scan(directory, entry.tag), foreign_objects=())


def scan(directory: Directory, tag: str) -> Manifest:
    """The manifest of a tag that has none."""
    tree: dict[str, Any] = {}
    arrays: dict[str, ArrayRecord] = {}
    files: list[FileRecord] = []
    for path in (name for name in directory.files() if name.endswith(".npy")):
        part, _, name = path.partition("/")
        name, _, number = name.removesuffix(".npy").rpartition(".")
        if number != "0":
            raise UnsupportedStateError("without a manifest only whole arrays are read", leaf=path, expected="0.npy")
        leaf = unquote(name) if part == "tree" else f"{part}/{unquote(name)}"
        dtype, shape, record = parse(directory, path)
        if record.size != record.head + Box.whole(shape).size * dtype.itemsize:
            raise CorruptCheckpointError("a file does not have the size that its header says", file=path)
        arrays[leaf] = array_record(dtype, shape, [Shard(Box.whole(shape), len(files), record.head)])
        files.append(record)
        *above, last = map(paths.unescape, paths.split(leaf))
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = {"$array": "numpy"}
    head = Head(tag=tag, sequence=0, pinned=False, created="")
    return Manifest(head=head, skeleton=tree, arrays=Arrays.of(arrays), files=tuple(files))


@contextlib.contextmanager
def registered() -> Iterator[Npy]:
    """The layout, known to the library as long as the block runs."""
    layout = register_layout(Npy())
    try:
        yield layout
    finally:
        remove_layout(layout)
