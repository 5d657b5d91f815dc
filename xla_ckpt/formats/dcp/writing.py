"""Plan the files of a DCP save: the keys of values, and one torch.save zip for each stored region of a tensor.

A key is the path of a value, joined by dots. Dicts are traversed, and lists that contain a dict or an array; any other
value is one item: ``optimizer.param_groups.0.betas`` (torch/distributed/checkpoint/_traverse.py, 2.4 to 2.15).
Stock DCP would pickle a tuple that contains an array as one item. Here it is traversed like a list, and other
containers of arrays like dicts, so that their arrays are stored as arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.dcp_file import ARCHIVE_NAME, DcpChunk, DcpFile, create_chunk_zip
from xla_ckpt.core.files.file_layout import Region
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.skeleton import get_children, is_array, is_object
from xla_ckpt.core.tree.values import Json
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.dcp.metadata import KeyPath
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Value that DCP stores under a key."""

    path: KeyPath
    leaf: str
    """Leaf path of the value."""

    part: Json
    """Part of the skeleton for the value."""

    @property
    def key(self) -> str:
        """Key of the value in DCP."""
        return ".".join(map(str, self.path))


def list_items(skeleton: Json, *, flat: bool = False) -> list[DcpItem]:
    """Return all values of a state.

    With `flat` the keys are as in torchtitan. The model has no prefix, so its keys are the keys of
    ``model.state_dict()``. The optimizer is one dict, as with ``StateDictOptions(flatten_optimizer_state_dict=True)``:
    each parameter has the hyperparameters of its group. The key of the scheduler is ``lr_scheduler``.

    Raises:
        UnsupportedStateError: Two values have the same DCP key.

    >>> skeleton = {"model": {"a.w": {"$array": "torch"}}, "groups": [{"lr": 1, "params": ["a"]}]}
    >>> [item.key for item in list_items(skeleton)]
    ['model.a.w', 'groups.0.lr', 'groups.0.params']
    """
    by_key: dict[str, DcpItem] = {}
    for item in _list_torchtitan_items(skeleton) if flat else _walk_items(skeleton, (), paths.ROOT):
        if (other := by_key.setdefault(item.key, item)) is not item:
            raise UnsupportedStateError(
                f"torch.distributed.checkpoint would call this {item.key!r}, as it would {other.leaf}",
                leaf=item.leaf,
                hint="Rename one of the two, or save in another layout.",
            )
    return list(by_key.values())


def _list_torchtitan_items(skeleton: Json) -> Iterator[DcpItem]:
    """Yield the values of a state with the keys of torchtitan."""
    for item in _walk_items(skeleton, (), paths.ROOT):
        match item.path:
            case (schema.MODEL, *rest) if rest:
                yield replace(item, path=tuple(rest))
            case (schema.OPTIMIZER, schema.STATE, *rest) if rest:
                yield replace(item, path=(schema.OPTIMIZER, ".".join(map(str, (schema.STATE, *rest)))))
            case (schema.OPTIMIZER, schema.PARAM_GROUPS, int(number), *rest):
                called = skeleton[schema.OPTIMIZER][schema.PARAM_GROUPS][number][schema.PARAMS]
                for name in called if rest != [schema.PARAMS] else ():
                    yield replace(item, path=(schema.OPTIMIZER, ".".join(map(str, (schema.PARAM_GROUPS, name, *rest)))))
            case (schema.SCHEDULER, *rest):
                yield replace(item, path=("lr_scheduler", *rest))
            case (schema.EXTRAS, *rest) if rest:
                yield replace(item, path=tuple(rest))
            case _:
                yield item


def _walk_items(part: Json, path: KeyPath, leaf: str) -> Iterator[DcpItem]:
    members = None if is_array(part) else _get_members(part)
    if members is None:
        # A state can be a single value. DCP supports only dicts, so it gets a key.
        yield DcpItem(path or ("value",), leaf, part)
        return
    for key, below, child in members:
        yield from _walk_items(child, (*path, key), paths.join(leaf, below))


def _get_members(part: Json) -> list[tuple[str | int, str, Json]] | None:
    """Return (key, path component, part) of the members of a container; None for a value that is one item."""
    below = get_children(part)
    if below is None:
        return None
    if isinstance(part, list):
        return None if _is_single_item(part) else [(i, str(i), child) for i, child in enumerate(part)]
    wrapped = next(iter(part)) if len(part) == 1 and next(iter(part)).startswith("$") else ""
    if not wrapped:
        return [(key, paths.escape(key), child) for key, child in part.items()]
    body = part[wrapped][1] if wrapped == "$defaultdict" else part[wrapped]
    if wrapped in _DICT_TYPES:
        return [(_format_key(key), format_key(key), child) for key, child in body]
    if not any(map(_has_array, below.values())):
        return None
    if all(name.isdigit() for name in below):
        return [(int(name), name, child) for name, child in below.items()]
    return [(paths.unescape(name), name, child) for name, child in below.items()]


_DICT_TYPES = frozenset({"$dict", "$OrderedDict", "$Counter", "$defaultdict"})


def _format_key(key: Json) -> str:
    """Format a dict key as DCP does: like ``str``.

    >>> _format_key({"$tuple": [1, {"$tuple": ["a"]}]})
    "(1, ('a',))"
    """
    return _format_repr(key) if isinstance(key, dict) else str(key)


def _format_repr(key: Json) -> str:
    if not isinstance(key, dict):
        return repr(key)
    if "$tuple" not in key:
        return json.dumps(key)
    members = [_format_repr(member) for member in key["$tuple"]]
    return f"({members[0]},)" if len(members) == 1 else f"({', '.join(members)})"


def _is_single_item(values: list[Json]) -> bool:
    """Return True if a list is stored as one value, because no member has a key of its own."""
    return not any(is_array(v) or is_object(v) or _get_members(v) is not None for v in values)


def _has_array(part: Json) -> bool:
    if is_array(part) or is_object(part):
        return True
    return any(map(_has_array, (get_children(part) or {}).values()))


def make_chunk(key: str, dtype: DType, box: Box) -> DcpChunk:
    """Return a region of the tensor with this DCP key.

    Raises:
        UnsupportedStateError: torch does not support the dtype.
    """
    name = key if key != "__metadata__" else "~" + key  # the only name that safetensors reserves
    return DcpChunk(Region(name, dtype, box), make_tensor_pickle(dtype, box.shape))


def locate_zip(dtype: DType, shape: tuple[int, ...], offset: int) -> tuple[int, int]:
    """Return (offset, bytes) of the zip of a region with this shape whose elements begin at `offset`."""
    nbytes = Box.from_shape(shape).size * dtype.itemsize
    layout = create_chunk_zip(make_tensor_pickle(dtype, shape), nbytes)
    return offset - layout.data_offset, layout.size


def make_object_zip(pickled: bytes) -> bytes:
    """Return the torch.save file of a value without tensors, given its pickle."""
    ((_, text),) = TorchFile(archive_name=ARCHIVE_NAME, pickled=pickled).build_framing((), ())
    return text


def make_value_zip(value: Any, leaf: str) -> bytes:
    """Return the torch.save file of a value without tensors.

    Raises:
        UnsupportedStateError: The value cannot be pickled.
    """
    return make_object_zip(dump_tree(value, leaf))


@lru_cache(maxsize=4096)
def make_tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a contiguous tensor that covers the storage ``0`` of its zip.

    Raises:
        UnsupportedStateError: torch does not support the dtype.
    """
    from xla_ckpt.arrays.torch_elements import find_torch_dtype

    if find_torch_dtype(dtype) is None:
        raise UnsupportedStateError(f"torch has no element type {dtype.name}, and so DCP has none")
    return dump_tree(LeafPlaceholder("0"), "0", lambda _: FileTensor(0, dtype, shape))


@dataclass(frozen=True, slots=True)
class DcpFileNaming:
    """Names and layout of the files (see `xla_ckpt.core.plan.save_plan.FileNaming`)."""

    keys: Mapping[str, str]
    """Leaf path of each array -> its key."""

    def place(self, leaf: str) -> tuple[str, str]:
        return "", self.keys[leaf]

    def create_layout(self, path: str, regions: Sequence[Region]) -> DcpFile:
        return DcpFile(path, tuple(make_chunk(region.key, region.dtype, region.box) for region in regions))


def make_file_naming(skeleton: Json, *, flat: bool) -> DcpFileNaming:
    """Return the file naming of a state with this skeleton. `flat` selects the torchtitan keys.

    Raises:
        UnsupportedStateError: Two values have the same DCP key.
    """
    return DcpFileNaming({item.leaf: item.key for item in list_items(skeleton, flat=flat) if is_array(item.part)})
