"""Adapters for torch tensors on XLA devices, on one device or sharded by SPMD. Imports torch_xla.

XLA buffers are immutable: an in-place operation creates a new one. On the CPU they are host memory, so a snapshot is a
DLPack view that holds the buffer, and a restored array is host memory that XLA imports; nothing is copied either way.
Other devices use one batched transfer (untested: no TPU or Trainium was available).

With SPMD, torch_xla copies the shards of all devices at once, and provides no view of one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.runtime

from xla_ckpt.arrays.dlpack_buffer import DLPACK_TYPE_CODES, DLPackBuffer, is_dlpack_compatible
from xla_ckpt.arrays.torch_elements import (
    allow_in_place_writes,
    check_dense_tensor,
    choose_torch_dtype,
    get_tensor_bytes,
    get_tensor_dtype,
    is_xla_tensor,
    narrow_to_box,
    view_as_tensor,
)
from xla_ckpt.arrays.torch_tensor import PieceBuffers, WholeTensorAdapter
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, Piece
from xla_ckpt.core.sharding.memory_layout import StridedMemory, create_contiguous
from xla_ckpt.errors import UsageError
from xla_ckpt.loading.target import ComposedTarget, MemorySpan, Target, with_installer
from xla_ckpt.snapshot.memory import ByteArray, SlabAllocator
from xla_ckpt.snapshot.shards import HOST_COPY_ENGINE, CopyEngine, HostShard, ImmutableShards, SampleWindows

_XLAC: Any = torch_xla._XLAC


@functools.cache
def is_xla_on_cpu() -> bool:
    """Return True if XLA runs on the CPU, where its buffers are host memory."""
    return bool(torch_xla.runtime.device_type() == "CPU")


def materialize(values: Sequence[torch.Tensor]) -> None:
    """Compute every value, so that it has a buffer. The values are on one device, and there is at least one.

    If a value is pending, everything that is pending on the device is computed, in the graph that the program's own
    `torch_xla.sync()` would run. A graph of only the values would compute their inputs a second time later on. It would
    also have to be compiled for the save.

    The step does not end here, because that would advance the random number generator, and a run that saves would use
    other random numbers than one that does not.

    Raises:
        UsageError: If the program is in a region in which torch_xla computes nothing. Nothing was changed.
    """
    if any(_XLAC._check_tensor_need_materialization(list(values))):
        # torch_xla detects this too late: the tensors have dropped their graph by then, and never get a value.
        if not _XLAC._get_allow_execution():
            raise UsageError(
                "XLA tensors are pending, and inside torch_xla.compile(full_graph=True) nothing is computed",
                hint="Make this call after the compiled region.",
            )
        device = str(values[0].device)
        # The graph may donate its inputs, for instance the old weights to the new ones. It must therefore contain all
        # live tensors: one that is left pending would read a donated buffer in the next graph ("buffer is deleted").
        _XLAC._xla_sync_live_tensors(device, [], True)
        # The order token of the collectives is not a live tensor. It is still pending, and would read donated
        # gradients.
        _XLAC._set_all_reduce_token(device, None)
    # Wait for running graphs. A value without a buffer (remaining ones are not operations of a step) gets one without
    # any donation: requesting a DLPack capsule of a value without a buffer aborts the process.
    _XLAC._xla_sync_multi(list(values), devices=[], wait=True, sync_xla_data=False)


def _can_import_host_memory() -> bool:
    """Return True if buffers are host memory, which XLA imports without a copy."""
    return is_xla_on_cpu() and not torch_xla.runtime.is_spmd()


def move_to_device(value: torch.Tensor, buffer: DLPackBuffer | None, device: torch.device) -> torch.Tensor:
    """Move a CPU tensor to the device. If its `buffer` is imported, `value` must not be used any more."""
    return value.to(device) if buffer is None or not _can_import_host_memory() else _import_buffer(buffer)


def _import_buffer(buffer: DLPackBuffer) -> torch.Tensor:
    adopted: torch.Tensor = _XLAC._from_dlpack(buffer.create_capsule())
    buffer.release_ownership()
    return adopted


class XlaAdapter(WholeTensorAdapter):
    """An adapter for unsharded tensors on one XLA device. `spmd` is True if torch_xla runs in SPMD mode."""

    def __init__(self, *, spmd: bool = False) -> None:
        self._imports_host_memory = is_xla_on_cpu() and not spmd

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_xla_tensor(value)

    def create_whole_target(
        self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool
    ) -> Target | None:
        if not (owned and self._imports_host_memory and is_dlpack_compatible(value.dtype, local.shape)):
            return None
        return XlaBufferTarget(dtype, local, value.dtype, value)

    def get_identity(self, value: torch.Tensor) -> Hashable | None:
        return "xla", _XLAC._xla_get_tensor_id(value)

    def get_buffer_key(self, value: torch.Tensor) -> Hashable | None:
        # Pending tensors have no buffer, and torch_xla aborts the process if an SPMD tensor's is requested.
        if torch_xla.runtime.is_spmd() or _XLAC._check_tensor_need_materialization([value])[0]:
            return None
        _, nodes = _XLAC._get_tensors_xla_device_data_node([value])
        return XlaBufferKey(_XLAC._get_tensors_handle([value])[0], nodes) if nodes else None

    def get_host_shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> HostTensorShards:
        return HostTensorShards(_hold_on_host([v for v, _ in values]), [local for _, local in values])

    get_shards = get_host_shards

    def create_in_place_target(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        target = self.create_target_like(value, local)
        if owned and isinstance(target, XlaBufferTarget):
            target.value = value
            return target
        install = target.install

        def take_over() -> torch.Tensor:
            value.data = install()  # the parameter gets the new buffer: no copy, no graph
            return value

        def copy() -> torch.Tensor:
            with allow_in_place_writes(value):
                value.copy_(install())  # an alias cannot pass a buffer to its base tensor
            return value

        whole = get_buffer_memory(value)
        return with_installer(
            target, take_over if owned else copy, lambda: [whole.slice_box(piece.local_box) for piece in local.pieces]
        )

    def create_target_like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        element = dtype or get_tensor_dtype(value)
        shape, torch_element = tuple(value.shape), choose_torch_dtype(element, value)
        return create_xla_target(
            element, shape, torch_element, value.device, local, imports_host_memory=self._imports_host_memory
        )


@dataclass(frozen=True, slots=True)
class XlaBufferKey:
    """The identity of a tensor's buffer. An in-place operation replaces the buffer."""

    handle: int
    """The address of torch_xla's data handle, which no other buffer has while this one is held."""

    node: Any = field(compare=False, repr=False)
    """A reference to the buffer. A view of the tensor would not be sufficient, because it changes with the tensor."""


def create_xla_target(
    dtype: DType,
    shape: tuple[int, ...],
    torch_dtype: torch.dtype,
    device: torch.device,
    local: LocalArray,
    *,
    imports_host_memory: bool | None = None,
) -> Target:
    """Create a target for a new tensor of a local shape on the device; its padding is zero.

    `imports_host_memory` is True if XLA imports host memory without a copy; None to detect it.
    """
    imports_host_memory = (
        _can_import_host_memory() if imports_host_memory is None else imports_host_memory
    ) and is_dlpack_compatible(torch_dtype, shape)
    if imports_host_memory and local.is_filled_by(shape):
        return XlaBufferTarget(dtype, local, torch_dtype)
    spread, tensor = PieceBuffers(local), torch.empty(0, device="cpu")
    buffer: DLPackBuffer | None = None

    def memory(slabs: SlabAllocator) -> list[memoryview]:
        nonlocal tensor, buffer
        if imports_host_memory:
            buffer = DLPackBuffer(torch_dtype, shape, slabs)
            tensor = buffer.as_tensor()
        else:
            tensor = view_as_tensor(slabs.allocate(prod(shape) * torch_dtype.itemsize), torch_dtype, shape)
        if not spread.has_no_padding(shape):
            tensor.zero_()
        return spread.get_memory(tensor)

    def install() -> torch.Tensor:
        nonlocal tensor
        filled, tensor = spread.copy_into(tensor), torch.empty(0, device="cpu")
        return move_to_device(filled, buffer, device)

    return ComposedTarget(dtype=dtype, local=local, live=False, allocator=memory, installer=install)


@dataclass(slots=True)
class XlaBufferTarget(Target):
    """A target for a new tensor of one box, in memory that XLA imports; `value`, if any, gets the new buffer."""

    dtype: DType
    local: LocalArray
    torch_dtype: torch.dtype
    value: torch.Tensor | None = None
    buffer: DLPackBuffer | None = None
    live = False

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        self.buffer = DLPackBuffer(self.torch_dtype, self.local.pieces[0].global_box.shape, slabs)
        return [self.buffer.as_memoryview()]

    def install(self) -> torch.Tensor:
        assert self.buffer is not None, "memory() comes first"
        adopted = _import_buffer(self.buffer)
        if self.value is None:
            return adopted
        self.value.data = adopted  # the parameter gets the new buffer: no copy, no graph
        return self.value

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        return [] if self.value is None else [get_buffer_memory(self.value)]

    @classmethod
    def list_spans(cls, targets: Sequence[XlaBufferTarget]) -> list[list[MemorySpan]]:
        number = _XLAC._xla_get_tensor_id
        return [[] if (v := t.value) is None else [(("xla", number(v)), 0, v.nbytes)] for t in targets]


def get_buffer_memory(value: torch.Tensor) -> StridedMemory:
    """Return the memory layout of a tensor: each buffer is a separate memory."""
    return create_contiguous(("xla", _XLAC._xla_get_tensor_id(value)), 0, tuple(value.shape), value.element_size())


def to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values as contiguous, immutable CPU tensors: views of the buffers if possible."""
    return [tensor.contiguous() for tensor in _hold_on_host(values)]


def _hold_on_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values as immutable CPU tensors: views of the buffers if possible."""
    if not values:
        return []
    materialize(values)
    views = _view_buffers(values) if _can_import_host_memory() else [None] * len(values)
    missing = [t.detach() for t, v in zip(values, views, strict=True) if v is None]
    moved = iter(_XLAC._xla_get_cpu_tensors(missing) if missing else ())
    return [v if v is not None else next(moved) for v in views]


@dataclass(frozen=True, slots=True, eq=False)
class HostTensorShards(ImmutableShards):
    """Immutable CPU tensors: views of buffers, or copies of them."""

    tensors: Sequence[torch.Tensor]
    local_arrays: Sequence[LocalArray]

    def __len__(self) -> int:
        return len(self.tensors)

    def get_row(self, index: int) -> list[HostShard]:
        return _create_host_shards(self.tensors[index].contiguous(), self.local_arrays[index])


def _create_host_shards(tensor: torch.Tensor, local: LocalArray) -> list[HostShard]:
    """Return the pieces of a contiguous, immutable CPU tensor."""
    # A single piece with as many elements as the tensor covers it, as for most arrays.
    if len(local.pieces) == 1 and local.pieces[0].local_box.size == tensor.numel():
        return [HostShard(get_tensor_bytes(tensor), tensor, immutable=True)]
    return [create_host_shard(narrow_to_box(tensor, piece.local_box)) for piece in local.pieces]


def create_host_shard(tensor: torch.Tensor) -> HostShard:
    """Return an immutable CPU tensor, a view or a copy of a buffer, as a shard."""
    plain = tensor.contiguous()
    return HostShard(get_tensor_bytes(plain), plain, immutable=True)


def _view_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return views of the buffers of materialized tensors as CPU tensors, without a copy; None if that is impossible.

    torch's own `to_dlpack` requires parameters to be detached, which would dominate the time. torch_xla's does not.
    """
    export, take = _XLAC._to_dlpack, torch._C._from_dlpack
    return [take(export(tensor)) if tensor.dtype in DLPACK_TYPE_CODES else None for tensor in tensors]


def get_global_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside an `XLAShardedTensor`; any other unchanged."""
    inner: torch.Tensor = getattr(value, "global_tensor", value)
    return inner


def is_spmd_sharded(value: torch.Tensor) -> bool:
    """Return True if a tensor on an XLA device is annotated as sharded."""
    return bool(_XLAC._get_xla_sharding_spec(get_global_tensor(value)))


def _get_device_regions(value: torch.Tensor) -> list[tuple[int, Box]]:
    """Return (replica, region without padding) of each local device."""
    if any(_XLAC._check_tensor_need_materialization([value])):
        # together with all others: the next line would compile a separate graph for each pending tensor
        materialize([value])
    _XLAC._xla_wait_device_ops([])  # the next line fails for results of a step that is still running
    shape = tuple(value.shape)
    (entries,) = _XLAC._get_local_shard_replica_and_indices([value])
    regions = []
    for replica, index in entries:
        if not isinstance(index, list):  # Ellipsis: the device holds the whole tensor
            regions.append((replica, Box.from_shape(shape)))
            continue
        bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        start = tuple(min(b[0], n) for b, n in zip(bounds, shape, strict=True))
        regions.append((replica, Box(start, tuple(max(a, b[1]) for a, b in zip(start, bounds, strict=True)))))
    return regions


class SpmdAdapter:
    """An adapter for tensors with a sharding annotation (`mark_sharding`), including partial replication and uneven
    dims.
    """

    kind = "torch"

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "xla" and is_spmd_sharded(value)

    def get_identity(self, value: torch.Tensor) -> Hashable | None:
        return "xla", _XLAC._xla_get_tensor_id(get_global_tensor(value))

    def get_dtype(self, value: torch.Tensor, path: str = "") -> DType:
        check_dense_tensor(get_global_tensor(value), path)
        return get_tensor_dtype(value, path)

    def get_form_key(self, value: torch.Tensor) -> Hashable | None:
        return None

    def get_shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def locate(self, value: torch.Tensor, path: str = "") -> LocalArray | None:
        pieces = [
            Piece(Box.from_shape(box.shape), box, lane)
            for lane, (replica, box) in enumerate(_get_device_regions(get_global_tensor(value)))
            if replica == 0 and box.size
        ]
        return LocalArray(shape=tuple(value.shape), pieces=tuple(pieces))

    def get_host_shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[HostShard]]:
        return [[shard.get_host_shard() for shard in shards] for shards in self.get_shards(values)]

    def get_shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[SpmdShard]]:
        tensors = [get_global_tensor(v).detach() for v, _ in values]
        if tensors:
            materialize(tensors)
        return [
            _HostCopies(tensor, local.pieces).get_shards() for tensor, (_, local) in zip(tensors, values, strict=True)
        ]

    def create_in_place_target(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        inner = get_global_tensor(value)
        shards = _ShardBuffers(inner, get_tensor_dtype(inner), inner.dtype)

        whole = create_contiguous(self.get_identity(value), 0, tuple(value.shape), value.element_size())

        def install() -> torch.Tensor:
            with allow_in_place_writes(inner):
                if shards.is_replicated:
                    inner.copy_(shards.get_filled_shards()[0])  # torch_xla loads no shards into a replicated tensor
                else:
                    _XLAC._load_local_shards(inner, shards.get_filled_shards(), _XLAC._xla_get_runtime_devices())
            return value

        return ComposedTarget(
            dtype=shards.dtype,
            local=shards.local,
            live=False,
            allocator=shards.allocate,
            installer=install,
            aliases=lambda: [whole.slice_box(box) for box in shards.local.boxes],
        )

    def create_target_like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = get_global_tensor(value)
        element = dtype or get_tensor_dtype(inner)
        shards = _ShardBuffers(inner, element, choose_torch_dtype(element, inner))
        sharding, shape = _XLAC._get_xla_op_sharding(inner), tuple(value.shape)

        def install() -> torch.Tensor:
            tensor: torch.Tensor = _XLAC._global_tensor_from_cpu_shards(shards.get_filled_shards(), sharding, shape)
            return tensor

        return ComposedTarget(
            dtype=element, local=shards.local, live=False, allocator=shards.allocate, installer=install
        )


class _HostCopies:
    """Copies of a tensor's local device shards in host memory, created on first use.

    torch_xla copies the shards of all devices at once, and provides no view of one.
    """

    def __init__(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._tensor = tensor
        self._shards: list[HostShard] | None = None

    def get_shards(self) -> list[SpmdShard]:
        """Return all pieces of the tensor, none of them copied yet."""
        itemsize = self._tensor.element_size()
        return [SpmdShard(self, number, piece.local_box.size * itemsize) for number, piece in enumerate(self._pieces)]

    def get_shard(self, number: int) -> HostShard:
        """Return a piece of the tensor, in host memory."""
        with self._lock:
            if self._shards is None:
                (copies,) = _XLAC._get_local_shards([self._tensor])
                # Once for all pieces: a piece without its padding may require another copy.
                self._shards = [
                    create_host_shard(narrow_to_box(copies[piece.local_device][0], piece.local_box))
                    for piece in self._pieces
                ]
            return self._shards[number]


@dataclass(frozen=True, slots=True)
class SpmdShard:
    """The shard of a tensor on one device; see `xla_ckpt.snapshot.shards.DeviceShard`.

    The shards of all devices are copied when one of them is requested, and are kept while one of them is in use: a
    blocking save needs memory for a few tensors, and writes while it copies.
    """

    copies: _HostCopies
    piece_number: int
    """Index of its piece."""

    nbytes: int
    immutable: bool = False
    """True if it is copied. In-place operations of the program replace the buffer of the held tensor."""

    version: Callable[[], Hashable] | None = None

    @property
    def copy_engine(self) -> CopyEngine:
        return HOST_COPY_ENGINE

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        self.get_host_shard().begin_copy(offset, target)

    def make_contiguous(self) -> SpmdShard:
        return self

    def clone(self) -> SpmdShard:
        self.get_host_shard()
        return replace(self, immutable=True)

    def read_sample(self, windows: SampleWindows) -> bytes:
        return windows.read(self.get_host_shard().data)

    def get_host_shard(self) -> HostShard:
        """Return its bytes in host memory."""
        return self.copies.get_shard(self.piece_number)


class _ShardBuffers:
    """Host memory for the local device shards of a tensor: each region once, padded as XLA requires."""

    def __init__(self, value: torch.Tensor, dtype: DType, torch_dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._torch_dtype = torch_dtype
        self._device_boxes = [box for _, box in _get_device_regions(value)]
        sizes = zip(*(box.shape for box in self._device_boxes), strict=True)
        self._padded_shape = tuple(max(n) for n in sizes)
        pieces = [
            Piece(Box.from_shape(box.shape), box, lane) for lane, box in enumerate(self._device_boxes) if box.size
        ]
        self.local = LocalArray(shape=tuple(value.shape), pieces=tuple(pieces))
        self._piece_buffers = {piece.global_box: PieceBuffers(replace(self.local, pieces=(piece,))) for piece in pieces}
        self._tensors: dict[Box, torch.Tensor] = {}

    @property
    def is_replicated(self) -> bool:
        """True if each device holds the whole tensor."""
        return all(box.shape == self.local.shape for box in self._device_boxes)

    def allocate(self, _: SlabAllocator) -> list[memoryview]:
        views = []
        for box, spread in self._piece_buffers.items():
            self._tensors[box] = torch.zeros(self._padded_shape, dtype=self._torch_dtype, device="cpu")
            views += spread.get_memory(self._tensors[box])
        return views

    def get_filled_shards(self) -> list[torch.Tensor]:
        """Return one padded shard for each local device."""
        for box, spread in self._piece_buffers.items():
            spread.copy_into(self._tensors[box])
        nothing = torch.zeros(self._padded_shape, dtype=self._torch_dtype, device="cpu")
        return [self._tensors.get(box, nothing) for box in self._device_boxes]
