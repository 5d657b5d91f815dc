"""Mixtures of experts of neuronx-distributed: whoever imports this is told what to use instead."""

from neuron_compat.lazy import absent
from neuron_compat.nxd.instead import KEEP_NXD

absent(__name__, KEEP_NXD)
