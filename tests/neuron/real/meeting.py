"""What tests/neuron/test_real_nxd.py has the real neuronx-distributed do."""

from __future__ import annotations

import torch


def stage_of(rank: int, stages: int) -> int:
    """The pipeline stage of a rank."""
    from neuronx_distributed.parallel_layers import parallel_state as ps

    ps.initialize_model_parallel(pipeline_model_parallel_size=stages)
    torch.distributed.barrier()  # rank 0 has the store, without which another rank cannot make its groups
    return ps.get_pipeline_model_parallel_rank()


def refuses(rank: int, culprit: int) -> None:
    """Fail on one rank."""
    if rank == culprit:
        raise ValueError("no part of the model is here")
