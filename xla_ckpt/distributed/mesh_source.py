"""Find the device mesh of the training library: neuronx-distributed, or a registered source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import check_arguments

NXD_PARALLEL_STATE = "neuronx_distributed.parallel_layers.parallel_state"
"""neuronx-distributed module that is queried if the program has imported it."""

_sources: list[Callable[[], Mesh | None]] = []


@check_arguments
def add_mesh_source(source: Callable[[], Mesh | None]) -> None:
    """Register a function that returns the device mesh for saves and loads without ``mesh=``.

    It is called in every such save or load, on every rank. Sources are called in the order of registration, after
    neuronx-distributed, and the first result that is not None is used.

    Args:
        source: Return the mesh, with ranks in the order that `Mesh` describes, or None if parallelism is not
            initialized.
    """
    if source not in _sources:
        _sources.append(source)


def get_current_mesh(rank: int, world_size: int) -> Mesh | None:
    """Return the mesh of an initialized parallel state, or None.

    Raises:
        UsageError: The rank order of the neuronx-distributed groups is unsupported.
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
    """Return True if neuronx-distributed places KV replicas on adjacent ranks, as it does on trn2.

    Otherwise the replicas are tp / kv_size_multiplier ranks apart.
    """
    groups = getattr(sys.modules.get(NXD_PARALLEL_STATE), "_KV_SHARED_GROUP_SPMD", None)
    first = list(groups[0]) if groups else []
    return len(first) > 1 and first[1] - first[0] == 1
