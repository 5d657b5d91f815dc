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


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensor: Callable[[str], InFile]) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.tensor = tensor

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
        """How tensors are made again."""
        tensor = self.tensor(value.path) if isinstance(value, LeafAt) else value
        if not isinstance(tensor, InFile):
            return NotImplemented
        hooks: dict[str, Any] = collections.OrderedDict()
        # A new tuple each time, as torch.save has it: pickle writes an object once, and equal states give equal files.
        args = _Id(tensor), 0, (*tensor.shape,), strides(tensor.shape, 1), False, hooks
        if tensor.dtype.name in _STORAGE_OF:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, tensor.dtype.name))


class _ReferencePickler(pickle._Pickler):  # only the one written in Python lets a name be written that is not imported
    def __init__(self, buffer: io.BytesIO, reference: Callable[[str], Reference]) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.reference = reference

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        """Write a value, or what stands for it."""
        stand_in = self.reference(value.path) if isinstance(value, LeafAt) else value
        return super().save(stand_in, save_persistent_id)  # type: ignore[misc]  # not in typeshed

    def save_global(self, value: Any, name: str | None = None) -> None:
        """Write the name of a class or a function."""
        if value is not Reference:
            super().save_global(value, name)  # type: ignore[misc]  # not in typeshed
            return
        self.write(b"ctorch_xla.utils.serialization\nTensorReference\n")  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    def reducer_override(self, value: Any) -> Any:
        """How references are made again."""
        if isinstance(value, Reference):
            return copyreg.__newobj__, (Reference,), {"tid": value.tid}  # type: ignore[attr-defined]  # not in typeshed
        return NotImplemented


_STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}


def no_tensor(path: str) -> InFile:
    """For trees without arrays."""
    raise UnsupportedStateError("an array where none can be", leaf=path)


def dumps(tree: Any, leaf: str, tensor: Callable[[str], InFile] = no_tensor) -> bytes:
    """The pickle of a tree, with what `tensor` makes of the path of each `LeafAt` in its place.

    Raises:
        UnsupportedStateError: Something in it cannot be pickled.
    """
    return _dumped(tree, leaf, lambda buffer: _Pickler(buffer, tensor))


def dumps_referring(tree: Any, leaf: str, reference: Callable[[str], Reference]) -> bytes:
    """The same, where each array lies in a file of its own: `reference` makes what stands for it."""
    return _dumped(tree, leaf, lambda buffer: _ReferencePickler(buffer, reference))


def _dumped(tree: Any, leaf: str, pickler: Callable[[io.BytesIO], Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        pickler(buffer).dump(tree)
    except CheckpointError:
        raise  # what makes the stand-ins says more than pickle would
    except Exception as error:
        # Objects raise whatever they like while they are pickled.
        raise UnsupportedStateError(f"it cannot be pickled: {error}", leaf=leaf) from error
    return buffer.getvalue()
