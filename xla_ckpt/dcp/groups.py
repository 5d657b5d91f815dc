"""The process groups in which DCP's calls meet: groups of their own, where those of the program will not do."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from xla_ckpt.job.call import Call, different_calls

Purpose = Literal["call", "background"]

_meetings: dict[tuple[int, Purpose], tuple[Any, Any]] = {}
"""(identity of a group, purpose) -> that group, and the one that was made for its ranks."""


def is_distributed(no_dist: bool) -> bool:
    """Whether a call is made by several ranks together; also by a group of one."""
    return not no_dist and bool(dist.is_available() and dist.is_initialized())


def meeting(process_group: Any, purpose: Purpose) -> Any:
    """The group in which the ranks of `process_group` (None: all) meet for a call of DCP's.

    A call in the background gets a group of its own: its messages must not mix with those of training, which may use
    the same group at the same time. So does a call in a group that cannot talk about values in host memory, as with
    the backends ``xla`` and ``nccl``. It has the timeout of the first one. All ranks of the group have to call this
    alike.
    """
    group: Any = process_group if process_group is not None else dist.group.WORLD
    if purpose == "call" and torch.device("cpu") in group._device_types:
        return process_group
    key = id(group), purpose
    known = _meetings.get(key)
    if known is None or known[0] is not group or known[1] not in distributed_c10d._world.pg_map:
        ranks = dist.get_process_group_ranks(group)
        # torch_xla puts a function in the place of dist.new_group that does not know this argument.
        gloo_group = distributed_c10d.new_group(
            ranks, backend="gloo", timeout=timeout_of(group), use_local_synchronization=True
        )
        known = _meetings[key] = (group, gloo_group)
    return known[1]


def check_same(call: Call, group: Any) -> None:
    """Compare the calls of the ranks of a group, before anything is done: as `xla_ckpt.job.job.Job.begin` does it.

    Raises:
        UsageError: They differ; the same on all ranks.
    """
    calls: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(calls, call, group)
    if (different := different_calls(calls)) is not None:
        raise different


def timeout_of(process_group: Any) -> datetime.timedelta:
    """How long the ranks of a group (None: all) wait for each other; torch's default if its backend does not say so."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout
