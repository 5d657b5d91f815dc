"""The bytes of tensors in host memory, whatever they are and wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_ckpt.arrays.registry import Adapters, require
from xla_ckpt.arrays.torch_elements import bytes_of, cut, torch_type
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.snapshot.shards import HostShard


def in_host_memory(named: Sequence[tuple[str, torch.Tensor]]) -> list[HostShard]:
    """The bytes of (key, tensor) pairs, each in C order: views where that is possible, else copies.

    What lies on one kind of device is transferred in one batch.

    Raises:
        UnsupportedStateError: A tensor has no plain array of elements, or not all of it is on devices of this process.
    """
    batches: dict[int, tuple[Any, list[int], list[tuple[Any, LocalArray]]]] = {}
    adapters = Adapters()
    for i, (key, value) in enumerate(named):
        adapter = adapters.require(value, key)
        adapter.dtype(value, key)  # refuses what cannot be stored
        local = adapter.place(value, key) or whole(tuple(value.shape))
        _, numbers, values = batches.setdefault(id(adapter), (adapter, [], []))
        numbers.append(i)
        values.append((value, local))
    joined: dict[int, HostShard] = {}
    for adapter, numbers, values in batches.values():
        for i, (value, local), shards in zip(numbers, values, adapter.host(values), strict=True):
            joined[i] = _joined(named[i][0], value, local, shards)
    return [joined[i] for i in range(len(named))]


def _joined(key: str, value: torch.Tensor, local: LocalArray, shards: Sequence[HostShard]) -> HostShard:
    """One shard for all of a tensor."""
    everything = Box.whole(tuple(value.shape))
    if everything.size == 0:
        return HostShard(memoryview(b""), None, immutable=True)
    if len(shards) == 1 and local.pieces[0].box == everything:
        return shards[0]
    elements = sum(piece.box.size for piece in local.pieces)
    if elements != everything.size:
        raise UnsupportedStateError(
            "a part of a tensor is on devices of other processes",
            leaf=key,
            expected=f"{everything.size} elements",
            found=elements,
            hint="Give planner=SPMDSavePlanner(), of torch_xla.experimental.distributed_checkpoint.",
        )
    element = torch_type(require(value).dtype(value), value)
    tensor = torch.empty(everything.shape, dtype=element, device="cpu")
    for piece, shard in zip(local.pieces, shards, strict=True):
        cut(tensor, piece.box).copy_(torch.frombuffer(shard.data, dtype=element).reshape(piece.box.shape))
    return HostShard(bytes_of(tensor), tensor, immutable=True)
