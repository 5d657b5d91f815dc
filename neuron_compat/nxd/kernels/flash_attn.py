"""Names of ``neuronx_distributed.kernels.flash_attn``, which can be imported; calls raise an error."""

from __future__ import annotations

from typing import Any, NoReturn

from neuron_compat.nxd.exports import attach_exports
from xla_ckpt import UsageError

__getattr__, __dir__ = attach_exports(__name__)


def nki_flash_attn_func(*_: Any, **__: Any) -> NoReturn:
    """Raise an error, because the kernel is unsupported.

    Raises:
        xla_ckpt.UsageError: Always.
    """
    raise UsageError(
        "flash attention is a kernel for Trainium",
        hint="Have the model compute its attention by torch's operations: use_flash_attention=False in its config.",
    )
