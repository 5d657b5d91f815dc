"""The toy state as DTensors: FSDP2, HSDP, tensor parallelism, and FSDP2 over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.topology.state import WHOLE, Toy, adamw, known, whole
from xla_ckpt import Mesh

RECIPES = ("fsdp2", "hsdp", "torch_tp", "tp_fsdp")


def sharded(recipe: str, value: Callable[[str], torch.Tensor]) -> Toy:
    """A module with these values, parallelised; `WHOLE`'s names, uneven and empty shards included."""
    world = torch.distributed.get_world_size()
    toy = Toy(Mesh(), 0)
    with torch.no_grad():
        for name, parameter in toy.by_name.items():
            parameter.copy_(value(name))
    if recipe == "fsdp2":
        fully_shard(toy, mesh=init_device_mesh("cpu", (world,)))
        return toy
    names = ("replicate", "shard") if recipe == "hsdp" else ("dp", "tp")
    parts = world if recipe == "torch_tp" else 2
    mesh = init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=names)
    if recipe == "hsdp":
        fully_shard(toy, mesh=mesh)
        return toy
    for name, (_, dim, _) in WHOLE.items():
        if dim is not None:
            parent: Any = toy
            *path, last = name.split(".")
            for step in path:
                parent = getattr(parent, step)
            part = distribute_tensor(getattr(parent, last).detach(), mesh["tp"], [Shard(dim)])
            setattr(parent, last, torch.nn.Parameter(part))
    if recipe == "tp_fsdp":
        fully_shard(toy, mesh=mesh["dp"])
    return toy


def make(recipe: str, *, blank: bool) -> tuple[Toy, dict[str, Any], torch.optim.AdamW]:
    """Module, parameters by name, and an optimizer that holds the known state (or, blank, none)."""
    toy = sharded(recipe, (lambda n: torch.full_like(whole(n), -7.0)) if blank else whole)
    toy.seen.fill_(0.0 if blank else 5.0)
    by_name = dict(toy.named_parameters())
    optimizer = adamw(by_name)
    if not blank:
        states = {what: dict(sharded(recipe, lambda n, w=what: known(n, w)).named_parameters())
                  for what in ("exp_avg", "exp_avg_sq")}  # fmt: skip
        for name, parameter in by_name.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(7.0), **{what: states[what][name].detach() for what in states}
            }  # fmt: skip
    return toy, by_name, optimizer


def differences(recipe: str, by_name: dict[str, Any], optimizer: torch.optim.AdamW) -> list[str]:
    """What is not the known state, compared by local parts: torch's `full_tensor` is wrong for uneven strided ones."""
    bad = []
    _, right, good = make(recipe, blank=False)
    for name, parameter in by_name.items():
        for what in ("weight", "exp_avg", "exp_avg_sq", "step"):
            found, want = (
                (p if what == "weight" else o.state[p][what]) for p, o in ((parameter, optimizer), (right[name], good))
            )
            assert isinstance(found, DTensor) == isinstance(want, DTensor)
            if isinstance(found, DTensor):
                assert found.placements == want.placements
                found, want = found.to_local(), want.to_local()
            if not torch.equal(found, want):
                bad.append(f"{name} {what}")
    return bad
