"""Plan saves and conversions to orbax items: zarr (version 2) chunks of arrays, and the tree in JSON.

orbax reads arrays that are uncompressed and not in one database like its own. So each chunk is a file of elements in
C order, and the manifest contains its location and digest. Each rank writes complete chunks of the arrays it holds.
One replica of each part is written, and the writers are distributed over the ranks. All ranks publish how they split
the arrays before anything is written, so that they agree on one grid of chunks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays import pytree
from xla_ckpt.core.dtypes import DType, get_dtype
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.save_plan import OwnedRegion, SavePlan, assign_regions
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.flatten import Unflattener
from xla_ckpt.core.tree.nested import KeyPath
from xla_ckpt.core.tree.skeleton import get_part
from xla_ckpt.core.tree.values import Composite, Json
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.base import ConversionPlan, StoredState
from xla_ckpt.formats.orbax import metadata
from xla_ckpt.formats.orbax.chunk_grid import (
    JobChunkGrid,
    RankParts,
    compute_chunk_shape,
    plan_chunk_files,
)
from xla_ckpt.formats.orbax.metadata import OrbaxLeaf, is_inside
from xla_ckpt.saving.finalize import IndexBuilder, WritePlanner
from xla_ckpt.tags.entry import ORBAX_TREE_METADATA_FILE

if TYPE_CHECKING:
    from xla_ckpt.core.plan.save_plan import FilePlan
    from xla_ckpt.state.describe import StateDescription


_ZARR_DTYPES = {
    "bool": "|b1", "uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "int8": "|i1", "int16": "<i2",
    "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
"""zarr names of dtypes. tensorstore uses the plain name of any other dtype."""

_NAMED_DTYPES = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "int4"}
)

_NATIVE_LAYOUT_HINT = 'layout="native" (--to native) has a place for it.'


@dataclass(frozen=True, slots=True)
class _ArrayLeaf:
    """Placeholder for an array in the tree."""

    leaf: str


@dataclass(frozen=True)
class OrbaxTree:
    """State, or a part of it, as an orbax tree: its leaves, and the value of each leaf."""

    values: Mapping[OrbaxLeaf, Any]

    @cached_property
    def arrays(self) -> dict[str, str]:
        """Name of each array in orbax -> its leaf path."""
        return {leaf.name: value.leaf for leaf, value in self.values.items() if isinstance(value, _ArrayLeaf)}

    def build_small_files(self, manifest: Manifest, prefix: str) -> dict[str, bytes]:
        """Build all files except the chunks of arrays. Return path -> bytes, with `prefix` before each path.

        Args:
            manifest: Manifest that locates the chunks.
            prefix: Prefix of the paths.
        """
        files: dict[str, bytes] = {}
        texts = {leaf.name: value for leaf, value in self.values.items() if leaf.value_type == metadata.STRING}
        for leaf, value in self.values.items():
            if leaf.value_type == metadata.SCALAR:
                kind, data = _encode_scalar(value)
                files |= {f"{leaf.name}/.zarray": _build_zarray(kind, (), ()), f"{leaf.name}/0": data}
        for name, leaf_path in self.arrays.items():
            record = manifest.find_array(leaf_path)
            assert record is not None, leaf_path  # the skeleton contains only stored arrays
            files[f"{name}/.zarray"] = _build_zarray(record.dtype, record.shape, _get_chunk_shape(record))
        if texts:
            files[metadata.STRINGS_FILE] = json.dumps(texts).encode()
        files[ORBAX_TREE_METADATA_FILE] = _build_tree_metadata([*self.values])
        return {prefix + name: data for name, data in files.items()}


def build_orbax_tree(skeleton: Json, part: str, *, trust: bool) -> OrbaxTree:
    """Return the orbax tree of a part of a state with this skeleton.

    Raises:
        UnsupportedStateError: orbax cannot store a value in it.
        UntrustedObjectError: It needs a class of a module that is not imported, and `trust` is False.
    """
    from xla_ckpt.state.values import CODEC, create_class_resolver  # imports torch, which listings do not need

    build = Unflattener(
        get_array=lambda leaf, _: _ArrayLeaf(leaf),
        codec=CODEC,
        get_object=_reject_object,
        resolve_class=create_class_resolver(trust),
        compose=_convert_composite,
    ).build
    values: dict[OrbaxLeaf, Any] = {}
    first: dict[str, OrbaxLeaf] = {}
    for keys, value in _iterate_leaves(build(get_part(skeleton, part), part), ()):
        leaf = OrbaxLeaf(keys, _get_leaf_type(keys, value))
        if leaf.value_type not in metadata.EMPTY_TYPES:
            _check_name(leaf, first.setdefault(leaf.name, leaf))
        values[leaf] = value
    return OrbaxTree(values)


def _reject_object(index: int, leaf: str) -> Any:  # noqa: ARG001  # signature of an `Unflattener` callback
    raise UnsupportedStateError("orbax has no place for an object of this class", leaf=leaf, hint=_NATIVE_LAYOUT_HINT)


def _convert_composite(value: Composite) -> Any:
    """Convert a value of a registered JAX class to the dict of its members, as orbax does.

    Raises:
        UnsupportedStateError: It is a PRNG key, or a composite that orbax cannot store.
    """
    if value.name != pytree.PRNG_KEY and pytree.is_composite_name(value.name):
        return dict(value.members)
    hint = (
        "Put jax.random.key_data(key) into the state in its place."
        if value.name == pytree.PRNG_KEY
        else _NATIVE_LAYOUT_HINT
    )
    raise UnsupportedStateError(f"orbax's files are not written with a {value.name}", hint=hint)


def _iterate_leaves(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the orbax keys of each leaf of a tree, and the leaf."""
    members: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
        if len(members) < len(value):
            raise UnsupportedStateError(
                "two keys of a dict have one name to orbax", leaf=_format_path(keys), hint=_NATIVE_LAYOUT_HINT
            )
    elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        members = dict(zip(names, value, strict=True))
    elif type(value) in (list, tuple):
        members = dict(enumerate(value))
    if not members:
        yield keys, value
        return
    for key, member in members.items():
        yield from _iterate_leaves(member, (*keys, key))


def _get_leaf_type(keys: KeyPath, value: Any) -> str:
    """Return the orbax type of a leaf.

    Raises:
        UnsupportedStateError: orbax cannot store the value.
    """
    if isinstance(value, _ArrayLeaf):
        return metadata.NUMPY  # for a JAX array, orbax would require the devices that held it
    for kind, example in (("None", type(None)), ("List", list), ("Tuple", tuple), ("Dict", Mapping)):
        if isinstance(value, example):
            return kind
    if type(value) is str:
        return metadata.STRING
    if type(value) in (bool, int, float):
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise UnsupportedStateError(
                f"orbax stores integers of 64 bits: expected one from -2**63 to 2**64 - 1, got {f'{value:#x}'[:40]}",
                leaf=_format_path(keys),
                hint=f"Store it as a string. {_NATIVE_LAYOUT_HINT}",
            )
        return metadata.SCALAR
    raise UnsupportedStateError(
        f"orbax has no place for a {type(value).__name__}", leaf=_format_path(keys), hint=_NATIVE_LAYOUT_HINT
    )


def _format_path(keys: KeyPath) -> str:
    return "/".join(map(str, keys))


def _check_name(leaf: OrbaxLeaf, first: OrbaxLeaf) -> None:
    if first is not leaf:
        raise UnsupportedStateError(
            f"orbax would call this {leaf.name!r}, as it would {_format_path(first.keys)}", leaf=_format_path(leaf.keys)
        )
    if not is_inside(leaf.name) or "\\" in leaf.name:
        raise UnsupportedStateError(f"orbax would have to make a directory {leaf.name!r}", leaf=_format_path(leaf.keys))


def _get_chunk_shape(record: ArrayRecord) -> tuple[int, ...]:
    """Return the chunk shape of a stored array: the shape of the first chunk, which is complete."""
    shards = list(record)
    first = min(shards, key=lambda shard: shard.box.start).file
    return tuple(map(max, zip(*(shard.box.stop for shard in shards if shard.file == first), strict=True)))


def check_array(leaf: str, element: DType, shape: tuple[int, ...]) -> None:
    """Check that orbax can store an array.

    Raises:
        UnsupportedStateError: It cannot.
    """
    known = element.name in _ZARR_DTYPES or element.name in _NAMED_DTYPES
    if known and Box.from_shape(shape).size:
        return
    problem = "has no place for an array without elements" if known else f"has no element type {element.name}"
    raise UnsupportedStateError(f"orbax {problem}", leaf=leaf, hint=_NATIVE_LAYOUT_HINT)


def _build_zarray(element: DType, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """Serialize ``.zarray``."""
    code = _ZARR_DTYPES.get(element.name, element.name)
    about = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": code, "order": "C", "compressor": None}
    return json.dumps({**about, "filters": None, "fill_value": None, "dimension_separator": "."}).encode()


def _encode_scalar(value: bool | int | float) -> tuple[DType, bytes]:  # a value of the state
    """Return the dtype of a number, and its bytes."""
    whole = ("int64", "<q") if value < 1 << 63 else ("uint64", "<Q")
    name, form = {bool: ("bool", "<?"), int: whole, float: ("float64", "<d")}[type(value)]
    return get_dtype(name), struct.pack(form, value)


def _build_tree_metadata(leaves: Sequence[OrbaxLeaf]) -> bytes:
    """Serialize ``_METADATA``."""
    tree = {
        str(tuple(map(str, leaf.keys))): {
            "key_metadata": [{"key": str(key), "key_type": metadata.get_key_type(key)} for key in leaf.keys],
            "value_metadata": {
                "value_type": leaf.value_type,
                "skip_deserialize": leaf.value_type in metadata.EMPTY_TYPES,
            },
        }
        for leaf in leaves
    }
    about = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **about, "custom_metadata": None}).encode()


def plan_orbax_conversion(stored: StoredState, prefix: str = "", *, keep_chunks: bool = False) -> ConversionPlan:
    """Plan the files of a stored state, or of the selected part of it.

    Args:
        prefix: Prefix of the paths of the files: the item that contains the tree.
        keep_chunks: True to keep the stored chunks, which have one shape.

    Raises:
        UnsupportedStateError: orbax cannot store a value in it.
    """
    manifest = stored.manifest
    item = build_orbax_tree(manifest.skeleton, stored.part, trust=stored.trust)
    files: list[FilePlan] = []
    written: set[str] = set()
    for name, leaf in item.arrays.items():
        record = manifest.find_array(leaf)
        assert record is not None, leaf  # the skeleton contains only stored arrays
        check_array(leaf, record.dtype, record.shape)
        if keep_chunks:
            chunk = min(record, key=lambda shard: shard.box.start).box.shape
        else:
            chunk = compute_chunk_shape(record.shape, record.dtype.itemsize, (0,) * len(record.shape))
        target, whole = manifest.aliases.get(leaf, leaf), Box.from_shape(record.shape)
        copy = target in written
        written.add(target)
        files += plan_chunk_files(
            prefix + name, target, whole, record.dtype.itemsize, chunk=chunk, source=None, copy=copy
        )
    return ConversionPlan([tuple(files)], index=lambda reader: item.build_small_files(reader.manifest, prefix))


@dataclass(frozen=True)
class OrbaxWritePlanner(WritePlanner):
    """Write plan of one rank in this layout."""

    description: StateDescription
    prefix: str
    """Prefix of the paths of the files: the item that contains the tree."""

    def validate(self) -> OrbaxWritePlanner:
        """Check that the layout can store the state. Return the planner.

        Raises:
            UnsupportedStateError: It cannot.
        """
        _ = self._tree
        for leaf in self.description.leaves:
            check_array(leaf.path, leaf.dtype, leaf.shape)
        return self

    @cached_property
    def _tree(self) -> OrbaxTree:
        return build_orbax_tree(self.description.structure, paths.ROOT, trust=True)  # this process described the state

    @cached_property
    def _owned_regions(self) -> Sequence[OwnedRegion]:
        return list(assign_regions(self.description.leaves, split=False))

    @property
    def shared_info(self) -> RankParts:
        parts: dict[str, list[list[Any]]] = {}  # lists, because other ranks receive it as JSON
        for own in self._owned_regions:
            parts.setdefault(own.leaf.path, [list(own.leaf.shape), []])[1].append([own.box.start, own.box.stop])
        return parts

    def combine_infos(self, infos: Sequence[Any]) -> Any:
        return JobChunkGrid.from_rank_parts(infos).to_json()

    @cached_property
    def plan(self) -> SavePlan:
        """Plan as in `WritePlanner`. Only its sources are final, because the chunk grid depends on all ranks."""
        return self._plan_files(JobChunkGrid.from_rank_parts([self.shared_info]))

    def plan_with(self, combined: Any) -> SavePlan:
        return self._plan_files(JobChunkGrid.from_json(combined))

    def _plan_files(self, grid: JobChunkGrid) -> SavePlan:
        """Return the plan of this rank for a chunk grid that all ranks use."""
        rank = self.description.placement.rank
        names: dict[str, list[str]] = {}
        for name, leaf in self._tree.arrays.items():
            names.setdefault(self.description.aliases.get(leaf, leaf), []).append(name)
        files: list[FilePlan] = []
        for own in self._owned_regions:
            leaf, shape, itemsize = own.leaf.path, own.leaf.shape, own.leaf.dtype.itemsize
            chunk = compute_chunk_shape(shape, itemsize, grid.steps.get(leaf, (0,) * len(shape)))
            # orbax does not read the file of a part that another rank also writes. It is compared, and the manifest
            # locates one of the files.
            suffix = "" if grid.first_writers.get((leaf, own.box), rank) == rank else f".of-rank-{rank}"
            for number, name in enumerate(names[leaf]):
                files += plan_chunk_files(
                    self.prefix + name,
                    leaf,
                    own.box,
                    itemsize,
                    chunk=chunk,
                    source=own.source,
                    copy=number > 0,
                    suffix=suffix,
                )
        return SavePlan(tuple(files))

    @property
    def index(self) -> IndexBuilder:
        return lambda reader: build_orbax_tree(reader.manifest.skeleton, paths.ROOT, trust=True).build_small_files(
            reader.manifest, self.prefix
        )
