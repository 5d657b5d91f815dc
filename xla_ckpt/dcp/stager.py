"""DCP's `AsyncStager` for XLA tensors: copy a state dict to host memory so that training may continue."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import AsyncStager as StockStager

from xla_ckpt.arrays.registry import AdapterRegistry, require_adapter
from xla_ckpt.arrays.torch_elements import choose_torch_dtype, get_tensor_bytes, narrow_to_box, view_as_tensor
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.tree.nested import KeyPath, map_leaves
from xla_ckpt.dcp.tensor import GlobalTensor
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, allocate, copy_all
from xla_ckpt.snapshot.shards import HostShard


class AsyncStager(StockStager):
    """A stager that copies a state dict to host memory: ``dcp.async_save(..., async_stager=AsyncStager())``.

    XLA buffers are immutable: on the CPU a reference is sufficient, without a copy; from other XLA devices all tensors
    are transferred in one batch. CPU tensors and tensors of other devices are copied, because the next step overwrites
    them. DTensors, FSDP1's ShardedTensors and SPMD tensors become `GlobalTensor`s with the shards of this process.
    Other values are deep-copied. When `stage` returns, training may continue.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """Return the same containers, with copied values.

        Raises:
            UnsupportedStateError: If a tensor cannot be stored, or a value cannot be copied.
        """
        with pause_gc():
            slots: dict[int, _TensorSlot] = {}
            pieces: list[_StagedPiece] = []
            taken_apart = functools.partial(_split_tensor, pieces, AdapterRegistry())
            copies: dict[int, Any] = {}
            """What `copy.deepcopy` remembers: a value that is there twice stays one."""

            def apart(keys: KeyPath, leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor):
                    if id(leaf) not in slots:
                        slots[id(leaf)] = _TensorSlot(leaf, taken_apart(".".join(map(str, keys)), leaf))
                    return slots[id(leaf)]
                if isinstance(leaf, list | tuple) and not isinstance(leaf, torch.Size):  # of another class
                    return map_leaves([*leaf] if isinstance(leaf, list) else (*leaf,), apart, keys, keep_classes=True)
                return _copy_value(leaf, keys, copies)

            staged = map_leaves(state_dict, apart, keep_classes=True)
            frozen = _copy_pieces(pieces)
            for slot in slots.values():
                slot.tensor = slot.build(frozen)
            return map_leaves(staged, lambda _, v: v.tensor if isinstance(v, _TensorSlot) else v, keep_classes=True)

    def synchronize_staging(self) -> None:
        """Return immediately, because `stage` returns when everything is copied."""

    def close(self) -> None:
        """Do nothing: staged memory is freed with the save that holds it."""


@dataclass(slots=True, eq=False)
class _TensorSlot:
    """A placeholder for a tensor until all are copied."""

    tensor: torch.Tensor
    build: Callable[[list[torch.Tensor]], torch.Tensor]


def _copy_value(value: Any, keys: KeyPath, copies: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, copies)
    except Exception as error:
        # `__deepcopy__` of the value may raise anything.
        raise UnsupportedStateError(
            f"a {type(value).__name__} cannot be copied: {error}",
            leaf=".".join(map(str, keys)),
            hint="Give plain values, tensors, or its state_dict().",
        ) from error


@dataclass(frozen=True, slots=True)
class _StagedPiece:
    """A plain tensor to copy."""

    key: str
    content: torch.Tensor | HostShard
    """The tensor; or its bytes, if an adapter has already provided them."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _split_tensor(
    pieces: list[_StagedPiece], adapters: AdapterRegistry, key: str, value: torch.Tensor
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Append the plain tensors of a value to `pieces`. Return the function that rebuilds it from the copied ones."""
    first, shape, dtype = len(pieces), tuple(value.shape), value.dtype
    if isinstance(value, GlobalTensor):
        boxes = [box for box, _ in value.regions]
        pieces += [_StagedPiece(key, tensor, tensor.dtype, tuple(tensor.shape)) for _, tensor in value.regions]
    else:
        adapter = adapters.require(value, key)
        adapter.get_dtype(value, key)  # raises for unsupported tensors
        local = adapter.locate(value, key)
        if local is None:
            pieces.append(_StagedPiece(key, value, dtype, shape))
            return lambda frozen: frozen[first]
        shape, boxes = local.shape, [piece.global_box for piece in local.pieces]
        (shards,) = adapter.get_host_shards([(value, local)])
        pieces += [_StagedPiece(key, shard, dtype, box.shape) for shard, box in zip(shards, boxes, strict=True)]
    return lambda frozen: GlobalTensor(shape, dtype, [*zip(boxes, frozen[first:], strict=False)])


def _copy_pieces(pieces: Sequence[_StagedPiece]) -> list[torch.Tensor]:
    """Return CPU tensors with the elements of the pieces, which the program cannot modify."""
    tensors = [(i, p.key, p.content) for i, p in enumerate(pieces) if isinstance(p.content, torch.Tensor)]
    shards = {i: p.content for i, p in enumerate(pieces) if isinstance(p.content, HostShard)}
    in_batch = copy_to_host([(key, tensor) for _, key, tensor in tensors])
    shards.update({i: shard for (i, _, _), shard in zip(tensors, in_batch, strict=True)})
    moving = [i for i, shard in shards.items() if not shard.immutable and len(shard.data)]
    sizes = [-(-len(shards[i].data) // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT for i in moving]
    memory = allocate(sum(sizes))
    copied, copies, at = {}, [], 0
    for i, size in zip(moving, sizes, strict=True):
        source = np.frombuffer(shards[i].data, np.uint8)
        target = memory[at : at + len(source)]
        copied[i] = view_as_tensor(target, pieces[i].dtype, pieces[i].shape)
        copies.append((target, source))
        at += size
    copy_all(copies)
    return [copied[i] if i in copied else _view_shard_as_tensor(shards[i], piece) for i, piece in enumerate(pieces)]


def _view_shard_as_tensor(shard: HostShard, piece: _StagedPiece) -> torch.Tensor:
    """Return a tensor that shares the bytes of a shard, which the program cannot modify."""
    if not len(shard.data):
        return torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    assert isinstance(shard.owner, torch.Tensor), "torch's adapters keep a tensor"
    return shard.owner.detach()


def copy_to_host(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[HostShard]:
    """Return the bytes of (key, tensor) pairs, each in C order: views if possible, otherwise copies.

    Tensors on one kind of device are transferred in one batch.

    Raises:
        UnsupportedStateError: If a tensor is not dense, or is not entirely on devices of this process.
    """
    batches: dict[int, tuple[Any, list[int], list[tuple[Any, LocalArray]]]] = {}
    adapters = AdapterRegistry()
    for i, (key, value) in enumerate(tensors):
        adapter = adapters.require(value, key)
        adapter.get_dtype(value, key)  # raises for unsupported tensors
        local = adapter.locate(value, key) or create_unsharded(tuple(value.shape))
        _, numbers, values = batches.setdefault(id(adapter), (adapter, [], []))
        numbers.append(i)
        values.append((value, local))
    joined: dict[int, HostShard] = {}
    for adapter, numbers, values in batches.values():
        for i, (value, local), shards in zip(numbers, values, adapter.get_host_shards(values), strict=True):
            joined[i] = _join_shards(tensors[i][0], value, local, shards)
    return [joined[i] for i in range(len(tensors))]


def _join_shards(key: str, value: torch.Tensor, local: LocalArray, shards: Sequence[HostShard]) -> HostShard:
    """Join the shards of a tensor into one.

    Raises:
        UnsupportedStateError: If a part of the tensor is on other processes.
    """
    everything = Box.from_shape(tuple(value.shape))
    if everything.size == 0:
        return HostShard(memoryview(b""), None, immutable=True)
    if len(shards) == 1 and local.pieces[0].global_box == everything:
        return shards[0]
    elements = sum(piece.global_box.size for piece in local.pieces)
    if elements != everything.size:
        raise UnsupportedStateError(
            "a part of a tensor is on devices of other processes",
            leaf=key,
            expected=f"{everything.size} elements",
            found=elements,
            hint="Give planner=SPMDSavePlanner(), of torch_xla.experimental.distributed_checkpoint.",
        )
    element = choose_torch_dtype(require_adapter(value).get_dtype(value), value)
    tensor = torch.empty(everything.shape, dtype=element, device="cpu")
    for piece, shard in zip(local.pieces, shards, strict=True):
        narrow_to_box(tensor, piece.global_box).copy_(
            torch.frombuffer(shard.data, dtype=element).reshape(piece.global_box.shape)
        )
    return HostShard(get_tensor_bytes(tensor), tensor, immutable=True)
