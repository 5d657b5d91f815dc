"""neuronx-distributed's ``scripts``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(__name__, {}, ["checkpoint_converter"], missing=here(__name__))
