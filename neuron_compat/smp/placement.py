"""How the ranks of a job are arranged, and the groups of processes that this gives."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.nxd.parallel_layers import parallel_state
from neuron_compat.smp.config import ModelParallelConfig
from neuron_compat.smp.errors import SMPConfigError, SMPUnsupportedError, SMPValidationError, WorkerSizeError
from xla_ckpt import Mesh
from xla_ckpt.facade import current_mesh

logger = logging.getLogger(__name__)

distributed: Any = torch.distributed

KINDS: dict[str, tuple[str, ...]] = {
    "world": ("pp", "dp", "tp"),
    "pp": ("pp",),
    "tp": ("tp",),
    "rdp": ("dp",),
    "dp": ("dp", "tp"),
    "mp": ("pp", "tp"),
}
"""Kind of group -> the mesh axes along which its members differ."""


def members(mesh: Mesh, rank: int, kind: str) -> list[int]:
    """The ranks of a rank's group, in the order of their ranks in it.

    >>> mesh = Mesh(pp=2, dp=2, tp=2)
    >>> members(mesh, 5, "dp"), members(mesh, 5, "mp"), members(mesh, 5, "rdp")
    ([4, 5, 6, 7], [0, 1, 4, 5], [5, 7])
    """
    here = mesh.coordinates(rank)
    alike = [axis for axis in ("pp", "dp", "tp") if axis not in KINDS[kind]]
    return [r for r in range(mesh.size) if all(mesh.coordinates(r)[axis] == here[axis] for axis in alike)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands in its job."""

    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    groups: dict[str, list[int]]
    """Kind -> the ranks of this process' group."""
    process_groups: dict[str, Any]
    """Kind -> its process group (gloo); empty without torch.distributed."""

    def of(self, kind: str) -> int:
        """This process' rank in its group."""
        return self.groups[kind].index(self.rank)


def arrange(cfg: ModelParallelConfig) -> Ranks:
    """Join the job, arrange its ranks, and find this process' place in it.

    Raises:
        WorkerSizeError: The number of processes does not fit the degrees.
        SMPConfigError: The ranks are arranged in another way already.
        SMPUnsupportedError: There is context or expert parallelism.
        SMPValidationError: The other processes cannot be met.
    """
    _join()
    joined = distributed.is_available() and distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    _check_world(cfg, world)
    tp, pp = cfg.tensor_parallel_degree, cfg.pipeline_parallel_degree
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    mesh = current_mesh(rank, world) or Mesh(pp=pp, dp=world // (pp * tp), tp=tp)
    if (mesh.pp, mesh.tp) != (pp, tp):
        raise SMPConfigError(
            "the ranks are arranged in another way already",
            expected=f"pipeline_parallel_degree={mesh.pp}, tensor_parallel_degree={mesh.tp}, as parallel_state has it",
            found=f"{pp} and {tp}",
            hint="Leave initialize_model_parallel() to smp.init().",
        )
    if mesh.cp > 1 or mesh.ep > 1:
        raise SMPUnsupportedError(
            "SMP has no context or expert parallelism", found=str(mesh), hint="Use neuron_compat.nxd for them."
        )
    if cfg.placement_strategy not in ("cluster", "DPT"):
        logger.warning(
            "placement_strategy %s: ranks are placed with pp outermost, then dp, then tp; only their places in the "
            "world differ from SMP's",
            cfg.placement_strategy,
        )
    groups = {kind: members(mesh, rank, kind) for kind in KINDS}
    return Ranks(
        mesh=mesh,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        groups=groups,
        process_groups=_process_groups(groups) if joined else {},
    )


def _join() -> None:
    """Make the process group, if there are several processes and the program has not made it."""
    if not distributed.is_available() or distributed.is_initialized():
        return
    launched, of_mpi = os.environ.get("WORLD_SIZE", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        distributed.init_process_group("gloo")
        atexit.register(_leave_world)
    elif not launched and of_mpi.isdecimal() and int(of_mpi) > 1:
        raise SMPValidationError(
            f"this process is one of {of_mpi} that mpirun started, and nothing says where they meet",
            expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment",
            hint="Start the program with torchrun.",
        )


def _check_world(cfg: ModelParallelConfig, world: int) -> None:
    product = cfg.pipeline_parallel_degree * cfg.tensor_parallel_degree
    degrees = f"the product of the specified pipeline parallelism and tensor parallelism degrees ({product})"
    if product > world:
        raise WorkerSizeError(f"The number of processes must be at least {degrees}.", found=f"{world} processes")
    if world % product:
        raise WorkerSizeError(
            f"The number of processes must be an integer multiple of {degrees}.", found=f"{world} processes"
        )
    if world > product and not cfg.ddp:
        raise WorkerSizeError(
            f"If the number of processes is larger than {degrees}, then 'horovod':True (for TensorFlow) or 'ddp':True "
            "(for PyTorch) must be specified.",
            found=f"{world} processes, ddp: False",
        )


def _process_groups(groups: Mapping[str, list[int]]) -> dict[str, Any]:
    """A gloo group of each kind; kinds of the same ranks share one, and parallel_state's are taken where they are."""
    known = {
        "tp": parallel_state.get_tensor_model_parallel_group,
        "pp": parallel_state.get_pipeline_model_parallel_group,
        "rdp": parallel_state.get_data_parallel_group,
        "world": parallel_state.get_world_group,
    }
    made: dict[tuple[int, ...], Any] = {}
    for kind, theirs in known.items():
        group = theirs()
        if distributed.get_backend(group) == "gloo":
            made.setdefault(tuple(groups[kind]), group)
    own = []
    for kind in KINDS:
        ranks = tuple(groups[kind])
        if ranks not in made:
            made[ranks] = parallel_state._new_group(list(ranks))
            own.append(made[ranks])
    atexit.register(functools.partial(_leave, own))
    return {kind: made[tuple(ranks)] for kind, ranks in groups.items()}


def _leave(groups: list[Any]) -> None:
    """End process groups on the CPU: threads of gloo that are left over abort the process now and then."""
    if "torch_xla" in sys.modules or not distributed.is_initialized():
        return  # with torch_xla loaded, jobs were seen to hang here; left alone, they end
    for group in groups:
        with contextlib.suppress(ValueError):  # it ended with a torch.distributed before this one
            distributed.destroy_process_group(group)


def _leave_world() -> None:
    if "torch_xla" not in sys.modules and distributed.is_initialized():
        distributed.destroy_process_group()
