"""neuronx-distributed's inference: whoever imports this is told what to use instead."""

from neuron_compat.lazy import absent
from neuron_compat.nxd.instead import TRACE

absent(__name__, TRACE)
