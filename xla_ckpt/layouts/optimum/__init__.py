"""optimum-neuron's directories: neuronx-distributed's rank files, and what optimum-neuron writes around them."""
