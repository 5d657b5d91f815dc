"""optimum-neuron checkpoints: NxD rank files with the metadata files of optimum-neuron."""
