"""Foreign checkpoints: scanned into the same `Manifest` that our own tags carry, and planned as files to be written."""
