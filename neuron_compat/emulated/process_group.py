"""What torch_xla's collectives are made of where processes meet over gloo."""

from __future__ import annotations

from typing import Any

import torch


def gathered(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The value of every rank of a process group, in the group's order, on the device of `value`."""
    distributed: Any = torch.distributed
    data = value.contiguous().reshape(-1).view(torch.uint8)  # bytes: gloo does not know all element types
    received = [torch.empty_like(data) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(received, data, group=group)
    return [part.view(value.dtype).reshape(value.shape) for part in received]
