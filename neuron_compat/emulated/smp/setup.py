"""`smp.init`: arrange the ranks of a job, and create its process groups."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from neuron_compat.emulated import parallel_state
from neuron_compat.groups import find_rank_group
from neuron_compat.smp import job
from neuron_compat.smp.config import CONFIG_VARIABLE, ModelParallelConfig, read_environment
from neuron_compat.smp.errors import SMPConfigError, SMPUnsupportedError, SMPValidationError, WorkerSizeError
from neuron_compat.smp.files import get_job_id
from neuron_compat.smp.job import GROUP_KINDS, RankInfo
from xla_ckpt import Mesh
from xla_ckpt.facade import get_current_mesh
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

distributed: Any = torch.distributed


def init(config: Mapping[str, Any] | None = None) -> None:
    """Arrange the ranks of the job. Call it on all ranks.

    With several processes, it initializes torch.distributed (gloo), unless the program has; it initializes
    `neuron_compat.emulated.parallel_state`, or uses its existing state. A second call with the same configuration has
    no effect, and neither has one after the configuration was read from SageMaker's environment.

    Args:
        config: SMP configuration: ``pipeline_parallel_degree`` (or ``partitions``), ``tensor_parallel_degree``,
            ``ddp``, ``microbatches`` and so on. None reads it from the environment (``SM_HP_MP_PARAMETERS``), if set.
            Missing degrees default to an initialized parallel state's, or 1.

    Raises:
        SMPConfigError: An entry is unknown, out of bounds, or contradicts another one or the parallel state.
        SMPUnsupportedError: It requests an unsupported feature.
        WorkerSizeError: The number of processes is not a multiple of the product of the two degrees, or is larger
            without ``ddp``.
        SMPValidationError: It was called before, with another configuration.
    """
    cfg = ModelParallelConfig(_fill_degrees(read_environment() if config is None else config))
    if job.state.rank_info is not None and not (job.state.initialized_implicitly and _has_same_degrees(cfg)):
        if cfg != job.state.cfg and CONFIG_VARIABLE not in os.environ:  # SMP ignores the argument in this case
            raise SMPValidationError(
                "smp is initialized already, with another configuration",
                expected=_find_differences(job.state.cfg, cfg),
                found=_find_differences(cfg, job.state.cfg),
                hint="Call smp.init() once, before anything else of smp. smp.shutdown() forgets the configuration.",
            )
        logger.warning("SageMaker model parallelism is initialized already. Ignoring the smp.init() call.")
        return
    job.state.initialized_implicitly = False
    if job.state.rank_info is None:
        job.state.rank_info = arrange_ranks(cfg)
        get_job_id()  # now, because the job's store may be gone when a file is saved
    job.state.cfg = cfg


def _fill_degrees(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with missing degrees filled in from an initialized parallel state."""
    if not isinstance(config, Mapping) or not parallel_state.model_parallel_is_initialized():
        return config
    degrees = {
        "pipeline_parallel_degree": parallel_state.get_size("pp"),
        "tensor_parallel_degree": parallel_state.get_size("tp"),
    }
    named = {n for n in degrees if n in config or (n == "pipeline_parallel_degree" and "partitions" in config)}
    return {**config, **{n: v for n, v in degrees.items() if n not in named}}


def _has_same_degrees(cfg: ModelParallelConfig) -> bool:
    names = ("pipeline_parallel_degree", "tensor_parallel_degree")
    return all(getattr(cfg, name) == getattr(job.state.cfg, name) for name in names)


def _find_differences(one: ModelParallelConfig, other: ModelParallelConfig) -> dict[str, Any]:
    """Return the entries of a configuration that differ in another one."""
    other_config = other.get_config_dict()
    return {name: value for name, value in one.get_config_dict().items() if value != other_config[name]}


def shutdown() -> None:
    """Reset all state, including the parallel state. Process groups exist until the process ends."""
    parallel_state.destroy_model_parallel()
    job.state.__init__()  # type: ignore[misc]  # other modules reference this object


def init_if_known() -> None:
    """Initialize from the parallel state or the environment, if possible."""
    if parallel_state.model_parallel_is_initialized():
        init({"ddp": True})
        job.state.initialized_implicitly = True
    elif CONFIG_VARIABLE in os.environ:
        init()


def arrange_ranks(cfg: ModelParallelConfig) -> RankInfo:
    """Join the job, arrange its ranks, and return this process's ranks.

    Raises:
        WorkerSizeError: The number of processes does not match the degrees.
        SMPConfigError: The ranks are already arranged differently.
        SMPUnsupportedError: There is context or expert parallelism.
        SMPValidationError: The other processes cannot be reached.
    """
    _join_process_group()
    joined = distributed.is_available() and distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    _check_world_size(cfg, world)
    tp, pp = cfg.tensor_parallel_degree, cfg.pipeline_parallel_degree
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    mesh = get_current_mesh(rank, world) or Mesh(pp=pp, dp=world // (pp * tp), tp=tp)
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
    groups = {kind: find_rank_group(mesh, its, rank) for kind, its in GROUP_KINDS.items()}
    return RankInfo(
        mesh=mesh,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        groups=groups,
        process_groups=_create_process_groups(groups) if joined else {},
    )


def _join_process_group() -> None:
    """Create the process group if there are several processes and the program has not created it."""
    if not distributed.is_available() or distributed.is_initialized():
        return
    launched, of_mpi = os.environ.get("WORLD_SIZE", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        distributed.init_process_group("gloo")
        atexit.register(_leave_process_group)
    elif not launched and of_mpi.isdecimal() and int(of_mpi) > 1:
        raise SMPValidationError(
            f"this process is one of {of_mpi} that mpirun started, and nothing says where they meet",
            expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment",
            hint="Start the program with torchrun.",
        )


def _check_world_size(cfg: ModelParallelConfig, world: int) -> None:
    """Raise an error for a number of processes that does not match the degrees."""
    product = cfg.pipeline_parallel_degree * cfg.tensor_parallel_degree
    degrees = f"the product of the specified pipeline parallelism and tensor parallelism degrees ({product})"
    must, there = "The number of processes must be", f"{world} processes"
    hint = "Start as many with torchrun --nproc_per_node."
    if product > world:
        raise WorkerSizeError(f"{must} at least {degrees}", found=there, hint=hint)
    if world % product:
        raise WorkerSizeError(f"{must} an integer multiple of {degrees}", found=there, hint=hint)
    if world > product and not cfg.ddp:
        raise WorkerSizeError(
            f"If the number of processes is larger than {degrees}, then 'horovod':True (for TensorFlow) or 'ddp':True "
            "(for PyTorch) must be specified.",
            found=f"{world} processes, ddp: False",
        )


def _create_process_groups(groups: Mapping[str, list[int]]) -> dict[str, Any]:
    """Create a gloo group of each kind. Kinds with the same ranks share a group, and `parallel_state`'s are reused."""
    known = {kind: parallel_state.get_process_group(kind) for kind in ("tp", "pp", "dp")}
    known["world"] = parallel_state.get_world_group()
    group_of = {
        tuple(groups[kind]): known[its]
        for kind, its in GROUP_KINDS.items()
        if its in known and distributed.get_backend(known[its]) == "gloo"
    }
    for kind in GROUP_KINDS:
        ranks = tuple(groups[kind])
        if ranks not in group_of:
            group_of[ranks] = parallel_state.create_group(list(ranks))
    return {kind: group_of[tuple(ranks)] for kind, ranks in groups.items()}


def _leave_process_group() -> None:
    if "torch_xla" not in sys.modules and distributed.is_initialized():
        distributed.destroy_process_group()
