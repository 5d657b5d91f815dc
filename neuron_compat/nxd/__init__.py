"""neuronx-distributed's calls, answered by `xla_ckpt` and torch_xla.

``import neuron_compat.nxd as nxd`` in place of ``import neuronx_distributed as nxd``. Checkpoints are written in
neuronx-distributed's layouts with a manifest beside them, and load on any topology. Names and submodules are loaded
when they are first used. docs/from-nxd.md has a table of the names that are there, and of those that are errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import LastFinder
from neuron_compat.nxd.homes import names_of
from neuron_compat.nxd.instead import refuse

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

LastFinder((__name__,), refuse).install()

__getattr__, __dir__ = names_of(__name__)
