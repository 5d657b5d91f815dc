"""ZeRO-1 optimizers: torch_xla's `ZeroRedundancyOptimizer` and its subclasses, including neuronx-distributed's.

It wraps an optimizer whose parameters are shards: each parameter is zero-padded along dim 0 and split into equal
chunks. The states of the wrapped optimizer belong to those shards, and are stored under the parameters' names.
torch_xla is not needed to recognize one.

neuronx-distributed's `NeuronEPZero1Optimizer` consists of two of them: one shards the experts over the ranks with the
same experts, the other one shards all other parameters. Its own wrapped optimizer never steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xla_ckpt.arrays.registry import require_adapter
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.sharding.sharding import find_group_axes
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.snapshot.memory import SlabAllocator
from xla_ckpt.state.shardings import OptimizerParameter

if TYPE_CHECKING:
    import torch

_ZERO1_MODULE = "torch_xla.distributed.zero_redundancy_optimizer"


def is_zero1(optimizer: Any) -> bool:
    """Return True for torch_xla's ZeRO-1 wrapper."""
    return any(c.__module__ == _ZERO1_MODULE for c in type(optimizer).__mro__)


def get_zero1_parts(optimizer: Any) -> list[Any]:
    """Return the ZeRO-1 optimizers that hold the shards: one for experts and one for the rest, or the optimizer
    itself.
    """
    names = ("non_ep_zero_optimizer", "ep_zero_optimizer")
    has_experts = all(hasattr(optimizer, name) for name in names)
    parts = [getattr(optimizer, name) for name in names] if has_experts else [optimizer]
    for part in parts:
        if not part.inited:
            part.init_zero()
    return parts


def get_base_optimizers(optimizer: Any) -> list[Any]:
    """Return the wrapped optimizers, which hold the states."""
    return [part.base_optimizer for part in get_zero1_parts(optimizer)]


def get_parameter_shards(optimizer: Any) -> dict[int, Any]:
    """Map each parameter, by `id`, to the shard of it that this rank's wrapped optimizer steps."""
    return {
        id(p): s
        for part in get_zero1_parts(optimizer)
        for outer, inner in zip(part.param_groups, part.base_optimizer.param_groups, strict=True)
        for p, s in zip(outer["params"], inner["params"], strict=True)
    }


def get_axes_by_parameter(optimizer: Any, placement: RankInfo) -> dict[int, tuple[str, ...]]:
    """Return the identity of each parameter -> the mesh axes over which the rows of its states are sharded.

    Raises:
        UsageError: If the sharding groups are not aligned with the mesh.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    for part in get_zero1_parts(optimizer):
        axes = get_mesh_axes(part, placement)
        axes_of.update({id(p): axes for group in part.param_groups for p in group["params"]})
    return axes_of


def get_mesh_axes(optimizer: Any, placement: RankInfo) -> tuple[str, ...]:
    """Return the mesh axes over which the rows of its states are sharded; empty if its group is a single rank.

    For an optimizer with a part for experts, return the axes of the other part.

    Raises:
        UsageError: If its sharding groups are not aligned with the mesh.
    """
    first = get_zero1_parts(optimizer)[0]
    if first.local_world_size == 1:
        return ()
    groups = [list(g) for g in first.sharding_groups]
    group = next((g for g in groups if placement.rank in g), None)
    axes = None if group is None else find_group_axes(group, placement.mesh, placement.rank)
    if axes is None:
        raise UsageError(
            "the sharding groups of the ZeRO-1 optimizer do not lie along the mesh",
            leaf=schema.OPTIMIZER,
            expected=f"groups along dp, or dp and cp, of {placement.mesh}",
            found=str(groups)[:200],
            hint="Pass the mesh= that the groups were made from.",
        )
    return axes


def find_expert_parameters(optimizer: Any, parameters: Iterable[OptimizerParameter]) -> frozenset[str] | None:
    """Return the names of the optimizer's expert parameters; None if it has no separate part for experts."""
    _, *apart = get_zero1_parts(optimizer)
    of_experts = {id(p) for part in apart for p in _list_parameters(part)}
    return frozenset(p.name for p in parameters if id(p.value) in of_experts) if apart else None


def has_master_weights(optimizer: Any) -> bool:
    """Return True if the shards hold more than the parameters: master weights are enabled, or have a higher
    precision.
    """
    pairs = get_parameter_shards(optimizer)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    asked = any(part.save_master_weights for part in get_zero1_parts(optimizer))
    return asked or any(pairs[id(p)].dtype != p.dtype for p in parameters)


def refresh_shards(optimizer: Any) -> None:
    """Copy the current parameters to the shards.

    neuronx-distributed's loader does not do this after loading the model, and the next step restores the old weights.
    """
    shards = get_parameter_shards(optimizer)
    for part in get_zero1_parts(optimizer):
        for parameter in (p for group in part.param_groups for p in group["params"]):
            shard = shards[id(parameter)]
            host = _copy_to_host(parameter)
            size = shard.shape[0]
            rows = host[part.local_rank * size : (part.local_rank + 1) * size]
            overwrite_shard(shard, rows.to(shard.dtype))


def overwrite_shard(shard: Any, rows: torch.Tensor) -> None:
    """Overwrite a shard with rows in host memory; the remaining rows are padding, and zero."""
    from xla_ckpt.arrays.torch_elements import get_tensor_bytes

    adapter = require_adapter(shard)
    target = adapter.create_in_place_target(shard, create_unsharded(tuple(shard.shape)), owned=True)
    (memory,) = target.allocate(SlabAllocator()) or [memoryview(b"")]
    padded = rows.new_zeros(tuple(shard.shape), dtype=shard.dtype)
    padded[: rows.shape[0]] = rows
    if len(memory):
        memory[:] = get_tensor_bytes(padded)
    target.install()


def _copy_to_host(value: torch.Tensor) -> torch.Tensor:
    from xla_ckpt.arrays.torch_elements import view_as_tensor

    (shards,) = require_adapter(value).get_host_shards([(value, create_unsharded(tuple(value.shape)))])
    return view_as_tensor(np.array(shards[0].data), value.dtype, value.shape)


def get_outer_state_dict(optimizer: Any) -> Mapping[str, Any]:
    """Return a state dict in torch's structure: the wrapper's groups, with the current hyper-parameters, and the
    states.

    The groups include options that only the wrapped optimizer has (`get_base_options`). The states of two parts are
    numbered like the parameters of the whole optimizer.

    Raises:
        UnsupportedStateError: If both parts have shared state under one key.
    """
    from torch.optim import Optimizer

    packed: Mapping[str, Any] = Optimizer.state_dict(optimizer)
    number = {id(p): i for i, p in enumerate(_list_parameters(optimizer))}
    states: dict[Any, Any] = {}
    for part in get_zero1_parts(optimizer):
        own = _list_parameters(part)
        for key, state in part.base_optimizer.state_dict()[schema.STATE].items():
            called = number[id(own[key])] if type(key) is int else key
            if called in states:
                raise UnsupportedStateError(
                    "the optimizer of experts and that of the rest keep state of their own under one key",
                    leaf=schema.OPTIMIZER,
                    found=repr(key),
                )
            states[called] = state
    inner = get_base_options(optimizer)
    groups = [{**inner_group, **group} for inner_group, group in zip(inner, packed[schema.PARAM_GROUPS], strict=True)]
    return {**packed, schema.STATE: states, schema.PARAM_GROUPS: groups}


def get_base_options(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of each group that only the wrapped optimizer has, because they were not passed explicitly.

    An unwrapped optimizer has them in its groups, and stock loaders reject a state without them.
    """
    first = get_zero1_parts(optimizer)[0].base_optimizer
    return [
        {key: value for key, value in inner.items() if key not in outer}
        for inner, outer in zip(first.param_groups, optimizer.param_groups, strict=True)
    ]


def _list_parameters(optimizer: Any) -> list[Any]:
    """List the parameters in packed-id order, as in torch."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
