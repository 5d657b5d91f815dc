"""Unpickling without running anything: an allowlist of names, each of which stands for a function of this library.

Containers and plain values are made. A tensor becomes a `TensorView`, which describes it. Any other name in the pickle
is refused with that name, before anything of it is imported or called; or an `Opaque` stands for it, which does
nothing.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # what pickle itself applies to the names of old protocols
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import numpy as np
import torch

from xla_ckpt.engine.tag_reader import DAMAGED
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UntrustedObjectError
from xla_ckpt.files.pickle_bounds import FEW_VALUES, MAX_SHARING, check
from xla_ckpt.layouts.torch_save.pickle_names import NAMES_IN_PICKLES
from xla_ckpt.layouts.torch_save.stand_ins import (
    Attributes,
    Buffer,
    Function,
    Namespace,
    NestedBuffer,
    NumpyArray,
    NumpyDType,
    Opaque,
    Reference,
    Storage,
    StorageType,
    TensorParts,
    TensorView,
)
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tree.module_metadata import with_metadata_of

_OF_OTHER_CLASSES = frozenset(
    NAMES_IN_PICKLES[name] for name in ("torch._tensor._rebuild_from_type_v2", "collections.defaultdict")
)
"""Functions whose argument may be a class, of which there are more than this file knows."""


def _or_opaque(make: Callable[..., Any], called: str) -> Callable[..., Any]:
    """A function of this file that makes an `Opaque` of what it would refuse."""
    refused = (CheckpointError, ValueError) if make in _OF_OTHER_CLASSES else CheckpointError

    @wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        try:
            return make(*args, **options)
        except refused:
            return Opaque.of(called)()

    return made


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, file: str, more: Mapping[str, Any], tolerant: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.file = file
        self.more = more
        self.tolerant = tolerant
        self.left = max(FEW_VALUES, MAX_SHARING * len(data))
        """Values and bytes that functions may still be given."""

    def spend(self, values: int) -> None:
        """Count what a function is given.

        Raises:
            ValueError: It is too much.
        """
        self.left -= values
        if self.left < 0:
            raise ValueError(f"its functions are given more than {MAX_SHARING} values for each of its bytes")

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        called = f"{module}.{name}"
        known = self.more.get(called, NAMES_IN_PICKLES.get(called))
        if known is not None:
            is_function = isinstance(known, types.FunctionType)
            if self.tolerant and called not in self.more and (known is NumpyDType or is_function):
                return Function(_or_opaque(known, called), self.spend)
            return Function(known, self.spend) if is_function else known
        # `vars`, because an attribute that torch does not have yet may be a module that it imports on first use.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if self.tolerant:
            return Opaque.of(called)
        raise UntrustedObjectError(
            f"the file names {called}, which is neither a tensor nor a plain value; it was not loaded, and nothing ran",
            file=self.file,
            hint="Have the program that wrote it save tensors, plain values and containers only.",
        )

    def persistent_load(self, pid: Any) -> Storage | Opaque:
        match pid:
            case ("storage", StorageType(dtype), str(key), str(), int(count)) if count >= 0:
                return Storage(key, dtype, count)
            case ("storage", type() as kind, str(), str(), int()) if issubclass(kind, Opaque):
                return kind()  # of elements that this file knows nothing of: quantized numbers
        raise ValueError("a storage that torch.save did not write")


def loads(
    data: bytes, file: str, more: Mapping[str, Any] = types.MappingProxyType({}), *, tolerant: bool = False
) -> Any:
    """The value in a pickle, with a `TensorView` for each tensor and a `Reference` for each reference to one.

    Args:
        file: Where it comes from, for errors.
        more: Further names that it may have, with what stands for each.
        tolerant: Make an `Opaque` of whatever it names besides, and of what cannot be described.

    Raises:
        UntrustedObjectError: It names anything but tensors, containers and plain values. Nothing of it has run.
        UnsupportedStateError: A tensor is of a kind that cannot be described.
        CorruptCheckpointError: It is no pickle.
    """
    with undisturbed():  # what a signal handler raises would be taken for damage
        try:
            check(data)
            return _Restricted(data, file, more, tolerant).load()
        except CheckpointError as error:
            raise error.at(file=file) from None
        except Exception as error:
            # Damaged pickles raise whatever the operation that they describe by accident raises.
            raise CorruptCheckpointError(f"a pickle is damaged: {error}"[:300], file=file, hint=DAMAGED) from error


def tensor_alone(data: bytes) -> TensorView | None:
    """The tensor that a pickle describes and nothing else; None if it holds anything more, or is damaged.

    torch_xla's `serialization.save` writes a file for each tensor. All tensors of one shape have the same pickle there,
    which is read once.
    """
    return _tensor_alone(data) if len(data) < _SMALL else None


_SMALL = 1024
"""Bytes below which a pickle may be one that describes a single tensor."""


@lru_cache(maxsize=1024)
def _tensor_alone(data: bytes) -> TensorView | None:
    try:
        value = loads(data, "")
    except CheckpointError:
        return None  # `loads` says what is wrong, with the name of the file
    return value if isinstance(value, TensorView) else None


MAX_PICKLE_DEPTH = 100
"""Containers inside of containers. A pickle may hold a list that contains itself, which a walk would never leave."""


def replaced(value: Any, leaf: Callable[[Any], Any], file: str, nbytes: int) -> Any:
    """The same containers, of the same classes, with ``leaf(value)`` in place of every `TensorView` and `Reference`.

    So it is with every `TensorParts`, whose members have been replaced by then, and with every `NestedBuffer`.

    Args:
        file: Where it comes from, for errors.

    Raises:
        CorruptCheckpointError: Containers are nested without end.
    """
    return _Walk(leaf, file, max(FEW_VALUES, MAX_SHARING * nbytes)).visit(value, 0)


class _Walk:
    def __init__(self, leaf: Callable[[Any], Any], file: str, most: int) -> None:
        self.leaf = leaf
        self.file = file
        self.most = most
        self.seen = 0

    def visit(self, value: Any, depth: int) -> Any:
        """The value, rebuilt; `depth` containers are around it."""
        if depth > MAX_PICKLE_DEPTH:
            raise CorruptCheckpointError(f"a pickle is nested deeper than {MAX_PICKLE_DEPTH}", file=self.file)
        self.count(1)
        kind = type(value)
        if kind is TensorView or kind is Reference or kind is NestedBuffer:
            return self.leaf(value)
        if kind is TensorParts:
            return self.leaf(replace(value, members={k: self.visit(v, depth + 1) for k, v in value.members.items()}))
        if kind is NumpyArray:
            if value.value is None:
                raise CorruptCheckpointError("a pickle names a numpy array that it does not describe", file=self.file)
            self.count(value.value.nbytes if isinstance(value.value, np.ndarray) else 1)
            return value.value.copy() if isinstance(value.value, np.ndarray) else value.value
        if isinstance(value, Attributes):
            return {"class": value.called.rpartition(".")[2], **self.mapping(vars(value), depth + 1)}
        if isinstance(value, Mapping):
            return self.mapping(value, depth + 1)
        if kind is Buffer:
            self.count(len(value.data))
            buffer = io.BytesIO(value.data)
            buffer.seek(value.position)
            return buffer
        if kind is list or kind is tuple:
            return kind([self.visit(v, depth + 1) for v in value])
        if kind is collections.deque:
            return collections.deque([self.visit(v, depth + 1) for v in value], value.maxlen)
        if kind is Namespace or kind is types.SimpleNamespace:
            members = {k: self.visit(v, depth + 1) for k, v in vars(value).items()}
            return argparse.Namespace(**members) if kind is Namespace else types.SimpleNamespace(**members)
        return value

    def count(self, values: int) -> None:
        """Count some values; a byte of an array is one."""
        self.seen += values
        if self.seen > self.most:
            raise CorruptCheckpointError(f"a pickle stands for more than {self.most} values", file=self.file)

    def mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        """A mapping of the same class."""
        members = {k: self.visit(v, depth) for k, v in value.items()}
        if type(value) is dict:
            return members
        if type(value) is collections.defaultdict:
            return collections.defaultdict(value.default_factory, members)
        same: Any = type(value)
        return with_metadata_of(value, same(members))
