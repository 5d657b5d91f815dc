"""neuronx-distributed's converter of weights: whoever imports this is told what to use instead."""

from neuron_compat.lazy import absent
from neuron_compat.nxd.instead import CONVERT

absent(__name__, CONVERT)
