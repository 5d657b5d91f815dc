"""Drop-in replacement for SageMaker model parallel (SMP), implemented with `xla_ckpt` and torch.

Use ``import neuron_compat.smp as smp`` instead of ``import smdistributed.modelparallel.torch as smp``. Names and
submodules are loaded on first use.

The implementation favors correctness over speed: every pipeline rank runs the whole model, and *owns* the partition
that it saves. Use the layers of `neuron_compat.nxd.parallel_layers` for weights that are sharded over tensor-parallel
ranks; unlike in SMP, the ranks of a tensor-parallel group then receive the same batch.
"""

from __future__ import annotations

from neuron_compat.lazy_imports import attach_lazy_names

__all__ = ["init"]

_NO_REGISTRY_HINT = (
    "Modules are not replaced here. Use the layers of neuron_compat.nxd.parallel_layers, or give parameters "
    "neuronx-distributed's attributes (tensor_model_parallel, partition_dim, partition_stride)."
)

__getattr__, __dir__ = attach_lazy_names(
    __name__,
    {
        "no_ops": "delay_param_initialization is_tracing model_creation set_activation_checkpointing "
        "set_tensor_parallelism tensor_parallelism",
        "checkpoint": "resume_from_checkpoint save_checkpoint",
        "comm": "CommGroup DP_GROUP MP_GROUP PP_GROUP RDP_GROUP RankType TP_GROUP WORLD allgather barrier broadcast "
        "dp_barrier gather mp_barrier pp_barrier rdp_barrier recv_from send tp_barrier",
        "errors": "BwdExecutionNotInStepFnError CommGroupConfigError DDPConfigError DDPNotEnabledError "
        "DistributedModelNotWrappedError IncompatibleCheckpointFoundError IncompatibleCheckpointRankFoundError "
        "InvalidCommGroupError InvalidPartitionIDError InvalidStepOutputError MissingCheckpointFilesError "
        "MissingKeysInCheckpointError ModelNotPartitionedError ModelTooSmallError MultipleDistributedModelError "
        "NotInitializedError RdpSizeError SMPAMPError SMPCheckpointError SMPConfigError SMPInvalidArgumentError "
        "SMPRuntimeError SMPUnsupportedError SMPValidationError StepFunctionCalledError TensorSplitError "
        "TooFewRanksError WorkerSizeError",
        "files": "load save",
        "job": "dp_rank dp_size get_dp_group get_dp_process_group get_mp_group get_mp_process_group get_pp_group "
        "get_pp_process_group get_rdp_group get_rdp_process_group get_tp_group get_tp_process_group "
        "get_world_process_group instance_id is_initialized is_multi_node local_rank local_size mp_rank mp_size "
        "num_microbatches pp_rank pp_size rank rdp_rank rdp_size reset size state tp_rank tp_size",
        "neuron_compat.emulated.smp.setup": "init shutdown",
        "neuron_compat.emulated.smp.step": "StepOutput step",
        "neuron_compat.emulated.smp.model": "DistributedModel partition set_partition",
        "neuron_compat.emulated.smp.optimizer": "DistributedOptimizer",
    },
    ["amp", "comm", "config", "errors", "job", "nn", "optimizers", "stored"],
    missing={"tp_register": _NO_REGISTRY_HINT, "tp_register_with_module": _NO_REGISTRY_HINT},
)
