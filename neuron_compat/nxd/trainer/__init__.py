"""How a job is set up, and its checkpoint functions; ``neuron_compat.nxd`` has them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

if TYPE_CHECKING:
    from neuron_compat.nxd.trainer import checkpoint as checkpoint
    from neuron_compat.nxd.trainer.checkpoint import finalize_checkpoint as finalize_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import has_checkpoint as has_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import load_checkpoint as load_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import save_checkpoint as save_checkpoint

__all__ = [
    "finalize_checkpoint",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "checkpoint": ("finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"),
        "trainer": ("initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"),
    },
    ["checkpoint", "checkpoint_storage", "config", "model", "optimizer", "trainer"],
    missing=here(__name__),
)
