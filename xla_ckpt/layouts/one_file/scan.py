"""Opening one file of torch.save: scanned into a `Manifest`. No tensor is read, and no code of the file's is run."""

from __future__ import annotations

import argparse
import collections
import io
import logging
import pickle
import types
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import torch

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import UnsupportedStateError, UntrustedObjectError, naming, storage_errors
from xla_ckpt.layouts.dcp import strided
from xla_ckpt.layouts.one_file.file import OneFileDirectory
from xla_ckpt.layouts.one_file.members import members_of
from xla_ckpt.layouts.torch_save.restricted_pickle import STORAGES, Opaque, StorageType
from xla_ckpt.layouts.torch_save.zip_reader import Ahead, StorageAt, TensorAt, Zip
from xla_ckpt.manifest.records import ArrayRecord, FileRecord, Head, Manifest, Shard, UnknownArray, array_record
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import TagEntry
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.nested import leaves

logger = logging.getLogger(__name__)

_AHEAD = 4096
"""Bytes that are read at once: beside the header of a large storage there is nothing else to see."""

Step = Any
"""A key of a dict, a place in a list, or the name of an attribute."""


def open_scanned(store: Store, found: TagEntry, hints: Hints, codec: ValueCodec) -> TagReader:
    """A reader of a file, for the restore engine.

    Raises:
        CorruptCheckpointError: It is cut off or damaged, or torch.save did not write it.
        UnsupportedStateError: It is of another byte order, or compressed.
    """
    with storage_errors("opening a file", path=store.path, file=found.tag):
        # Caches of other programs have links in place of files.
        directory = OneFileDirectory(store.open("", lock=False, links=True), found.tag)
    try:
        with naming(path=store.path, tag=found.tag, file=found.tag), storage_errors("reading a file"):
            manifest, objects = _scan(directory, found.tag, hints, codec)
            return TagReader(directory, store.path, found.tag, manifest, objects)
    except BaseException:
        directory.close()  # nobody else will
        raise


def _scan(directory: OneFileDirectory, file: str, hints: Hints, codec: ValueCodec) -> tuple[Manifest, list[_Object]]:
    with closing(directory.open(file)) as source:
        size = source.size
        archive = Zip(Ahead(source, file, _AHEAD), 0, size)
        directory.storages = archive.storages()
        objects = _Objects(directory, file, archive.pickled)
        walk = _Walk(objects, codec)
        tree = walk.visit(archive.value(strided=True, tolerant=True), ())
    members = members_of(tree, hints, _is_array, _shape_of_numbers)
    if members.guessed:
        logger.warning(
            "%s: the stored optimizer numbers its parameters. They are taken to be those of the stored model in its "
            "order, which is the only one that fits their shapes; the model and the optimizer would say for certain "
            "(model=, optimizer=; --like)",
            file,
        )
    flat = flatten(members.tree, lambda value: "torch" if _is_array(value) else None, codec)
    known = {leaf: value for leaf, value in flat.arrays.items() if isinstance(value, ArrayRecord)}
    aliases = _aliases(known)
    manifest = Manifest(
        head=Head(tag=file, sequence=0, pinned=False, created=""),
        skeleton=flat.skeleton,
        arrays={leaf: record for leaf, record in known.items() if leaf not in aliases},
        aliases=aliases,
        files=(FileRecord(path=file, size=size, head=0, digest=0),),
        unknown={leaf: value for leaf, value in flat.arrays.items() if isinstance(value, UnknownArray)},
    )
    stray = next(((leaf, value) for leaf, value in flat.objects if not isinstance(value, _Object)), None)
    if stray is not None:
        raise UnsupportedStateError(f"a {type(stray[1]).__name__} is neither array nor plain value", leaf=stray[0])
    return manifest, [value for _, value in flat.objects]


def _is_array(value: Any) -> bool:
    return isinstance(value, ArrayRecord | UnknownArray)


def _shape_of_numbers(value: Any) -> tuple[int, ...] | None:
    """The shape of an array that may be a parameter, or a state of one."""
    if isinstance(value, ArrayRecord | UnknownArray) and value.dtype is not None:
        numbers = value.dtype.floating or value.dtype.name.startswith("complex")
        return value.shape if numbers else None
    return None


def _aliases(known: Mapping[str, ArrayRecord]) -> dict[str, str]:
    """Leaf paths of arrays that are those of one before them, with that one."""
    first: dict[int, str] = {}
    return {leaf: same for leaf, record in known.items() if (same := first.setdefault(id(record), leaf)) != leaf}


class _Walk:
    """Puts records in place of tensors, and an `_Object` in place of whatever is no plain value."""

    def __init__(self, objects: _Objects, codec: ValueCodec) -> None:
        self.objects = objects
        self.codec = codec
        self._records: dict[tuple[Any, ...], ArrayRecord | UnknownArray] = {}

    def visit(self, value: Any, path: tuple[Step, ...]) -> Any:
        """A value of the file; `path` leads to it."""
        if isinstance(value, TensorAt):
            return self._record(value)
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
            held = (value.start, value.stop, value.step) if kind is slice else value
            return value if all(map(self._is_plain, held)) else _Object(self.objects, path, kind.__name__)
        return value if self._is_plain(value) else _Object(self.objects, path, _called(value))

    def _is_plain(self, value: Any) -> bool:
        if type(value) in (tuple, frozenset):
            return all(map(self._is_plain, value))
        return self.codec.encode(value) is not NotImplemented

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Step, ...]) -> Any:
        if not all(map(self._is_plain, value)):
            return _Object(self.objects, path, type(value).__name__)
        made = {key: self.visit(member, (*path, key)) for key, member in value.items()}
        if type(value) is dict or any(map(_is_array, leaves(made))):
            return made  # a state dict is one of ours, whatever class it was: OrderedDict, as a rule
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, made)
        return type(value)(made)  # type: ignore[call-arg]

    def _record(self, at: TensorAt) -> ArrayRecord | UnknownArray:
        """The record of a tensor: one for all tensors that are the same elements."""
        elements = Box.whole(at.shape)
        key = (at.offset, at.dtype, at.shape, at.strides) if elements.size else (at, len(self._records))
        if key not in self._records:
            self._records[key] = _record(at)
        self.objects.read_by_others.add(at.offset)
        return self._records[key]


def _called(value: Any) -> str:
    return value.called if isinstance(value, Opaque) else type(value).__name__


def _record(at: TensorAt) -> ArrayRecord | UnknownArray:
    if at.strides is None:
        return array_record(at.dtype, at.shape, [Shard(Box.whole(at.shape), 0, at.offset)])
    try:
        parts = list(strided.boxes(at.shape, at.strides, (0,) * len(at.shape)))
    except UnsupportedStateError as error:
        # The rest of the file is good: only who wants this array hears of it.
        return UnknownArray(
            problem=error.problem,
            expected=str(error.expected),
            found=str(error.found),
            hint="Load it with torch, make it contiguous, and save it anew.",
            dtype=at.dtype,
            shape=at.shape,
            tensors=1,
        )
    shards = [Shard(box, 0, at.offset + first * at.dtype.itemsize) for box, first in parts]
    return array_record(at.dtype, at.shape, shards)


class _Object:
    """Stands for an object that is read on trust only: its class is one of the program's."""

    def __init__(self, objects: _Objects, path: tuple[Step, ...], called: str) -> None:
        self.objects = objects
        self.path = path
        self.called = called

    def load(self, leaf: str, *, trust: bool) -> Any:
        """The object.

        Raises:
            UntrustedObjectError: `trust` is False. Nothing of it has run.
        """
        if not trust:
            raise UntrustedObjectError(
                f"the file holds a {self.called}, which is neither a tensor nor a plain value; it was not loaded, and "
                "nothing ran",
                leaf=leaf,
                file=self.objects.file,
                hint="Pass trust_pickle=True if you trust whoever wrote this file.",
            )
        return self.objects.at(self.path)


class _Objects:
    """What a file holds, unpickled with all that it names: for objects that are trusted."""

    def __init__(self, directory: OneFileDirectory, file: str, pickled: bytes) -> None:
        self.directory = directory
        self.file = file
        self.pickled = pickled
        self.read_by_others: set[int] = set()
        """Offsets of tensors that are read as arrays. Objects have their storages without bytes."""
        self._tree: Any = None

    @cached_property
    def _places(self) -> Mapping[str, StorageAt]:
        return {storage.key: storage for storage in self.directory.storages}

    @cached_property
    def _of_others(self) -> list[int]:
        return sorted(self.read_by_others)

    def at(self, path: Sequence[Step]) -> Any:
        """What lies at a place. The first call runs the pickle."""
        if self._tree is None:
            self._tree = _Trusting(self).load()
        found = self._tree
        for step in path:
            found = vars(found)[step] if isinstance(found, argparse.Namespace | types.SimpleNamespace) else found[step]
        return found

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
        return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else torch.empty(0).untyped_storage()


_QUANTIZED = {"QUInt8Storage": "quint8", "QInt8Storage": "qint8", "QInt32Storage": "qint32"}
"""Storages of tensors that objects are made of here."""


class _Trusting(pickle.Unpickler):
    """Runs a pickle of torch.save."""

    def __init__(self, objects: _Objects) -> None:
        super().__init__(io.BytesIO(objects.pickled), encoding="utf-8")
        self.objects = objects

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in (known := STORAGES | _QUANTIZED):
            return StorageType(known[name])
        if name == "UntypedStorage":
            return StorageType(None)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        dtype = torch.uint8 if kind.dtype is None else getattr(torch, kind.dtype)
        untyped = self.objects.storage(key, count * dtype.itemsize)
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=untyped, dtype=dtype, _internal=True)
