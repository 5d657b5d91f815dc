"""Write pickles like torch.save and torch_xla's `serialization.save`, for trees with placeholders for tensors."""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import compute_strides
from xla_ckpt.core.tree.nested import iterate_leaves
from xla_ckpt.errors import CheckpointError, UnsupportedStateError
from xla_ckpt.formats.torch_save.pickle_stubs import STORAGE_DTYPES, TensorReferenceStub

PROTOCOL = 2
"""Pickle protocol of torch.save."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """Placeholder for a contiguous tensor that covers a storage of the same file."""

    key: int
    """Number of the storage."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeafPlaceholder:
    """Placeholder for an array in a state, in containers of any kind."""

    path: str


def iterate_leaf_paths(tree: Any) -> Iterator[str]:
    """Yield the paths of all arrays in dicts and lists."""
    for leaf in iterate_leaves(tree):
        if isinstance(leaf, LeafPlaceholder):
            yield leaf.path


@dataclass(frozen=True, slots=True)
class _StorageId:
    """Placeholder for the storage of a tensor, for `persistent_id`."""

    tensor: FileTensor


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensor: Callable[[str], FileTensor]) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.tensor = tensor

    def persistent_id(self, value: Any) -> Any:
        """Return the description of a storage; None for other values."""
        if not isinstance(value, _StorageId):
            return None
        dtype, elements = value.tensor.dtype, Box.from_shape(value.tensor.shape).size
        legacy = _LEGACY_STORAGES.get(dtype.name)
        if legacy is not None:
            return "storage", getattr(torch, legacy), str(value.tensor.key), "cpu", elements
        return "storage", torch.UntypedStorage, str(value.tensor.key), "cpu", elements * dtype.itemsize

    def reducer_override(self, value: Any) -> Any:
        """Return the function and arguments that rebuild a tensor."""
        tensor = self.tensor(value.path) if isinstance(value, LeafPlaceholder) else value
        if not isinstance(tensor, FileTensor):
            return NotImplemented
        hooks: dict[str, Any] = collections.OrderedDict()
        # A new tuple each time, as in torch.save: pickle writes an object once, and equal states must give equal files.
        args = _StorageId(tensor), 0, (*tensor.shape,), compute_strides(tensor.shape, 1), False, hooks
        if tensor.dtype.name in _LEGACY_STORAGES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, tensor.dtype.name))


class _ReferencePickler(pickle._Pickler):  # only the Python implementation can write a name that is not imported
    def __init__(self, buffer: io.BytesIO, reference: Callable[[str], TensorReferenceStub]) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.reference = reference

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        """Write a value, or its reference."""
        stand_in = self.reference(value.path) if isinstance(value, LeafPlaceholder) else value
        return super().save(stand_in, save_persistent_id)  # type: ignore[misc]  # not in typeshed

    def save_global(self, value: Any, name: str | None = None) -> None:
        """Write the name of a class or function."""
        if value is not TensorReferenceStub:
            super().save_global(value, name)  # type: ignore[misc]  # not in typeshed
            return
        self.write(b"ctorch_xla.utils.serialization\nTensorReference\n")  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    def reducer_override(self, value: Any) -> Any:
        """Return the function and arguments that rebuild a reference."""
        if isinstance(value, TensorReferenceStub):
            return copyreg.__newobj__, (TensorReferenceStub,), {"tid": value.tid}  # type: ignore[attr-defined]  # not in typeshed
        return NotImplemented


_LEGACY_STORAGES = {dtype: storage for storage, dtype in STORAGE_DTYPES.items()}


def reject_tensor(path: str) -> FileTensor:
    """Raise an error: for trees without arrays.

    Raises:
        UnsupportedStateError: Always.
    """
    raise UnsupportedStateError("an array where none can be", leaf=path)


def dump_tree(tree: Any, leaf: str, make_tensor: Callable[[str], FileTensor] = reject_tensor) -> bytes:
    """Pickle a tree, with each `LeafPlaceholder` replaced by the result of `make_tensor` for its path.

    Raises:
        UnsupportedStateError: A value cannot be pickled.
    """
    return _dump(tree, leaf, lambda buffer: _Pickler(buffer, make_tensor))


def dump_tree_with_references(tree: Any, leaf: str, make_reference: Callable[[str], TensorReferenceStub]) -> bytes:
    """Pickle a tree whose arrays are stored in files of their own: `make_reference` returns the reference to each.

    Raises:
        UnsupportedStateError: A value cannot be pickled.
    """
    return _dump(tree, leaf, lambda buffer: _ReferencePickler(buffer, make_reference))


def _dump(tree: Any, leaf: str, make_pickler: Callable[[io.BytesIO], Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        make_pickler(buffer).dump(tree)
    except CheckpointError:
        raise  # these errors are more specific than pickle errors
    except Exception as error:
        # Objects may raise any exception while they are pickled.
        raise UnsupportedStateError(f"it cannot be pickled: {error}", leaf=leaf) from error
    return buffer.getvalue()
