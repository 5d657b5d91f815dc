"""State dicts of DCP calls: states of `Stateful` objects, and planners for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from xla_ckpt.arrays.declared_chunks import has_declared_chunks
from xla_ckpt.arrays.registry import count_local_devices
from xla_ckpt.core.tree.nested import iterate_leaves, map_leaves
from xla_ckpt.dcp.tensor import GlobalTensor, wrap_declared_chunks
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.errors import CheckpointError, LoadError, SaveError
from xla_ckpt.loading.restore import MAX_STAGED_BYTES


def collect_states(
    state_dict: Mapping[str, Any], rank: int, error_class: type[CheckpointError]
) -> tuple[dict[str, Any], CheckpointError | None]:
    """Replace `Stateful` objects in a state dict by their states. Return it, and the error of an object, if any."""
    states: dict[str, Any] = {}
    for key, value in state_dict.items():
        try:
            states[key] = value.state_dict() if _is_stateful(value) else value
        except Exception as error:
            # `state_dict` of the program may raise anything. The error must reach all ranks.
            return {}, as_checkpoint_error(error, f"{type(value).__name__}.state_dict()", rank, error_class, leaf=key)
    return states, None


def collect_saved_states(state_dict: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], CheckpointError | None]:
    """Return `collect_states` for a save, with declared chunks as `GlobalTensor`s."""
    states, problem = collect_states(state_dict, rank, SaveError)
    if problem is None and any(map(has_declared_chunks, iterate_leaves(states))):
        try:
            states = map_leaves(
                states, lambda keys, leaf: wrap_declared_chunks(leaf, ".".join(map(str, keys))), keep_classes=True
            )
        except CheckpointError as error:
            return {}, error.at(rank=rank)
    return states, problem


def _is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return True for a `Stateful` value. A protocol check takes 10 us per tensor, so tensors are skipped."""
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def install_states(state_dict: dict[str, Any], states: Mapping[str, Any], rank: int) -> CheckpointError | None:
    """Load the states into `Stateful` objects, and replace all other values. Return the error of an object, if any."""
    for key in sorted(state_dict):
        value = state_dict[key]
        if not _is_stateful(value):
            state_dict[key] = states[key]
            continue
        try:
            value.load_state_dict(states[key])
        except Exception as error:
            # `load_state_dict` may raise anything, too.
            doing = f"{type(value).__name__}.load_state_dict()"
            return as_checkpoint_error(error, doing, rank, LoadError, leaf=key)
    return None


def find_empty_optimizers(states: Mapping[str, Any], stored: Collection[str], prefix: str = "") -> Iterator[str]:
    """Find optimizers of a state dict that have no state yet although some is stored, which DCP would not load.

    >>> [*find_empty_optimizers({"o": {"state": {}, "param_groups": []}}, ["o.state.w.step"])]
    ['o']
    """
    for key, value in states.items():
        if not isinstance(value, Mapping):
            continue
        name, state = f"{prefix}{key}", value.get("state")
        if "param_groups" in value and isinstance(state, Mapping):
            if not state and any(of_state.startswith(f"{name}.state.") for of_state in stored):
                yield name
        else:
            yield from find_empty_optimizers(value, stored, f"{name}.")


def should_read_once(value: Any) -> bool:
    """Return True if a state should be read once into staging memory: if it is small, or mostly on accelerators."""
    if count_local_devices() > 1:
        return False  # a process only needs parts of an SPMD tensor
    on_host = on_devices = 0
    todo = [value]
    while todo:
        member = todo.pop()
        if isinstance(member, GlobalTensor):
            todo += [part for _, part in member.regions]
        elif type(member).__name__ == "ShardedTensor":
            todo += [shard.tensor for shard in member.local_shards()]
        elif isinstance(member, torch.Tensor):
            nbytes = member.numel() * member.element_size()
            if member.device.type == "cpu":
                on_host += nbytes
            else:
                on_devices += nbytes
        elif isinstance(member, Mapping):
            todo += member.values()
        elif isinstance(member, list | tuple):
            todo += member
    return on_devices > on_host or on_devices + on_host <= MAX_STAGED_BYTES


class _FailingPlanner:
    """A planner that raises an earlier error of this rank on all ranks of a call."""

    def __init__(self, problem: CheckpointError) -> None:
        super().__init__()
        self.problem = problem

    def set_up_planner(self, *_: Any, storage_meta: Any = None, **__: Any) -> None:  # DCP looks for it
        raise self.problem


class FailingSavePlanner(_FailingPlanner, DefaultSavePlanner):
    """A `_FailingPlanner` for saves."""


class FailingLoadPlanner(_FailingPlanner, DefaultLoadPlanner):
    """A `_FailingPlanner` for loads."""


class ChunkLoadPlanner(DefaultLoadPlanner):
    """DCP's `DefaultLoadPlanner`, with support for declared chunks, and for ranks without a shard of some tensors.

    FSDP1 has such ranks, if a tensor has fewer rows than there are ranks. DCP's own planner drops these tensors from
    the state, treats the checkpoint as one of torch 2.3, because it has more keys, and fails on the optimizer's groups.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        if self.flatten_state_dict:
            flat, mappings = flatten_state_dict(state_dict)
            for key, value in flat.items():
                if key not in self.state_dict and isinstance(value, ShardedTensor):
                    self.state_dict[key], self.mappings[key] = value, mappings[key]
        self.state_dict = {key: wrap_declared_chunks(value, key) for key, value in self.state_dict.items()}
