"""Small models of the tests, and what a plain run of one process makes of them."""

from __future__ import annotations

from typing import Any

import torch

import neuron_compat.smp as smp
from neuron_compat.nxd.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear


class Plain(torch.nn.Module):
    """Layers that no rank splits: one in each of two partitions, and an output that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 8)
        with smp.partition(0):
            self.first = torch.nn.Linear(8, 16)
        with smp.partition(1):
            self.second = torch.nn.Linear(16, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = torch.relu(self.first(self.embed(ids))) * self.frozen.sum()
        norm = self.norm  # as in evaluation: statistics of a batch would depend on how it is divided
        normed = torch.nn.functional.batch_norm(
            self.second(hidden), norm.running_mean, norm.running_var, norm.weight, norm.bias
        )
        found: torch.Tensor = self.head(normed)
        return found

    def get_extra_state(self) -> Any:
        return {"note": "extra"}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Split(torch.nn.Module):
    """Layers that tensor-parallel ranks hold parts of: padded, strided, by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.embed = ParallelEmbedding(11, 8, pad=True)
            self.up = ColumnParallelLinear(8, 16, gather_output=False, stride=2)
        with smp.partition(1):
            self.down = RowParallelLinear(16, 8, input_is_parallel=True, stride=2)
            self.norm = torch.nn.LayerNorm(8)
            self.head = ColumnParallelLinear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.down(torch.relu(self.up(self.embed(ids))))))
        return found


def batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(0, 11, (size,), generator=generator), torch.randint(0, 11, (size,), generator=generator))
        for _ in range(count)
    ]


def make(kind: type[torch.nn.Module], seed: int = 3) -> torch.nn.Module:
    """A model with the same initial values for the same seed."""
    torch.manual_seed(seed)
    return kind()


@smp.step
def train_step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A step as SMP's users write it."""
    loss = torch.nn.functional.cross_entropy(model(ids), labels)
    model.backward(loss)
    return loss


def losses_of(model: Any, optimizer: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Train with `train_step`; the mean loss of each batch."""
    found = []
    for ids, labels in data:
        optimizer.zero_grad()
        found.append(train_step(model, ids, labels).reduce_mean().item())
        optimizer.step()
    return found


def plain_losses(model: Any, optimizer: Any, data: list[tuple[torch.Tensor, torch.Tensor]], parts: int) -> list[float]:
    """The same without anything of SMP: the batch in parts, gradients divided by their number."""
    found = []
    for ids, labels in data:
        optimizer.zero_grad()
        total = 0.0
        for some, theirs in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
            loss = torch.nn.functional.cross_entropy(model(some), theirs)
            (loss / parts).backward()
            total += loss.item()
        optimizer.step()
        found.append(total / parts)
    return found
