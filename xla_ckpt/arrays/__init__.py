"""Array adapters: torch, XLA, SPMD, DTensor, ShardedTensor, numpy, jax."""
