"""Opening a directory of torch_checkpointing's: scanned into a `Manifest`. No tensor is read, and no code is run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from xla_ckpt.engine.tag_reader import DAMAGED, TagReader
from xla_ckpt.engine.verified import VerifiedDirectory
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedStateError, naming
from xla_ckpt.layouts.digests import records_in
from xla_ckpt.layouts.hugging_face import of_unknown_type, scanned_file
from xla_ckpt.layouts.one_file.members import file_members
from xla_ckpt.layouts.one_file.objects import stored_tree
from xla_ckpt.layouts.saved_files import SavedFiles
from xla_ckpt.layouts.scanned import MAX_JSON, ScannedFiles, directory_to_scan, flattened, scanned_manifest
from xla_ckpt.layouts.torch_checkpointing.dtensors import NAMES_OF_DTENSORS
from xla_ckpt.layouts.torch_checkpointing.metadata import ItemMetadata, said_of_items
from xla_ckpt.layouts.torch_checkpointing.ranks import RankTensors, item_of_ranks, keeps_class
from xla_ckpt.layouts.torch_checkpointing.tags import ITEMS_METADATA, items_by_name, world_of
from xla_ckpt.layouts.torch_save.ahead import FEW_AHEAD, Ahead
from xla_ckpt.layouts.torch_save.compared import same_tensor
from xla_ckpt.layouts.torch_save.strided import record_at, shards_of_piece
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.layouts.untrusted import UntrustedObject
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import FileRecord, UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh_cuts import MeshCutting
from xla_ckpt.storage.base import Directory, ReadDirectory, Store, open_without_links
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree.json_object import json_value
from xla_ckpt.tree.nested import Keys, nested, replaced_leaves

_UNEVEN = "versions of torch do not agree about what an interleaved strided shard of uneven blocks is"


def open_items(store: Store, entry: TagEntry, hints: Hints) -> TagReader:
    """A reader of such a directory, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, or do not add up.
        UnsupportedStateError: A file is of another version, of another byte order, or compressed.
    """
    with directory_to_scan(store, entry.tag, lambda: open_without_links(store, entry.directory)) as directory:
        scan = _Scan(directory)
        members = file_members(scan.tree(), hints)
        flat = flattened(members.tree)
        manifest, objects = scanned_manifest(
            entry.tag, flat, scan.records, created=entry.created, world=world_of(scan.paths)
        )
        return TagReader(scan.files, store.path, entry.tag, manifest, objects)


class _Scan(ScannedFiles):
    """The files of a directory, and what they hold together."""

    def __init__(self, opened: Directory) -> None:
        super().__init__()
        records = records_in(opened)
        directory: ReadDirectory = VerifiedDirectory(opened, records) if records else opened
        names = {name for name in directory.files() if not name.startswith(".")}
        metadata: dict[str, ItemMetadata] = {}
        if ITEMS_METADATA in names:
            metadata = said_of_items(read_whole(directory, ITEMS_METADATA, limit=MAX_JSON, what="the metadata"))
        said = {path: form for about in metadata.values() for path, form in about.files.values()}
        if lost := sorted(said.keys() - names):
            raise CorruptCheckpointError("a file is missing that the metadata name", file=lost[0], hint=DAMAGED)
        by_name = items_by_name(names - said.keys() - {ITEMS_METADATA})
        self.directory = directory
        self.is_verified = bool(records)
        self.formats = said
        self.metadata = metadata
        self.paths = {item: {rank: path for rank, (path, _) in about.files.items()} for item, about in metadata.items()}
        self.paths = by_name | self.paths
        self.files = SavedFiles(directory, [path for of_item in self.paths.values() for path in of_item.values()])
        self._records: dict[Any, ArrayRecord | UnknownArray | None] = {}

    def tree(self) -> dict[str, Any]:
        """All items, with a record for each array."""
        world = world_of(self.paths)
        return {item: self._item(item, world) for item in sorted(self.paths)}

    def _item(self, item: str, world: int) -> Any:
        with naming(leaf=item):
            of_rank = {rank: self._content(item, rank, path) for rank, path in self.paths[item].items()}
            return item_of_ranks(of_rank, world, self._record, _same)

    def _content(self, item: str, rank: int, path: str) -> Any:
        """What the file of a rank holds, with a `TensorAt` for each tensor."""
        with naming(file=path):
            form = self.formats.get(path) or self._form(path)
            about = self.metadata.get(item)
            cuttings = {} if about is None else about.cuttings.get(rank, {})
            if form == "torch":
                return self._torch(path, cuttings)
            if form == "safetensors":
                return self._safetensors(path, cuttings)
            data = read_whole(self.directory, path, limit=MAX_JSON, what="an item that is no tensor")
            self.add(FileRecord(path=path, size=len(data)))
            if form == "raw":
                return data
            return json_value(data, "an item")

    def _form(self, path: str) -> str:
        """How a file is written of which nothing is said."""
        ending = path.rpartition(".")[2]
        if ending in ("json", "safetensors"):
            return ending
        with closing(self.directory.open(path)) as source:
            start = bytearray(4)
            is_zip = ending == "pt" or (source.read_into(memoryview(start), 0) == 4 and start == b"PK\3\4")
        return "torch" if is_zip else "raw"

    def _torch(self, path: str, cuttings: Mapping[Keys, MeshCutting]) -> Any:
        with closing(self.directory.open(path)) as source:
            self.add(FileRecord(path=path, size=source.size))
            ahead = Ahead(source, path, FEW_AHEAD)
            tree = stored_tree(self.files, ahead, lambda at: at, NAMES_OF_DTENSORS, compared=not self.is_verified)

        def as_part(keys: Keys, leaf: Any) -> Any:
            """A plain tensor that is a part of an array, as this library writes them: the metadata alone say so."""
            cutting = cuttings.get(keys)
            if not isinstance(leaf, TensorAt) or leaf.part is not None or cutting is None:
                return leaf
            return leaf if cutting.local == cutting.shape else replace(leaf, part=cutting)

        return replaced_leaves(tree, as_part, is_leaf=keeps_class) if cuttings else tree

    def _safetensors(self, path: str, cuttings: Mapping[Keys, MeshCutting]) -> Any:
        """Such a file has the names of nested tensors with dots, which the metadata take apart."""
        record, _, tensors = scanned_file(self.directory, path)
        self.add(FileRecord(path=path, size=record.size))
        keys_of = {".".join(map(str, keys)): keys for keys in cuttings}
        items: list[tuple[Keys, Any]] = []
        for t in tensors:
            keys = keys_of.get(t.name, (t.name,))
            if t.dtype is None:
                items.append((keys, of_unknown_type(t)))
                continue
            part = cuttings.get(keys)
            items.append((keys, TensorAt(file=path, offset=t.offset, dtype=t.dtype, shape=t.shape, part=part)))
        return nested(items)

    def _record(self, tensors: RankTensors) -> ArrayRecord | UnknownArray | None:
        """See `Combine`. One record for all tensors that are the same elements."""
        first = next(iter(tensors.values()))
        key = tuple(tensors.items()) if Box.whole(first.shape).size else (len(self._records),)
        if key not in self._records:
            self._records[key] = self._new_record(tensors, first)
        return self._records[key]

    def _new_record(self, tensors: RankTensors, first: TensorAt) -> ArrayRecord | UnknownArray | None:
        parts = [at.part for at in tensors.values()]
        try:
            if None in parts:
                if any(part is not None for part in parts) or not all(
                    same_tensor(self.files, first, at) for at in tensors.values()
                ):
                    return None
                return record_at(first, self.numbers[first.file])
            return self._of_parts(tensors, first)
        except UnsupportedStateError as error:
            return UnknownArray.because(error, first.dtype, first.shape, len(tensors))  # the rest of the tag is good

    def _of_parts(self, tensors: RankTensors, first: TensorAt) -> ArrayRecord:
        """The array that the parts of a DTensor make up."""
        shards: dict[Box, Shard] = {}
        for at in tensors.values():
            cutting = at.part
            if cutting.problem or cutting.uneven:
                raise UnsupportedStateError(cutting.problem or _UNEVEN)
            if (cutting.shape, at.dtype) != (first.part.shape, first.dtype):
                raise CorruptCheckpointError("the parts of a DTensor do not fit together", file=at.file)
            if cutting.local not in (None, at.shape):
                raise CorruptCheckpointError(
                    "the local part of a DTensor does not have the shape that its placements give",
                    file=at.file,
                    expected=str(cutting.local),
                    found=str(at.shape),
                )
            for piece in cutting.pieces:
                if piece.box.size and piece.box not in shards:
                    shards |= {shard.box: shard for shard in shards_of_piece(at, piece, self.numbers[at.file])}
        try:
            return array_record(first.dtype, first.part.shape, [*shards.values()], first.part.spec)
        except FormatError as error:
            raise CorruptCheckpointError(
                f"the files of the ranks do not hold an array exactly once: {error.problem}",
                expected=error.expected,
                found=error.found,
                hint="The file of a rank was lost, or files of two saves lie here.",
            ) from error


def _same(one: Any, other: Any) -> bool:
    """Whether two values without tensors are equal."""
    if isinstance(one, UntrustedObject) or isinstance(other, UntrustedObject):
        return bool(one == other)
    a, b = flattened({"value": one}), flattened({"value": other})
    return (a.skeleton, [value for _, value in a.objects]) == (b.skeleton, [value for _, value in b.objects])
