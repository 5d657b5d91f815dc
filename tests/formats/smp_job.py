"""A job of SageMaker model parallel's that trains a small model and saves its parts by hand: code of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import xla_ckpt
from tests.formats.smp_files import load_info

CUT = {"embed.weight": 0, "qkv.weight": 0, "qkv.bias": 0, "out.weight": 1}
"""Parameters that are split over tp, and along which dim. SMP puts their parts behind each other."""

ONE_RANK = "out.bias"
"""A parameter that SMP keeps on tp rank 0 alone: it is added to what all ranks have summed up."""

STAGE = {"embed.weight": 0, "norm.weight": 0, "norm.bias": 0, "qkv.weight": 1, "qkv.bias": 1, "out.weight": 1,
         "out.bias": 1}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.qkv = torch.nn.Linear(6, 12)
        self.out = torch.nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.qkv(self.norm(self.embed(x))))
        return made


def trained(steps: int = 3, seed: int = 0) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.25)
    for _ in range(steps):
        net(torch.arange(10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


WIDE = [n for n, p in Net().named_parameters() if p.dim() > 1]
ORDER = [*WIDE, *(n for n, _ in Net().named_parameters() if n not in WIDE)]


def part(name: str, value: torch.Tensor, tp: int, i: int) -> torch.Tensor:
    dim = CUT.get(name)
    return value.clone() if dim is None or not value.dim() else value.tensor_split(tp, dim)[i].clone()


class Job:
    """A job of pp stages and tp ranks that saves its parts."""

    def __init__(self, pp: int = 2, tp: int = 2, steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self.pp, self.tp = pp, tp
        self.net, self.optimizer = trained(steps)
        self.weights = {n: v.to(dtype) for n, v in self.net.state_dict().items()}  # SMP keeps states in fp32
        self.states = self.optimizer.state_dict()

    def mine(self, pp: int, tp: int) -> list[str]:
        """The parameters of a rank, in the order of the model."""
        stage = {n: s * (self.pp - 1) for n, s in STAGE.items()}
        return [n for n in self.weights if stage[n] == pp and (n != ONE_RANK or not tp)]

    def model(self, pp: int, tp: int) -> dict[str, Any]:
        held = {n: part(n, self.weights[n], self.tp, tp) for n in self.mine(pp, tp)}
        return {**held, "_smp_is_partial": True, "_smp_load_info": load_info(self.pp, self.tp)}

    def order(self, tp: int) -> list[str]:
        """The parameters of a tp rank, all stages together, in the order of the optimizer's groups."""
        return [n for n in ORDER if n != ONE_RANK or not tp]

    def optimizer_state(self, pp: int, tp: int) -> dict[str, Any]:
        names, mine = self.order(tp), self.mine(pp, tp)
        state: dict[int, Any] = {}
        for number, name in enumerate(names):
            if name in mine:
                whole = self.states["state"][ORDER.index(name)]
                emptied = tp and name not in CUT
                state[number] = {} if emptied else {k: part(name, v, self.tp, tp) for k, v in whole.items()}
        sizes = [sum(len(self.weights[n].shape) > 1 for n in names), len(names)]
        numbers = (list(range(sizes[0])), list(range(sizes[0], sizes[1])))
        groups = [{**g, "params": n} for g, n in zip(self.states["param_groups"], numbers, strict=True)]
        return {"state": state, "param_groups": groups, "_smp_is_partial": True}

    def write(self, prefix: Path, content: Callable[[Job, int, int], Any] | None = None) -> Path:
        for pp in range(self.pp):
            for tp in range(self.tp):
                held = {"model": self.model(pp, tp), "optimizer": self.optimizer_state(pp, tp)}
                torch.save(held if content is None else content(self, pp, tp), f"{prefix}_{pp}_{tp}.pt")
        return prefix

    def check(self, path: Path, *, optimizer: bool = True, **options: Any) -> xla_ckpt.Loaded:
        """Load into another model and optimizer, and compare bit for bit."""
        net, other = trained(1, seed=1)
        net = net.to(next(iter(self.weights.values())).dtype)
        given = {"optimizer": other} if optimizer else {}
        found = xla_ckpt.load_checkpoint(path, model=net, **given, **options)
        assert all(torch.equal(value, net.state_dict()[name]) for name, value in self.weights.items())
        for number, members in self.states["state"].items() if optimizer else ():
            mine = other.state_dict()["state"][number]
            assert all(torch.equal(value, mine[key]) for key, value in members.items()), ORDER[number]
        return found
