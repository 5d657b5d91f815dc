"""A model with grouped-query attention, split over tensor-parallel ranks, and the same model unsplit; float64.

Heads of queries are numbered as their rows lie in memory, over all ranks, and in a checkpoint. Which head of keys and
values each of them meets is said by an `order` of the model's own: the number of copies of keys and values for whose
ranks the rows are in order. A job on other ranks may keep the order of a checkpoint if its ranks have the heads that
their queries meet; `Attention` refuses the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import neuron_compat
import neuron_compat.nxd as nxd
from neuron_compat.nxd.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuron_compat.nxd.parallel_layers import parallel_state as ps

WORDS, HIDDEN, HEADS, WIDE = 12, 8, 8, 2
WIDTH = HEADS * WIDE


class Ranks(NamedTuple):
    """How a job is arranged, and how its model is made."""

    tp: int
    copies: int = 1
    adjacent: bool = False
    fused: bool = True
    kv_heads: int = 2
    order: int = 1


class Step(NamedTuple):
    """What a step of training shows. Compiling it takes a rank more than a second, and a loss alone much less."""

    loss: float
    """Of the whole batch."""

    norm: float
    """Of the gradients, before they are clipped."""

    after: float
    """The loss of the next batch, which the step has changed."""


def meets(head: int, kv_heads: int, order: int) -> int:
    """The head of keys and values that a head of queries meets."""
    return (head % (HEADS // order)) // (HEADS // (kv_heads * order))


class Attention(torch.nn.Module):
    """Causal attention of this rank's heads."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.qkv: torch.nn.Module
        self.o: torch.nn.Module

    def split(self) -> None:
        r, f64 = self.ranks, torch.float64
        self.qkv = GQAQKVColumnParallelLinear(
            HIDDEN, [WIDTH, r.kv_heads * WIDE], gather_output=False, dtype=f64, kv_size_multiplier=r.copies,
            fuse_qkv=r.fused, reduce_dtype=f64,
        )  # fmt: skip
        self.o = RowParallelLinear(WIDTH, HIDDEN, input_is_parallel=True, dtype=f64, reduce_dtype=f64)
        tp, parts, me = r.tp, r.tp // r.copies, ps.get_tensor_model_parallel_rank()
        first = HEADS // tp * me
        first_kv = r.kv_heads // parts * (me // r.copies if r.adjacent else me % parts)
        local = [meets(h, r.kv_heads, r.order) - first_kv for h in range(first, first + HEADS // tp)]
        assert set(local) <= set(range(r.kv_heads // parts)), "the heads that some queries meet are on other ranks"
        self.local = local

    def whole(self) -> None:
        sizes = (WIDTH, self.ranks.kv_heads * WIDE, self.ranks.kv_heads * WIDE)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, size) for size in sizes).double()
        self.o = torch.nn.Linear(WIDTH, HIDDEN).double()
        self.local = [meets(h, self.ranks.kv_heads, self.ranks.order) for h in range(HEADS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [one(x) for one in self.qkv] if isinstance(self.qkv, torch.nn.ModuleList) else self.qkv(x)
        q, k, v = (part.unflatten(-1, (-1, WIDE)).transpose(-2, -3) for part in made)
        k, v = (torch.stack([part[..., h, :, :] for h in self.local], -3) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / WIDE**0.5
        late = torch.ones_like(scores).triu(1) * -1e9
        return self.o((torch.softmax(scores + late, -1) @ v).transpose(-2, -3).flatten(-2))


class Model(torch.nn.Module):
    """Guesses words from the words before. Its parts are made in this order: random numbers are drawn in it."""

    def __init__(self, seed: int, ranks: Ranks, split: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        f64: Any = {"dtype": torch.float64}
        self.embed = ParallelEmbedding(WORDS, HIDDEN, **f64) if split else torch.nn.Embedding(WORDS, HIDDEN)
        self.attention = Attention(ranks)
        self.attention.split() if split else self.attention.whole()
        self.norm = torch.nn.LayerNorm(HIDDEN, **f64)
        self.head = (
            ColumnParallelLinear(HIDDEN, WORDS, bias=False, reduce_dtype=torch.float64, **f64)
            if split
            else torch.nn.Linear(HIDDEN, WORDS, bias=False)
        )
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        logits: torch.Tensor = self.head(self.norm(x + self.attention(x)))
        return logits


def loss_of(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    guesses = model(words[:, :-1])
    return torch.nn.functional.cross_entropy(guesses.flatten(0, 1), words[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(step))


class Job:
    """A rank of a job: its part of the model, with neuronx-distributed's ZeRO-1 optimizer on XLA's CPU."""

    def __init__(self, ranks: Ranks, seed: int = 3) -> None:
        neuron_compat.emulate()
        ps.initialize_model_parallel(tensor_model_parallel_size=ranks.tp)
        ps.initialize_kv_group(ranks.copies, sequential_ranks_in_group=ranks.adjacent)
        self.model = Model(seed, ranks).to("xla")
        self.optimizer: Any = NeuronZero1Optimizer(
            self.model.parameters(), torch.optim.AdamW, optimizer_dtype=torch.float64, max_norm=0.1, pin_layout=False,
            lr=1e-2,
        )  # fmt: skip

    def end(self) -> None:
        ps.destroy_model_parallel()

    def save(self, root: Path) -> None:
        """In each layout, under its name."""
        for layout in ("native", "xser"):
            nxd.save_checkpoint(root, layout, self.model, self.optimizer, layout=layout)

    def load(self, root: Path, tag: str) -> None:
        nxd.load_checkpoint(root, tag, self.model, self.optimizer)

    def step(self, number: int) -> Step:
        """Train on one batch, of which each data-parallel rank has its part."""
        self.optimizer.zero_grad()
        loss = self._loss(number)
        loss.backward()
        self.optimizer.step()
        torch_xla.sync()
        with torch.no_grad():
            after = self._loss(number + 1)
        return Step(self._mean(loss), float(self.optimizer.grad_norm), self._mean(after))

    def _loss(self, number: int) -> torch.Tensor:
        words = batch(number).chunk(len(ps.get_data_parallel_replica_groups()[0]))[ps.get_data_parallel_rank()]
        return loss_of(self.model, words.to("xla"))

    def _mean(self, loss: torch.Tensor) -> float:
        replicas = ps.get_data_parallel_replica_groups()
        return float(xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / len(replicas[0]), groups=replicas))


def unsplit(ranks: Ranks, count: int, seed: int = 3) -> list[Step]:
    """The same of the unsplit model in one process: what the mathematics gives."""
    model = Model(seed, ranks, split=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = []
    for number in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, batch(number))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            after = loss_of(model, batch(number + 1))
        trained.append(Step(float(loss.detach()), float(norm), float(after)))
    return trained
