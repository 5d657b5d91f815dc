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

from xla_ckpt.core import dtypes
from xla_ckpt.core.checksum import compute_digest
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.file_layout import Framing
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.leaf import ArrayLeaf
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, SavePlan, assign_regions, get_item_and_key
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology, format_timestamp
from xla_ckpt.formats.native import assign_leaves_to_ranks
from xla_ckpt.formats.registry import register_layout, unregister_layout
from xla_ckpt.formats.scan import open_for_scan
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.saving.finalize import WritePlanner
from xla_ckpt.state.describe import StateDescription
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry


@dataclass(frozen=True)
class NpyFile:
    """The codec of a .npy file (see `xla_ckpt.core.files.file_layout.FileLayout`): numpy's header, then one region."""

    dtype: DType
    shape: tuple[int, ...]
    needs_digests: bool = False
    needs_crc32: bool = False

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
        (at, nbytes), *_ = self.region_ranges
        return at + nbytes

    @property
    def region_ranges(self) -> list[tuple[int, int]]:
        return [(len(self.head), Box.from_shape(self.shape).size * self.dtype.itemsize)]

    def to_streaming(self) -> NpyFile:
        return self

    def exclude_regions(self, regions: frozenset[int]) -> NpyFile:
        return self  # a file without its only region is not written at all

    def build_framing(self, digests: Sequence[int], crcs: Sequence[int]) -> Framing:
        return [(0, self.head)]

    def create_record(self, path: str, framing: Framing, digests: Sequence[int]) -> FileRecord:
        # numpy has no place for our digests, so the manifest keeps them.
        kept = {"regions": tuple(self.region_ranges), "block_digests": tuple(digests)}
        return FileRecord(
            path=path, size=self.size, framing_bytes=len(self.head), framing_digest=compute_digest(self.head), **kept
        )


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
    if fortran or kind.byteorder == ">" or not dtypes.is_known_dtype(kind.name):
        raise UnsupportedStateError("its elements are stored in another way", leaf=path, found=str(kind))
    head = bytes(start[: file.tell()])
    return (
        dtypes.get_dtype(kind.name),
        shape,
        FileRecord(path=path, size=size, framing_bytes=len(head), framing_digest=compute_digest(head)),
    )


def files_of(leaves: Sequence[ArrayLeaf], rank: int, world: int) -> tuple[FilePlan, ...]:
    """The files of one rank: one for each box that it writes, under names that no other rank uses."""
    files, boxes = [], dict[str, int]()
    for mine in assign_regions(leaves):
        part, name = get_item_and_key(mine.leaf.path)
        nth = boxes[mine.leaf.path] = boxes.get(mine.leaf.path, -1) + 1
        path = f"{part}/{quote(name, safe='')}.{rank + world * nth}.npy"
        codec = NpyFile(mine.leaf.dtype, mine.box.shape)
        entry = FileEntry(leaf=mine.leaf.path, box=mine.box, region=0)
        files.append(FilePlan(path=path, layout=codec, sources=(mine.source,), entries=(entry,)))
    return tuple(files)


@dataclass(frozen=True)
class NpyWriting(WritePlanner):
    """How one rank writes its state."""

    description: StateDescription

    @cached_property
    def plan(self) -> SavePlan:
        at = self.description.placement
        return SavePlan(files_of(self.description.leaves, at.rank, at.world_size))


class Npy(Layout):
    """A directory of .npy files. Without our manifest it holds whole arrays only, each under ``<leaf>.0.npy``."""

    name = "toy"
    origin = "numpy"
    saves = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path.endswith(".npy") for file in manifest.files)

    def writing(self, description: StateDescription) -> NpyWriting:
        return NpyWriting(description)

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        ranks, specs = assign_leaves_to_ranks(stored.manifest, stored.manifest.arrays, to)
        return ConversionPlan([files_of(leaves, rank, to.mesh.size) for rank, leaves in enumerate(ranks)], specs)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if not any(
            name.endswith(".npy") for part in store.list_names(tag) for name in store.list_names(f"{tag}/{part}")
        ):
            return None
        return TagEntry(tag=tag, created=format_timestamp(store.get_modified_time(tag) or 0), directory=tag)

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        with open_for_scan(store, entry.tag, lambda: store.open(entry.tag)) as directory:
            return TagReader(directory, store.path, entry.tag, scan(directory, entry.tag), foreign_objects=())


def scan(directory: Directory, tag: str) -> Manifest:
    """The manifest of a tag that has none."""
    tree: dict[str, Any] = {}
    arrays: dict[str, ArrayRecord] = {}
    files: list[FileRecord] = []
    for path in (name for name in directory.list_files() if name.endswith(".npy")):
        part, _, name = path.partition("/")
        name, _, number = name.removesuffix(".npy").rpartition(".")
        if number != "0":
            raise UnsupportedStateError("without a manifest only whole arrays are read", leaf=path, expected="0.npy")
        leaf = unquote(name) if part == "tree" else f"{part}/{unquote(name)}"
        dtype, shape, record = parse(directory, path)
        if record.size != record.framing_bytes + Box.from_shape(shape).size * dtype.itemsize:
            raise CorruptCheckpointError("a file does not have the size that its header says", file=path)
        arrays[leaf] = create_array_record(
            dtype, shape, [Shard(Box.from_shape(shape), len(files), record.framing_bytes)]
        )
        files.append(record)
        *above, last = map(paths.unescape, paths.split(leaf))
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = {"$array": "numpy"}
    head = ManifestHeader(tag=tag, sequence=0, pinned=False, created="")
    return Manifest(header=head, skeleton=tree, arrays=ArrayTable.from_records(arrays), files=tuple(files))


@contextlib.contextmanager
def registered() -> Iterator[Npy]:
    """The layout, known to the library as long as the block runs."""
    layout = register_layout(Npy())
    try:
        yield layout
    finally:
        unregister_layout(layout)
