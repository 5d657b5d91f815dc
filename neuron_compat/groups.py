"""Rank groups (replica groups), computed from the mesh. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xla_ckpt import Mesh

FIXED_AXES = {
    "tp": ("pp", "dp", "cp"),
    "pp": ("dp", "cp", "tp"),
    "dp": ("pp", "cp", "tp"),
    "cp": ("pp", "dp", "tp"),
    "ep": ("pp", "edp", "cp", "tp"),
    "edp": ("pp", "ep", "tp"),
    "dp_cp": ("pp", "tp"),
    "dp_tp": ("pp", "cp"),
    "pp_tp": ("dp", "cp"),
    "world": (),
}
"""Kind of group -> the axes along which all members have the same index.

Context-parallel ranks hold the same weights, so they count as replicas of experts (``edp``), as in neuronx-distributed,
and ZeRO-1 also shards its states over them (``dp_cp``).
"""

NXD_NAMES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_model_parallel",
    "ep": "expert_model_parallel",
    "dp": "data_parallel",
    "edp": "expert_data_parallel",
    "kv": "kv_shared",
}
"""Kind of group -> its name in neuronx-distributed's functions."""


def list_rank_groups(mesh: Mesh, kind: str) -> list[list[int]]:
    """Return all groups of a kind, with members and groups in ascending order, as XLA's replica groups.

    >>> from xla_ckpt import Mesh
    >>> list_rank_groups(Mesh(dp=2, tp=2), "tp"), list_rank_groups(Mesh(dp=2, tp=2), "dp")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in FIXED_AXES[kind]), []).append(rank)
    return list(groups.values())


def find_rank_group(mesh: Mesh, kind: str, rank: int) -> list[int]:
    """Return the ranks of a rank's group, in ascending order.

    >>> from xla_ckpt import Mesh
    >>> find_rank_group(Mesh(pp=2, dp=2, tp=2), "pp_tp", 5)
    [0, 1, 4, 5]
    """
    return next(group for group in list_rank_groups(mesh, kind) if rank in group)


def list_kv_groups(tp_groups: list[list[int]], copies: int, adjacent: bool) -> list[list[int]]:
    """Return the groups of ranks with the same keys and values, for one tensor-parallel group after the other.

    Within a tensor-parallel group, they are ordered by the part of the keys and values that they hold.

    >>> list_kv_groups([[0, 1, 2, 3]], 2, adjacent=False), list_kv_groups([[0, 1, 2, 3]], 2, adjacent=True)
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    parts = len(tp_groups[0]) // copies
    slices = [slice(i * copies, (i + 1) * copies) if adjacent else slice(i, None, parts) for i in range(parts)]
    return [ranks[part] for ranks in tp_groups for part in slices]
