"""SMP calls without effect here: they reduce memory or time, or configure the replacement of layers.

Use the layers of `neuron_compat.nxd.parallel_layers` to shard weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from neuron_compat.smp.errors import SMPInvalidArgumentError
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


def set_activation_checkpointing(module: torch.nn.Module, **options: Any) -> None:
    """Accept the call without effect: activations are kept in memory, and not recomputed.

    Args:
        options: ``preserve_rng_state``, ``pack_args_as_tuple`` and ``strategy``.

    Raises:
        SMPInvalidArgumentError: It is not a module.
    """
    if not isinstance(module, torch.nn.Module):
        raise SMPInvalidArgumentError("activation checkpointing is for a torch.nn.Module", found=type(module).__name__)
    logger.info("activations of %s are kept: %s changes no result", type(module).__name__, options or "this")


def delay_param_initialization(
    enabled: bool = True,  # noqa: ARG001  # SMP's signature
) -> contextlib.AbstractContextManager[None]:
    """Return a context without effect."""
    return contextlib.nullcontext()


def is_tracing() -> bool:
    """Return False, because nothing is traced."""
    return False


def tensor_parallelism(
    enabled: bool = True,  # noqa: ARG001  # SMP's signature
    **_tp_config: Any,
) -> contextlib.AbstractContextManager[None]:
    """Return a context without effect."""
    return contextlib.nullcontext()


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """Accept the call without effect."""


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,  # noqa: ARG001  # SMP's signature
    dtype: torch.dtype | None = None,
    **_tensor_parallel_config: Any,
) -> Iterator[None]:
    """Create floating-point parameters of a dtype within the block; None uses torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
