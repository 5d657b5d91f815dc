"""Every way to hold the toy state, by name: what the ranks of a test job save, and load as something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.topology import dtensors, wrapped
from tests.topology.state import Toy, adamw, annotate, differences, fill, zero1
from tests.xla import HAS_XLA
from xla_ckpt import Mesh

HALF = "bf16"


def possible(*kinds: str) -> tuple[str, ...]:
    """Those of some kinds that there are in this environment: the ZeRO-1 optimizer is torch_xla's."""
    return tuple(kind for kind in kinds if HAS_XLA or "zero1" not in kind)


def pairs(sources: Sequence[str], kinds: Sequence[str], every: int = 1) -> list[tuple[str, str]]:
    """(who saved, who loads): every one, or every third: another third for each that saved. So each kind loads.

    Each one that saved is loaded, too, if there are as many kinds.
    """
    return [(s, k) for i, s in enumerate(sources) for j, k in enumerate(kinds) if (i + j) % every == 0]


def emulate() -> None:
    """Have torch_xla's collectives, which ZeRO-1 uses, reach all ranks of this job; nothing without torch_xla."""
    if HAS_XLA:
        import neuron_compat

        neuron_compat.emulate()


@dataclass
class Held:
    """A training state on this rank."""

    model: Any
    optimizer: Any
    options: dict[str, Any]
    differences: Callable[[], list[str]]


def build(kind: str, *, blank: bool) -> Held:
    """``tp=2,dp=2``, with ``zero1``, ``bf16`` and ``cpu`` after it; or a recipe of `dtensors` or `wrapped`.

    The first ones lie on XLA's device, if it is there, but for those with ``cpu``.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if kind in dtensors.RECIPES:
        toy, by_name, optimizer = dtensors.make(kind, blank=blank)
        return Held(toy, optimizer, {}, lambda: dtensors.differences(kind, by_name, optimizer))
    if kind in wrapped.RECIPES:
        module, optimizer = wrapped.make(kind, blank=blank)
        return Held(module, optimizer, {}, lambda: wrapped.differences(kind, module, optimizer))
    text, *words = kind.split()
    mesh = Mesh.parse(text)
    toy = Toy(mesh, rank, blank=blank, device="xla" if HAS_XLA and "cpu" not in words else "cpu")
    if HALF in words:
        toy.to(torch.bfloat16)
        for name, parameter in toy.named_parameters():
            annotate(parameter, name, mesh.tp)
    by_name = dict(toy.named_parameters())
    masters = HALF in words
    optimizer = zero1(by_name, mesh) if "zero1" in words else adamw(by_name)
    if not blank:
        fill(optimizer, by_name, mesh, rank, masters=masters)
    return Held(
        toy, optimizer, {"mesh": mesh},
        lambda: differences(optimizer, by_name, mesh, rank, masters=masters if "zero1" in words else None),
    )  # fmt: skip
