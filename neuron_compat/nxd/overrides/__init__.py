"""neuronx-distributed's ``overrides``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(__name__, {}, ["transformer_overrides"], missing=here(__name__))
