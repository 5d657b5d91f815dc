"""The boundary to torch, torch_xla, jax and numpy."""
