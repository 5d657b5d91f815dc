"""SMP's ranks, sizes and groups of this process, and its global state.

SMP's tensor parallelism is inside of data parallelism. With ``pp`` partitions, ``tp`` tensor-parallel ranks and ``rdp``
(reduced data parallel) replicas of those:

==========  ======================================================  ====================================
rank        index among                                             size
==========  ======================================================  ====================================
`pp_rank`   partitions of the pipeline                              ``pp``
`tp_rank`   tensor-parallel ranks                                   ``tp``
`rdp_rank`  ranks that hold the same parameters                     ``rdp = size / (pp * tp)``
`dp_rank`   ``tp_rank + tp * rdp_rank``                             ``size / pp``
`mp_rank`   ``tp_rank + tp * pp_rank``                              ``pp * tp``
==========  ======================================================  ====================================

The ranks are ordered as in `xla_ckpt.Mesh` (pp outermost, then dp, tp innermost) for any `placement_strategy`, because
programs and checkpoints use the ranks above, not global ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuron_compat.lazy_imports import import_module
from neuron_compat.smp.errors import DDPNotEnabledError, NotInitializedError, SMPRuntimeError
from xla_ckpt import Mesh
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

GROUP_KINDS = {"world": "world", "pp": "pp", "tp": "tp", "rdp": "dp", "dp": "dp_tp", "mp": "pp_tp"}
"""SMP's kind of group -> the kind in `neuron_compat.groups`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Ranks and groups of this process in its job."""

    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    groups: dict[str, list[int]]
    """Kind -> the ranks of this process's group."""
    process_groups: dict[str, Any]
    """Kind -> its process group (gloo); empty without torch.distributed."""

    def get_rank(self, kind: str) -> int:
        """Return this process's rank in its group."""
        return self.groups[kind].index(self.rank)


PendingLoad = Callable[[Any, Any], None]


class State:
    """Global SMP state of this process.

    Attributes:
        cfg: The configuration; None before `init`.
        rank_info: Ranks and groups of this process; None before `init`.
        model: The `DistributedModel`; None before it is created.
        optimizer: The last result of `DistributedOptimizer`; None before that.
        pending_loads: Loads that wait for the model and the optimizer. Each is called with (model, optimizer) as soon
            as both exist, and then removed. If the model is used before there is an optimizer, each is first called
            with (model, None), once.
    """

    def __init__(self) -> None:
        self.cfg: Any = None
        self.rank_info: RankInfo | None = None
        self.model: Any = None
        self.optimizer: Any = None
        self.pending_loads: list[PendingLoad] = []
        self._applied_loads: list[PendingLoad] = []
        """Loads that were called with only the model, or are being called."""
        self.initialized_implicitly = False
        """True if the configuration came from the parallel state or the environment, not from a call of `init`."""

    @property
    def initialized(self) -> bool:
        """True if `init` was called."""
        return self.rank_info is not None

    def num_microbatches(self) -> int:
        """Return the number of microbatches in a step."""
        return int(self.cfg.microbatches) if self.cfg is not None else 1

    def apply_pending_loads(self) -> None:
        """Call the pending loads whose objects exist; see `pending_loads`."""
        if self.model is None:
            return
        if self.optimizer is None:
            waiting = [call for call in self.pending_loads if call not in self._applied_loads]
        else:
            waiting, self.pending_loads = self.pending_loads, []
        self._applied_loads = [
            *self._applied_loads,
            *waiting,
        ]  # a load may use the model, which calls this method again
        for call in waiting:
            call(self.model, self.optimizer)


state = State()


def is_initialized() -> bool:
    """Return True if `init` was called, or if a rank was requested that was known without it."""
    return state.initialized


def reset() -> None:
    """Remove the model and the optimizer, so that others can be wrapped."""
    state.model = state.optimizer = None
    state.pending_loads, state._applied_loads = [], []


def get_rank_info() -> RankInfo:
    """Return this process's ranks. The first call initializes from the parallel state or the environment, if possible.

    Raises:
        NotInitializedError: Neither is set.
    """
    known = _get_rank_info_if_known()
    if known is None:
        raise NotInitializedError("smp is not initialized!", hint="Call smp.init(config) first.")
    return known


def _get_rank_info_if_known() -> RankInfo | None:
    """Return this process's ranks; None if they are unknown."""
    if state.rank_info is None:
        # The only entry from these calls to the emulation. It is imported lazily, because a program that has
        # initialized its ranks itself does not need it.
        import_module("neuron_compat.emulated.smp.setup").init_if_known()
    return state.rank_info


# -- ranks and sizes


def rank() -> int:
    """Return this process's rank in the job.

    Raises:
        NotInitializedError: `init` was not called. (All rank functions here raise it; sizes are then 1.)
    """
    return get_rank_info().rank


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return get_rank_info().local_rank


def local_size() -> int:
    """Return the number of processes on this machine."""
    known = _get_rank_info_if_known()
    return 1 if known is None else known.local_size


def _get_rank(kind: str) -> int:
    return get_rank_info().get_rank(kind)


def _get_size(kind: str) -> int:
    known = _get_rank_info_if_known()
    return 1 if known is None else len(known.groups[kind])


size = functools.partial(_get_size, "world")
"""Number of processes of the job."""

pp_rank, pp_size = functools.partial(_get_rank, "pp"), functools.partial(_get_size, "pp")
tp_rank, tp_size = functools.partial(_get_rank, "tp"), functools.partial(_get_size, "tp")
rdp_rank, rdp_size = functools.partial(_get_rank, "rdp"), functools.partial(_get_size, "rdp")
dp_rank, dp_size = functools.partial(_get_rank, "dp"), functools.partial(_get_size, "dp")
"""Ranks and sizes of the table above. With tensor parallelism, use `rdp_rank` to select the ranks that save."""


def mp_rank() -> int:
    """Return ``tp_rank() + tp_size() * pp_rank()``; with tensor parallelism, log a warning about it once."""
    number = get_rank_info().get_rank("mp")
    if tp_size() > 1:
        _warn_about_mp("mp_rank", "the rank among pipeline-parallel processes only, use pp_rank()")
    return number


def mp_size() -> int:
    """Return ``pp_size() * tp_size()``; with tensor parallelism, log a warning about it once."""
    if tp_size() > 1:
        _warn_about_mp("mp_size", "the pipeline parallelism degree, use pp_size()")
    return _get_size("mp")


@functools.cache
def _warn_about_mp(name: str, instead: str) -> None:
    logger.warning(
        "Using %s(). When tensor-parallel degree is more than 1, %s() counts all model-parallel processes, including "
        "pipeline parallelism and tensor parallelism. If you would like to get %s.",
        name,
        name,
        instead,
    )


def instance_id() -> int:
    """Return the index of this process's machine."""
    here = get_rank_info()
    return int(os.environ.get("GROUP_RANK", here.rank // here.local_size))


def is_multi_node() -> bool:
    """Return True if the job runs on several machines."""
    return size() > local_size()


def num_microbatches() -> int:
    """Return the number of microbatches in a step (``microbatches``)."""
    return state.num_microbatches()


# -- groups


def _get_group(kind: str) -> list[int]:
    return list(get_rank_info().groups[kind])


get_pp_group = functools.partial(_get_group, "pp")
get_tp_group = functools.partial(_get_group, "tp")
get_rdp_group = functools.partial(_get_group, "rdp")
get_dp_group = functools.partial(_get_group, "dp")
get_mp_group = functools.partial(_get_group, "mp")
"""Ranks of this process's pipeline; of its tensor-parallel group; those that hold the same parameters; those that own
the same partition; and those that together hold a model.
"""


def get_process_group(kind: str) -> Any:
    """Return the process group (gloo) of a kind.

    Raises:
        NotInitializedError: `init` was not called.
        SMPRuntimeError: torch.distributed is not initialized, because this is the only process.
    """
    groups = get_rank_info().process_groups
    if not groups:
        raise SMPRuntimeError("there are no process groups: torch.distributed is not initialized")
    return groups[kind]


def _get_ddp_process_group(kind: str) -> Any:
    """Return the process group of a kind, if ``ddp`` is True.

    Raises:
        DDPNotEnabledError: ``ddp`` is False.
    """
    get_rank_info()
    if not state.cfg.ddp:
        raise DDPNotEnabledError("Torch.dist is not initialized. Please enable DDP in config to use torch.dist")
    return get_process_group(kind)


get_world_process_group = functools.partial(_get_ddp_process_group, "world")
get_dp_process_group = functools.partial(_get_ddp_process_group, "dp")
get_rdp_process_group = functools.partial(_get_ddp_process_group, "rdp")
get_tp_process_group = functools.partial(_get_ddp_process_group, "tp")
get_pp_process_group = functools.partial(_get_ddp_process_group, "pp")
"""Process groups of the same ranks, and of all ranks. They need ``ddp: True``, except for `mp`.

Raises:
    DDPNotEnabledError: ``ddp`` is False.
    NotInitializedError: `init` was not called.
    SMPRuntimeError: This is the only process, without torch.distributed.
"""

get_mp_process_group = functools.partial(get_process_group, "mp")
"""Process group of `get_mp_group`."""
