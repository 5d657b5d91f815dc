"""Collective and point-to-point communication of picklable objects, with SMP's calls, over gloo.

`broadcast` only sends: the receiving ranks call `recv_from`, as in SMP. Objects are pickled, and come only from ranks
of this job.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import torch

from neuron_compat.smp import job
from neuron_compat.smp.errors import InvalidCommGroupError, SMPInvalidArgumentError

distributed: Any = torch.distributed


class CommGroup(Enum):
    """Kind of a group of ranks."""

    WORLD = 0
    PP_GROUP = 1
    TP_GROUP = 2
    RDP_GROUP = 3
    DP_GROUP = 4
    MP_GROUP = 5

    def get_rank_type(self) -> RankType:
        """Return the type of the ranks in the group."""
        return RankType(self.value)


class RankType(Enum):
    """Kind of a rank: its index in the group of the same name."""

    WORLD_RANK = 0
    PP_RANK = 1
    TP_RANK = 2
    RDP_RANK = 3
    DP_RANK = 4
    MP_RANK = 5

    def get_comm_group(self) -> CommGroup:
        """Return the group that the rank belongs to."""
        return CommGroup(self.value)


WORLD = CommGroup.WORLD
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
DP_GROUP = CommGroup.DP_GROUP
MP_GROUP = CommGroup.MP_GROUP

_GROUP_KINDS = {WORLD: "world", PP_GROUP: "pp", TP_GROUP: "tp", RDP_GROUP: "rdp", DP_GROUP: "dp", MP_GROUP: "mp"}


def _get_members(group: Any) -> tuple[str, list[int]]:
    """Return the kind of a group, and the global ranks of its members."""
    if group not in _GROUP_KINDS:
        raise InvalidCommGroupError(
            f"Invalid group {group} passed, it needs to be one of CommGroup.WORLD, CommGroup.PP_GROUP, "
            "CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.RDP_GROUP, CommGroup.MP_GROUP"
        )
    return _GROUP_KINDS[group], job.get_rank_info().groups[_GROUP_KINDS[group]]


def _find_peer(rank: int, rank_type: Any) -> tuple[int, Any]:
    """Return (global rank, process group) of another member of one of this process's groups."""
    if not isinstance(rank_type, RankType):
        raise SMPInvalidArgumentError("rank_type is one of smp.RankType", found=repr(rank_type))
    kind, ranks = _get_members(rank_type.get_comm_group())
    if not 0 <= rank < len(ranks):
        raise SMPInvalidArgumentError(
            f"there is no {rank_type.name} of this number", expected=f"0 to {len(ranks) - 1}", found=rank
        )
    if ranks[rank] == job.rank():
        raise SMPInvalidArgumentError("a rank does not send to itself, or receive from itself", found=rank)
    return ranks[rank], job.get_process_group(kind)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Gather the objects of all ranks of a group, in rank order. Call it on all ranks of the group."""
    kind, ranks = _get_members(group)
    if len(ranks) == 1:
        return [obj]
    objects: list[Any] = [None] * len(ranks)
    distributed.all_gather_object(objects, obj, group=job.get_process_group(kind))
    return objects


def gather(obj: Any, group: CommGroup, rank: int = 0) -> list[Any] | None:
    """Gather the objects of all ranks of a group on its `rank`; return None on the others. Call it on all of them."""
    kind, ranks = _get_members(group)
    if not 0 <= rank < len(ranks):
        raise SMPInvalidArgumentError(f"{group.name} has no such rank", expected=f"0 to {len(ranks) - 1}", found=rank)
    if len(ranks) == 1:
        return [obj]
    objects: list[Any] | None = [None] * len(ranks) if ranks[rank] == job.rank() else None
    distributed.gather_object(obj, objects, dst=ranks[rank], group=job.get_process_group(kind))
    return objects


def broadcast(obj: Any, group: CommGroup) -> Any:
    """Send an object to all other ranks of a group, which call `recv_from`; return the object."""
    kind, ranks = _get_members(group)
    for peer in ranks:
        if peer != job.rank():
            distributed.send_object_list([obj], dst=peer, group=job.get_process_group(kind))
    return obj


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to a rank, which calls `recv_from`."""
    peer, group = _find_peer(dest_rank, rank_type)
    distributed.send_object_list([obj], dst=peer, group=group)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that a rank sends to this one with `send` or `broadcast` in the same kind of group."""
    peer, group = _find_peer(src_rank, rank_type)
    received: list[Any] = [None]
    distributed.recv_object_list(received, src=peer, group=group)
    return received[0]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait for all ranks of a group."""
    kind, ranks = _get_members(group)
    if len(ranks) > 1:
        distributed.barrier(group=job.get_process_group(kind))


pp_barrier = functools.partial(barrier, PP_GROUP)
tp_barrier = functools.partial(barrier, TP_GROUP)
rdp_barrier = functools.partial(barrier, RDP_GROUP)
dp_barrier = functools.partial(barrier, DP_GROUP)
mp_barrier = functools.partial(barrier, MP_GROUP)
"""`barrier` for one kind of group each."""
