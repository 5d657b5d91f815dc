"""neuronx-distributed's kernels: whoever imports this is told what to use instead."""

from neuron_compat.lazy import absent
from neuron_compat.nxd.instead import KERNELS

absent(__name__, KERNELS)
