"""The mesh that a training library has set up: neuronx-distributed's `parallel_state`, or one that answers alike."""

from __future__ import annotations

import sys
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.mesh import Mesh

HOMES = ("neuronx_distributed.parallel_layers.parallel_state", "neuron_compat.nxd.parallel_layers.parallel_state")
"""Modules that are asked, if the program has imported them."""


def current_mesh(rank: int, world: int) -> Mesh | None:
    """The mesh of an initialised parallel state; None if there is none.

    Raises:
        UsageError: Its groups are not in neuronx-distributed's rank order.
    """
    for home in HOMES:
        state = sys.modules.get(home)
        if state is not None and state.model_parallel_is_initialized():
            return _checked(_read(state, world), state, rank, home)
    return None


def _read(state: Any, world: int) -> Mesh:
    tp, pp = state.get_tensor_model_parallel_size(), state.get_pipeline_model_parallel_size()
    cp = _optional(state, "get_context_model_parallel_size", "get_context_parallel_size")
    ep = _optional(state, "get_expert_model_parallel_size")
    return Mesh(pp=pp, dp=max(world // (pp * cp * tp), 1), ep=ep, cp=cp, tp=tp)


def _optional(state: Any, *names: str) -> int:
    found = next((getattr(state, name) for name in names if hasattr(state, name)), None)
    return 1 if found is None else int(found())


def _checked(mesh: Mesh, state: Any, rank: int, home: str) -> Mesh:
    mine = (state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank())
    at = mesh.coordinates(rank) if rank < mesh.size else {}
    if (at.get("tp"), at.get("pp")) != mine:
        raise UsageError(
            f"{home} arranges the ranks in another order than this library knows", rank=rank,
            expected=f"tp rank {at.get('tp')}, pp rank {at.get('pp')} in {mesh}", found=f"tp {mine[0]}, pp {mine[1]}",
            hint="Only pp, dp, cp, tp from the outside to the inside is supported.",
        )  # fmt: skip
    return mesh
