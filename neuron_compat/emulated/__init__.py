"""Training on CPUs: what scripts for neuronx-distributed and SageMaker model parallel need besides checkpoints.

It is plain and correct, not fast, and frozen in what it covers: groups of ranks, tensor-parallel layers and ZeRO-1, and
SMP's steps, in which every pipeline rank runs the whole model. `neuron_compat.nxd` and `neuron_compat.smp` have the
names. The checkpoint calls do not need it, and import nothing of it.
"""
