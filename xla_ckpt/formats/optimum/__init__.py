"""optimum-neuron checkpoints: NxD rank files, and the metadata that optimum-neuron writes beside them."""
