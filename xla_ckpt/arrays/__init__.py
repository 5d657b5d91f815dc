"""The kinds of arrays, each an adapter: torch, XLA, SPMD, DTensor, numpy, jax."""
