"""ZeRO-1: torch_xla's `ZeroRedundancyOptimizer` and its subclasses (neuronx-distributed's among them).

It wraps an optimizer whose parameters are shards: each parameter, zero-padded along dim 0 to a multiple of the group,
cut into as many chunks. The states of the wrapped optimizer belong to those shards, and here they are put back to the
parameters' names. torch_xla is not needed to recognise one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_ckpt.arrays.registry import require
from xla_ckpt.arrays.torch_host import bytes_of
from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.sharding import axes_of
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.tree import schema

_HOME = "torch_xla.distributed.zero_redundancy_optimizer"


def is_zero1(optimizer: Any) -> bool:
    """Whether an optimizer is torch_xla's ZeRO-1 wrapper."""
    return any(c.__module__ == _HOME for c in type(optimizer).__mro__)


def shards_of(optimizer: Any) -> dict[int, Any]:
    """Identity of each parameter -> the shard of it that the wrapped optimizer steps."""
    if not optimizer.inited:
        optimizer.init_zero()
    return {
        id(p): s
        for outer, inner in zip(optimizer.param_groups, optimizer.base_optimizer.param_groups, strict=True)
        for p, s in zip(outer["params"], inner["params"], strict=True)
    }


def mesh_axes(optimizer: Any, placement: Placement) -> tuple[str, ...]:
    """The mesh axes over which the rows of its states are dealt out; none if its group is a single rank.

    Raises:
        UsageError: Its sharding groups do not lie along the mesh.
    """
    if optimizer.local_world_size == 1:
        return ()
    groups = [list(g) for g in optimizer.sharding_groups]
    group = next((g for g in groups if placement.rank in g), None)
    axes = None if group is None else axes_of(group, placement.mesh, placement.rank)
    if axes is None:
        raise UsageError(
            "the sharding groups of the ZeRO-1 optimizer do not lie along the mesh",
            leaf=schema.OPTIMIZER,
            expected=f"groups along dp, or dp and cp, of {placement.mesh}",
            found=str(groups)[:200],
            hint="Pass the mesh= that the groups were made from.",
        )
    return axes


def keeps_master(optimizer: Any) -> bool:
    """Whether the shards hold more than the parameters do: they are asked for, or of a higher precision."""
    pairs = shards_of(optimizer)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    return bool(optimizer.save_master_weights) or any(pairs[id(p)].dtype != p.dtype for p in parameters)


def take_weights(optimizer: Any) -> None:
    """Make the shards anew from the parameters, as they are now.

    neuronx-distributed's loader leaves this out after it loads the model, and the next step puts the old weights back.
    """
    shards = shards_of(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shard = shards[id(parameter)]
            host = _on_host(parameter)
            size = shard.shape[0]
            rows = host[optimizer.local_rank * size : (optimizer.local_rank + 1) * size]
            put(shard, rows.to(shard.dtype))


def put(shard: Any, rows: torch.Tensor) -> None:
    """Overwrite a shard with rows in host memory; what they do not reach is padding, and zero."""
    adapter = require(shard)
    target = adapter.into(shard, whole(tuple(shard.shape)), owned=True)
    (memory,) = target.memory(Slabs()) or [memoryview(b"")]
    padded = torch.zeros(tuple(shard.shape), dtype=shard.dtype)
    padded[: rows.shape[0]] = rows
    if len(memory):
        memory[:] = bytes_of(padded)
    target.install()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    (held,) = require(value).host([(value, whole(tuple(value.shape)))])
    data = torch.frombuffer(bytearray(held[0].data), dtype=value.dtype) if len(held[0].data) else torch.empty(0)
    return data.reshape(value.shape)


def outer_state(optimizer: Any) -> Mapping[str, Any]:
    """The state dict of the wrapper's own class: its groups, which hold the current hyper-parameters."""
    packed: Mapping[str, Any] = torch.optim.Optimizer.state_dict(optimizer)
    return {**packed, schema.STATE: optimizer.base_optimizer.state_dict()[schema.STATE]}
