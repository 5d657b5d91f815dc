"""A whole file of torch.save as the value that was saved, without running anything that is in it."""

from __future__ import annotations

import types
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch

from xla_ckpt.arrays.composite import compose
from xla_ckpt.arrays.torch_elements import bytes_of, torch_dtype
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    storage_errors,
)
from xla_ckpt.layouts.torch_save.ahead import AHEAD, Ahead
from xla_ckpt.layouts.torch_save.stand_ins import META, TensorParts
from xla_ckpt.layouts.torch_save.zip_reader import StorageAt, TensorAt, Zip
from xla_ckpt.sharding.ranges import strides
from xla_ckpt.storage.base import Source
from xla_ckpt.storage.door import above
from xla_ckpt.tree.codec import Composite
from xla_ckpt.tree.nested import replaced_leaves
from xla_ckpt.tree.unflatten import resolve_nothing

Put = Callable[[torch.Tensor], torch.Tensor]
"""The bytes of a storage (uint8, on the CPU) -> the same where they are wanted."""


def read_whole_file(
    path: str,
    put: Put = lambda storage: storage,
    *,
    reference: Callable[[int], Any] | None = None,
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """What a file holds. Tensors that shared a storage share one again.

    Every record of the file is compared with its CRC-32 before anything is made of it.

    Args:
        reference: What stands for torch_xla's reference to the tensor of a number. None: there is none.
        more: Names that the pickle may have besides, with what stands for each.

    Raises:
        NoCheckpointError: There is no such file.
        CorruptCheckpointError: It is cut off, or a record is not what was written.
        UntrustedObjectError: It names anything but tensors, containers and plain values. Nothing of it has run.
        UnsupportedStateError: A tensor is of a kind that cannot be described.
        StorageError: It cannot be read.
    """
    with storage_errors("reading a file", path=path), closing(_opened(path)) as source:
        archive = Zip(Ahead(source, path, AHEAD), 0, source.size)
        archive.check()
        tensors = ZipTensors(archive, source, put)
        return archive.value(reference, strided=True, tensor=tensors.of, parts=composed, more=more)


def load_whole_file(
    path: str,
    *,
    trust_pickle: bool,
    put: Put = lambda storage: storage,
    reference: Callable[[int], Any] | None = None,
    more: Mapping[str, Any] = types.MappingProxyType({}),
    options: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """What a file holds: as `read_whole_file` makes it, or on trust as torch.load does, which may run what is in it.

    Args:
        put: As `read_whole_file` takes it, without trust alone; so is `more`.
        options: With trust, for torch.load: ``map_location``, ``pickle_module``.

    Raises:
        CheckpointError: As `read_whole_file`; or an object in it cannot be made.
    """
    if not trust_pickle:
        try:
            return read_whole_file(path, put, reference=reference, more=more)
        except UntrustedObjectError as error:
            error.hint = "Pass trust_pickle=True (--trust-pickle) if you trust whoever wrote this file."
            raise
    check_whole_file(path)
    try:
        with storage_errors("reading a file", path=path):
            value = torch.load(path, weights_only=False, **{"map_location": "cpu", **options})
    except CheckpointError:
        raise
    except Exception as error:  # whatever an object in it raises while it is made
        raise CorruptCheckpointError("its objects cannot be made", file=path, found=str(error)[:200]) from error
    if reference is None:
        return value
    resolve = reference

    def resolved(_: Any, leaf: Any) -> Any:
        return resolve(leaf.tid) if type(leaf).__name__ == "TensorReference" else leaf

    return replaced_leaves(value, resolved, classes=True)


def check_whole_file(path: str) -> None:
    """Read a whole file, and compare each of its records with its CRC-32.

    Raises:
        NoCheckpointError: There is no such file.
        CorruptCheckpointError: It is cut off, or a record is not what was written.
        StorageError: It cannot be read.
    """
    with storage_errors("reading a file", path=path), closing(_opened(path)) as source:
        Zip(Ahead(source, path, AHEAD), 0, source.size).check()


def _opened(path: str) -> Source:
    store, name = above(path)
    if store.is_directory(name):
        raise NoCheckpointError("there is a directory of this name, and no file", file=path)
    try:
        with closing(store.open("", lock=False, links=True)) as directory:
            return directory.open(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoCheckpointError("there is no such file", file=path) from error


def composed(parts: TensorParts) -> torch.Tensor:
    """A tensor that consists of several, which `ZipTensors` has made.

    Raises:
        FormatError: They make no such tensor.
    """
    if parts.kind == META:
        about = parts.about
        return torch.empty_strided(about["size"], about["stride"], dtype=about["dtype"], device="meta")
    tensor: torch.Tensor = compose(Composite(parts.kind, parts.members, parts.about), resolve_nothing)
    return tensor


class ZipTensors:
    """The tensors of a zip, each storage read once. `put` brings a storage to where it is wanted."""

    def __init__(self, archive: Zip, source: Source, put: Put = lambda storage: storage) -> None:
        self.storages = archive.storages()
        self.starts = [storage.offset for storage in self.storages]
        self.source, self.put = source, put
        self.read: dict[str, torch.Tensor] = {}
        self.tensors: dict[TensorAt, torch.Tensor] = {}

    def of(self, place: TensorAt) -> torch.Tensor:
        """The tensor that lies there: one that stands in two places of the value stays one."""
        if place not in self.tensors:
            self.tensors[place] = self._tensor(place)
        return self.tensors[place]

    def _tensor(self, place: TensorAt) -> torch.Tensor:
        dtype = torch_dtype(place.dtype)
        if dtype is None:
            raise UnsupportedStateError("torch has no such element type", file=place.file, found=place.dtype.name)
        if 0 in place.shape:
            empty = self.put(torch.empty(0, dtype=torch.uint8, device="cpu"))
            return torch.empty(place.shape, dtype=dtype, device=empty.device)
        storage = self.storages[bisect_right(self.starts, place.offset) - 1]
        data = self._held(storage, place.file)
        first = (place.offset - storage.offset) // place.dtype.itemsize
        steps = strides(place.shape, 1) if place.strides is None else place.strides
        tensor = torch.empty(0, dtype=dtype, device=data.device)
        return tensor.set_(data.untyped_storage(), first, place.shape, steps)

    def _held(self, storage: StorageAt, file: str) -> torch.Tensor:
        """The bytes of a storage."""
        if storage.key not in self.read:
            data = torch.empty(storage.nbytes, dtype=torch.uint8, device="cpu")
            got = self.source.read_into(bytes_of(data), storage.offset)
            if got < storage.nbytes:
                raise CorruptCheckpointError("the file is cut off", file=file, expected=storage.nbytes, found=got)
            self.read[storage.key] = self.put(data)
        return self.read[storage.key]
