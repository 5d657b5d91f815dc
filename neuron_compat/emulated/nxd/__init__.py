"""neuronx-distributed's job setup, ZeRO-1 optimizer, and batch utilities."""
