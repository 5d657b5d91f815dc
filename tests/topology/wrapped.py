"""The toy state in modules that wrap it: DistributedDataParallel, and FSDP1's FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tests.topology.state import WHOLE, Toy, adamw, known, whole
from xla_ckpt import Mesh

RECIPES = ("ddp", "fsdp1")
STATES = ("exp_avg", "exp_avg_sq")


def wrapped(recipe: str, value: Callable[[str], torch.Tensor], seen: float) -> Any:
    """A module with these values. FSDP1 cuts its one flat parameter anywhere, and some ranks have nothing of some."""
    toy = Toy(Mesh(), 0)
    with torch.no_grad():
        for name, parameter in toy.by_name.items():
            parameter.copy_(value(name))
        toy.seen.fill_(seen)
    if recipe == "ddp":
        return DistributedDataParallel(toy)
    return FullyShardedDataParallel(toy, use_orig_params=True, device_id=torch.device("cpu"))


def named(module: Any) -> dict[str, torch.nn.Parameter]:
    """Its parameters under `WHOLE`'s names; of FSDP1 what this rank has of them, without dims."""
    own = {n.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p for n, p in module.named_parameters()}
    assert own.keys() == WHOLE.keys()
    return own


def make(recipe: str, *, blank: bool) -> tuple[Any, torch.optim.AdamW]:
    """Module, and an optimizer that holds the known state (or, blank, none)."""
    module = wrapped(recipe, (lambda n: torch.full_like(whole(n), -7.0)) if blank else whole, 0.0 if blank else 5.0)
    by_name = named(module)
    optimizer = adamw(by_name)
    if not blank:
        states = {what: named(wrapped(recipe, lambda n, w=what: known(n, w), 5.0)) for what in STATES}
        for name, parameter in by_name.items():
            moments = {what: states[what][name].detach().clone() for what in STATES}
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    return module, optimizer


def differences(recipe: str, module: Any, optimizer: torch.optim.AdamW) -> list[str]:
    """What is not the known state."""
    right, good = make(recipe, blank=False)
    bad = []
    for (name, found), want in zip(named(module).items(), named(right).values(), strict=True):
        if not torch.equal(found, want):
            bad.append(f"{name} weight")
        if want.numel():
            held = optimizer.state[found]
            bad += [f"{name} {w}" for w in (*STATES, "step") if not torch.equal(held[w], good.state[want][w])]
    return bad
