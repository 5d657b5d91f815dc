"""What files of torch.save hold besides tensors: values that are plain, and objects that are read on trust only."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.saved_files import SavedFiles
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.stand_ins import QUANTIZED, STORAGES, Opaque, StorageType, TensorParts
from xla_ckpt.layouts.torch_save.zip_reader import KIND_OF_TENSOR, StorageAt, TensorAt, Zip
from xla_ckpt.layouts.untrusted import TRUST_IT, UntrustedObject
from xla_ckpt.lightweight import cached_property
from xla_ckpt.logs import get_logger
from xla_ckpt.state.values import CODEC
from xla_ckpt.tree.module_metadata import module_metadata, with_module_metadata
from xla_ckpt.tree.nested import leaves

logger = get_logger(__name__)

Step = Any
"""A key of a dict, a place in a list, or the name of an attribute."""


def stored_tree(
    files: SavedFiles,
    ahead: Ahead,
    tensor: Callable[[TensorAt], Any],
    more: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    compared: bool = True,
    parts: Callable[[TensorParts], Any] | None = None,
    reference: Callable[[int], TensorAt] | None = None,
) -> Any:
    """What a file holds: something for each tensor, and an `UntrustedObject` for what is read on trust only.

    Args:
        more: See `loads`.
        compared: Whether `files` compares its storages with their CRC-32s from now on.
        parts: Makes something of a tensor that consists of several, for each of which `tensor` has made something. None
            has such tensors read on trust only.
        reference: Finds the tensor of a number that lies in a file of its own. None refuses such numbers.

    Raises:
        CorruptCheckpointError: It is cut off or damaged, or torch.save did not write it.
        UnsupportedStateError: It is of another byte order, or compressed.
    """
    archive = Zip(ahead, 0, ahead.size)
    storages = archive.storages()
    if compared:
        files.storages[ahead.file] = storages
    objects = FileObjects(files, ahead.file, archive.pickled, storages)
    kept = None if parts is None else (lambda value: value)
    value = archive.value(reference, strided=True, tolerant=True, parts=kept, more=more)
    return _Walk(objects, tensor, parts).visit(value, ())


_OF_TENSORS = ("torch._utils._rebuild", "torch._tensor._rebuild", KIND_OF_TENSOR)
"""How the names of functions begin by which pickles make tensors."""

_SAVE_PLAIN = (
    "A model takes plain tensors: load the file with torch.load, and save value.as_subclass(torch.Tensor). Or pass "
    "trust_pickle=True (--trust-pickle) to restore, which makes it as an object, if you trust whoever wrote this file."
)


class _Walk:
    """Puts something in place of tensors, and an `UntrustedObject` in place of whatever is no plain value."""

    def __init__(
        self,
        objects: FileObjects,
        tensor: Callable[[TensorAt], Any],
        parts: Callable[[TensorParts], Any] | None,
    ) -> None:
        self.objects = objects
        self.tensor = tensor
        self.parts = parts

    def visit(self, value: Any, path: tuple[Step, ...]) -> Any:
        """A value of the file; `path` leads to it."""
        if isinstance(value, TensorAt):
            if value.file == self.objects.file:
                self.objects.read_by_others.add(value.offset)
            return self.tensor(value)
        if isinstance(value, TensorParts) and self.parts is not None:
            # Their storages stay with the objects: torch puts none of these kinds together on the device meta.
            return self.parts(replace(value, members={k: self.tensor(at) for k, at in value.members.items()}))
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        kind = type(value)
        if kind in (list, tuple):
            return kind([self.visit(member, (*path, i)) for i, member in enumerate(value)])
        if kind is collections.deque:
            return kind([self.visit(member, (*path, i)) for i, member in enumerate(value)], value.maxlen)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return kind(**{name: self.visit(member, (*path, name)) for name, member in vars(value).items()})
        if kind in (set, frozenset, slice):
            members = (value.start, value.stop, value.step) if kind is slice else value
            return value if all(map(self._is_plain, members)) else self._untrusted(path, kind.__name__)
        if self._is_plain(value):
            return value
        return self._untrusted(path, value.called if isinstance(value, Opaque) else kind.__name__)

    def _untrusted(self, path: tuple[Step, ...], called: str) -> UntrustedObject:
        is_tensor = called.startswith(_OF_TENSORS)
        what = (
            f"a tensor of a class or kind that is read as no array ({called})"
            if is_tensor
            else f"a {called}, which is neither a tensor nor a plain value"
        )
        problem = f"the file holds {what}; it was not loaded, and nothing ran"
        hint = _SAVE_PLAIN if is_tensor else TRUST_IT
        return UntrustedObject(problem, self.objects.file, lambda: self.objects.at(path), path, called, hint)

    def _is_plain(self, value: Any) -> bool:
        if type(value) in (tuple, frozenset):
            return all(map(self._is_plain, value))
        return CODEC.encode(value) is not NotImplemented

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Step, ...]) -> Any:
        if not all(map(self._is_plain, value)):
            return self._untrusted(path, type(value).__name__)
        members = {key: self.visit(member, (*path, key)) for key, member in value.items()}
        metadata = module_metadata(value)
        if metadata is not None:
            return with_module_metadata(members, {name: self._plain_metadata(of) for name, of in metadata.items()})
        if type(value) is dict or any(isinstance(leaf, TensorAt) for leaf in leaves(value)):
            return members  # a state dict is one of ours, whatever class it was: OrderedDict, as a rule
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, members)
        return type(value)(members)  # type: ignore[call-arg]

    def _plain_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What of the metadata of a module is plain: its version, as a rule. Classes of the program take trust."""
        plain = {}
        for name, value in metadata.items():
            if isinstance(value, Mapping):
                plain[name] = self._plain_metadata(value)
            elif self._is_plain(value):
                plain[name] = value
            else:
                logger.warning("%s: metadata %r of a module are left out: they are not plain", self.objects.file, name)
        return plain


class FileObjects:
    """What a file holds, unpickled with all that it names: for objects that are trusted."""

    def __init__(self, directory: SavedFiles, file: str, pickled: bytes, storages: Sequence[StorageAt]) -> None:
        self.directory = directory
        self.file = file
        self.pickled = pickled
        self._places = {storage.key: storage for storage in storages}
        self.read_by_others: set[int] = set()
        """Offsets of tensors that are read as arrays. Objects have their storages without bytes."""
        self._tree: Any = None

    @cached_property
    def _of_others(self) -> list[int]:
        return sorted(self.read_by_others)

    def at(self, path: Sequence[Step]) -> Any:
        """What lies at a place. The first call runs the pickle."""
        if self._tree is None:
            self._tree = _Trusting(self).load()
        place = self._tree
        for step in path:
            place = vars(place)[step] if isinstance(place, argparse.Namespace | types.SimpleNamespace) else place[step]
        return place

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """A storage of the pickle: on the device meta, if nothing in it belongs to an object."""
        place = self._places.get(key)
        if place is None or place.nbytes < nbytes:
            raise UnsupportedStateError(f"the record data/{key} is missing, or too short", file=self.file)
        at = bisect_left(self._of_others, place.offset)
        if at < len(self._of_others) and self._of_others[at] < place.offset + place.nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self._read(place, nbytes)

    def _read(self, place: StorageAt, nbytes: int) -> torch.UntypedStorage:
        data = bytearray(nbytes)
        with closing(self.directory.open(self.file)) as source:
            source.read_into(memoryview(data), place.offset)
        bits = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
        return bits.untyped_storage()


class _Trusting(pickle.Unpickler):
    """Runs a pickle of torch.save."""

    def __init__(self, objects: FileObjects) -> None:
        super().__init__(io.BytesIO(objects.pickled), encoding="utf-8")
        self.objects = objects

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in (known := STORAGES | QUANTIZED):
            return StorageType(known[name])
        if name == "UntypedStorage":
            return StorageType(None)
        if name == "_rebuild_device_tensor_from_cpu_tensor":  # of a device that this process may not have
            return lambda data, dtype, *_: data.to(dtype)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        dtype = torch.uint8 if kind.dtype is None else getattr(torch, kind.dtype)
        untyped = self.objects.storage(key, count * dtype.itemsize)
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=untyped, dtype=dtype, _internal=True)
