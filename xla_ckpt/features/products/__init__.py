"""Products that are made of committed checkpoints."""
