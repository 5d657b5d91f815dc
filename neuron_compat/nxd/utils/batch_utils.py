"""neuronx-distributed's ``utils.batch_utils``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {"neuron_compat.emulated.nxd.batches": ("get_batch_on_this_context_parallel_rank", "shift_labels")},
    missing=here(__name__),
)
