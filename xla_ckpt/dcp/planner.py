"""The planner of loads for which the program gives none."""

from __future__ import annotations

from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner


class LoadPlanner(DefaultLoadPlanner):
    """DCP's `DefaultLoadPlanner`, on ranks that have nothing of some tensors, too.

    FSDP1 has such ranks, if a tensor has fewer rows than there are ranks. DCP's own planner leaves these tensors out of
    the state, takes the checkpoint for one of torch 2.3, since it has more keys, and fails on the optimizer's groups.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        if self.flatten_state_dict:
            flat, mappings = flatten_state_dict(state_dict)
            for key, value in flat.items():
                if key not in self.state_dict and isinstance(value, ShardedTensor):
                    self.state_dict[key], self.mappings[key] = value, mappings[key]
