"""neuronx-distributed's ``kernels.ring_attention_kernel``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.nxd.kernels": ("nki_ring_attn_func",)}, missing=here(__name__)
)
