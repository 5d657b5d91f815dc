"""Array adapters for torch, XLA, SPMD, DTensor, ShardedTensor, numpy and jax arrays."""
