"""Where neuronx-distributed has its converters."""
