"""Calls that PyTorch/XLA scripts already make, answered by `xla_ckpt`.

`emulate` (also ``NEURON_COMPAT_EMULATE=1`` in the environment) runs a script written for many XLA devices under
torchrun on CPUs. The facade ``neuron_compat.nxd``, for scripts written for neuronx-distributed, is still to come.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_compat.emulation import Emulation as Emulation
    from neuron_compat.emulation import emulate as emulate

__all__ = ["Emulation", "emulate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'neuron_compat' has no attribute {name!r}")
    from neuron_compat import emulation

    return getattr(emulation, name)


if os.environ.get("NEURON_COMPAT_EMULATE") == "1":
    __getattr__("emulate")()
