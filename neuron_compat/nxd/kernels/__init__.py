"""neuronx-distributed's ``kernels``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {"flash_attn": ("nki_flash_attn_func",), "ring_attention_kernel": ("nki_ring_attn_func",)},
    ["flash_attn", "ring_attention_kernel"],
    missing=here(__name__),
)
