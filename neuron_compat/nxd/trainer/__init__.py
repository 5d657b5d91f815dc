"""Where neuronx-distributed's checkpoint functions live; ``neuron_compat.nxd`` has them, too."""

from __future__ import annotations

from neuron_compat.nxd.trainer.checkpoint import (
    finalize_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]
