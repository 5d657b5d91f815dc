"""The door to orbax: it is loaded when rank 0 commits its first tag, and by nobody else."""

from __future__ import annotations

import sys
from typing import Any


def save_tag(*args: Any, **kwargs: Any) -> int:
    """`xla_ckpt.tags.orbax_dir.save_tag`."""
    if "xla_ckpt.tags.orbax_dir" not in sys.modules:
        _keep_jax_off_accelerators()
    from xla_ckpt.tags import orbax_dir

    return orbax_dir.save_tag(*args, **kwargs)


def _keep_jax_off_accelerators() -> None:
    """Have jax run on the CPU, unless the program uses it itself.

    orbax asks jax which process this is, and jax would open (and keep) an accelerator to answer: the one that
    torch_xla holds. A program that uses jax itself has imported it before, and decides for itself.
    """
    used = "jax" in sys.modules
    import jax

    if not used or "torch_xla" in sys.modules:
        jax.config.update("jax_platforms", "cpu")
