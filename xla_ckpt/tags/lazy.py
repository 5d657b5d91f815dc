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
    """Have jax run on the CPU, unless the program has imported it before its first save.

    orbax asks jax which process this is, and to answer, jax opens all platforms that it may: an accelerator that
    torch_xla holds would be taken from it, or could not be opened. A program that has imported jax uses it itself, and
    keeps its platforms, also beside torch_xla: on the CPU its computations would still run, only slowly. One that has
    imported jax for nothing says so with ``jax.config.update("jax_platforms", "cpu")``.
    """
    if "jax" not in sys.modules:
        import jax

        jax.config.update("jax_platforms", "cpu")
