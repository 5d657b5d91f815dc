"""neuronx-distributed's layouts: its files read, and written.

SageMaker model parallel's files and optimum-neuron's hold one rank's tensors each, too: their scans use the modules
here that put such tensors together (`arrays`, `copies`, `state`, `optimizer`, `stage_numbers`).
"""
