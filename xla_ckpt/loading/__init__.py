"""Load a checkpoint: open, check, plan, read, verify and restore."""
