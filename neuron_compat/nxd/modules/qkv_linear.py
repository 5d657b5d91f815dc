"""neuronx-distributed's ``modules.qkv_linear``."""

from neuron_compat.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {"neuron_compat.emulated.qkv_linear": ("GQAQKVColumnParallelLinear",)},
)
