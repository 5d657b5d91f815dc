"""DCP's `AsyncStager` for XLA tensors: what a save in the background writes while training goes on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import AsyncStager as StockStager

from xla_ckpt.arrays.registry import Adapters
from xla_ckpt.arrays.torch_elements import tensor_from
from xla_ckpt.dcp.memory import in_host_memory
from xla_ckpt.dcp.tensor import GlobalTensor
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, allocate, copy_all
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.tree.nested import Keys, replaced_leaves


class AsyncStager(StockStager):
    """Freezes a state dict for ``dcp.async_save(..., async_stager=AsyncStager())``.

    XLA buffers never change: on the CPU they are only held, and nothing is copied; from other XLA devices all tensors
    are transferred in one batch. CPU tensors are copied, since the next step overwrites them, and so are those of other
    devices. DTensors, FSDP1's ShardedTensors and SPMD tensors become `GlobalTensor`s of what this process holds.
    Anything else is deep-copied. When `stage` returns, the program may go on.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """The same containers, with frozen values in them.

        Raises:
            UnsupportedStateError: A tensor cannot be stored, or a value cannot be copied.
        """
        with collector_paused():
            slots: dict[int, _Slot] = {}
            pieces: list[_Piece] = []
            taken_apart = functools.partial(_taken_apart, pieces, Adapters())
            copies: dict[int, Any] = {}
            """What `copy.deepcopy` remembers: a value that is there twice stays one."""

            def apart(keys: Keys, leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor):
                    if id(leaf) not in slots:
                        slots[id(leaf)] = _Slot(leaf, taken_apart(".".join(map(str, keys)), leaf))
                    return slots[id(leaf)]
                if isinstance(leaf, list | tuple) and not isinstance(leaf, torch.Size):  # of another class
                    return replaced_leaves([*leaf] if isinstance(leaf, list) else (*leaf,), apart, keys, classes=True)
                return _copied(leaf, keys, copies)

            staged = replaced_leaves(state_dict, apart, classes=True)
            frozen = _frozen(pieces)
            for slot in slots.values():
                slot.tensor = slot.build(frozen)
            return replaced_leaves(staged, lambda _, v: v.tensor if isinstance(v, _Slot) else v, classes=True)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when everything is frozen."""

    def close(self) -> None:
        """Nothing to release: what is staged is freed with the save that holds it."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Stands for a tensor until all are frozen."""

    tensor: torch.Tensor
    build: Callable[[list[torch.Tensor]], torch.Tensor]


def _copied(value: Any, keys: Keys, copies: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, copies)
    except Exception as error:
        # It runs code of the value's own, which may raise anything.
        raise UnsupportedStateError(
            f"a {type(value).__name__} cannot be copied: {error}",
            leaf=".".join(map(str, keys)),
            hint="Give plain values, tensors, or its state_dict().",
        ) from error


@dataclass(frozen=True, slots=True)
class _Piece:
    """A plain tensor that is to be frozen."""

    key: str
    content: torch.Tensor | HostShard
    """The tensor; or its bytes, where an adapter has given them already."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _taken_apart(
    pieces: list[_Piece], adapters: Adapters, key: str, value: torch.Tensor
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Append the plain tensors of a value to `pieces`; how it is made of the frozen ones."""
    first, shape, dtype = len(pieces), tuple(value.shape), value.dtype
    if isinstance(value, GlobalTensor):
        boxes = [box for box, _ in value.regions]
        pieces += [_Piece(key, tensor, tensor.dtype, tuple(tensor.shape)) for _, tensor in value.regions]
    else:
        adapter = adapters.require(value, key)
        adapter.dtype(value, key)  # refuses what cannot be stored
        local = adapter.place(value, key)
        if local is None:
            pieces.append(_Piece(key, value, dtype, shape))
            return lambda frozen: frozen[first]
        shape, boxes = local.shape, [piece.box for piece in local.pieces]
        (shards,) = adapter.host([(value, local)])
        pieces += [_Piece(key, shard, dtype, box.shape) for shard, box in zip(shards, boxes, strict=True)]
    return lambda frozen: GlobalTensor(shape, dtype, [*zip(boxes, frozen[first:], strict=False)])


def _frozen(pieces: Sequence[_Piece]) -> list[torch.Tensor]:
    """CPU tensors with the elements of the pieces, which nobody else will write to."""
    tensors = [(i, p.key, p.content) for i, p in enumerate(pieces) if isinstance(p.content, torch.Tensor)]
    shards = {i: p.content for i, p in enumerate(pieces) if isinstance(p.content, HostShard)}
    in_batch = in_host_memory([(key, tensor) for _, key, tensor in tensors])
    shards.update({i: shard for (i, _, _), shard in zip(tensors, in_batch, strict=True)})
    moving = [i for i, shard in shards.items() if not shard.immutable and len(shard.data)]
    sizes = [-(-len(shards[i].data) // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT for i in moving]
    memory = allocate(sum(sizes))
    copied, copies, at = {}, [], 0
    for i, size in zip(moving, sizes, strict=True):
        source = np.frombuffer(shards[i].data, np.uint8)
        target = memory[at : at + len(source)]
        copied[i] = tensor_from(target, pieces[i].dtype, pieces[i].shape)
        copies.append((target, source))
        at += size
    copy_all(copies)
    return [copied[i] if i in copied else _tensor_over(shards[i], piece) for i, piece in enumerate(pieces)]


def _tensor_over(shard: HostShard, piece: _Piece) -> torch.Tensor:
    """The tensor that has the bytes of a shard, which nobody else writes to."""
    if not len(shard.data):
        return torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    assert isinstance(shard.keep, torch.Tensor), "torch's adapters keep a tensor"
    return shard.keep.detach()
