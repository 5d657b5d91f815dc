"""Calls that PyTorch/XLA scripts already make, answered by `xla_ckpt`.

`neuron_compat.nxd` stands in for neuronx-distributed; its checkpoint functions are here, too. `emulate` (also
``NEURON_COMPAT_EMULATE=1`` in the environment) runs a script written for many XLA devices under torchrun on CPUs.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_compat.emulation import Emulation as Emulation
    from neuron_compat.emulation import emulate as emulate
    from neuron_compat.nxd.trainer.checkpoint import finalize_checkpoint as finalize_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import has_checkpoint as has_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import load_checkpoint as load_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import save_checkpoint as save_checkpoint

_EMULATION = ("Emulation", "emulate")
_NXD = (
    "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint",
    "optimizer", "parallel_layers", "trainer",
)  # fmt: skip
_MODULES = ("nxd",)

__all__ = [
    "Emulation", "emulate", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"neuron_compat.{name}")
    if name in _EMULATION:
        return getattr(importlib.import_module("neuron_compat.emulation"), name)
    if name in _NXD:  # for `import neuron_compat as nxd`
        return getattr(importlib.import_module("neuron_compat.nxd"), name)
    raise AttributeError(f"module 'neuron_compat' has no attribute {name!r}")


if os.environ.get("NEURON_COMPAT_EMULATE") == "1":
    __getattr__("emulate")()
