"""Drop-in replacements for calls that PyTorch/XLA scripts already make, implemented with `xla_ckpt`.

- `neuron_compat.nxd` replaces neuronx-distributed: its checkpoint functions, the calls that set up a job, its
  parallel state, layers, and ZeRO-1 optimizer. docs/from-nxd.md lists the supported, different and
  unsupported features.
- `neuron_compat.smp` replaces SageMaker model parallel (``smdistributed.modelparallel.torch``).
- `emulate` makes torch_xla's collectives reach all processes of a torchrun job on CPUs, so that you can test a script
  that was written for many XLA devices. With ``NEURON_COMPAT_EMULATE=1`` in the environment, importing this package
  calls it, and leaves ``init_process_group`` to the program (docs/testing-on-cpus.md).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from neuron_compat.lazy_imports import attach_lazy_names

if TYPE_CHECKING:
    from neuron_compat import nxd as nxd
    from neuron_compat import smp as smp
    from neuron_compat.emulation import Emulation as Emulation
    from neuron_compat.emulation import emulate as emulate
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
    "Emulation",
    "emulate",
    "finalize_checkpoint",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]

__getattr__, __dir__ = attach_lazy_names(
    __name__,
    {
        "emulation": "Emulation emulate",
        "nxd": "finalize_checkpoint has_checkpoint initialize_parallel_model initialize_parallel_optimizer "
        "load_checkpoint neuronx_distributed_config save_checkpoint "
        "modules optimizer parallel_layers trainer utils",  # for `import neuron_compat as nxd`
    },
    ["nxd", "smp"],
)

if os.environ.get("NEURON_COMPAT_EMULATE") == "1":
    __getattr__("emulate")(join=False)
