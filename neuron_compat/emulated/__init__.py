"""Emulated training on CPUs, for the calls of neuronx-distributed and SMP scripts other than checkpoints.

It favors correctness over speed, and its scope is fixed: rank groups, tensor-parallel layers, ZeRO-1, and SMP's
steps, in which every pipeline rank runs the whole model. `neuron_compat.nxd` and `neuron_compat.smp` export the
names. The checkpoint calls do not import it.
"""
