"""Adapters for torch tensors outside of XLA: CPU memory in place, other devices through copies.

CPU tensors are saved from and loaded into their own memory. Tensors of an accelerator (CUDA, or any other of
torch.accelerator) are copied on a separate stream, into pinned memory if the backend supports it. Tensors with the
attributes of torch 2.15's `CheckpointableTensor` are supported on any version of torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.declared_chunks import (
    copy_declared_chunks,
    is_checkpointable,
    locate_checkpointable,
)
from xla_ckpt.arrays.torch_elements import (
    DENSE_CLASSES,
    allow_in_place_writes,
    check_dense_tensor,
    check_writable_tensor,
    choose_torch_dtype,
    copy_with_strides,
    get_piece_memory,
    get_strided_memory,
    get_tensor_bytes,
    get_tensor_dtype,
    narrow_to_box,
)
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.memory_layout import HOST_MEMORY, StridedMemory, compute_runs
from xla_ckpt.loading.target import ComposedTarget, MemorySpan, Target, with_installer
from xla_ckpt.logs import get_logger
from xla_ckpt.snapshot.memory import ByteArray, SlabAllocator, allocate, allocate_touched
from xla_ckpt.snapshot.shards import HostShard, LocalShard, SampleWindows
from xla_ckpt.storage.base import BLOCK_BYTES
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES


class WholeTensorAdapter(ABC):
    """A base class of adapters for torch tensors whose elements this process holds in one tensor."""

    kind = "torch"

    def get_dtype(self, value: torch.Tensor, path: str = "") -> DType:
        check_dense_tensor(value, path)
        return get_tensor_dtype(value, path)

    def get_form_key(self, value: torch.Tensor) -> Hashable | None:
        # An attribute of the tensor may declare its sharding.
        return (value.dtype, value.shape) if type(value) in DENSE_CLASSES and not value.__dict__ else None

    def get_shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def locate(self, value: torch.Tensor, path: str = "") -> LocalArray | None:
        return None

    def get_buffer_key(self, value: torch.Tensor) -> Hashable | None:
        """Return a key that is equal while the tensor has the same immutable buffer, which the key holds; None if it is
        mutable.
        """
        return None

    @abstractmethod
    def create_whole_target(
        self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool
    ) -> Target | None:
        """Create a target that overwrites a non-empty, dense, unsharded tensor; None if further checks are needed.

        A load calls this for each of its arrays on the devices that the adapter supports.
        """


class TorchAdapter(WholeTensorAdapter):
    """An adapter for dense torch tensors that are not on an XLA device."""

    def create_whole_target(
        self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool
    ) -> Target | None:
        in_order = value.layout is torch.strided and value.is_contiguous() and not value.is_nested
        return (
            InPlaceTensorTarget(dtype, local, value) if in_order and not (value.is_conj() or value.is_neg()) else None
        )

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def get_form_key(self, value: torch.Tensor) -> Hashable | None:
        has_elements = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return super().get_form_key(value) if has_elements else None

    def get_identity(self, value: torch.Tensor) -> Hashable | None:
        if value.layout is not torch.strided or value.device.type == "meta" or value.numel() == 0:
            return None
        return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()

    def get_host_shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[HostShard]]:
        return [
            [self._create_host_shard(narrow_to_box(v.detach(), p.local_box)) for p in local.pieces]
            for v, local in values
        ]

    def get_shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[LocalShard]]:
        return [
            [self._create_shard(narrow_to_box(v.detach(), p.local_box)) for p in local.pieces] for v, local in values
        ]

    def _create_shard(self, value: torch.Tensor) -> LocalShard:
        return self._create_host_shard(value) if value.device.type == "cpu" else TorchDeviceShard(value)

    @staticmethod
    def _create_host_shard(value: torch.Tensor) -> HostShard:
        in_place = value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())
        plain = value if in_place else value.cpu().resolve_conj().resolve_neg().contiguous()
        # A copy is never shared. For a CPU tensor some of these steps may not have copied.
        is_copy = value.device.type != "cpu" or plain.data_ptr() != value.data_ptr()
        return HostShard(
            get_tensor_bytes(plain), plain, immutable=is_copy, version=None if is_copy else create_version_getter(plain)
        )

    def create_in_place_target(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        check_writable_tensor(value)
        over = functools.partial(get_piece_memory, value, local)
        if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
            # In host memory: the device might have no room for a second tensor.
            fresh = create_dense_target_factory(get_tensor_dtype(value), tuple(value.shape), value.dtype, None, local)()

            def install() -> torch.Tensor:
                loaded = fresh.install()
                with allow_in_place_writes(value):
                    for piece in local.pieces:
                        narrow_to_box(value, piece.local_box).copy_(narrow_to_box(loaded, piece.local_box))
                return value

            return with_installer(fresh, install, over)
        spread = PieceBuffers(local)
        if local.is_filled_by(value.shape):
            return InPlaceTensorTarget(get_tensor_dtype(value), local, value)
        return ComposedTarget(
            dtype=get_tensor_dtype(value),
            local=local,
            live=True,
            allocator=lambda _: spread.get_memory(value),
            installer=lambda: spread.copy_into(value),
            aliases=over,
        )

    def create_target_like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        element, shape = dtype or get_tensor_dtype(value), tuple(value.shape)
        kind = choose_torch_dtype(element, value)
        if value.is_contiguous():
            return create_dense_target_factory(element, shape, kind, value.device, local)()
        fresh = create_dense_target_factory(element, shape, kind, None, local)()
        return with_installer(fresh, lambda: copy_with_strides(fresh.install(), value))


class PieceBuffers:
    """Writable memory for the pieces of a local CPU tensor.

    A piece that is contiguous in the tensor is filled in place, any other in a separate buffer.
    """

    def __init__(self, local: LocalArray) -> None:
        self._pieces = local.pieces
        self._buffers: list[tuple[Box, torch.Tensor]] = []

    def get_memory(self, tensor: torch.Tensor) -> list[memoryview]:
        """Return memory for each piece of the contiguous `tensor`."""
        memory, whole = [], Box.from_shape(tensor.shape)
        for piece in self._pieces:
            where = compute_runs(piece.local_box, whole, tensor.element_size()) if piece.local_box.size else None
            if where is not None and where.is_contiguous:
                memory.append(get_tensor_bytes(tensor.detach())[where.offset : where.offset + where.run_bytes])
            else:
                buffer = torch.empty(piece.local_box.shape, dtype=tensor.dtype, device="cpu")
                self._buffers.append((piece.local_box, buffer))
                memory.append(get_tensor_bytes(buffer))
        return memory

    def copy_into(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the separate buffers into a tensor."""
        with allow_in_place_writes(tensor):
            for region, buffer in self._buffers:
                narrow_to_box(tensor, region).copy_(buffer)
        return tensor

    def has_no_padding(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape has no padding."""
        return sum(p.local_box.size for p in self._pieces) == prod(shape)


@slots_dataclass()
class InPlaceTensorTarget(Target):
    """A target that overwrites a contiguous CPU tensor that consists of one box."""

    dtype: DType
    local: LocalArray
    value: torch.Tensor
    live = True

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        return [get_tensor_bytes(self.value)]

    def install(self) -> torch.Tensor:
        return self.value

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        return [get_strided_memory(self.value)]

    @classmethod
    def allocate_all(cls, targets: Sequence[InPlaceTensorTarget], slabs: SlabAllocator) -> list[list[memoryview]]:  # noqa: ARG003
        return [[get_tensor_bytes(target.value)] for target in targets]

    @classmethod
    def install_all(cls, targets: Sequence[InPlaceTensorTarget]) -> list[torch.Tensor]:
        return [target.value for target in targets]

    @classmethod
    def list_spans(cls, targets: Sequence[InPlaceTensorTarget]) -> list[list[MemorySpan]]:
        values = [target.value for target in targets]
        return [[(HOST_MEMORY, at := value.data_ptr(), at + value.nbytes)] for value in values]


@dataclass(slots=True)
class NewTensorTarget(Target):
    """A target that creates a new CPU tensor that consists of one box."""

    dtype: DType
    local: LocalArray
    tensor_shape: tuple[int, ...]
    torch_dtype: torch.dtype
    value: torch.Tensor | None = None
    live = False

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        self.value = _allocate_tensor(self.tensor_shape, self.torch_dtype, slabs)
        return [get_tensor_bytes(self.value)]

    def install(self) -> torch.Tensor:
        assert self.value is not None, "memory() comes first"
        return self.value


def _allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype, slabs: SlabAllocator) -> torch.Tensor:
    """Allocate a tensor. Its memory is torch's own, because memory of `SlabAllocator` could not be resized."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.nbytes >= HUGE_PAGE_BYTES:
        slabs.add_region(np.frombuffer(get_tensor_bytes(tensor), np.uint8))
    return tensor


def create_dense_target_factory(
    dtype: DType, shape: tuple[int, ...], torch_dtype: torch.dtype, device: torch.device | None, local: LocalArray
) -> Callable[[], Target]:
    """Return a factory of targets for new tensors of a local shape; their padding is zero."""
    if local.is_filled_by(shape) and (device is None or device.type == "cpu"):
        return functools.partial(NewTensorTarget, dtype, local, shape, torch_dtype)
    return functools.partial(_create_padded_target, dtype, shape, torch_dtype, device, local)


def _create_padded_target(
    dtype: DType, shape: tuple[int, ...], torch_dtype: torch.dtype, device: torch.device | None, local: LocalArray
) -> Target:
    """Create a target for a new tensor composed of any pieces, on any device."""
    spread, tensor = PieceBuffers(local), torch.empty(0, device="cpu")

    def memory(slabs: SlabAllocator) -> list[memoryview]:
        nonlocal tensor
        covers = spread.has_no_padding(shape)
        tensor = (
            _allocate_tensor(shape, torch_dtype, slabs)
            if covers
            else torch.zeros(shape, dtype=torch_dtype, device="cpu")
        )
        return spread.get_memory(tensor)

    def install() -> torch.Tensor:
        spread.copy_into(tensor)
        return tensor if device is None or device.type == "cpu" else tensor.to(device)

    return ComposedTarget(dtype=dtype, local=local, live=False, allocator=memory, installer=install)


class CheckpointableTensorAdapter:
    """An adapter for tensors whose attributes declare their regions of a global array.

    They have no replica numbers: ranks with equal regions all write, and one copy is kept.
    """

    kind = "torch"

    def __init__(self, find_plain_adapter: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._find_plain_adapter = find_plain_adapter
        """Finds the adapter of the tensor without its attributes."""

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_checkpointable(value)

    def get_identity(self, value: Any) -> Hashable | None:
        inner = self._find_plain_adapter(value).get_identity(value)
        return None if inner is None else ("checkpointable", inner, locate_checkpointable(value, ""))

    def get_dtype(self, value: Any, path: str = "") -> DType:
        return self._find_plain_adapter(value).get_dtype(value, path)

    def get_form_key(self, value: Any) -> Hashable | None:
        return None

    def get_shape(self, value: Any) -> tuple[int, ...]:
        return locate_checkpointable(value, "").shape

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        return locate_checkpointable(value, path)

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[HostShard]]:
        return [self._find_plain_adapter(value).get_host_shards([(value, local)])[0] for value, local in values]

    def get_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[LocalShard]]:
        return [self._find_plain_adapter(value).get_shards([(value, local)])[0] for value, local in values]

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        return self._find_plain_adapter(value).create_in_place_target(value, local, owned=owned)

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = self._find_plain_adapter(value).create_target_like(value, local, dtype)
        return with_installer(inner, lambda: copy_declared_chunks(value, inner.install()))


logger = get_logger(__name__)

_cuda: Any = torch.cuda
"""torch.cuda, including its untyped functions."""


class TorchCopyEngine:
    """Copies from one device, on a separate stream and into pinned memory if the backend supports both.

    Without streams a copy is synchronous, and ordered after all earlier operations on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = device.type
        self._stream = _create_side_stream(device)

    def allocate(self, nbytes: int) -> ByteArray:
        """Allocate pinned memory; ordinary memory if the backend does not support it."""
        if nbytes == 0:
            return allocate(0)
        if self.name == "cuda":
            return self._allocate_registered(nbytes)
        memory = _allocate_pinned(nbytes)
        if memory is None:
            return allocate(nbytes)
        if memory.ctypes.data % BLOCK_BYTES:  # files are written from it without the page cache
            memory = _allocate_pinned(nbytes + BLOCK_BYTES)
            assert memory is not None, "it was pinned a moment ago"
            return memory[-memory.ctypes.data % BLOCK_BYTES :][:nbytes]
        return memory

    def _allocate_registered(self, nbytes: int) -> ByteArray:
        """Allocate memory and register it with CUDA as pinned; ordinary memory if CUDA rejects it.

        torch's own pinned memory takes five times as long, and is rounded up to a power of two.
        """
        memory = allocate_touched(nbytes)
        with torch.cuda.device(self._device):
            cuda: Any = _cuda.cudart()
            try:
                torch.cuda.check_error(cuda.cudaHostRegister(memory.ctypes.data, nbytes, 0))
            except RuntimeError as error:
                _warn_not_pinned(error)
                # otherwise CUDA reports the error again in the program's next operation
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                return memory

        def free(address: int = memory.ctypes.data) -> None:
            if _cuda.is_initialized():  # not in a forked child
                self._stream.synchronize()  # an interrupted save may leave copies in progress
                cuda.cudaHostUnregister(address)

        weakref.finalize(memory.base, free).atexit = False  # at exit, CUDA is shut down with the process
        return memory

    def wait_for_stream(self) -> None:
        if self._stream is None:
            torch.accelerator.synchronize(self._device)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def begin_copy(self, source: torch.Tensor, target: ByteArray) -> None:
        """Start copying a flat tensor of bytes to host memory."""
        into = torch.from_numpy(target)
        if self._stream is None:
            into.copy_(source)
            return
        with self._stream:
            into.copy_(source, non_blocking=True)

    def record_event(self) -> Callable[[], None]:
        if self._stream is None:
            return lambda: None
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait


@functools.cache
def get_copy_engine(device: torch.device) -> TorchCopyEngine:
    """Return the copy engine of a device: one per process."""
    return TorchCopyEngine(device)


def _create_side_stream(device: torch.device) -> Any:
    """Create a stream in addition to the program's; None if the backend has no streams."""
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError) as error:
        logger.warning("%s has no streams (%s): its tensors are copied in the order of its operations", device, error)
        return None


def _allocate_pinned(nbytes: int) -> ByteArray | None:
    """Allocate pinned host memory; None if the backend does not support it."""
    try:
        memory: ByteArray = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    except (RuntimeError, NotImplementedError) as error:
        _warn_not_pinned(error)
        return None
    return memory


def _warn_not_pinned(error: Exception) -> None:
    logger.warning("no pinned memory (%s): copies from the device are slower, and wait for each other", error)


@dataclass(frozen=True, slots=True, eq=False)
class TorchDeviceShard:
    """A tensor, or a region of one, on a device; see `xla_ckpt.snapshot.shards.DeviceShard`.

    It holds the storage, and not the parameter, whose storage the program may replace.
    """

    value: torch.Tensor
    immutable: bool = False

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    @property
    def version(self) -> Callable[[], Hashable] | None:
        return create_version_getter(self.value)

    @property
    def copy_engine(self) -> TorchCopyEngine:
        return get_copy_engine(self.value.device)

    def begin_copy(self, offset: int, target: ByteArray) -> None:
        self.copy_engine.begin_copy(_view_as_bytes(self.value)[offset : offset + len(target)], target)

    def make_contiguous(self) -> TorchDeviceShard:
        value = self.value
        if value.is_contiguous() and not (value.is_conj() or value.is_neg()):
            return self
        return TorchDeviceShard(value.resolve_conj().resolve_neg().contiguous(), immutable=True)

    def clone(self) -> TorchDeviceShard:
        plain = self.make_contiguous()
        return TorchDeviceShard(plain.value.clone(), immutable=True) if plain is self else plain

    def read_sample(self, windows: SampleWindows) -> bytes:
        flat = _view_as_bytes(self.make_contiguous().value)[windows.offset :]
        data: bytes = flat.as_strided((windows.count, windows.nbytes), (windows.stride, 1)).cpu().numpy().tobytes()
        return data


def _view_as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8)


def create_version_getter(value: torch.Tensor) -> Callable[[], Hashable] | None:
    """Return a function whose result changes when a tensor is written to, or its storage is resized; None without a
    counter.

    The counter is shared with views of the tensor, and with the parameter that they were detached from.
    """
    if value.is_inference():
        return None

    def version() -> Hashable:
        storage = value.untyped_storage()
        return value._version, storage.data_ptr(), storage.nbytes()

    return version
