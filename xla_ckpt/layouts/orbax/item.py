"""A state as an item of orbax's: a directory of zarr, version 2, for each array, and the tree in JSON.

orbax reads arrays that are not compressed and do not lie in one database as it reads its own. So each chunk is a file
of elements in C order, which the manifest finds, and whose digests it has.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays import pytree
from xla_ckpt.dtypes import DType, dtype
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.orbax import metadata
from xla_ckpt.layouts.orbax.metadata import OrbaxLeaf, is_inside
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.sharding.box import Box
from xla_ckpt.tags.entry import TREE_METADATA
from xla_ckpt.tree.codec import Composite, Json
from xla_ckpt.tree.nested import Keys
from xla_ckpt.tree.skeleton import part_at
from xla_ckpt.tree.unflatten import Unflattener

_CODES = {
    "bool": "|b1", "uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "int8": "|i1", "int16": "<i2",
    "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
"""How zarr spells element types; tensorstore calls all others by their names."""

_BY_NAME = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "int4"}
)

_ELSEWHERE = 'layout="native" (--to native) has a place for it.'


@dataclass(frozen=True, slots=True)
class _At:
    """Stands for an array in the tree."""

    leaf: str


@dataclass(frozen=True)
class OrbaxTree:
    """What a state, or a part of it, is to orbax: the leaves of its tree, and what each of them holds."""

    values: Mapping[OrbaxLeaf, Any]

    @cached_property
    def arrays(self) -> dict[str, str]:
        """What orbax calls each array -> its leaf path."""
        return {leaf.name: value.leaf for leaf, value in self.values.items() if isinstance(value, _At)}

    def small_files(self, manifest: Manifest, below: str) -> dict[str, bytes]:
        """Path -> bytes of all files but the chunks of arrays, which this manifest finds, below a directory."""
        files: dict[str, bytes] = {}
        texts = {leaf.name: value for leaf, value in self.values.items() if leaf.kind == metadata.STRING}
        for leaf, value in self.values.items():
            if leaf.kind == metadata.SCALAR:
                kind, data = _scalar(value)
                files |= {f"{leaf.name}/.zarray": _header(kind, (), ()), f"{leaf.name}/0": data}
        for name, leaf_path in self.arrays.items():
            record = manifest.array(leaf_path)
            assert record is not None, leaf_path  # the skeleton names what is stored
            files[f"{name}/.zarray"] = _header(record.dtype, record.shape, _chunk_shape(record))
        if texts:
            files[metadata.TEXTS] = json.dumps(texts).encode()
        files[TREE_METADATA] = _tree([*self.values])
        return {below + name: data for name, data in files.items()}


def item_of(skeleton: Json, part: str, *, trust: bool) -> OrbaxTree:
    """What a part of a state with this skeleton is to orbax.

    Raises:
        UnsupportedStateError: orbax has no place for something in it.
        UntrustedObjectError: It needs a class of a module that is not imported, and `trust` is False.
    """
    from xla_ckpt.state.values import CODEC, resolver  # torch, which listings do without

    build = Unflattener(
        array=lambda leaf, _: _At(leaf),
        codec=CODEC,
        object=_no_object,
        resolve=resolver(trust),
        compose=_parts_of,
    ).build
    values: dict[OrbaxLeaf, Any] = {}
    first: dict[str, OrbaxLeaf] = {}
    for keys, value in _leaves(build(part_at(skeleton, part), part), ()):
        leaf = OrbaxLeaf(keys, _kind(keys, value))
        if leaf.kind not in metadata.EMPTY:
            _check_name(leaf, first.setdefault(leaf.name, leaf))
        values[leaf] = value
    return OrbaxTree(values)


def _no_object(index: int, leaf: str) -> Any:  # noqa: ARG001  # what an `Unflattener` calls
    raise UnsupportedStateError("orbax has no place for an object of this class", leaf=leaf, hint=_ELSEWHERE)


def _parts_of(value: Composite) -> Any:
    """A value of a class that is registered with jax as the dict of its parts: so orbax has it, too."""
    if value.name != pytree.KEY and pytree.is_name(value.name):
        return dict(value.members)
    hint = "Put jax.random.key_data(key) into the state in its place." if value.name == pytree.KEY else _ELSEWHERE
    raise UnsupportedStateError(f"orbax's files are not written with a {value.name}", hint=hint)


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """The keys that lead to each leaf of a tree, as orbax has them, and the leaf."""
    members: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
        if len(members) < len(value):
            raise UnsupportedStateError("two keys of a dict have one name to orbax", leaf=_path(keys), hint=_ELSEWHERE)
    elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        members = dict(zip(names, value, strict=True))
    elif type(value) in (list, tuple):
        members = dict(enumerate(value))
    if not members:
        yield keys, value
        return
    for key, member in members.items():
        yield from _leaves(member, (*keys, key))


def _kind(keys: Keys, value: Any) -> str:
    """The type of a leaf, as orbax calls it."""
    if isinstance(value, _At):
        return metadata.NUMPY  # of an array of jax's it would want to know on which devices it was
    for kind, example in (("None", type(None)), ("List", list), ("Tuple", tuple), ("Dict", Mapping)):
        if isinstance(value, example):
            return kind
    if type(value) is str:
        return metadata.STRING
    if type(value) in (bool, int, float):
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise UnsupportedStateError(
                f"orbax stores integers of 64 bits: expected one from -2**63 to 2**64 - 1, got {f'{value:#x}'[:40]}",
                leaf=_path(keys),
                hint=f"Store it as a string. {_ELSEWHERE}",
            )
        return metadata.SCALAR
    raise UnsupportedStateError(f"orbax has no place for a {type(value).__name__}", leaf=_path(keys), hint=_ELSEWHERE)


def _path(keys: Keys) -> str:
    return "/".join(map(str, keys))


def _check_name(leaf: OrbaxLeaf, first: OrbaxLeaf) -> None:
    if first is not leaf:
        raise UnsupportedStateError(
            f"orbax would call this {leaf.name!r}, as it would {_path(first.keys)}", leaf=_path(leaf.keys)
        )
    if not is_inside(leaf.name) or "\\" in leaf.name:
        raise UnsupportedStateError(f"orbax would have to make a directory {leaf.name!r}", leaf=_path(leaf.keys))


def _chunk_shape(record: ArrayRecord) -> tuple[int, ...]:
    """The shape of the chunks of a stored array: that of the first one, which is whole."""
    shards = list(record)
    first = min(shards, key=lambda shard: shard.box.start).file
    return tuple(map(max, zip(*(shard.box.stop for shard in shards if shard.file == first), strict=True)))


def check_array(leaf: str, element: DType, shape: tuple[int, ...]) -> None:
    """Refuse an array that orbax has no place for.

    Raises:
        UnsupportedStateError: It has none.
    """
    known = element.name in _CODES or element.name in _BY_NAME
    if known and Box.whole(shape).size:
        return
    problem = "has no place for an array without elements" if known else f"has no element type {element.name}"
    raise UnsupportedStateError(f"orbax {problem}", leaf=leaf, hint=_ELSEWHERE)


def _header(element: DType, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """``.zarray``."""
    code = _CODES.get(element.name, element.name)
    about = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": code, "order": "C", "compressor": None}
    return json.dumps({**about, "filters": None, "fill_value": None, "dimension_separator": "."}).encode()


def _scalar(value: bool | int | float) -> tuple[DType, bytes]:  # a value of the state
    """The element type of a number, and its bytes."""
    whole = ("int64", "<q") if value < 1 << 63 else ("uint64", "<Q")
    name, form = {bool: ("bool", "<?"), int: whole, float: ("float64", "<d")}[type(value)]
    return dtype(name), struct.pack(form, value)


def _tree(leaves: Sequence[OrbaxLeaf]) -> bytes:
    """``_METADATA``."""
    tree = {
        str(tuple(map(str, leaf.keys))): {
            "key_metadata": [{"key": str(key), "key_type": metadata.key_type(key)} for key in leaf.keys],
            "value_metadata": {"value_type": leaf.kind, "skip_deserialize": leaf.kind in metadata.EMPTY},
        }
        for leaf in leaves
    }
    about = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **about, "custom_metadata": None}).encode()
