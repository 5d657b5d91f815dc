"""torch tensors on an XLA device. Loaded only where torch_xla already is.

XLA buffers never change: an in-place operation makes a new one. On CPU they are host memory, so a snapshot is a DLPack
view that holds the buffer, and a restored array is host memory that XLA adopts; nothing is copied either way. Other
devices go through one batched transfer (unverified: no TPU or Trainium was at hand).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.runtime

from xla_ckpt.arrays.adopted import DLPACK_CODES, Adoptable, adoptable
from xla_ckpt.arrays.torch_elements import bytes_of, cut, dtype_of, is_xla, overwriting, tensor_from, torch_type
from xla_ckpt.arrays.torch_host import Spread, WholeTensors
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import ComposedTarget, MemorySpan, Target, changed
from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.strided import Strided, packed
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.shards import HostShard, Lasting

_XLAC: Any = torch_xla._XLAC


@functools.cache
def on_cpu() -> bool:
    """Whether XLA runs on the CPU, where its buffers are host memory."""
    return bool(torch_xla.runtime.device_type() == "CPU")


def materialize(values: Sequence[torch.Tensor]) -> None:
    """Have every value computed and in a buffer. The values are on one device, and there is at least one.

    If one of them is pending, everything that is pending on the device is computed, in the graph that the program's
    own `torch_xla.sync()` would run. A graph of the values alone would compute their inputs a second time later on. It
    would also have to be compiled for the save.

    The step does not end here: that would move the random number generator on, and a run that saves would train on
    other numbers than one that does not.

    Raises:
        UsageError: The program is in a region in which torch_xla computes nothing. Nothing was changed.
    """
    if any(_XLAC._check_tensor_need_materialization(list(values))):
        # torch_xla finds out too late: the tensors have given up their graph by then, and never get a value.
        if not _XLAC._get_allow_execution():
            raise UsageError(
                "XLA tensors are pending, and inside torch_xla.compile(full_graph=True) nothing is computed",
                hint="Make this call after the compiled region.",
            )
        device = str(values[0].device)
        # The graph may donate its inputs, for instance the old weights to the new ones. So all live tensors have to be
        # in it: one that is left pending would read a donated buffer in the next graph ("buffer is deleted").
        _XLAC._xla_sync_live_tensors(device, [], True)
        # The order token of the collectives is no live tensor. It is pending still, and would read donated gradients.
        _XLAC._set_all_reduce_token(device, None)
    # Wait for graphs that run. A value without a buffer (what is left is no operation of a step) gets one without any
    # donation: asking DLPack for a value that has none aborts the process.
    _XLAC._xla_sync_multi(list(values), devices=[], wait=True, sync_xla_data=False)


def _adopts() -> bool:
    """Whether buffers are host memory, which XLA takes as it is."""
    return on_cpu() and not torch_xla.runtime.is_spmd()


def from_host(value: torch.Tensor, memory: Adoptable | None, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device. Where its `memory` is adopted, `value` must not be used any more."""
    return value.to(device) if memory is None or not _adopts() else _adopt(memory)


def _adopt(memory: Adoptable) -> torch.Tensor:
    adopted: torch.Tensor = _XLAC._from_dlpack(memory.capsule())
    memory.given()
    return adopted


class Xla(WholeTensors):
    """Tensors that lie whole on one XLA device. `spmd`: whether torch_xla runs in SPMD mode."""

    def __init__(self, *, spmd: bool = False) -> None:
        self._adopts = on_cpu() and not spmd

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_xla(value)

    def over_whole(self, value: torch.Tensor, dtype: DType, local: LocalArray, *, owned: bool) -> Target | None:
        if not (owned and self._adopts and adoptable(value.dtype, local.shape)):
            return None
        return NewBuffer(dtype, local, value.dtype, value)

    def identity(self, value: torch.Tensor) -> Hashable | None:
        return "xla", _XLAC._xla_get_tensor_id(value)

    def buffer(self, value: torch.Tensor) -> Hashable | None:
        # What is pending has no buffer, and torch_xla ends the process where it is asked for that of SPMD's.
        if torch_xla.runtime.is_spmd() or _XLAC._check_tensor_need_materialization([value])[0]:
            return None
        _, nodes = _XLAC._get_tensors_xla_device_data_node([value])
        return XlaBuffer(_XLAC._get_tensors_handle([value])[0], nodes) if nodes else None

    def host(self, values: Sequence[tuple[torch.Tensor, LocalArray]]) -> HeldTensors:
        return HeldTensors(_held([v for v, _ in values]), [local for _, local in values])

    shards = host

    def into(self, value: torch.Tensor, local: LocalArray, *, owned: bool) -> Target:
        target = self.like(value, local)
        if owned and isinstance(target, NewBuffer):
            target.value = value
            return target
        install = target.install

        def take_over() -> torch.Tensor:
            value.data = install()  # the parameter takes over the new buffer: no copy, no graph
            return value

        def copy() -> torch.Tensor:
            with overwriting(value):
                value.copy_(install())  # an alias cannot hand a buffer on to what it is an alias of
            return value

        whole = buffer_of(value)
        return changed(target, take_over if owned else copy, lambda: [whole.cut(piece.local) for piece in local.pieces])

    def like(self, value: torch.Tensor, local: LocalArray, dtype: DType | None = None) -> Target:
        element = dtype or dtype_of(value)
        shape, torch_element = tuple(value.shape), torch_type(element, value)
        return fresh_xla(element, shape, torch_element, value.device, local, adopts=self._adopts)


@dataclass(frozen=True, slots=True)
class XlaBuffer:
    """The buffer that was in a tensor. An in-place operation puts another one there."""

    handle: int
    """The address of what torch_xla has for it: no other buffer has it as long as this one is held."""

    node: Any = field(compare=False, repr=False)
    """Holds it. A view of the tensor would not: it sees what is written to the tensor."""


def fresh_xla(
    dtype: DType,
    shape: tuple[int, ...],
    torch_type: torch.dtype,
    device: torch.device,
    local: LocalArray,
    *,
    adopts: bool | None = None,
) -> Target:
    """A target that makes a new tensor of a local shape on the device; its padding is zero.

    `adopts`: whether XLA takes host memory as it is; None to find out.
    """
    adopts = (_adopts() if adopts is None else adopts) and adoptable(torch_type, shape)
    if adopts and local.fills(shape):
        return NewBuffer(dtype, local, torch_type)
    spread, tensor = Spread(local), torch.empty(0, device="cpu")
    buffer: Adoptable | None = None

    def memory(slabs: Slabs) -> list[memoryview]:
        nonlocal tensor, buffer
        if adopts:
            buffer = Adoptable(torch_type, shape, slabs)
            tensor = buffer.tensor()
        else:
            tensor = tensor_from(slabs.take(prod(shape) * torch_type.itemsize), torch_type, shape)
        if not spread.covers(shape):
            tensor.zero_()
        return spread.over(tensor)

    def install() -> torch.Tensor:
        nonlocal tensor
        filled, tensor = spread.fill(tensor), torch.empty(0, device="cpu")
        return from_host(filled, buffer, device)

    return ComposedTarget(dtype=dtype, local=local, live=False, fill=memory, finish=install)


@dataclass(slots=True)
class NewBuffer(Target):
    """A target that makes a new tensor of one box, in memory that XLA adopts; it goes into `value`, if there is one."""

    dtype: DType
    local: LocalArray
    torch_type: torch.dtype
    value: torch.Tensor | None = None
    buffer: Adoptable | None = None
    live = False

    def memory(self, slabs: Slabs) -> list[memoryview]:
        self.buffer = Adoptable(self.torch_type, self.local.pieces[0].box.shape, slabs)
        return [self.buffer.memory()]

    def install(self) -> torch.Tensor:
        assert self.buffer is not None, "memory() comes first"
        adopted = _adopt(self.buffer)
        if self.value is None:
            return adopted
        self.value.data = adopted  # the parameter takes over the new buffer: no copy, no graph
        return self.value

    def over(self) -> Sequence[Strided]:
        return [] if self.value is None else [buffer_of(self.value)]

    @classmethod
    def spans(cls, targets: Sequence[NewBuffer]) -> list[list[MemorySpan]]:
        number = _XLAC._xla_get_tensor_id
        return [[] if (v := t.value) is None else [(("xla", number(v)), 0, v.nbytes)] for t in targets]


def buffer_of(value: torch.Tensor) -> Strided:
    """Where the elements of a tensor lie: each buffer is a memory of its own."""
    return packed(("xla", _XLAC._xla_get_tensor_id(value)), 0, tuple(value.shape), value.element_size())


def to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values as contiguous CPU tensors that stay as they are: views of the buffers where that is possible."""
    return [tensor.contiguous() for tensor in _held(values)]


def _held(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values as CPU tensors that stay as they are: views of the buffers where that is possible."""
    if not values:
        return []
    materialize(values)
    views = _views(values) if _adopts() else [None] * len(values)
    missing = [t.detach() for t, v in zip(values, views, strict=True) if v is None]
    moved = iter(_XLAC._xla_get_cpu_tensors(missing) if missing else ())
    return [v if v is not None else next(moved) for v in views]


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors(Lasting):
    """CPU tensors that nobody writes to: views of buffers, or copies of them."""

    tensors: Sequence[torch.Tensor]
    locals: Sequence[LocalArray]

    def __len__(self) -> int:
        return len(self.tensors)

    def row(self, number: int) -> list[HostShard]:
        return _shards(self.tensors[number].contiguous(), self.locals[number])


def _shards(tensor: torch.Tensor, local: LocalArray) -> list[HostShard]:
    """The pieces of a contiguous CPU tensor that nobody writes to."""
    # The only piece is somewhere in the tensor, so that it is all of it if it has as many elements: as of most arrays.
    if len(local.pieces) == 1 and local.pieces[0].local.size == tensor.numel():
        return [HostShard(bytes_of(tensor), tensor, immutable=True)]
    return [shard_of(cut(tensor, piece.local)) for piece in local.pieces]


def shard_of(tensor: torch.Tensor) -> HostShard:
    """A CPU tensor that nobody writes to, a view of a buffer or a copy of one, as a shard."""
    plain = tensor.contiguous()
    return HostShard(bytes_of(plain), plain, immutable=True)


def _views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The buffers of materialized tensors as CPU tensors, held and not copied; None where that is impossible.

    torch's own `to_dlpack` wants parameters to be detached, which takes as long as all the rest. torch_xla's does not.
    """
    export, take = _XLAC._to_dlpack, torch._C._from_dlpack
    return [take(export(tensor)) if tensor.dtype in DLPACK_CODES else None for tensor in tensors]
