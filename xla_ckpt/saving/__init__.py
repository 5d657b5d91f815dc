"""Save a checkpoint: capture, plan, write, finalize and commit."""
