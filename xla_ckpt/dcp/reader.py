"""DCP `StorageReader` on this library's engine: verified reads without running pickles.

Before any tensor of the program changes, each rank reads all bytes that it needs once and compares them with their
checksums; DCP notifies all ranks if one of them fails. Then the bytes are copied into the tensors if the first read
kept them (staged reads), or are read a second time. Pickled metadata and values are parsed without running any of it.
"""

from __future__ import annotations

import dataclasses
import io
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.futures import Future

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.dlpack_buffer import DLPackBuffer, is_dlpack_compatible
from xla_ckpt.arrays.registry import AdapterRegistry, create_array_target, require_adapter
from xla_ckpt.arrays.torch_elements import (
    DENSE_CLASSES,
    allow_inference_writes,
    check_writable_tensor,
    find_torch_dtype,
    get_tensor_bytes,
    get_tensor_dtype,
    narrow_to_box,
)
from xla_ckpt.core.checksum import check_crc32
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.manifest.arrays import ArrayTable, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.dcp.checkpoint_id import CheckpointIdMixin
from xla_ckpt.dcp.tensor import check_can_plan
from xla_ckpt.errors import (
    ChangedTagError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NoCheckpointError,
    UntrustedObjectError,
    UsageError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.formats.dcp.files import DcpFiles, check_no_transforms
from xla_ckpt.formats.dcp.metadata import METADATA_FILE, DcpTensor
from xla_ckpt.formats.dcp.metadata_writer import build_stock_metadata
from xla_ckpt.formats.scan import make_foreign_head
from xla_ckpt.formats.tags import suggest_path
from xla_ckpt.formats.torch_save.serialization import ZipTensors, compose_tensor
from xla_ckpt.formats.torch_save.stored_tensors import iterate_shards
from xla_ckpt.formats.torch_save.zip_reader import ReadAheadFile, TensorLocation, TorchZip
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.read import read_into, verify_reads
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT, TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.snapshot.memory import SlabAllocator
from xla_ckpt.state.guard import WRITE_BARRIER
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.resolve import PathLike, open_parent
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.storage.threads import READ_THREADS, get_worker_count, run_tasks
from xla_ckpt.tags.entry import MANIFEST_FILE
from xla_ckpt.tags.resolve import open_root


class StorageReader(CheckpointIdMixin, StockReader):
    """A reader of `torch.distributed.checkpoint` checkpoints, written by stock DCP, by `xla_ckpt.dcp`, or as tags of
    this library in the layout ``dcp``.

    Use it as ``dcp.load(..., storage_reader=StorageReader(path))``, with any planner. ``.metadata`` is a pickle, and is
    parsed without running any of it. The same applies to values other than tensors, unless `trust_pickle` is set. Bytes
    that this library wrote are verified by their checksums on all ranks before a tensor is changed.

    Args:
        checkpoint_id: The directory.
        trust_pickle: True to allow values other than tensors to be of any class. Loading them may run code.
        read_once: True to keep verified bytes until they are copied into the tensors. Needs host memory for everything
            that this rank loads, and is faster for small tensors or accelerators. By default `xla_ckpt.dcp.load` keeps
            at most 128 MiB, or more if most bytes go to an accelerator, and stock `load` reads twice.
        num_workers: Maximum number of reader threads.
    """

    load_id = ""
    """ID of this load in the metadata that DCP's planners and loggers receive."""

    # Stock's base class has no `__init__`, so derived classes of programs do not call one.
    read_once: bool | None = None
    _checkpoint: OpenCheckpoint | None = None
    _tag_reader: TagReader | None = None
    _failure: BaseException | None = None
    _keys: Sequence[str] = ()
    overwriting: Callable[[], None] | None = None
    """Called when every byte that this rank needs is verified, before any tensor of the program is changed."""

    def __init__(
        self,
        checkpoint_id: PathLike | None = None,
        *,
        trust_pickle: bool = False,
        read_once: bool | None = None,
        num_workers: int = READ_THREADS,
    ) -> None:
        super().__init__()
        self.trust_pickle = trust_pickle
        self.read_once = read_once
        self.num_workers = num_workers
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.close()
        self._set_path(checkpoint_id)
        self.load_id = uuid.uuid4().hex

    @property
    def _io_context(self) -> IoContext:
        return IoContext(workers=self.num_workers)

    def close(self) -> None:
        """Release the directory. Called at the end of a load."""
        self._values: dict[str, bytes] = {}
        self._staged: dict[TensorDestination, StagedTensor] = {}
        if self._tag_reader is not None:
            self._tag_reader.close_files()
            self._tag_reader = None
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the DCP metadata of the checkpoint.

        Raises:
            NoCheckpointError: If the checkpoint does not exist.
            CorruptCheckpointError: If it is damaged.
            UntrustedObjectError: If its metadata refers to anything except DCP's own classes. No code was run.
        """
        if "rank" in kwargs and self._failure is not None:
            # DCP ignores exceptions of the first call, and requests the metadata of one rank. `set_up_storage_reader`
            # raises the exception again, which reaches all ranks.
            return Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
        self.close()
        self._failure = None
        try:
            if self._path is None:
                raise UsageError("nobody has said where the checkpoint is", hint="Give checkpoint_id, the directory.")
            with wrap_os_errors("opening a checkpoint", path=self._path), annotate_errors(path=self._path):
                self._checkpoint = open_checkpoint(self._path)
            opened = self._checkpoint.stored
            about = StorageMeta(checkpoint_id=self._path, save_id=opened.save_id, load_id=self.load_id)
            self._keys = (*opened.tensors, *opened.objects)
            return dataclasses.replace(build_stock_metadata(opened), storage_meta=about)
        except BaseException as error:
            self._failure = error
            raise

    def keys(self) -> Sequence[str]:
        """Return the stored keys, if the metadata was read."""
        return self._keys

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._require_open()
        tensors = group_by_destination(plan.items)
        starts: dict[str, set[tuple[int, ...]]] = {}
        for item in chain.from_iterable(tensors.values()):
            starts.setdefault(item.storage_index.fqn, set()).add(tuple(item.storage_index.offset or ()))
        with wrap_os_errors("reading a checkpoint", path=self._path), annotate_errors(path=self._path):
            with pause_gc():
                self._tag_reader = tag = opened.locate_chunks(starts)
                wants, slots, slabs = list[ReadRequest](), list[memoryview](), SlabAllocator()
                if self.read_once:
                    self._staged, wants, slots = plan_staged_reads(opened, tensors, slabs)
                others = [items for destination, items in tensors.items() if destination not in self._staged]
                checked = dict.fromkeys(map(get_read_request, chain.from_iterable(others)))
                read = plan_restore(tag.manifest, wants)
                seen = plan_restore(tag.manifest, list(checked))
            self.planned()
            read_into(tag, read, slots, self._io_context, slabs=slabs)
            verify_reads(tag, seen, self._io_context)
            opened.check_crcs()
            self._values = {
                item.storage_index.fqn: opened.read_value_bytes(item.storage_index.fqn, trust=self.trust_pickle)
                for item in plan.items
                if item.type == LoadItemType.BYTE_IO
            }
        return dataclasses.replace(plan, storage_data=opened.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Another job may have replaced the checkpoint after one rank has opened it and before another does.
        versions = {plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}
        if len(versions) > 1:
            raise ChangedTagError(
                "the checkpoint was replaced while the ranks opened it, and they have found different versions",
                path=self._path,
                hint="Load it again.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        WRITE_BARRIER.wait()  # an asynchronous save of this library may not have copied the memory yet
        if self.overwriting is not None:
            self.overwriting()
        with defer_signals():
            self._overwrite_targets(plan, planner)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _overwrite_targets(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        tag = self._tag_reader
        assert tag is not None, "prepare_local_plan comes first"
        with pause_gc():
            filled = create_load_targets(self._require_open(), group_by_destination(plan.items), self._staged, planner)
            slabs = SlabAllocator()
            wants: list[ReadRequest] = []
            slots: list[memoryview] = []
            for filling in filled:
                for box, memory in zip(filling.boxes, filling.allocate(slabs), strict=True):
                    wants.append(ReadRequest(filling.key, box, len(slots)))
                    slots.append(memory)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn]))
        with wrap_os_errors("reading a checkpoint", path=self._path), annotate_errors(path=self._path):
            planned = plan_restore(tag.manifest, wants)
            read_into(tag, planned, slots, self._io_context, slabs=slabs)
            with torch.no_grad(), pause_gc():
                for filling in filled:
                    filling.finish(planner)

    def _require_open(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise UsageError("the checkpoint is not open", path=self._path, hint="read_metadata() opens it.")
        return self._checkpoint


class FileSystemReader(StorageReader):
    """A `StorageReader` with the arguments of the DCP `FileSystemReader`.

    Raises:
        UsageError: If extensions are passed, which change the stored bytes (on construction).
    """

    def __init__(self, path: PathLike, _extension_registry: Any = None) -> None:
        if _extension_registry is not None:
            raise UsageError(
                "extensions that change what is stored are not supported",
                path=str(path),
                hint="Use torch.distributed.checkpoint.FileSystemReader.",
            )
        super().__init__(path)


@slots_dataclass(kw_only=True)
class LoadTarget:
    """A tensor of the program, or a part of one, that a load fills."""

    value: torch.Tensor
    install_tensor: Callable[[], torch.Tensor]
    """Returns the tensor with the restored bytes."""

    is_in_place: bool = False
    """True if that is `value` itself; otherwise it is copied into `value`."""

    key: str = ""
    boxes: tuple[Box, ...] = ()
    """Regions of the stored tensor that are read for it."""

    allocate: Callable[[SlabAllocator], Sequence[memoryview]] = lambda _: ()
    item: ReadItem | None = None
    """The item to commit with the planner when it is filled."""

    def finish(self, planner: LoadPlanner) -> None:
        """Install the restored bytes. Gradients must be disabled."""
        tensor = self.install_tensor()
        if not self.is_in_place:
            with allow_inference_writes([self.value]):
                self.value.copy_(tensor)
        elif not self.value.is_inference():
            # Like an in-place operation: a backward pass over the old value must fail.
            torch.autograd.graph.increment_version(self.value)
        if self.item is not None:
            planner.commit_tensor(self.item, self.value)


def create_load_targets(
    checkpoint: OpenCheckpoint,
    tensors: ItemsByDestination,
    staged: Mapping[TensorDestination, StagedTensor],
    planner: LoadPlanner,
) -> list[LoadTarget]:
    """Create the targets: whole tensors with DCP's own planner, otherwise the planner's tensor for each item.

    Raises:
        UsageError: If a tensor is not writable. Raised before any tensor is changed.
    """
    plain, adapters, filled = _is_default_planner(planner), AdapterRegistry(), list[LoadTarget]()
    for destination, items in tensors.items():
        source = staged.get(destination)
        if plain:
            value = planner.lookup_tensor(items[0].dest_index)  # type: ignore[attr-defined]  # `_is_default_planner`
            check_can_plan(value, destination[0])
            value = value.detach()
            if source is not None and tuple(value.shape) == tuple(source.value.shape):
                filled.append(_create_staged_target(destination[0], source, value))
                continue
            if source is None and sum(prod(item.lengths) for item in items) == value.numel():
                filled.append(
                    _create_whole_target(checkpoint, items[0], value, adapters.require(value, destination[0]))
                )
                continue
        filled += [_create_item_target(checkpoint, item, planner, source) for item in items]
    return filled


TensorDestination = tuple[str, tuple[int, ...]]
"""(key, offset) of a local tensor in the program's state dict."""

ItemsByDestination = Mapping[TensorDestination, Sequence[ReadItem]]
"""Read items of each local tensor."""


def group_by_destination(items: Sequence[ReadItem]) -> ItemsByDestination:
    """Group the read items of a plan by tensor."""
    groups: dict[TensorDestination, list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            groups.setdefault((item.dest_index.fqn, tuple(item.dest_index.offset or ())), []).append(item)
    return groups


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor in host memory, filled by one read, that is not installed in the program's state yet."""

    value: torch.Tensor
    buffer: DLPackBuffer | None
    """Buffer that an XLA device on the CPU imports."""


def plan_staged_reads(
    checkpoint: OpenCheckpoint, tensors: ItemsByDestination, slabs: SlabAllocator
) -> tuple[dict[TensorDestination, StagedTensor], list[ReadRequest], list[memoryview]]:
    """Allocate host memory for the local tensors that are read as a whole, and plan the reads into it.

    Returns:
        The staged tensors, the read requests, and a buffer for each request.
    """
    kept, wants, slots = dict[TensorDestination, StagedTensor](), list[ReadRequest](), list[memoryview]()
    for destination, members in tensors.items():
        key = members[0].storage_index.fqn
        stored, dims = checkpoint.get_tensor_record(key).dtype, range(len(members[0].lengths))
        shape = tuple(max(item.dest_offsets[d] + item.lengths[d] for item in members) for d in dims)
        box = Box.from_shape(shape).translate(destination[1] or (0,) * len(shape))
        whole_of_it = sum(prod(item.lengths) for item in members) == box.size
        # A custom planner may store the elements elsewhere.
        if not whole_of_it or not all(
            item.storage_index.fqn == key
            and get_read_request(item).box.start == tuple(map(add, box.start, item.dest_offsets))
            for item in members
        ):
            continue
        kind = find_torch_dtype(stored)
        assert kind is not None, "what the metadata says has been read with torch's types"
        memory = DLPackBuffer(kind, shape, slabs) if is_dlpack_compatible(kind, shape) else None
        value = torch.empty(shape, dtype=kind, device="cpu") if memory is None else memory.as_tensor()
        kept[destination] = StagedTensor(value, memory)
        wants.append(ReadRequest(key, box, len(slots)))
        slots.append(get_tensor_bytes(kept[destination].value))
    return kept, wants, slots


def _is_default_planner(planner: LoadPlanner) -> bool:
    """Return True if a planner uses the tensors of the state dict directly. Derived classes may differ."""
    names = ("lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor")
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name) for name in names
    )


def _check_writable(value: torch.Tensor, key: str) -> None:
    """Raise an error if a tensor is not writable, before other tensors are changed."""
    if type(value) in DENSE_CLASSES and not value.is_contiguous():
        with annotate_errors(leaf=key):
            check_writable_tensor(value)


def _create_staged_target(key: str, staged: StagedTensor, value: torch.Tensor) -> LoadTarget:
    """Create a target for a tensor whose bytes are already in memory."""
    _check_writable(value, key)
    if value.device.type != "xla":
        return LoadTarget(value=value, install_tensor=lambda: staged.value)
    from xla_ckpt.arrays.xla_tensor import move_to_device

    return LoadTarget(value=value, install_tensor=lambda: move_to_device(staged.value, staged.buffer, value.device))


def _create_whole_target(
    checkpoint: OpenCheckpoint, item: ReadItem, value: torch.Tensor, adapter: ArrayAdapter
) -> LoadTarget:
    """Create a target for a whole local tensor, a part of which `item` fills."""
    key = item.storage_index.fqn
    _check_writable(value, key)
    origin = tuple(item.dest_index.offset or (0,) * value.dim())
    local = adapter.locate(value, key) or create_unsharded(tuple(value.shape))
    stored = checkpoint.get_tensor_record(key).dtype
    direct = adapter.get_dtype(value, key) == stored
    target = (
        adapter.create_in_place_target(value, local, owned=False)
        if direct
        else create_array_target(stored, create_unsharded(tuple(value.shape)), "torch")
    )
    boxes = tuple(box.translate(origin) for box in target.boxes) if any(origin) else target.boxes
    return LoadTarget(
        value=value, install_tensor=target.install, is_in_place=direct, key=key, boxes=boxes, allocate=target.allocate
    )


def _create_item_target(
    checkpoint: OpenCheckpoint, item: ReadItem, planner: LoadPlanner, staged: StagedTensor | None
) -> LoadTarget:
    """Create a target for the planner's tensor for an item.

    Raises:
        IncompatibleCheckpointError: If its shape does not fit the item.
    """
    key, value = item.storage_index.fqn, planner.resolve_tensor(item).detach()
    _check_writable(value, key)
    shape = tuple(value.shape)
    if shape != tuple(item.lengths):
        raise IncompatibleCheckpointError(
            "the planner gave a tensor of another shape than it has planned",
            leaf=key,
            expected=list(item.lengths),
            found=list(value.shape),
        )
    if staged is not None:
        start = tuple(item.dest_offsets)
        tensor = narrow_to_box(staged.value, Box(start, tuple(map(add, start, shape))))
        return LoadTarget(value=value, install_tensor=lambda: tensor, item=item)
    stored, want = checkpoint.get_tensor_record(key).dtype, get_read_request(item)
    direct = value.device.type == "cpu" and value.is_contiguous() and get_tensor_dtype(value, key) == stored
    target = (
        require_adapter(value, key).create_in_place_target(value, create_unsharded(shape), owned=False)
        if direct
        else create_array_target(stored, create_unsharded(shape), "torch")
    )
    boxes = (want.box,) if want.box.size else ()
    return LoadTarget(
        value=value,
        install_tensor=target.install,
        is_in_place=direct,
        key=key,
        boxes=boxes,
        allocate=target.allocate,
        item=item,
    )


def get_read_request(item: ReadItem) -> ReadRequest:
    """Return the region of the stored tensor that an item reads."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    stop = tuple(a + n for a, n in zip(start, item.lengths, strict=True))
    return ReadRequest(item.storage_index.fqn, Box(start, stop), 0)


TRUST_PICKLE = "Pass trust_pickle=True to xla_ckpt.dcp.load, or to StorageReader"
"""Hint for loading values of any class."""

ChunkStart = tuple[int, ...]
"""The first element of a chunk, which identifies it among the chunks of its key."""


class OpenCheckpoint(DcpFiles):
    """An open DCP checkpoint.

    Raises:
        NoCheckpointError: If the directory contains no checkpoint (on construction, like the following).
        CorruptCheckpointError: If it is damaged, or contradicts itself.
        UntrustedObjectError: If its metadata refers to anything except DCP's own classes. No code was run.
    """

    def __init__(self, directory: Directory, path: str) -> None:
        super().__init__(directory)
        self.path = path
        stored = self.read_contents()
        if stored is None:
            raise NoCheckpointError("there is no checkpoint of DCP's", hint=_describe_other_directory(self.file_names))
        self.stored = stored
        self._open_files: dict[str, ReadAheadFile] = {}
        self._undigested_chunks: list[tuple[str, TensorLocation]] = []
        """(key, chunk) of located chunks without digests: their zip files may have CRC-32s."""

    def close(self) -> None:
        """Release all files, and the directory."""
        for ahead in self._open_files.values():
            ahead.source.close()
        self._open_files.clear()
        self.directory.close()

    def get_tensor_record(self, key: str) -> DcpTensor:
        """Return the record of a stored tensor.

        Raises:
            CorruptCheckpointError: If there is no such tensor.
            IncompatibleCheckpointError: If it cannot be described.
        """
        self._check_described(key)
        if key not in self.stored.tensors:
            raise CorruptCheckpointError("the checkpoint has no such tensor", leaf=key, path=self.path)
        return self.stored.tensors[key]

    def read_value_bytes(self, key: str, *, trust: bool) -> bytes:
        """Return a value other than a tensor, as bytes for `torch.load`.

        Without `trust`, a parser that runs no code reads the stored bytes, and its result is saved again. DCP's
        planners, which unpickle without restrictions, therefore never receive bytes from an untrusted file.

        Raises:
            UntrustedObjectError: If it needs a class, and `trust` is False. No code was run.
            CorruptCheckpointError: If it is damaged.
            IncompatibleCheckpointError: If it is a tensor that cannot be described.
        """
        self._check_described(key)
        span = self.stored.objects.get(key)
        if span is None:
            raise CorruptCheckpointError("the checkpoint has no such value", leaf=key, path=self.path)
        with annotate_errors(leaf=key, file=span.file, path=self.path):
            check_no_transforms(span)
            ahead = self.get_readahead_file(span.file)
            if self.digest_records:
                self.check_value(ahead, span)
            else:
                TorchZip(ahead, span.offset, span.nbytes).check()
            if trust:
                return bytes(ahead.read_at(span.offset, span.nbytes))
            buffer = io.BytesIO()
            try:
                zipped = TorchZip(ahead, span.offset, span.nbytes)
                tensors = ZipTensors(zipped, ahead.source)
                torch.save(
                    zipped.read_value(
                        allow_strided=True, convert_tensor=tensors.get_tensor, convert_parts=compose_tensor
                    ),
                    buffer,
                )
            except UntrustedObjectError as error:
                error.hint = f"{TRUST_PICKLE}, if you trust whoever wrote it."
                raise
            return buffer.getvalue()

    def _check_described(self, key: str) -> None:
        if key in self.stored.unsupported:
            raise self.stored.unsupported[key].create_error(key).at(file=METADATA_FILE, path=self.path)

    def get_readahead_file(self, file: str) -> ReadAheadFile:
        """Return a file, opened once.

        Raises:
            CorruptCheckpointError: If the file is missing, or its size differs from the recorded one.
            ChangedTagError: If the file is missing because the checkpoint has been removed.
        """
        if file not in self._open_files:
            with annotate_errors(path=self.path):
                self._open_files[file] = ReadAheadFile(self.open(file), file)
        return self._open_files[file]

    def locate_chunks(self, wanted: Mapping[str, Iterable[ChunkStart]]) -> TagReader:
        """Return a reader of these chunks, by key: the leaf paths of its manifest are the keys.

        Raises:
            CorruptCheckpointError: If they are not at the recorded positions, or the chunks of a key are incomplete.
            UnsupportedStateError: If their storage format is not supported.
        """

        def number(file: str) -> int:
            return self.get_file_number(file, self.get_readahead_file(file).size)

        arrays = {}
        for key, starts in wanted.items():
            tensor = self.get_tensor_record(key)
            asked = set(starts)
            shards: list[Shard] = []
            with annotate_errors(leaf=key, path=self.path):
                for chunk in tensor.chunks:
                    if chunk.span is None or not chunk.box.size:
                        continue
                    if chunk.box.start not in asked:
                        # Not read, but needed to verify that the chunks cover the tensor.
                        shards.append(Shard(chunk.box, number(chunk.span.file), chunk.span.offset))
                        continue
                    with annotate_errors(file=chunk.span.file):
                        check_no_transforms(chunk.span)
                        at = self.locate_tensor(
                            self.get_readahead_file(chunk.span.file), chunk.span, tensor.dtype, chunk.box
                        )
                    if not self.digest_records:
                        self._undigested_chunks.append((key, at))
                    shards += iterate_shards(at, chunk.box, number(at.file))
                arrays[key] = create_array_record(tensor.dtype, tensor.shape, shards)
        manifest = Manifest(
            header=make_foreign_head(""),
            skeleton=None,
            arrays=ArrayTable.from_records(arrays),
            files=tuple(self.records),
        )
        root, _, name = self.path.rpartition("/")
        return TagReader(self.directory, root, name, manifest, foreign_objects=())

    def check_crcs(self) -> None:
        """Compare chunks without digests with the CRC-32s of their zip files, if these have any.

        Raises:
            CorruptCheckpointError: If a chunk differs from the saved one.
        """
        chunks = [(key, at) for key, at in self._undigested_chunks if at.crc is not None]

        def check(one: tuple[str, TensorLocation], _: memoryview) -> None:
            key, at = one
            nbytes = Box.from_shape(at.shape).size * at.dtype.itemsize
            with annotate_errors(leaf=key, path=self.path, hint=DAMAGED_FILE_HINT):
                read_into = self.get_readahead_file(at.file).source.read_into
                check_crc32(read_into, at.file, "a tensor", at.offset, nbytes, at.crc)

        workers = min(get_worker_count(READ_THREADS, 2), len(chunks)) or 1
        run_tasks(chunks, check, workers=workers, buffer_bytes=0, name="xla_ckpt-crc")


def open_checkpoint(path: str) -> OpenCheckpoint:
    """Open a DCP directory.

    Raises:
        NoCheckpointError: If the directory contains no checkpoint.
        CorruptCheckpointError: If it is damaged, or contradicts itself.
        UntrustedObjectError: If its metadata refers to anything except DCP's own classes. No code was run.
        OSError: If the storage fails.
    """
    store, name = open_parent(path)
    directory = _open_directory(store, name)
    try:
        return OpenCheckpoint(directory, path)
    except BaseException:
        directory.close()
        raise


def _open_directory(store: Store, name: str) -> Directory:
    for _ in range(3):  # it may be replaced between two reads
        try:
            return store.open(open_root(store).get_directory_name(name))
        except (FileNotFoundError, NotADirectoryError):
            continue
    if store.has(name):
        raise NoCheckpointError(
            "there is a file, and a checkpoint of DCP's is a directory",
            hint="If torch.save wrote it, use torch.load or xla_ckpt.load_checkpoint.",
        )
    raise NoCheckpointError(
        f"there is no such checkpoint{suggest_path(f'{store.path}/{name}')}", hint=_list_sibling_checkpoints(store)
    )


def _list_sibling_checkpoints(store: Store) -> str | None:
    """List the DCP checkpoints in a directory, as text; None if there are none."""
    try:
        checkpoints = [name for name in sorted(store.list_names()) if store.has(f"{name}/{METADATA_FILE}")]
    except OSError:
        return None
    return f"Checkpoints beside it: {', '.join(checkpoints[-10:])}." if checkpoints else None


def _describe_other_directory(names: frozenset[str]) -> str:
    """Describe the likely content of a directory without metadata."""
    below = sorted(
        f.removesuffix(f"/{METADATA_FILE}") for f in names if f.count("/") == 1 and f.endswith(f"/{METADATA_FILE}")
    )
    if below:
        return f"Checkpoints lie in it: pass the path of one, {', '.join(below[-10:])}."
    tags = sorted(
        f.removesuffix(f"/{MANIFEST_FILE}") for f in names if f.count("/") == 1 and f.endswith(f"/{MANIFEST_FILE}")
    )
    if tags:
        names_of_tags = ", ".join(tags[-10:])
        return f"Tags of this library lie in it, {names_of_tags}: use load_checkpoint, or xla-ckpt convert --to dcp."
    if MANIFEST_FILE in names:
        return "It is a tag of this library in another layout: use load_checkpoint, or xla-ckpt convert --to dcp."
    return f"It has no {METADATA_FILE}: its save did not end, or it is no checkpoint of DCP's."
