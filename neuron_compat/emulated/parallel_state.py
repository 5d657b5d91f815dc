"""Rank groups of the job: neuronx-distributed's ``parallel_state``, over gloo.

Ranks are arranged as in `xla_ckpt.Mesh`: pp outermost, then dp, cp, and tp innermost; ep divides dp. Saves and loads
read their mesh from here, so that they need no ``mesh=``. If the program has imported the real neuronx-distributed,
and has not initialized this module, calls are delegated to the real one.

Unlike neuronx-distributed on some Trainium machines (tp=4 on trn1, tp=32 or 64 on trn2), ranks are not interleaved.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from neuron_compat.groups import NXD_NAMES, list_kv_groups, list_rank_groups
from neuron_compat.lazy_imports import import_module
from xla_ckpt import Mesh, UsageError, add_mesh_source
from xla_ckpt.facade import check_peers_reachable

P = ParamSpec("P")
R = TypeVar("R")

REAL_MODULE = "neuronx_distributed.parallel_layers.parallel_state"

GROUP_KINDS = ("tp", "pp", "cp", "ep", "dp", "edp", "world")

distributed: Any = torch.distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParallelState:
    """Initialized parallel state."""

    mesh: Mesh
    rank: int
    replica_groups: dict[str, list[list[int]]]
    process_groups: dict[str, Any]
    """This rank's group of each kind; empty without torch.distributed."""

    def get_groups(self, kind: str) -> list[list[int]]:
        """Return the members of all groups of a kind."""
        if kind not in self.replica_groups:
            raise AssertionError("there are no groups of keys and values: call initialize_kv_group() first")
        return self.replica_groups[kind]

    def get_ranks(self, kind: str) -> list[int]:
        """Return the members of this rank's group."""
        return next(g for g in self.get_groups(kind) if self.rank in g)


_current: list[_ParallelState] = []

_groups_to_destroy: list[Any] = []
"""Created process groups, destroyed at exit."""

add_mesh_source(lambda: _current[0].mesh if _current else None)


def _get_real_function(name: str) -> Callable[..., Any] | None:
    """Return the function of the real neuronx-distributed if it is imported and this module is not initialized."""
    real = None if _current else sys.modules.get(REAL_MODULE)
    return None if real is None else getattr(real, name)


def _delegate_to_real(function: Callable[P, R]) -> Callable[P, R]:
    """Delegate calls to the function of the same name in the real neuronx-distributed, if it is in use."""

    @functools.wraps(function)
    def answer(*args: P.args, **kwargs: P.kwargs) -> R:
        asked: Callable[P, R] = _get_real_function(function.__name__) or function
        return asked(*args, **kwargs)

    return answer


def _get_state() -> _ParallelState:
    """Return the state that `initialize_model_parallel` has set up.

    Raises:
        AssertionError: It was not called.
    """
    # neuronx-distributed raises AssertionError here, and its users catch it.
    if not _current:
        raise AssertionError("parallel_state is not initialised: call initialize_model_parallel() first")
    return _current[0]


def _get_group(kind: str, as_list: bool) -> Any:
    """Return the process group of a kind; or the ranks of all groups of the kind, as lists."""
    state = _get_state()
    groups = state.get_groups(kind)
    if as_list:
        return groups
    if kind not in state.process_groups:
        raise AssertionError("there are no process groups: torch.distributed was not initialised")
    return state.process_groups[kind]


def _get_rank(kind: str) -> int:
    """Return the rank of this process in its group of a kind."""
    state = _get_state()
    return state.get_ranks(kind).index(state.rank)


@_delegate_to_real
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,  # noqa: ARG001  # neuronx-distributed's signature
    lnc_size: int = 1,  # noqa: ARG001
    kv_shared_group_size: int | None = None,
) -> None:
    """Arrange the ranks of the job, and create their process groups (gloo). Call it on all ranks.

    If torch.distributed is not initialized, the job consists of this process. The data-parallel size is the number of
    ranks divided by the other sizes. `skip_collective_init` and `lnc_size` are accepted, without effect. With
    `kv_shared_group_size`, it also calls `initialize_kv_group`; otherwise the first `GQAQKVColumnParallelLinear` does.

    Raises:
        RuntimeError: It was called before, or the sizes do not divide the number of ranks.
        xla_ckpt.UsageError: There are other ranks, but no torch.distributed, or an XLA client that does not reach them.
    """
    if _current:
        raise RuntimeError("parallel_state is initialised already; call destroy_model_parallel() first")
    check_peers_reachable()
    joined = distributed.is_available() and distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    if world > 1 and distributed.get_backend() == "xla":
        _check_xla_world_size(world)
    mesh = _build_mesh(
        world,
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
    )
    if kv_shared_group_size is not None:
        _check_kv_group_size(mesh.tp, kv_shared_group_size)
    replica_groups = {kind: list_rank_groups(mesh, kind) for kind in GROUP_KINDS}
    state = _ParallelState(mesh=mesh, rank=rank, replica_groups=replica_groups, process_groups={})
    if joined:
        group_of: dict[tuple[int, ...], Any] = {}
        for kind in GROUP_KINDS:
            ranks = tuple(state.get_ranks(kind))
            if ranks not in group_of:
                group_of[ranks] = create_group(list(ranks))
            state.process_groups[kind] = group_of[ranks]
    _current.append(state)
    if kv_shared_group_size is not None:
        initialize_kv_group(kv_shared_group_size)


def _check_xla_world_size(world: int) -> None:
    """Raise an error if XLA sees only one rank in a job of several, because the first collective would fail."""
    reached = import_module("torch_xla.runtime").world_size()
    if reached < world:
        raise UsageError(
            "XLA's collectives do not reach the other ranks of this job",
            expected=f"{world} devices",
            found=reached,
            hint="On CPUs each process has an XLA of its own: set NEURON_COMPAT_EMULATE=1, or call "
            "neuron_compat.emulate() after init_process_group, or in its place (docs/testing-on-cpus.md).",
        )


def create_group(ranks: list[int]) -> Any:
    """Create a gloo process group. Only its members synchronize, so they must create groups in the same order."""
    # torch_xla replaces torch.distributed.new_group by a function without this argument.
    group = distributed.distributed_c10d.new_group(ranks, backend="gloo", use_local_synchronization=True)
    if not _groups_to_destroy:
        atexit.register(_destroy_groups_at_exit)
    _groups_to_destroy.append(group)
    return group


def _check_kv_group_size(tp: int, copies: int) -> None:
    """Raise an error if key/value groups of this size do not divide the tensor-parallel ranks."""
    if copies < 1 or tp % copies:
        raise RuntimeError(
            f"{tp} tensor-parallel ranks cannot be divided into groups of {copies} (kv_shared_group_size)"
        )


@_delegate_to_real
def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> None:
    """Set the number of tensor-parallel ranks that hold copies of the same keys and values. Call it on all ranks.

    With n tensor-parallel ranks and groups of m, keys and values are sharded into n/m parts. Ranks r, r + n/m, r +
    2n/m, ... hold the same part, as on trn1; with `sequential_ranks_in_group`, ranks m*r, m*r + 1, ..., m*r + m - 1 do,
    as on trn2. All layers of a model share this arrangement; a further call for the same size has no effect.

    Raises:
        AssertionError: `initialize_model_parallel` was not called.
        RuntimeError: The size does not divide the tensor-parallel ranks, or other groups already exist.
    """
    state, copies, adjacent = _get_state(), kv_shared_group_size, sequential_ranks_in_group
    tp_groups, known = state.replica_groups["tp"], state.replica_groups.get("kv")
    if known is not None:
        if len(known[0]) != copies or (adjacent and known != list_kv_groups(tp_groups, copies, adjacent)):
            raise RuntimeError(
                f"groups such as {known[0]} share keys and values already, not of {copies} "
                f"{'neighbouring ' if adjacent else ''}ranks: all layers have the same kv_size_multiplier, and "
                "destroy_kv_group() comes before the layers of another model"
            )
        return
    _check_kv_group_size(state.mesh.tp, copies)
    state.replica_groups["kv"] = list_kv_groups(tp_groups, copies, adjacent)
    if state.process_groups:
        state.process_groups["kv"] = create_group(state.get_ranks("kv"))


@_delegate_to_real
def get_kv_shared_group_size() -> int:
    """Return the number of ranks that hold copies of the same keys and values."""
    return len(_get_state().get_ranks("kv"))


@_delegate_to_real
def destroy_kv_group() -> None:
    """Remove the key/value groups, so that others can be created. Process groups exist until the process ends."""
    for state in _current:
        state.replica_groups.pop("kv", None)
        state.process_groups.pop("kv", None)


def _build_mesh(world: int, tp: int, pp: int, cp: int, ep: int) -> Mesh:
    """Return the mesh for a number of ranks; the remaining factor is the data-parallel size."""
    sizes = f"tensor {tp} x pipeline {pp} x context {cp} parallel"
    if min(tp, pp, cp, ep) < 1 or world % (tp * pp * cp):
        start = f"start a multiple of {tp * pp * cp} (torchrun --nproc_per_node)"
        raise RuntimeError(f"{world} ranks cannot be divided into {sizes}: {start}")
    try:
        return Mesh(pp=pp, dp=world // (tp * pp * cp), ep=ep, cp=cp, tp=tp)
    except ValueError as error:
        raise RuntimeError(f"{world} ranks cannot be divided into {sizes}, expert {ep}: {error}") from error


@_delegate_to_real
def model_parallel_is_initialized() -> bool:
    """Return True if `initialize_model_parallel` was called."""
    return bool(_current)


@_delegate_to_real
def destroy_model_parallel() -> None:
    """Remove the arrangement, so that another one can be created. Process groups exist until the process ends."""
    _current.clear()


def _destroy_groups_at_exit() -> None:
    """Destroy the process groups on the CPU at exit, because gloo threads that remain sometimes abort the process."""
    if "torch_xla" in sys.modules or not distributed.is_initialized():
        return  # with torch_xla loaded, jobs hung here in tests; without this, they end
    while _groups_to_destroy:
        with contextlib.suppress(ValueError):  # destroyed with an earlier torch.distributed
            distributed.destroy_process_group(_groups_to_destroy.pop())
    _current.clear()


def get_process_group(kind: str, as_list: bool = False) -> Any:
    """Return this rank's process group of a kind; with `as_list`, the ranks of all such groups."""
    real = _get_real_function(f"get_{NXD_NAMES[kind]}_group")
    return _get_group(kind, as_list) if real is None else real(as_list)


def get_replica_groups(kind: str) -> list[list[int]]:
    """Return the ranks of all groups of a kind, in the form that torch_xla's collectives accept."""
    real = _get_real_function(f"get_{NXD_NAMES[kind]}_replica_groups")
    return _get_state().get_groups(kind) if real is None else real()


def get_size(kind: str) -> int:
    """Return the number of ranks in a group of a kind."""
    real = _get_real_function(f"get_{NXD_NAMES[kind]}_size")
    return len(_get_state().get_ranks(kind)) if real is None else real()


def get_rank(kind: str) -> int:
    """Return this rank's index in its group of a kind."""
    real = _get_real_function(f"get_{NXD_NAMES[kind]}_rank")
    return _get_rank(kind) if real is None else real()


for _kind, _name in NXD_NAMES.items():  # get_tensor_model_parallel_group, ..., get_expert_data_parallel_rank
    for _what, _answer in (
        ("group", get_process_group),
        ("replica_groups", get_replica_groups),
        ("size", get_size),
        ("rank", get_rank),
    ):
        globals()[f"get_{_name}_{_what}"] = functools.partial(_answer, _kind)


@_delegate_to_real
def get_world_group(as_list: bool = False) -> Any:
    """Return the process group of all ranks; with `as_list`, a list that contains the list of them."""
    return _get_group("world", as_list)


@_delegate_to_real
def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's tensor-parallel group."""
    return _get_state().get_ranks("tp")[0]


@_delegate_to_real
def get_data_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's data-parallel group."""
    return _get_state().get_ranks("dp")[0]


@_delegate_to_real
def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next pipeline stage, cyclically."""
    ranks = _get_state().get_ranks("pp")
    return ranks[(_get_rank("pp") + 1) % len(ranks)]


@_delegate_to_real
def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous pipeline stage, cyclically."""
    return _get_state().get_ranks("pp")[_get_rank("pp") - 1]


@_delegate_to_real
def get_context_model_parallel_src_tgt_pairs() -> list[list[int]]:
    """Return the ring of this rank's context-parallel group: pairs of a rank and the rank that it sends to."""
    ranks = _get_state().get_ranks("cp")
    return [[rank, ranks[(i + 1) % len(ranks)]] for i, rank in enumerate(ranks)]


@_delegate_to_real
def is_global_rank_zero() -> bool:
    """Return True on the first rank of the job."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
