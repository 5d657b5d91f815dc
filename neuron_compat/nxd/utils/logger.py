"""neuronx-distributed's ``utils.logger``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.nxd.logger": (
            "get_log_level",
            "get_logger",
        )
    },
    missing=here(__name__),
)
