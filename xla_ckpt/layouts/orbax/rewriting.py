"""A stored state as an item of orbax's: a directory of zarr, version 2, for each array, and the tree in JSON.

orbax reads arrays that are not compressed and do not lie in one database as it reads its own. So each chunk is a file
of elements in C order, which the manifest finds, and whose digests it has.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xla_ckpt.dtypes import DType, dtype
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.zarr_chunk import ZarrChunk
from xla_ckpt.layouts.base import Rewriting, StoredState
from xla_ckpt.layouts.orbax import metadata
from xla_ckpt.layouts.orbax.metadata import OrbaxLeaf, is_inside
from xla_ckpt.layouts.orbax.tags import TREE_METADATA
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree.nested import Keys

CHUNK_BYTES = 1 << 26
"""Bytes of a chunk, at most, unless a single row of the array has more."""

_CODES = {
    "bool": "|b1", "uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "int8": "|i1", "int16": "<i2",
    "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
"""How zarr spells element types; tensorstore calls all others by their names."""

_BY_NAME = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "int4"}
)

_ELSEWHERE = 'layout="native" has a place for it; or convert a part of the state: part="model".'


class _At:
    """Stands for an array in the tree."""

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf


def item_of(stored: StoredState) -> Rewriting:
    """The files of a stored state, or of the part of it that is wanted.

    Raises:
        UnsupportedStateError: orbax has no place for something in it.
    """
    manifest = stored.manifest
    files: list[FilePlan] = []
    small: dict[str, bytes] = {}
    leaves: list[OrbaxLeaf] = []
    names: dict[str, OrbaxLeaf] = {}
    texts: dict[str, str] = {}
    written: set[str] = set()
    for keys, value in _leaves(stored.tree(stored.part, lambda leaf, _: _At(leaf)), ()):
        leaf = OrbaxLeaf(keys, _kind(keys, value))
        leaves.append(leaf)
        if leaf.kind not in metadata.EMPTY:
            _check_name(leaf, names.setdefault(leaf.name, leaf))
        if isinstance(value, _At):
            record = manifest.array(value.leaf)
            assert record is not None, value.leaf  # the skeleton names what is stored
            target = manifest.aliases.get(value.leaf, value.leaf)
            files += _chunks(leaf.name, target, record, copy=target in written)
            small[f"{leaf.name}/.zarray"] = _header(value.leaf, record.dtype, record.shape, _chunk_shape(record))
            written.add(target)
        elif leaf.kind == metadata.STRING:
            texts[leaf.name] = value
        elif leaf.kind == metadata.SCALAR:
            kind, data = _scalar(value)
            small |= {f"{leaf.name}/.zarray": _header(leaf.name, kind, (), ()), f"{leaf.name}/0": data}
    if texts:
        small[metadata.TEXTS] = json.dumps(texts).encode()
    small[TREE_METADATA] = _tree(leaves)
    return Rewriting([tuple(files)], index=lambda _: small)


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
    if type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
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


def _chunks(name: str, leaf: str, record: ArrayRecord, *, copy: bool) -> Iterator[FilePlan]:
    """The chunks of an array: rows of it, as many in each. The last one is filled up."""
    whole, itemsize = Box.whole(record.shape), record.dtype.itemsize
    chunk = _chunk_shape(record)
    size = Box.whole(chunk).size * itemsize
    for number in range(-(-record.shape[0] // chunk[0]) if chunk else 1):
        box = whole
        if chunk:
            low = number * chunk[0]
            box = Box((low, *whole.start[1:]), (min(low + chunk[0], record.shape[0]), *whole.stop[1:]))
        yield FilePlan(
            path=f"{name}/{'.'.join(map(str, (number, *(0 for _ in chunk[1:]))))}",
            codec=ZarrChunk(box.size * itemsize, size),
            entries=(Entry(leaf=leaf, box=box, region=0, copy=copy),),
        )


def _chunk_shape(record: ArrayRecord) -> tuple[int, ...]:
    if not record.shape:
        return ()
    rows = record.shape[0]
    chunks = -(-Box.whole(record.shape).size * record.dtype.itemsize // CHUNK_BYTES) or 1
    return (max(-(-rows // chunks), 1), *record.shape[1:])


def _header(leaf: str, dtype: DType, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """``.zarray``."""
    code = _CODES.get(dtype.name, dtype.name if dtype.name in _BY_NAME else "")
    if not code or not Box.whole(shape).size:
        problem = "has no place for an array without elements" if code else f"has no element type {dtype.name}"
        raise UnsupportedStateError(f"orbax {problem}", leaf=leaf, hint=_ELSEWHERE)
    about = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": code, "order": "C", "compressor": None}
    return json.dumps({**about, "filters": None, "fill_value": None, "dimension_separator": "."}).encode()


def _scalar(value: bool | int | float) -> tuple[DType, bytes]:  # a value of the state
    """The element type of a number, and its bytes."""
    name, form = {bool: ("bool", "<?"), int: ("int64", "<q"), float: ("float64", "<d")}[type(value)]
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
