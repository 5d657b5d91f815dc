"""Foreign checkpoints: scanned into the same `Manifest` that our own tags carry, and restored by the same engine."""
