"""ZeRO-1: torch_xla's `ZeroRedundancyOptimizer` and its subclasses (neuronx-distributed's among them).

It wraps an optimizer whose parameters are shards: each parameter, zero-padded along dim 0 to a multiple of the group,
cut into as many chunks. The states of the wrapped optimizer belong to those shards, and here they are put back to the
parameters' names. torch_xla is not needed to recognise one.

neuronx-distributed's `NeuronEPZero1Optimizer` consists of two of them: one deals the experts out over the ranks that
hold the same experts, the other one deals out all other parameters. Its own wrapped optimizer never steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xla_ckpt.arrays.registry import require
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.sharding import axes_of
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.state.shardings import Parameter
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    import torch

_HOME = "torch_xla.distributed.zero_redundancy_optimizer"


def is_zero1(optimizer: Any) -> bool:
    """Whether an optimizer is torch_xla's ZeRO-1 wrapper."""
    return any(c.__module__ == _HOME for c in type(optimizer).__mro__)


def parts_of(optimizer: Any) -> list[Any]:
    """The ZeRO-1 optimizers that hold the shards: one for experts and one for the rest, or the optimizer itself."""
    names = ("non_ep_zero_optimizer", "ep_zero_optimizer")
    has_experts = all(hasattr(optimizer, name) for name in names)
    parts = [getattr(optimizer, name) for name in names] if has_experts else [optimizer]
    for part in parts:
        if not part.inited:
            part.init_zero()
    return parts


def bases_of(optimizer: Any) -> list[Any]:
    """The wrapped optimizers, which hold the states."""
    return [part.base_optimizer for part in parts_of(optimizer)]


def parameter_shards(optimizer: Any) -> dict[int, Any]:
    """Identity of each parameter -> the shard of it that a wrapped optimizer steps."""
    return {
        id(p): s
        for part in parts_of(optimizer)
        for outer, inner in zip(part.param_groups, part.base_optimizer.param_groups, strict=True)
        for p, s in zip(outer["params"], inner["params"], strict=True)
    }


def axes_by_parameter(optimizer: Any, placement: Placement) -> dict[int, tuple[str, ...]]:
    """Identity of each parameter -> the mesh axes over which the rows of its states are dealt out.

    Raises:
        UsageError: The sharding groups do not lie along the mesh.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    for part in parts_of(optimizer):
        axes = mesh_axes(part, placement)
        axes_of.update({id(p): axes for group in part.param_groups for p in group["params"]})
    return axes_of


def mesh_axes(optimizer: Any, placement: Placement) -> tuple[str, ...]:
    """The mesh axes over which the rows of its states are dealt out; none if its group is a single rank.

    Of an optimizer with a part for experts, those of the other part.

    Raises:
        UsageError: Its sharding groups do not lie along the mesh.
    """
    first = parts_of(optimizer)[0]
    if first.local_world_size == 1:
        return ()
    groups = [list(g) for g in first.sharding_groups]
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


def experts_of(optimizer: Any, parameters: Iterable[Parameter]) -> frozenset[str] | None:
    """Names of the parameters that its part for experts has; None if it has no such part."""
    _, *apart = parts_of(optimizer)
    of_experts = {id(p) for part in apart for p in _parameters(part)}
    return frozenset(p.name for p in parameters if id(p.value) in of_experts) if apart else None


def keeps_master(optimizer: Any) -> bool:
    """Whether the shards hold more than the parameters do: they are asked for, or of a higher precision."""
    pairs = parameter_shards(optimizer)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    asked = any(part.save_master_weights for part in parts_of(optimizer))
    return asked or any(pairs[id(p)].dtype != p.dtype for p in parameters)


def take_weights(optimizer: Any) -> None:
    """Make the shards anew from the parameters, as they are now.

    neuronx-distributed's loader leaves this out after it loads the model, and the next step puts the old weights back.
    """
    shards = parameter_shards(optimizer)
    for part in parts_of(optimizer):
        for parameter in (p for group in part.param_groups for p in group["params"]):
            shard = shards[id(parameter)]
            host = _on_host(parameter)
            size = shard.shape[0]
            rows = host[part.local_rank * size : (part.local_rank + 1) * size]
            put(shard, rows.to(shard.dtype))


def put(shard: Any, rows: torch.Tensor) -> None:
    """Overwrite a shard with rows in host memory; what they do not reach is padding, and zero."""
    from xla_ckpt.arrays.torch_elements import bytes_of

    adapter = require(shard)
    target = adapter.into(shard, whole(tuple(shard.shape)), owned=True)
    (memory,) = target.memory(Slabs()) or [memoryview(b"")]
    padded = rows.new_zeros(tuple(shard.shape), dtype=shard.dtype)
    padded[: rows.shape[0]] = rows
    if len(memory):
        memory[:] = bytes_of(padded)
    target.install()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    from xla_ckpt.arrays.torch_elements import tensor_from

    (shards,) = require(value).host([(value, whole(tuple(value.shape)))])
    return tensor_from(np.array(shards[0].data), value.dtype, value.shape)


def outer_state(optimizer: Any) -> Mapping[str, Any]:
    """A state dict of torch's own structure: the wrapper's groups, which hold the current hyper-parameters, and states.

    What only the wrapped optimizer knows of a group (`base_options`) is in it, too.

    The states of two parts are numbered as the parameters of the whole are.

    Raises:
        UnsupportedStateError: Both parts keep state of their own under one key.
    """
    from torch.optim import Optimizer

    packed: Mapping[str, Any] = Optimizer.state_dict(optimizer)
    number = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    states: dict[Any, Any] = {}
    for part in parts_of(optimizer):
        own = _parameters(part)
        for key, state in part.base_optimizer.state_dict()[schema.STATE].items():
            called = number[id(own[key])] if type(key) is int else key
            if called in states:
                raise UnsupportedStateError(
                    "the optimizer of experts and that of the rest keep state of their own under one key",
                    leaf=schema.OPTIMIZER,
                    found=repr(key),
                )
            states[called] = state
    inner = base_options(optimizer)
    groups = [{**inner_group, **group} for inner_group, group in zip(inner, packed[schema.GROUPS], strict=True)]
    return {**packed, schema.STATE: states, schema.GROUPS: groups}


def base_options(optimizer: Any) -> list[dict[str, Any]]:
    """What the wrapped optimizer knows of each group and the wrapper does not: the options that nobody passed.

    Another optimizer, which is not wrapped, has them in its groups: stock loaders refuse a state that lacks them.
    """
    first = parts_of(optimizer)[0].base_optimizer
    return [
        {key: value for key, value in inner.items() if key not in outer}
        for inner, outer in zip(first.param_groups, optimizer.param_groups, strict=True)
    ]


def _parameters(optimizer: Any) -> list[Any]:
    """Its parameters in the order of torch's packed ids."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
