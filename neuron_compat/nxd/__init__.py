"""neuronx-distributed's calls, answered by `xla_ckpt` and torch_xla.

``import neuron_compat.nxd as nxd`` in place of ``import neuronx_distributed as nxd``. Checkpoints are written in
xla_ckpt's native format, and load on any topology. Names and submodules are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_compat.nxd.trainer.checkpoint import finalize_checkpoint as finalize_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import has_checkpoint as has_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import load_checkpoint as load_checkpoint
    from neuron_compat.nxd.trainer.checkpoint import save_checkpoint as save_checkpoint

_MODULES = ("optimizer", "parallel_layers", "trainer")

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"neuron_compat.nxd.{name}")
    if name in __all__:
        return getattr(importlib.import_module("neuron_compat.nxd.trainer.checkpoint"), name)
    raise AttributeError(f"module 'neuron_compat.nxd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
