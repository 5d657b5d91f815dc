"""Drop-in replacement for neuronx-distributed, implemented with `xla_ckpt` and torch_xla.

Use ``import neuron_compat.nxd as nxd`` instead of ``import neuronx_distributed as nxd``. Checkpoints are written in
neuronx-distributed's layouts with an additional manifest, and load on any topology. Names and submodules are loaded on
first use. docs/from-nxd.md lists the supported names, and those that raise an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy_imports import FallbackFinder
from neuron_compat.nxd.exports import attach_exports, refuse_unsupported_import

if TYPE_CHECKING:
    from neuron_compat.nxd import modules as modules
    from neuron_compat.nxd import optimizer as optimizer
    from neuron_compat.nxd import parallel_layers as parallel_layers
    from neuron_compat.nxd import trainer as trainer
    from neuron_compat.nxd import utils as utils
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

FallbackFinder((__name__,), refuse_unsupported_import).install()

__getattr__, __dir__ = attach_exports(__name__)
