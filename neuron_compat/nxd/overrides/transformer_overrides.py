"""neuronx-distributed's ``overrides.transformer_overrides``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.nxd.attention": ("apply_rotary_pos_emb", "rotate_half")}, missing=here(__name__)
)
