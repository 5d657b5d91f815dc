"""Which rank is what, by SMP's names, and what the process has set up.

SMP runs tensor parallelism inside of data parallelism. With ``pp`` partitions, ``tp`` tensor-parallel ranks and ``rdp``
(reduced data parallel) replicas of those:

==========  ======================================================  ====================================
rank        counts                                                  size
==========  ======================================================  ====================================
`pp_rank`   partitions of the pipeline                              ``pp``
`tp_rank`   tensor-parallel ranks                                   ``tp``
`rdp_rank`  ranks that hold the same parameters                     ``rdp = size / (pp * tp)``
`dp_rank`   ``tp_rank + tp * rdp_rank``                             ``size / pp``
`mp_rank`   ``tp_rank + tp * pp_rank``                              ``pp * tp``
==========  ======================================================  ====================================

The order of the ranks is that of `xla_ckpt.Mesh` (pp outermost, then dp, tp innermost), whatever `placement_strategy`
says: programs and checkpoints go by the ranks above, not by the place of a rank in the world.
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
"""SMP's kind of group -> that of `neuron_compat.groups`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where this process stands in its job."""

    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    groups: dict[str, list[int]]
    """Kind -> the ranks of this process' group."""
    process_groups: dict[str, Any]
    """Kind -> its process group (gloo); empty without torch.distributed."""

    def get_rank(self, kind: str) -> int:
        """This process' rank in its group."""
        return self.groups[kind].index(self.rank)


PendingLoad = Callable[[Any, Any], None]


class State:
    """What this process has set up.

    Attributes:
        cfg: The configuration; None before `init`.
        ranks: Where this process stands; None before `init`.
        model: The `DistributedModel`; None before there is one.
        optimizer: What `DistributedOptimizer` returned last; None before that.
        pending: Loads that wait for what they load into. Each is called with (model, optimizer) as soon as both are
            there, and removed then. If the model is used before there is an optimizer, each is first called with
            (model, None), once.
    """

    def __init__(self) -> None:
        self.cfg: Any = None
        self.rank_info: RankInfo | None = None
        self.model: Any = None
        self.optimizer: Any = None
        self.pending_loads: list[PendingLoad] = []
        self._applied_loads: list[PendingLoad] = []
        """Those that were called with the model alone, or are being called."""
        self.initialized_implicitly = False
        """Whether the configuration was read from what was there, and not given to `init`."""

    @property
    def initialized(self) -> bool:
        """Whether `init` was called."""
        return self.rank_info is not None

    def num_microbatches(self) -> int:
        """Into how many parts a step splits a batch."""
        return int(self.cfg.microbatches) if self.cfg is not None else 1

    def apply_pending_loads(self) -> None:
        """Make the calls that can be made: see `pending_loads`."""
        if self.model is None:
            return
        if self.optimizer is None:
            waiting = [call for call in self.pending_loads if call not in self._applied_loads]
        else:
            waiting, self.pending_loads = self.pending_loads, []
        self._applied_loads = [
            *self._applied_loads,
            *waiting,
        ]  # such a call may use the model, which brings us here again
        for call in waiting:
            call(self.model, self.optimizer)


state = State()


def is_initialized() -> bool:
    """Whether `init` was called, or a rank was asked for that was known without it."""
    return state.initialized


def reset() -> None:
    """Forget the model and the optimizer, so that others can be wrapped."""
    state.model = state.optimizer = None
    state.pending_loads, state._applied_loads = [], []


def get_rank_info() -> RankInfo:
    """Where this process stands. The first call initialises, if the parallel state or the environment say how.

    Raises:
        NotInitializedError: They do not.
    """
    known = _get_rank_info_if_known()
    if known is None:
        raise NotInitializedError("smp is not initialized!", hint="Call smp.init(config) first.")
    return known


def _get_rank_info_if_known() -> RankInfo | None:
    """Where this process stands; None if nothing says it."""
    if state.rank_info is None:
        # The one door from the calls to the emulation. It is not opened by an import: a program that has set up its
        # ranks itself has no use for what is behind it.
        import_module("neuron_compat.emulated.smp.setup").init_if_known()
    return state.rank_info


# -- ranks and sizes


def rank() -> int:
    """This process' rank in the job.

    Raises:
        NotInitializedError: `init` was not called. (So do all ranks here; sizes are 1 then.)
    """
    return get_rank_info().rank


def local_rank() -> int:
    """This process' rank on its machine."""
    return get_rank_info().local_rank


def local_size() -> int:
    """Number of processes on this machine."""
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
"""The ranks and sizes of the table above. With tensor parallelism, ask `rdp_rank` which ranks save."""


def mp_rank() -> int:
    """``tp_rank() + tp_size() * pp_rank()``; with tensor parallelism a warning says so, once."""
    number = get_rank_info().get_rank("mp")
    if tp_size() > 1:
        _warn_about_mp("mp_rank", "the rank among pipeline-parallel processes only, use pp_rank()")
    return number


def mp_size() -> int:
    """``pp_size() * tp_size()``; with tensor parallelism a warning says so, once."""
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
    """The number of this process' machine."""
    here = get_rank_info()
    return int(os.environ.get("GROUP_RANK", here.rank // here.local_size))


def is_multi_node() -> bool:
    """Whether the job runs on several machines."""
    return size() > local_size()


def num_microbatches() -> int:
    """Into how many parts a step splits a batch (``microbatches``)."""
    return state.num_microbatches()


# -- groups


def _get_group(kind: str) -> list[int]:
    return list(get_rank_info().groups[kind])


get_pp_group = functools.partial(_get_group, "pp")
get_tp_group = functools.partial(_get_group, "tp")
get_rdp_group = functools.partial(_get_group, "rdp")
get_dp_group = functools.partial(_get_group, "dp")
get_mp_group = functools.partial(_get_group, "mp")
"""The ranks of this process' pipeline; of its tensor-parallel group; those that hold the same parameters; that own the
same partition; and that hold a model together with it."""


def get_process_group(kind: str) -> Any:
    """The process group (gloo) of a kind.

    Raises:
        NotInitializedError: `init` was not called.
        SMPRuntimeError: torch.distributed was not initialised, because this process works alone.
    """
    groups = get_rank_info().process_groups
    if not groups:
        raise SMPRuntimeError("there are no process groups: torch.distributed is not initialized")
    return groups[kind]


def _get_ddp_process_group(kind: str) -> Any:
    """As `get_process_group`, where ``ddp`` is on."""
    get_rank_info()
    if not state.cfg.ddp:
        raise DDPNotEnabledError("Torch.dist is not initialized. Please enable DDP in config to use torch.dist")
    return get_process_group(kind)


get_world_process_group = functools.partial(_get_ddp_process_group, "world")
get_dp_process_group = functools.partial(_get_ddp_process_group, "dp")
get_rdp_process_group = functools.partial(_get_ddp_process_group, "rdp")
get_tp_process_group = functools.partial(_get_ddp_process_group, "tp")
get_pp_process_group = functools.partial(_get_ddp_process_group, "pp")
"""The process groups of the same ranks, and that of all. They need ``ddp: True``; that of `mp` does not.

Raises:
    DDPNotEnabledError: ``ddp`` is False.
    NotInitializedError: `init` was not called.
    SMPRuntimeError: This process works alone, without torch.distributed.
"""

get_mp_process_group = functools.partial(get_process_group, "mp")
"""The process group of `get_mp_group`."""
