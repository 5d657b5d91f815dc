"""neuronx-distributed's converter of weights: the name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import CONVERT

__getattr__, __dir__ = lazily(__name__, {}, missing=dict.fromkeys(("CheckpointConverterBase",), CONVERT))
