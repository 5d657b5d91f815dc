"""The files of a save for DCP: a zip of torch.save for each stored region of a tensor, and one for each other value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.distcp import STEM, Chunk, Distcp, zip_of
from xla_ckpt.files.regions import Region
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.dcp.keys import items
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, LeafAt, dumps
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree.codec import Json
from xla_ckpt.tree.skeleton import is_array


def chunk_of(key: str, dtype: DType, box: Box) -> Chunk:
    """A region of the tensor that DCP calls `key`.

    Raises:
        UnsupportedStateError: torch has no such element type.
    """
    name = key if key != "__metadata__" else "~" + key  # the one name that safetensors keeps for itself
    return Chunk(Region(name, dtype, box), tensor_pickle(dtype, box.shape))


def around(dtype: DType, shape: tuple[int, ...], offset: int) -> tuple[int, int]:
    """(offset, bytes) of the zip of a region of this shape whose elements begin at `offset`."""
    nbytes = Box.whole(shape).size * dtype.itemsize
    layout = zip_of(tensor_pickle(dtype, shape), nbytes)
    return offset - layout.start, layout.size


def object_zip(pickled: bytes) -> bytes:
    """The file of torch.save that holds a value without tensors, from its pickle."""
    ((_, text),) = TorchFile(stem=STEM, pickled=pickled).glue((), ())
    return text


def value_zip(value: Any, leaf: str) -> bytes:
    """The same, from the value.

    Raises:
        UnsupportedStateError: It cannot be pickled.
    """
    return object_zip(dumps(value, leaf))


@lru_cache(maxsize=4096)
def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor that is the whole storage ``0`` of its zip.

    Raises:
        UnsupportedStateError: torch has no such element type.
    """
    from xla_ckpt.arrays.torch_elements import torch_dtype

    if torch_dtype(dtype) is None:
        raise UnsupportedStateError(f"torch has no element type {dtype.name}, and so DCP has none")
    return dumps(LeafAt("0"), "0", lambda _: InFile(0, dtype, shape))


@dataclass(frozen=True, slots=True)
class DcpFiling:
    """What the files are called, and how each is laid out (see `xla_ckpt.plan.save_plan.Filing`)."""

    keys: Mapping[str, str]
    """Leaf path of each array -> its key."""

    def place(self, leaf: str) -> tuple[str, str]:
        return "", self.keys[leaf]

    def codec(self, path: str, regions: Sequence[Region]) -> Distcp:
        return Distcp(path, tuple(chunk_of(region.name, region.dtype, region.box) for region in regions))


def filing_of(skeleton: Json, *, flat: bool) -> DcpFiling:
    """The filing of a state with this skeleton. `flat`: under torchtitan's keys.

    Raises:
        UnsupportedStateError: DCP would call two values of it the same.
    """
    return DcpFiling({item.leaf: item.key for item in items(skeleton, flat=flat) if is_array(item.part)})
