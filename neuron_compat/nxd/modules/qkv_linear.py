"""Names of ``neuronx_distributed.modules.qkv_linear``."""

from neuron_compat.nxd.exports import attach_exports

__getattr__, __dir__ = attach_exports(__name__)
