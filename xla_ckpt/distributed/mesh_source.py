"""Find the device mesh of the training library: neuronx-distributed's, or that of a registered source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import check_arguments

NXD_PARALLEL_STATE = "neuronx_distributed.parallel_layers.parallel_state"
"""neuronx-distributed's module, which is asked if the program has imported it."""

_sources: list[Callable[[], Mesh | None]] = []


@check_arguments
def add_mesh_source(source: Callable[[], Mesh | None]) -> None:
    """Have saves and loads without a ``mesh=`` ask a training library how it has arranged the ranks.

    It is asked in every such call, on every rank. Sources are asked in the order in which they were added, after
    neuronx-distributed, and the first answer counts.

    Args:
        source: Returns the mesh, ranks in the order that `Mesh` describes; None while nothing is set up.
    """
    if source not in _sources:
        _sources.append(source)


def get_current_mesh(rank: int, world_size: int) -> Mesh | None:
    """The mesh of an initialised parallel state; None if there is none.

    Raises:
        UsageError: neuronx-distributed's groups are not in the rank order that this library knows.
    """
    state = sys.modules.get(NXD_PARALLEL_STATE)
    if state is not None and state.model_parallel_is_initialized():
        return _check_rank_order(_read_nxd_mesh(state, world_size), state, rank)
    return next((mesh for source in _sources if (mesh := source()) is not None), None)


def _read_nxd_mesh(state: Any, world_size: int) -> Mesh:
    tp, pp = state.get_tensor_model_parallel_size(), state.get_pipeline_model_parallel_size()
    cp = _get_optional_size(state, "get_context_model_parallel_size", "get_context_parallel_size")
    ep = _get_optional_size(state, "get_expert_model_parallel_size")
    return Mesh(pp=pp, dp=max(world_size // (pp * cp * tp), 1), ep=ep, cp=cp, tp=tp)


def _get_optional_size(state: Any, *names: str) -> int:
    getter = next((getattr(state, name) for name in names if hasattr(state, name)), None)
    return 1 if getter is None else int(getter())


def _check_rank_order(mesh: Mesh, state: Any, rank: int) -> Mesh:
    tp_and_pp = (state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank())
    at = mesh.coordinates(rank) if rank < mesh.size else {}
    if (at.get("tp"), at.get("pp")) != tp_and_pp:
        raise UsageError(
            f"{NXD_PARALLEL_STATE} arranges the ranks in another order than this library knows",
            rank=rank,
            expected=f"tp rank {at.get('tp')}, pp rank {at.get('pp')} in {mesh}",
            found=f"tp {tp_and_pp[0]}, pp {tp_and_pp[1]}",
            hint="Only pp, dp, cp, tp from the outside to the inside is supported.",
        )
    return mesh


def has_adjacent_kv_replicas() -> bool:
    """Whether neuronx-distributed has neighbouring ranks hold the same keys and values, as it does on trn2.

    Elsewhere they are repeated as a whole: ranks that hold the same are tp / kv_size_multiplier ranks apart.
    """
    groups = getattr(sys.modules.get(NXD_PARALLEL_STATE), "_KV_SHARED_GROUP_SPMD", None)
    first = list(groups[0]) if groups else []
    return len(first) > 1 and first[1] - first[0] == 1
