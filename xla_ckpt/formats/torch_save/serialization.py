"""Load and save complete torch.save files as values, without running code in them, atomically and durably."""

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
"""Function that moves the bytes of a storage (uint8, on the CPU) to the target device."""


def read_whole_file(
    path: str,
    put: MoveStorage = lambda storage: storage,
    *,
    reference: Callable[[int], Any] | None = None,
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Read the content of a file. Tensors that shared a storage share one again.

    All records of the file are checked against their CRC-32s before any object is created.

    Args:
        put: Function that moves a storage to the target device.
        reference: Function that returns the tensor for the number in a torch_xla reference. None refuses references.
        more: Additional names that the pickle may contain, with the stub for each.

    Raises:
        NoCheckpointError: The file does not exist.
        CorruptCheckpointError: It is truncated, or a record is corrupt.
        UntrustedObjectError: It names classes other than tensors, containers and plain values. No code was run.
        UnsupportedStateError: A tensor is of an unsupported kind.
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
    """Read the content of a file: as `read_whole_file`, or with trust as torch.load, which may run code in the file.

    Args:
        put: As in `read_whole_file`; ignored with trust.
        reference: As in `read_whole_file`.
        more: As in `read_whole_file`; ignored with trust.
        options: Options for torch.load with trust: ``map_location``, ``pickle_module``.

    Raises:
        CheckpointError: As `read_whole_file`; or an object in the file cannot be created.
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
    except Exception as error:  # any exception of an object that is created
        raise CorruptCheckpointError("its objects cannot be made", file=path, found=str(error)[:200]) from error
    if reference is None:
        return value
    resolve = reference

    def resolved(_: Any, leaf: Any) -> Any:
        return resolve(leaf.tid) if type(leaf).__name__ == "TensorReference" else leaf

    return map_leaves(value, resolved, keep_classes=True)


def check_whole_file(path: str) -> None:
    """Read a complete file, and check all records against their CRC-32s.

    Raises:
        NoCheckpointError: The file does not exist.
        CorruptCheckpointError: It is truncated, or a record is corrupt.
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
    """Compose a tensor that consists of several tensors created by `ZipTensors`.

    Raises:
        FormatError: They do not form such a tensor.
    """
    if parts.kind == META_TENSOR_KIND:
        about = parts.about
        return torch.empty_strided(about["size"], about["stride"], dtype=about["dtype"], device="meta")
    tensor: torch.Tensor = compose(Composite(parts.kind, parts.members, parts.about), refuse_class)
    return tensor


class ZipTensors:
    """Tensors of a zip. Each storage is read once, and moved to the target device by `put`."""

    def __init__(self, archive: TorchZip, source: FileReader, put: MoveStorage = lambda storage: storage) -> None:
        self.storages = archive.list_storages()
        self.starts = [storage.offset for storage in self.storages]
        self.source, self.put = source, put
        self.loaded_storages: dict[str, torch.Tensor] = {}
        self.tensors: dict[TensorLocation, torch.Tensor] = {}

    def get_tensor(self, place: TensorLocation) -> torch.Tensor:
        """Return the tensor at a location. Two references to one location give the same object."""
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
        """Return the bytes of a storage."""
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
    """Save a value with torch.save. XLA tensors are moved to the CPU in one batch, and stored as CPU tensors.

    The file contains CRC-32s, independent of the global torch option. Missing directories are created.

    Args:
        sealed: Function that receives the durable file before it is renamed to its final name.
        options: Options for torch.save.

    Raises:
        UnsupportedStateError: A value cannot be pickled. An existing file is unchanged.
        StorageError: A storage operation failed. An existing file is unchanged.
        NotDurableError: The file is in place, but may be lost in a power failure.
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
    """Write a small file atomically. Missing directories are created.

    Raises:
        StorageError: A storage operation failed. An existing file is unchanged.
        NotDurableError: The file is in place, but may be lost in a power failure.
    """
    store, name = open_parent(path)
    with (
        wrap_os_errors("saving", file=path),
        Transaction(open_root(store), name, TransactionKind.REPLACED_FILE) as transaction,
    ):
        transaction.seal({name: data})
        transaction.commit()


def collect_xla_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the XLA tensors in containers, each once, in traversal order."""
    met = {
        id(leaf): leaf for leaf in iterate_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"
    }
    return list(met.values())


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to each tensor in containers, including named tuples."""
    return map_leaves(tree, lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, keep_classes=True)


def move_to_host(tree: Any) -> Any:
    """Return the containers with all XLA tensors moved to the CPU in one batch; without any, the tree itself."""
    tensors = collect_xla_tensors(tree)
    if not tensors:
        return tree
    from xla_ckpt.arrays.xla_tensor import to_host

    hosted = {id(t): h for t, h in zip(tensors, to_host(tensors), strict=True)}
    return map_tensors(tree, lambda tensor: hosted.get(id(tensor), tensor))


class _SinkStream:
    """Sequential output stream for torch.save."""

    def __init__(self, sink: FileWriter) -> None:
        self._sink = sink
        self._end = 0
        self.storage_error: OSError | None = None
        """Error of the storage. torch replaces it with an error of its own."""

    def write(self, data: Any) -> int:
        """Append bytes. Return their number."""
        view = memoryview(data).cast("B")
        try:
            self._sink.patch(view, self._end)
        except OSError as error:
            self.storage_error = error
            raise
        self._end += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def _save_tensors(value: Any, sink: FileWriter, path: str, options: dict[str, Any]) -> None:
    stream = _SinkStream(sink)
    try:
        with _enable_crc32():
            torch.save(value, stream, **options)  # type: ignore[arg-type]  # torch only needs `write`
    except Exception as error:  # objects may raise any exception while they are pickled
        if stream.storage_error is not None:
            raise stream.storage_error from error
        raise UnsupportedStateError(f"something in it cannot be pickled: {error}", file=path) from error


@contextmanager
def _enable_crc32() -> Iterator[None]:
    """Enable CRC-32s in torch.save. Without them corrupt bytes cannot be detected."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
