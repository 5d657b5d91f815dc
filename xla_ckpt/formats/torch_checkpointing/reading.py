"""Open torch_checkpointing directories: parse ``metadata.pkl`` and pickled DTensors, and merge the items of all ranks.
No code is run.

A DTensor becomes the view of its local tensor, with a `DTensorLayout` as its `part`; torch.distributed is not imported.
Dicts at one path on several ranks are merged into one dict with all members, the shards of a DTensor become one array,
and equal values are stored once. An item without DTensors that differs between ranks is rank-local state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from xla_ckpt.core.json_data import parse_json
from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import FileRecord, UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.dtensor import DTensorLayout, MeshDimPlacement, compute_dtensor_layout
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath, build_nested, iterate_leaves, map_leaves
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.digests import read_digests
from xla_ckpt.formats.hugging_face.layout import describe_unknown_dtype, scan_safetensors_file
from xla_ckpt.formats.scan import (
    MAX_JSON_BYTES,
    CrcCheckedDirectory,
    ScannedFiles,
    UntrustedObject,
    build_scanned_manifest,
    flatten_state,
    open_for_scan,
)
from xla_ckpt.formats.torch_checkpointing.layout import (
    ITEMS_METADATA_FILE,
    get_file_name,
    group_files_by_item,
    infer_world_size,
)
from xla_ckpt.formats.torch_checkpointing.verified_directory import VerifiedDirectory
from xla_ckpt.formats.torch_save.pickle_stubs import (
    AttributesStub,
    FunctionStub,
    OpaqueStub,
    TensorView,
    TypeStub,
    parse_sizes,
    require_type,
)
from xla_ckpt.formats.torch_save.state_file import find_file_members, read_stored_tree
from xla_ckpt.formats.torch_save.stored_tensors import is_same_tensor, list_piece_shards, make_array_record
from xla_ckpt.formats.torch_save.unpickler import ALLOWED_NAMES, load_pickle
from xla_ckpt.formats.torch_save.zip_reader import SMALL_READ_AHEAD_BYTES, ReadAheadFile, TensorLocation
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT, TagReader
from xla_ckpt.storage.base import Directory, ReadDirectory, Store, open_without_links, read_file
from xla_ckpt.tags.entry import TagEntry

_REBUILD_NAME = "torch._tensor._rebuild_from_type_v2"

_DTENSOR_STUB = TypeStub("DTensor")


class _NamedTupleStub:
    """Stub for a named tuple: its fields, in order."""

    def __init__(self, *fields: Any) -> None: ...  # receives the arguments of `__new__` if the class is called

    def __new__(cls, *fields: Any) -> _NamedTupleStub:
        stand_in = super().__new__(cls)
        stand_in.fields = fields
        return stand_in

    fields: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a named tuple, which has none")


def _reject_wrapper_subclass(*_: Any) -> Any:
    raise ValueError("a tensor of a class of its own")


def _rebuild_tensor(make: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """Rebuild a tensor with attributes: the view of a DTensor, or of a plain tensor."""
    if kind is _DTENSOR_STUB and isinstance(make, FunctionStub) and make.function is _reject_wrapper_subclass:
        # Attributes in slots come after those in `__dict__`.
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else state
        local = slots.get("_local_tensor") if isinstance(slots, dict) else None
        if isinstance(local, TensorView):
            return replace(local, part=_parse_dtensor_spec(slots.get("_spec")))
        return OpaqueStub.for_name("torch.distributed.tensor.DTensor")()
    try:
        return ALLOWED_NAMES[_REBUILD_NAME](make, kind, args)
    except (CheckpointError, ValueError):
        return OpaqueStub.for_name(_REBUILD_NAME)()


DTENSOR_STUBS: dict[str, Any] = {
    _REBUILD_NAME: _rebuild_tensor,
    "torch._utils._rebuild_wrapper_subclass": _reject_wrapper_subclass,
    "torch.distributed.tensor.DTensor": _DTENSOR_STUB,
    "torch.serialization._get_layout": lambda name: None,
    **{
        name: AttributesStub.for_name(name)
        for name in (
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed._mesh_layout._MeshLayout",
            "torch.distributed._mesh_layout._FlatLayout",
            *(
                f"torch.distributed.tensor.placement_types.{placement}"
                for placement in ("Shard", "_StridedShard", "Replicate", "Partial", "_NormPartial", "_MaskPartial")
            ),
        )
    },
    **{
        f"torch.distributed.tensor._dtensor_spec.{name}": type(name, (_NamedTupleStub,), {})
        for name in ("TensorMeta", "ShardOrderEntry")
    },
}
"""Additional names for `TorchZip.read_value` (`extra_names`)."""


def _parse_dtensor_spec(spec: Any) -> DTensorLayout:
    """Return the layout of a DTensor with this spec."""
    try:
        facts = _get_attributes(spec)
        shape = parse_sizes(require_type(_NamedTupleStub, facts["tensor_meta"]).fields[0])
        try:
            _check_order(facts.get("shard_order"))
            mesh = _get_attributes(facts["mesh"])
            coordinate = mesh["_coordinate_on_dim"]
            if coordinate is None:  # the rank is not in the mesh, and holds no shard
                return DTensorLayout(global_shape=shape)
            names = mesh.get("_mesh_dim_names")
            placements = [_parse_placement(placement) for placement in require_type(_SEQUENCE, facts["placements"])]
            return compute_dtensor_layout(
                shape,
                _get_mesh_sizes(mesh),
                parse_sizes(coordinate),
                placements,
                None if names is None else tuple(require_type(str, name) for name in require_type(_SEQUENCE, names)),
            )
        except UnsupportedStateError as error:
            return DTensorLayout(global_shape=shape, problem=error.problem)
    except (LookupError, ValueError, TypeError) as error:
        return DTensorLayout(
            global_shape=(), problem=f"its mesh and placements are not described as torch 2.11 and newer do it: {error}"
        )


_SEQUENCE = (tuple, list)


def _get_mesh_sizes(mesh: dict[str, Any]) -> tuple[int, ...]:
    """Return the size of each dim of a mesh. Its form differs between torch versions."""
    layout = _get_attributes(mesh["_layout"])
    axes = layout.get("shape")
    if "axes" in layout:
        axes = [_get_attributes(axis)["shape"] for axis in require_type(_SEQUENCE, layout["axes"])]
    return tuple(prod(parse_sizes([axis] if type(axis) is int else axis)) for axis in require_type(_SEQUENCE, axes))


def _check_order(order: Any) -> None:
    for entry in order or ():
        _, mesh_dims = require_type(_NamedTupleStub, entry).fields
        if list(mesh_dims) != sorted(mesh_dims):
            raise UnsupportedStateError("a DTensor that is cut in another order than that of its mesh dims is not read")


def _parse_placement(placement: Any) -> MeshDimPlacement:
    facts = _get_attributes(placement)
    kind = placement.called.rpartition(".")[2]
    if kind == "Replicate":
        return MeshDimPlacement(None)
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedStateError(f"a DTensor with the placement {kind} has no values of its own")
    return MeshDimPlacement(
        require_type(int, facts["dim"]), require_type(int, facts["split_factor"]) if kind == "_StridedShard" else 1
    )


def _get_attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = vars(require_type(AttributesStub, value))
    return attributes


METADATA_VERSION = "2.0"
"""Supported version of the file."""

SERIALIZATION_FORMATS = {"TorchSerialization": "torch", "JsonSerialization": "json", "RawSerialization": "raw",
           "SafetensorsSerialization": "safetensors"}  # fmt: skip
"""Serialization format in the package -> format here."""


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """Metadata of an item."""

    files: Mapping[int, tuple[str, str]]
    """Rank -> (path, format) of its file."""

    cuttings: Mapping[int, Mapping[KeyPath, DTensorLayout]] = field(default_factory=dict)
    """Rank -> layout of its tensors, by path."""


def parse_items_metadata(data: bytes) -> dict[str, ItemMetadata]:
    """Parse a metadata file. Return the metadata by item.

    Raises:
        CorruptCheckpointError: It is corrupt.
        UntrustedObjectError: It names classes. No code was run.
        UnsupportedStateError: It has another version.
    """
    content = load_pickle(data, ITEMS_METADATA_FILE)
    try:
        if content["version"] != METADATA_VERSION:
            raise UnsupportedStateError(
                "metadata of another version are not read",
                file=ITEMS_METADATA_FILE,
                expected=METADATA_VERSION,
                found=content["version"],
            )
        return {require_type(str, item): _parse_item(item, about) for item, about in content["metadata"].items()}
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the metadata are damaged: {error}"[:300], file=ITEMS_METADATA_FILE) from error


def _parse_item(item: str, about: Any) -> ItemMetadata:
    files = {
        _parse_number(rank): _parse_file(item, rank, layout) for rank, layout in about["rank_to_layout_info"].items()
    }
    cuttings: dict[int, dict[KeyPath, DTensorLayout]] = {}
    for text, groups in about["nested_path_to_metadata"].items():
        keys = tuple(key if type(key) is int else require_type(str, key) for key in json.loads(text))
        for group in groups:
            sharding = group["sharding_metadata"]
            if sharding["type"] == "DTensorShardingMetadata":
                for rank in group["ranks"]:
                    cuttings.setdefault(_parse_number(rank), {})[keys] = _parse_cutting(sharding["data"], rank)
    return ItemMetadata(files, cuttings)


def _parse_file(item: str, rank: int, layout: Any) -> tuple[str, str]:
    if layout is None:
        return get_file_name(item, rank), "torch"
    return require_type(str, layout["file_path"]), SERIALIZATION_FORMATS[layout["serialization_format"]["type"]]


def _parse_cutting(data: Any, rank: int) -> DTensorLayout:
    """Return the layout of the tensor of a rank."""
    mesh = data["mesh_spec"]
    sizes, ranks = parse_sizes(mesh["mesh_shape"]), parse_sizes(mesh["mesh_data"])
    if len(ranks) != prod(sizes):
        raise ValueError("a mesh has not as many ranks as it has places")
    coordinate = tuple(int(index) for index in np.unravel_index(ranks.index(rank), sizes)) if sizes else ()
    placements = [
        MeshDimPlacement(None) if placement["type"] == "Replicate" else _parse_shard(placement)
        for placement in data["placements"]
    ]
    names = mesh["mesh_dim_names"]
    called = None if names is None else tuple(require_type(str, name) for name in names)
    return compute_dtensor_layout(parse_sizes(data["global_shape"]), sizes, coordinate, placements, called)


def _parse_shard(placement: Any) -> MeshDimPlacement:
    if placement["type"] not in ("Shard", "StridedShard"):
        raise ValueError("a placement of another kind")
    return MeshDimPlacement(_parse_number(placement["dim"]), _parse_number(placement.get("split_factor", 1)))


def _parse_number(value: Any) -> int:
    return parse_sizes([value])[0]


TensorsByRank = Mapping[int, TensorLocation]
"""Rank -> its part of one tensor."""

CombineTensors = Callable[[TensorsByRank], Any]
"""Function that returns a record for the parts of one tensor on some ranks; None if they are different full tensors."""

_DIFFERENT_VALUES = UnreadableArray(
    problem="the ranks have different values here, and nothing says how they belong together",
    hint="Have the program save them in an item of their own, which has no DTensors: such an item is read as the state "
    "of each rank.",
)


class _RanksDifferError(Exception):
    """Signal that ranks differ in an item."""


def merge_ranks(
    by_rank: Mapping[int, Any], world: int, combine: CombineTensors, is_same: Callable[[Any, Any], bool]
) -> Any:
    """Merge an item of all ranks.

    Args:
        by_rank: Rank -> its value, with a `TensorLocation` for each tensor.
        world: Number of ranks.
        combine: Function that combines the parts of one tensor.
        is_same: Function that returns True if two values without tensors are equal.
    """
    cut = any(
        isinstance(leaf, TensorLocation) and leaf.part is not None
        for tree in by_rank.values()
        for leaf in iterate_leaves(tree)
    )

    def different() -> Any:
        if cut:
            return _DIFFERENT_VALUES
        raise _RanksDifferError

    try:
        return _merge_values(by_rank, combine, is_same, different)
    except _RanksDifferError:
        ranks = {str(rank): _convert_rank(rank, tree, combine) for rank, tree in by_rank.items()}
        return {schema.RANK_COUNT: world, schema.RANKS: ranks}


def _convert_rank(rank: int, tree: Any, combine: CombineTensors) -> Any:
    """Convert the value of one rank."""
    return map_leaves(
        tree,
        lambda _, leaf: combine({rank: leaf}) if isinstance(leaf, TensorLocation) else leaf,
        is_leaf=has_custom_class,
    )


def has_custom_class(value: Any) -> bool:
    """Return True if a container without tensors has a class that must be kept."""
    return type(value) not in (dict, list, tuple) and not any(
        isinstance(leaf, TensorLocation) for leaf in iterate_leaves(value)
    )


def _merge_values(
    by_rank: Mapping[int, Any],
    combine: CombineTensors,
    is_same: Callable[[Any, Any], bool],
    different: Callable[[], Any],
) -> Any:
    values = list(by_rank.values())
    first = values[0]

    def below(members: Mapping[int, Any]) -> Any:
        return _merge_values(members, combine, is_same, different)

    if any(isinstance(value, TensorLocation) for value in values):
        record = combine(by_rank) if all(isinstance(value, TensorLocation) for value in values) else None
        return different() if record is None else record
    if all(isinstance(value, Mapping) for value in values) and not has_custom_class(first):
        keys = dict.fromkeys(key for value in values for key in value)
        return {k: below({rank: value[k] for rank, value in by_rank.items() if k in value}) for k in keys}
    if type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        return type(first)(below({rank: value[i] for rank, value in by_rank.items()}) for i in range(len(first)))
    return first if all(is_same(first, value) for value in values[1:]) else different()


_UNEVEN_PROBLEM = "versions of torch do not agree about what an interleaved strided shard of uneven blocks is"


def open_torch_checkpointing(store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
    """Return a reader of a torch_checkpointing directory, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, corrupt, or inconsistent.
        UnsupportedStateError: A file has another version or byte order, or is compressed.
    """
    with open_for_scan(store, entry.tag, lambda: open_without_links(store, entry.directory)) as directory:
        scan = _DirectoryScan(directory)
        members = find_file_members(scan.read_tree(), hints)
        flat = flatten_state(members.tree)
        manifest, objects = build_scanned_manifest(
            entry.tag, flat, scan.records, created=entry.created, world=infer_world_size(scan.paths)
        )
        return TagReader(scan.files, store.path, entry.tag, manifest, objects)


class _DirectoryScan(ScannedFiles):
    """Files of a directory, and their merged content."""

    def __init__(self, opened: Directory) -> None:
        super().__init__()
        records = read_digests(opened)
        directory: ReadDirectory = VerifiedDirectory(opened, records) if records else opened
        names = {name for name in directory.list_files() if not name.startswith(".")}
        metadata: dict[str, ItemMetadata] = {}
        if ITEMS_METADATA_FILE in names:
            metadata = parse_items_metadata(
                read_file(directory, ITEMS_METADATA_FILE, limit=MAX_JSON_BYTES, what="the metadata")
            )
        said = {path: form for about in metadata.values() for path, form in about.files.values()}
        if lost := sorted(said.keys() - names):
            raise CorruptCheckpointError(
                "a file is missing that the metadata name", file=lost[0], hint=DAMAGED_FILE_HINT
            )
        by_name = group_files_by_item(names - said.keys() - {ITEMS_METADATA_FILE})
        self.directory = directory
        self.is_verified = bool(records)
        self.formats = said
        self.metadata = metadata
        self.paths = {item: {rank: path for rank, (path, _) in about.files.items()} for item, about in metadata.items()}
        self.paths = by_name | self.paths
        self.files = CrcCheckedDirectory(
            directory, [path for of_item in self.paths.values() for path in of_item.values()]
        )
        self._records: dict[Any, ArrayRecord | UnreadableArray | None] = {}

    def read_tree(self) -> dict[str, Any]:
        """Read all items, with a record for each array."""
        world = infer_world_size(self.paths)
        return {item: self._read_item(item, world) for item in sorted(self.paths)}

    def _read_item(self, item: str, world: int) -> Any:
        with annotate_errors(leaf=item):
            of_rank = {rank: self._read_file(item, rank, path) for rank, path in self.paths[item].items()}
            return merge_ranks(of_rank, world, self._get_record, _is_same_value)

    def _read_file(self, item: str, rank: int, path: str) -> Any:
        """Read the file of a rank, with a `TensorLocation` for each tensor."""
        with annotate_errors(file=path):
            form = self.formats.get(path) or self._detect_format(path)
            about = self.metadata.get(item)
            cuttings = {} if about is None else about.cuttings.get(rank, {})
            if form == "torch":
                return self._read_torch_file(path, cuttings)
            if form == "safetensors":
                return self._read_safetensors(path, cuttings)
            data = read_file(self.directory, path, limit=MAX_JSON_BYTES, what="an item that is no tensor")
            self.add(FileRecord(path=path, size=len(data)))
            if form == "raw":
                return data
            return parse_json(data, "an item")

    def _detect_format(self, path: str) -> str:
        """Return the format of a file that the metadata do not list."""
        ending = path.rpartition(".")[2]
        if ending in ("json", "safetensors"):
            return ending
        with closing(self.directory.open(path)) as source:
            start = bytearray(4)
            is_zip = ending == "pt" or (source.read_into(memoryview(start), 0) == 4 and start == b"PK\3\4")
        return "torch" if is_zip else "raw"

    def _read_torch_file(self, path: str, cuttings: Mapping[KeyPath, DTensorLayout]) -> Any:
        with closing(self.directory.open(path)) as source:
            self.add(FileRecord(path=path, size=source.size))
            ahead = ReadAheadFile(source, path, SMALL_READ_AHEAD_BYTES)
            tree = read_stored_tree(self.files, ahead, lambda at: at, DTENSOR_STUBS, check_crcs=not self.is_verified)

        def as_part(keys: KeyPath, leaf: Any) -> Any:
            """Mark a plain tensor as a part of an array. Our own files record this only in the metadata."""
            cutting = cuttings.get(keys)
            if not isinstance(leaf, TensorLocation) or leaf.part is not None or cutting is None:
                return leaf
            return leaf if cutting.local_shape == cutting.global_shape else replace(leaf, part=cutting)

        return map_leaves(tree, as_part, is_leaf=has_custom_class) if cuttings else tree

    def _read_safetensors(self, path: str, cuttings: Mapping[KeyPath, DTensorLayout]) -> Any:
        """Read a safetensors file. Dotted names of nested tensors are split according to the metadata."""
        record, _, tensors = scan_safetensors_file(self.directory, path)
        self.add(FileRecord(path=path, size=record.size))
        keys_of = {".".join(map(str, keys)): keys for keys in cuttings}
        items: list[tuple[KeyPath, Any]] = []
        for t in tensors:
            keys = keys_of.get(t.name, (t.name,))
            if t.dtype is None:
                items.append((keys, describe_unknown_dtype(t)))
                continue
            part = cuttings.get(keys)
            items.append((keys, TensorLocation(file=path, offset=t.offset, dtype=t.dtype, shape=t.shape, part=part)))
        return build_nested(items)

    def _get_record(self, tensors: TensorsByRank) -> ArrayRecord | UnreadableArray | None:
        """Combine the parts of a tensor (see `CombineTensors`). Tensors with the same elements share one record."""
        first = next(iter(tensors.values()))
        key = tuple(tensors.items()) if Box.from_shape(first.shape).size else (len(self._records),)
        if key not in self._records:
            self._records[key] = self._make_record(tensors, first)
        return self._records[key]

    def _make_record(self, tensors: TensorsByRank, first: TensorLocation) -> ArrayRecord | UnreadableArray | None:
        parts = [at.part for at in tensors.values()]
        try:
            if None in parts:
                if any(part is not None for part in parts) or not all(
                    is_same_tensor(self.files, first, at) for at in tensors.values()
                ):
                    return None
                return make_array_record(first, self.file_numbers[first.file])
            return self._assemble_parts(tensors, first)
        except UnsupportedStateError as error:
            return UnreadableArray.from_error(
                error, first.dtype, first.shape, len(tensors)
            )  # the rest of the tag can be read

    def _assemble_parts(self, tensors: TensorsByRank, first: TensorLocation) -> ArrayRecord:
        """Assemble the array from the shards of a DTensor.

        Raises:
            UnsupportedStateError: The layout of a shard is unsupported.
            CorruptCheckpointError: Shards are missing or inconsistent.
        """
        shards: dict[Box, Shard] = {}
        for at in tensors.values():
            cutting = at.part
            if cutting.problem or cutting.uneven_shards:
                raise UnsupportedStateError(cutting.problem or _UNEVEN_PROBLEM)
            if (cutting.global_shape, at.dtype) != (first.part.global_shape, first.dtype):
                raise CorruptCheckpointError("the parts of a DTensor do not fit together", file=at.file)
            if cutting.local_shape not in (None, at.shape):
                raise CorruptCheckpointError(
                    "the local part of a DTensor does not have the shape that its placements give",
                    file=at.file,
                    expected=str(cutting.local_shape),
                    found=str(at.shape),
                )
            for piece in cutting.pieces:
                if piece.global_box.size and piece.global_box not in shards:
                    shards |= {shard.box: shard for shard in list_piece_shards(at, piece, self.file_numbers[at.file])}
        try:
            return create_array_record(first.dtype, first.part.global_shape, [*shards.values()], first.part.spec)
        except FormatError as error:
            raise CorruptCheckpointError(
                f"the files of the ranks do not hold an array exactly once: {error.problem}",
                expected=error.expected,
                found=error.found,
                hint="The file of a rank was lost, or files of two saves lie here.",
            ) from error


def _is_same_value(one: Any, other: Any) -> bool:
    """Return True if two values without tensors are equal."""
    if isinstance(one, UntrustedObject) or isinstance(other, UntrustedObject):
        return bool(one == other)
    a, b = flatten_state({"value": one}), flatten_state({"value": other})
    return (a.skeleton, [value for _, value in a.objects]) == (b.skeleton, [value for _, value in b.objects])
