"""neuronx-distributed's ``kernels.flash_attn``, which programs import, and do not call on CPUs."""

from __future__ import annotations

from typing import Any, NoReturn

from neuron_compat.nxd.homes import names_of
from xla_ckpt import UsageError

__getattr__, __dir__ = names_of(__name__)


def nki_flash_attn_func(*_: Any, **__: Any) -> NoReturn:
    """Is refused.

    Raises:
        xla_ckpt.UsageError: Always.
    """
    raise UsageError(
        "flash attention is a kernel for Trainium",
        hint="Have the model compute its attention by torch's operations: use_flash_attention=False in its config.",
    )
