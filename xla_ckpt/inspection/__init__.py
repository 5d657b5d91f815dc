"""List, show, sample, verify and repair checkpoints."""
