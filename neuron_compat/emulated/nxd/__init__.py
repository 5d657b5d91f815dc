"""neuronx-distributed's set-up of a job, its ZeRO-1 optimizer, and small functions of its scripts."""
