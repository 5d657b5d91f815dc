"""torch tensors outside of XLA: CPU memory in place, other devices (CUDA, ...) through a copy."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from xla_ckpt.arrays.accelerator import TensorShard, version_of
from xla_ckpt.arrays.torch_elements import (
    DENSE,
    bytes_of,
    check_dense,
    check_writable,
    copy_with_strides,
    cut,
    dtype_of,
    memory_under,
    overwriting,
    strided,
    torch_type,
)
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import ComposedTarget, MemorySpan, Target, changed
from xla_ckpt.lightweight import lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.sharding.strided import HOST_MEMORY, Strided
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.shards import HostShard, MemoryShard
from xla_ckpt.storage.pool import HUGE_BYTES


class WholeTensors(ABC):
    """What kinds of torch tensors answer alike of which this process holds all elements in one."""

    kind = "torch"

    def dtype(self, value: torch.Tensor, path: str = "") -> DType:
        check_dense(value, path)
        return dtype_of(value, path)

    def look(self, value: torch.Tensor) -> Hashable | None:
        # An attribute of the tensor may say how it is split.
        return (value.dtype, value.shape) if type(value) in DENSE and not value.__dict__ else None

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: torch.Tensor, path: str = "") -> LocalArray | None:
        return None

    def buffer(self, value: torch.Tensor) -> Hashable | None:
        """Equal as long as the bytes are those of the same buffer, which it holds; None if somebody may write to it."""
        return None

    @abstractmethod
    def over_whole(self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool) -> Target | None:
        """The target that overwrites a dense tensor that is the whole array, and has elements; None if that takes more.

        A load asks this of each of its arrays, and only of those that lie where tensors of this kind do.
        """


class TorchHost(WholeTensors):
    """Dense torch tensors that are not on an XLA device."""

    def over_whole(self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool) -> Target | None:
        in_order = value.layout is torch.strided and value.is_contiguous() and not value.is_nested
        return InPlace(dtype, local, value) if in_order and not (value.is_conj() or value.is_neg()) else None

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def look(self, value: torch.Tensor) -> Hashable | None:
        has_elements = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return super().look(value) if has_elements else None

    def identity(self, value: torch.Tensor) -> Hashable | None:
        if value.layout is not torch.strided or value.device.type == "meta" or value.numel() == 0:
            return None
        return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()

    def host(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[HostShard]]:
        return [[self._host(cut(v.detach(), p.local)) for p in local.pieces] for v, local in values]

    def shards(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> list[list[MemoryShard]]:
        return [[self._shard(cut(v.detach(), p.local)) for p in local.pieces] for v, local in values]

    def _shard(self, value: torch.Tensor) -> MemoryShard:
        return self._host(value) if value.device.type == "cpu" else TensorShard(value)

    @staticmethod
    def _host(value: torch.Tensor) -> HostShard:
        in_place = value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())
        plain = value if in_place else value.cpu().resolve_conj().resolve_neg().contiguous()
        # A copy is ours alone. Of a CPU tensor some of these steps may have made none.
        is_copy = value.device.type != "cpu" or plain.data_ptr() != value.data_ptr()
        return HostShard(bytes_of(plain), plain, immutable=is_copy, version=None if is_copy else version_of(plain))

    def into(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        check_writable(value)
        over = functools.partial(memory_under, value, local)
        if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
            # In host memory: a second tensor on the device might have no room there.
            fresh = making_tensors(dtype_of(value), tuple(value.shape), value.dtype, None, local)()

            def install() -> torch.Tensor:
                loaded = fresh.install()
                with overwriting(value):
                    for piece in local.pieces:
                        cut(value, piece.local).copy_(cut(loaded, piece.local))
                return value

            return changed(fresh, install, over)
        spread = Spread(local)
        if local.fills(value.shape):
            return InPlace(dtype_of(value), local, value)
        return ComposedTarget(
            dtype=dtype_of(value),
            local=local,
            live=True,
            fill=lambda _: spread.over(value),
            finish=lambda: spread.fill(value),
            lies=over,
        )

    def like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        element, shape = dtype or dtype_of(value), tuple(value.shape)
        kind = torch_type(element, value)
        if value.is_contiguous():
            return making_tensors(element, shape, kind, value.device, local)()
        fresh = making_tensors(element, shape, kind, None, local)()
        return changed(fresh, lambda: copy_with_strides(fresh.install(), value))


class Spread:
    """The pieces of a local CPU tensor, as memory to be filled.

    A piece that is contiguous in the tensor is filled in place, another one in a buffer of its own.
    """

    def __init__(self, local: LocalArray) -> None:
        self._pieces = local.pieces
        self._buffers: list[tuple[Box, torch.Tensor]] = []

    def over(self, tensor: torch.Tensor) -> list[memoryview]:
        """Memory for each piece of `tensor`, which is contiguous."""
        memory, whole = [], Box.whole(tensor.shape)
        for piece in self._pieces:
            where = runs(piece.local, whole, tensor.element_size()) if piece.local.size else None
            if where is not None and where.contiguous:
                memory.append(bytes_of(tensor.detach())[where.offset : where.offset + where.nbytes])
            else:
                buffer = torch.empty(piece.local.shape, dtype=tensor.dtype, device="cpu")
                self._buffers.append((piece.local, buffer))
                memory.append(bytes_of(buffer))
        return memory

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put what came through buffers in place."""
        with overwriting(tensor):
            for region, buffer in self._buffers:
                cut(tensor, region).copy_(buffer)
        return tensor

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether nothing of a tensor of this shape is padding."""
        return sum(p.local.size for p in self._pieces) == prod(shape)


@lightweight()
class InPlace(Target):
    """A target that overwrites a contiguous CPU tensor, all of which is one box."""

    dtype: DType
    local: LocalArray
    value: torch.Tensor
    live = True

    def memory(self, slabs: Slabs) -> list[memoryview]:
        return [bytes_of(self.value)]

    def install(self) -> torch.Tensor:
        return self.value

    def over(self) -> Sequence[Strided]:
        return [strided(self.value)]

    @classmethod
    def memory_of(cls, targets: Sequence[InPlace], slabs: Slabs) -> list[list[memoryview]]:  # noqa: ARG003
        return [[bytes_of(target.value)] for target in targets]

    @classmethod
    def install_all(cls, targets: Sequence[InPlace]) -> list[torch.Tensor]:
        return [target.value for target in targets]

    @classmethod
    def spans(cls, targets: Sequence[InPlace]) -> list[list[MemorySpan]]:
        values = [target.value for target in targets]
        return [[(HOST_MEMORY, at := value.data_ptr(), at + value.nbytes)] for value in values]


@dataclass(slots=True)
class NewTensor(Target):
    """A target that makes a new CPU tensor, all of which is one box."""

    dtype: DType
    local: LocalArray
    tensor_shape: tuple[int, ...]
    torch_type: torch.dtype
    value: torch.Tensor | None = None
    live = False

    def memory(self, slabs: Slabs) -> list[memoryview]:
        self.value = _new_tensor(self.tensor_shape, self.torch_type, slabs)
        return [bytes_of(self.value)]

    def install(self) -> torch.Tensor:
        assert self.value is not None, "memory() comes first"
        return self.value


def _new_tensor(shape: tuple[int, ...], dtype: torch.dtype, slabs: Slabs) -> torch.Tensor:
    """A tensor to be filled. Its memory is torch's own, as that of `Slabs` could not be resized."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.nbytes >= HUGE_BYTES:
        slabs.add(np.frombuffer(bytes_of(tensor), np.uint8))
    return tensor


def making_tensors(
    dtype: DType, shape: tuple[int, ...], torch_type: torch.dtype, device: torch.device | None, local: LocalArray
) -> Callable[[], Target]:
    """What makes targets, each of them for a new tensor of a local shape; its padding is zero."""
    if local.fills(shape) and (device is None or device.type == "cpu"):
        return functools.partial(NewTensor, dtype, local, shape, torch_type)
    return functools.partial(_padded, dtype, shape, torch_type, device, local)


def _padded(
    dtype: DType, shape: tuple[int, ...], torch_type: torch.dtype, device: torch.device | None, local: LocalArray
) -> Target:
    """A target that makes a new tensor out of any pieces, on any device."""
    spread, tensor = Spread(local), torch.empty(0, device="cpu")

    def memory(slabs: Slabs) -> list[memoryview]:
        nonlocal tensor
        covers = spread.covers(shape)
        tensor = _new_tensor(shape, torch_type, slabs) if covers else torch.zeros(shape, dtype=torch_type, device="cpu")
        return spread.over(tensor)

    def install() -> torch.Tensor:
        spread.fill(tensor)
        return tensor if device is None or device.type == "cpu" else tensor.to(device)

    return ComposedTarget(dtype=dtype, local=local, live=False, fill=memory, finish=install)
