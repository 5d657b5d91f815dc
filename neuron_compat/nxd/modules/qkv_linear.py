"""neuronx-distributed's ``modules.qkv_linear``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.qkv_linear": ("GQAQKVColumnParallelLinear",)}, missing=here(__name__)
)
