"""Names of ``neuronx_distributed.trainer.checkpoint_storage``: all unsupported; each raises an error with a hint."""

from neuron_compat.nxd.exports import attach_exports

__getattr__, __dir__ = attach_exports(__name__)
