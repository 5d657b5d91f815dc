"""A model for any degrees, which names no partition, and training whose losses can be compared between topologies."""

from __future__ import annotations

from typing import Any

import torch

import neuron_compat.smp as smp
from neuron_compat.nxd.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from tests.smp.models import batches, train_step


class Net(torch.nn.Module):
    """Layers that are split over tensor-parallel ranks, one that is not, a buffer, and an output tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(12, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.mid = torch.nn.Linear(8, 8)
        self.head = ColumnParallelLinear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        found: torch.Tensor = self.head(torch.relu(self.mid(hidden)))
        return found


def begin(pp: int, tp: int, **config: Any) -> None:
    """Arrange the ranks of a job."""
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True, "microbatches": 2, **config})


def wrapped(seed: int = 3, lr: float = 0.05, scale: float = 16.0) -> tuple[Any, Any]:
    """A model of float64, and an optimizer with two groups, in smp's wrappers; with fp16, a loss scale that rises."""
    torch.manual_seed(seed)
    model = smp.DistributedModel(Net().double())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    if not smp.state.cfg.fp16:
        return model, smp.DistributedOptimizer(optimizer)
    how = {"init_scale": scale, "scale_window": 1}
    return model, smp.DistributedOptimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=how)


def trained(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Train on batches `first` to `last`; the mean loss of each, over all data-parallel ranks."""
    found = []
    for ids, labels in batches(last)[first:]:
        part = [t.chunk(smp.rdp_size())[smp.rdp_rank()] for t in (ids, labels)]
        optimizer.zero_grad()
        loss = train_step(model, *part).reduce_mean().item()
        optimizer.step()
        of_all = smp.allgather(loss, smp.RDP_GROUP)
        found.append(sum(of_all) / len(of_all))
    return found
