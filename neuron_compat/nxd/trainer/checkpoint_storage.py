"""The storages of neuronx-distributed: each name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(__name__, {}, missing=here(__name__))
