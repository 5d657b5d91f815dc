"""neuronx-distributed's ``utils.adamw_fp32_optim_params``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.nxd.adamw": ("AdamW_FP32OptimParams",)}, missing=here(__name__)
)
