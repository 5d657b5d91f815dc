"""Load and save whole torch.save files as values, without running code in them, atomically and durably."""

from __future__ import annotations

import types
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch

from xla_ckpt.arrays.composite_tensor import compose
from xla_ckpt.arrays.torch_elements import find_torch_dtype, get_tensor_bytes
from xla_ckpt.core.sharding.memory_layout import compute_strides
from xla_ckpt.core.tree.flatten import refuse_class
from xla_ckpt.core.tree.nested import iterate_leaves, map_leaves
from xla_ckpt.core.tree.values import Composite
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    wrap_os_errors,
)
from xla_ckpt.formats.torch_save.pickle_stubs import META_TENSOR_KIND, CompositeTensor
from xla_ckpt.formats.torch_save.zip_reader import (
    READ_AHEAD_BYTES,
    ReadAheadFile,
    StorageLocation,
    TensorLocation,
    TorchZip,
)
from xla_ckpt.storage.base import FileReader, FileWriter
from xla_ckpt.storage.resolve import open_parent
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind

MoveStorage = Callable[[torch.Tensor], torch.Tensor]
"""The bytes of a storage (uint8, on the CPU) -> the same where they are wanted."""


def read_whole_file(
    path: str,
    put: MoveStorage = lambda storage: storage,
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
    with wrap_os_errors("reading a file", path=path), closing(_open_file(path)) as source:
        archive = TorchZip(ReadAheadFile(source, path, READ_AHEAD_BYTES), 0, source.size)
        archive.check()
        tensors = ZipTensors(archive, source, put)
        return archive.read_value(
            reference,
            allow_strided=True,
            convert_tensor=tensors.get_tensor,
            convert_parts=compose_tensor,
            extra_names=more,
        )


def load_whole_file(
    path: str,
    *,
    trust_pickle: bool,
    put: MoveStorage = lambda storage: storage,
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
        with wrap_os_errors("reading a file", path=path):
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

    return map_leaves(value, resolved, keep_classes=True)


def check_whole_file(path: str) -> None:
    """Read a whole file, and compare each of its records with its CRC-32.

    Raises:
        NoCheckpointError: There is no such file.
        CorruptCheckpointError: It is cut off, or a record is not what was written.
        StorageError: It cannot be read.
    """
    with wrap_os_errors("reading a file", path=path), closing(_open_file(path)) as source:
        TorchZip(ReadAheadFile(source, path, READ_AHEAD_BYTES), 0, source.size).check()


def _open_file(path: str) -> FileReader:
    store, name = open_parent(path)
    if store.is_directory(name):
        raise NoCheckpointError("there is a directory of this name, and no file", file=path)
    try:
        with closing(store.open("", lock=False, links=True)) as directory:
            return directory.open(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoCheckpointError("there is no such file", file=path) from error


def compose_tensor(parts: CompositeTensor) -> torch.Tensor:
    """A tensor that consists of several, which `ZipTensors` has made.

    Raises:
        FormatError: They make no such tensor.
    """
    if parts.kind == META_TENSOR_KIND:
        about = parts.about
        return torch.empty_strided(about["size"], about["stride"], dtype=about["dtype"], device="meta")
    tensor: torch.Tensor = compose(Composite(parts.kind, parts.members, parts.about), refuse_class)
    return tensor


class ZipTensors:
    """The tensors of a zip, each storage read once. `put` brings a storage to where it is wanted."""

    def __init__(self, archive: TorchZip, source: FileReader, put: MoveStorage = lambda storage: storage) -> None:
        self.storages = archive.list_storages()
        self.starts = [storage.offset for storage in self.storages]
        self.source, self.put = source, put
        self.loaded_storages: dict[str, torch.Tensor] = {}
        self.tensors: dict[TensorLocation, torch.Tensor] = {}

    def get_tensor(self, place: TensorLocation) -> torch.Tensor:
        """The tensor that lies there: one that stands in two places of the value stays one."""
        if place not in self.tensors:
            self.tensors[place] = self._make_tensor(place)
        return self.tensors[place]

    def _make_tensor(self, place: TensorLocation) -> torch.Tensor:
        dtype = find_torch_dtype(place.dtype)
        if dtype is None:
            raise UnsupportedStateError("torch has no such element type", file=place.file, found=place.dtype.name)
        if 0 in place.shape:
            empty = self.put(torch.empty(0, dtype=torch.uint8, device="cpu"))
            return torch.empty(place.shape, dtype=dtype, device=empty.device)
        storage = self.storages[bisect_right(self.starts, place.offset) - 1]
        data = self._load_storage(storage, place.file)
        first = (place.offset - storage.offset) // place.dtype.itemsize
        steps = compute_strides(place.shape, 1) if place.strides is None else place.strides
        tensor = torch.empty(0, dtype=dtype, device=data.device)
        return tensor.set_(data.untyped_storage(), first, place.shape, steps)

    def _load_storage(self, storage: StorageLocation, file: str) -> torch.Tensor:
        """The bytes of a storage."""
        if storage.key not in self.loaded_storages:
            data = torch.empty(storage.nbytes, dtype=torch.uint8, device="cpu")
            got = self.source.read_into(get_tensor_bytes(data), storage.offset)
            if got < storage.nbytes:
                raise CorruptCheckpointError("the file is cut off", file=file, expected=storage.nbytes, found=got)
            self.loaded_storages[storage.key] = self.put(data)
        return self.loaded_storages[storage.key]


def write_whole_file(
    value: Any, path: str, *, sealed: Callable[[FileReader], object] = lambda file: None, **options: Any
) -> None:
    """torch.save of a value. XLA tensors are stored as CPU tensors, and brought there in one batch.

    The file has CRC-32s, whatever the program has told torch. Missing directories are made.

    Args:
        sealed: Gets the file when it is durable, before it takes its name.
        options: For torch.save.

    Raises:
        UnsupportedStateError: Something in it cannot be pickled. What was there is there still.
        StorageError: The storage refused. Likewise.
        NotDurableError: The file is in place, and a loss of power may take it away.
    """
    hosted = move_to_host(value)
    store, name = open_parent(path)
    with (
        wrap_os_errors("saving", file=path),
        Transaction(open_root(store), name, TransactionKind.REPLACED_FILE) as transaction,
    ):
        sink = transaction.directory.create(name, 0)
        try:
            _save_tensors(hosted, sink, path, options)
            sink.commit()
        except BaseException:
            sink.abort()
            raise
        transaction.seal({})
        with closing(transaction.directory.open(name)) as file:
            sealed(file)
        transaction.commit()


def replace_file(data: bytes, path: str) -> None:
    """Write a small file of these bytes. Missing directories are made.

    Raises:
        StorageError: The storage refused. What was there is there still.
        NotDurableError: The file is in place, and a loss of power may take it away.
    """
    store, name = open_parent(path)
    with (
        wrap_os_errors("saving", file=path),
        Transaction(open_root(store), name, TransactionKind.REPLACED_FILE) as transaction,
    ):
        transaction.seal({name: data})
        transaction.commit()


def collect_xla_tensors(tree: Any) -> list[torch.Tensor]:
    """The XLA tensors in containers, each once, in the order in which they are met."""
    met = {
        id(leaf): leaf for leaf in iterate_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"
    }
    return list(met.values())


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers, named tuples included, with `change` of each tensor in them."""
    return map_leaves(tree, lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, keep_classes=True)


def move_to_host(tree: Any) -> Any:
    """The same containers with all XLA tensors on the CPU, brought there in one batch. Without any, the tree itself."""
    tensors = collect_xla_tensors(tree)
    if not tensors:
        return tree
    from xla_ckpt.arrays.xla_tensor import to_host

    hosted = {id(t): h for t, h in zip(tensors, to_host(tensors), strict=True)}
    return map_tensors(tree, lambda tensor: hosted.get(id(tensor), tensor))


class _SinkStream:
    """What torch.save writes to: a file from its beginning to its end."""

    def __init__(self, sink: FileWriter) -> None:
        self._sink = sink
        self._end = 0
        self.storage_error: OSError | None = None
        """What the storage said. torch raises an error of its own in its place."""

    def write(self, data: Any) -> int:
        """Append bytes; how many."""
        view = memoryview(data).cast("B")
        try:
            self._sink.patch(view, self._end)
        except OSError as error:
            self.storage_error = error
            raise
        self._end += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""


def _save_tensors(value: Any, sink: FileWriter, path: str, options: dict[str, Any]) -> None:
    stream = _SinkStream(sink)
    try:
        with _enable_crc32():
            torch.save(value, stream, **options)  # type: ignore[arg-type]  # torch asks for `write` alone
    except Exception as error:  # objects raise whatever they like while they are pickled
        if stream.storage_error is not None:
            raise stream.storage_error from error
        raise UnsupportedStateError(f"something in it cannot be pickled: {error}", file=path) from error


@contextmanager
def _enable_crc32() -> Iterator[None]:
    """Have torch.save write CRC-32s: without them nobody finds a damaged byte."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
