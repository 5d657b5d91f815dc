"""The process groups in which DCP's calls meet: groups of their own, where those of the program will not do."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class CallRanks:
    """The ranks of one call of DCP's."""

    group: Any
    """The group in which they meet; None for that of all ranks, and in a process alone."""

    no_dist: bool
    rank: int
    world: int

    @classmethod
    def of(cls, process_group: Any, purpose: Purpose, *, no_dist: bool) -> CallRanks:
        """Those of `process_group` (None: all); this process alone, if it has no others, or wants none."""
        if not is_distributed(no_dist):
            return cls(None, no_dist, 0, 1)
        group = _meeting(process_group, purpose)
        return cls(group, no_dist, dist.get_rank(group), dist.get_world_size(group))

    @property
    def seconds(self) -> float:
        """How long they wait for each other."""
        return _timeout(self.group).total_seconds() if is_distributed(self.no_dist) else 0.0

    def gathered(self, value: Any) -> list[Any]:
        """What each of them says."""
        if not is_distributed(self.no_dist):
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values

    def check_same(self, call: Call) -> None:
        """Compare what they call, before anything is done: as `xla_ckpt.job.job.Job.begin` does it.

        Raises:
            UsageError: The calls differ; the same on all ranks.
        """
        if (different := different_calls(self.gathered(call))) is not None:
            raise different


def _meeting(process_group: Any, purpose: Purpose) -> Any:
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
            ranks, backend="gloo", timeout=_timeout(group), use_local_synchronization=True
        )
        known = _meetings[key] = (group, gloo_group)
    return known[1]


def _timeout(process_group: Any) -> datetime.timedelta:
    """How long the ranks of a group (None: all) wait for each other; torch's default if its backend does not say so."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout
