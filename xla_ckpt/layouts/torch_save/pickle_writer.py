"""Pickles as torch.save and torch_xla's `serialization.save` write them, of trees that have places for tensors."""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CheckpointError, UnsupportedStateError
from xla_ckpt.layouts.torch_save.stand_ins import STORAGES, Reference
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import strides
from xla_ckpt.tree.nested import leaves

PROTOCOL = 2
"""What torch.save writes."""


@dataclass(frozen=True, slots=True, eq=False)
class InFile:
    """Stands for a contiguous tensor that is a whole storage of the same file."""

    key: int
    """Number of the storage."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeafAt:
    """Stands where an array stands in a state, in containers of any kind."""

    path: str


def leaves_in(tree: Any) -> Iterator[str]:
    """The paths of all arrays in dicts and lists."""
    for leaf in leaves(tree):
        if isinstance(leaf, LeafAt):
            yield leaf.path


@dataclass(frozen=True, slots=True)
class _Id:
    """Stands for the storage of a tensor: pickle asks `persistent_id` about it."""

    of: InFile


class _Pickler(pickle._Pickler):  # the one written in Python: only it lets a name be written that is not imported
    def __init__(self, buffer: io.BytesIO, tensor: Tensor) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.tensor = tensor

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        """Write a value, or what stands for it."""
        stand_in = self.tensor(value.path) if isinstance(value, LeafAt) else value
        return super().save(stand_in, save_persistent_id)  # type: ignore[misc]  # not in typeshed

    def persistent_id(self, value: Any) -> Any:
        """The description of a storage; None for all else."""
        if not isinstance(value, _Id):
            return None
        dtype, elements = value.of.dtype, Box.whole(value.of.shape).size
        legacy = _STORAGE_OF.get(dtype.name)
        if legacy is not None:
            return "storage", getattr(torch, legacy), str(value.of.key), "cpu", elements
        return "storage", torch.UntypedStorage, str(value.of.key), "cpu", elements * dtype.itemsize

    def reducer_override(self, value: Any) -> Any:
        """How tensors and references are made again."""
        if isinstance(value, Reference):
            return copyreg.__newobj__, (Reference,), {"tid": value.tid}  # type: ignore[attr-defined]  # not in typeshed
        if not isinstance(value, InFile):
            return NotImplemented
        hooks: dict[str, Any] = collections.OrderedDict()
        args = _Id(value), 0, value.shape, strides(value.shape, 1), False, hooks
        if value.dtype.name in _STORAGE_OF:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, value.dtype.name))

    def save_global(self, value: Any, name: str | None = None) -> None:
        """Write the name of a class, a function or a dtype."""
        known = _NAMES.get(value) if isinstance(value, type) else None
        if isinstance(value, torch.dtype):
            known = "torch\n" + str(value).removeprefix("torch.")
        if known is None:
            super().save_global(value, name)  # type: ignore[misc]  # not in typeshed
            return
        self.write(b"c" + known.encode() + b"\n")  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]


Tensor = Callable[[str], InFile | Reference]
"""Leaf path -> what stands for the array in a pickle."""

_STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}
_NAMES: dict[type, str] = {Reference: "torch_xla.utils.serialization\nTensorReference"}


def no_tensor(path: str) -> InFile | Reference:
    """For trees without arrays."""
    raise UnsupportedStateError("an array where none can be", leaf=path)


def dumps(tree: Any, leaf: str, tensor: Tensor = no_tensor) -> bytes:
    """The pickle of a tree, with what `tensor` says in place of each `LeafAt`.

    Raises:
        UnsupportedStateError: Something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, tensor).dump(tree)
    except CheckpointError:
        raise  # `tensor` says more than pickle would
    except Exception as error:
        # Objects raise whatever they like while they are pickled.
        raise UnsupportedStateError(f"it cannot be pickled: {error}", leaf=leaf) from error
    return buffer.getvalue()
