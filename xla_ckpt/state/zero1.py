"""ZeRO-1 optimizers: torch_xla's `ZeroRedundancyOptimizer` and its subclasses, neuronx-distributed's included.

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
    """Whether an optimizer is torch_xla's ZeRO-1 wrapper."""
    return any(c.__module__ == _ZERO1_MODULE for c in type(optimizer).__mro__)


def get_zero1_parts(optimizer: Any) -> list[Any]:
    """The ZeRO-1 optimizers that hold the shards: one for experts and one for the rest, or the optimizer itself."""
    names = ("non_ep_zero_optimizer", "ep_zero_optimizer")
    has_experts = all(hasattr(optimizer, name) for name in names)
    parts = [getattr(optimizer, name) for name in names] if has_experts else [optimizer]
    for part in parts:
        if not part.inited:
            part.init_zero()
    return parts


def get_base_optimizers(optimizer: Any) -> list[Any]:
    """The wrapped optimizers, which hold the states."""
    return [part.base_optimizer for part in get_zero1_parts(optimizer)]


def get_parameter_shards(optimizer: Any) -> dict[int, Any]:
    """Identity of each parameter -> the shard of it that a wrapped optimizer steps."""
    return {
        id(p): s
        for part in get_zero1_parts(optimizer)
        for outer, inner in zip(part.param_groups, part.base_optimizer.param_groups, strict=True)
        for p, s in zip(outer["params"], inner["params"], strict=True)
    }


def get_axes_by_parameter(optimizer: Any, placement: RankInfo) -> dict[int, tuple[str, ...]]:
    """Identity of each parameter -> the mesh axes over which the rows of its states are dealt out.

    Raises:
        UsageError: The sharding groups do not lie along the mesh.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    for part in get_zero1_parts(optimizer):
        axes = get_mesh_axes(part, placement)
        axes_of.update({id(p): axes for group in part.param_groups for p in group["params"]})
    return axes_of


def get_mesh_axes(optimizer: Any, placement: RankInfo) -> tuple[str, ...]:
    """The mesh axes over which the rows of its states are dealt out; none if its group is a single rank.

    Of an optimizer with a part for experts, those of the other part.

    Raises:
        UsageError: Its sharding groups do not lie along the mesh.
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
    """Names of the parameters that its part for experts has; None if it has no such part."""
    _, *apart = get_zero1_parts(optimizer)
    of_experts = {id(p) for part in apart for p in _list_parameters(part)}
    return frozenset(p.name for p in parameters if id(p.value) in of_experts) if apart else None


def has_master_weights(optimizer: Any) -> bool:
    """Whether the shards hold more than the parameters do: they are asked for, or of a higher precision."""
    pairs = get_parameter_shards(optimizer)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    asked = any(part.save_master_weights for part in get_zero1_parts(optimizer))
    return asked or any(pairs[id(p)].dtype != p.dtype for p in parameters)


def refresh_shards(optimizer: Any) -> None:
    """Make the shards anew from the parameters, as they are now.

    neuronx-distributed's loader leaves this out after it loads the model, and the next step puts the old weights back.
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
    """Overwrite a shard with rows in host memory; what they do not reach is padding, and zero."""
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
    """A state dict of torch's own structure: the wrapper's groups, which hold the current hyper-parameters, and states.

    What only the wrapped optimizer knows of a group (`get_base_options`) is in it, too.

    The states of two parts are numbered as the parameters of the whole are.

    Raises:
        UnsupportedStateError: Both parts keep state of their own under one key.
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
    """What the wrapped optimizer knows of each group and the wrapper does not: the options that nobody passed.

    Another optimizer, which is not wrapped, has them in its groups: stock loaders refuse a state that lacks them.
    """
    first = get_zero1_parts(optimizer)[0].base_optimizer
    return [
        {key: value for key, value in inner.items() if key not in outer}
        for inner, outer in zip(first.param_groups, optimizer.param_groups, strict=True)
    ]


def _list_parameters(optimizer: Any) -> list[Any]:
    """Its parameters in the order of torch's packed ids."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
