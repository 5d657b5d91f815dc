"""Job setup and checkpoint functions, which ``neuron_compat.nxd`` exports, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.nxd.exports import attach_exports

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

__getattr__, __dir__ = attach_exports(__name__)
