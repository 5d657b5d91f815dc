"""neuronx-distributed (NxD) checkpoints: read, written, and ZeRO-1 files converted."""
