"""Kernels for Trainium, by their names: programs import them, and do not call them on CPUs."""

from __future__ import annotations

from typing import Any, NoReturn

from xla_ckpt import UsageError


def nki_flash_attn_func(*_: Any, **__: Any) -> NoReturn:
    """Is refused.

    Raises:
        xla_ckpt.UsageError: Always.
    """
    raise UsageError(
        "flash attention is a kernel for Trainium",
        hint="Have the model compute its attention by torch's operations: use_flash_attention=False in its config.",
    )


def nki_ring_attn_func(*_: Any, **__: Any) -> NoReturn:
    """Is refused.

    Raises:
        xla_ckpt.UsageError: Always.
    """
    raise UsageError(
        "ring attention is a kernel for Trainium", hint="Train with context_parallel_size=1, where nothing needs it."
    )
