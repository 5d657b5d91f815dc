"""SMP calls that have no effect here: they save memory or time, or ask SMP to replace layers.

Use the layers of `neuron_compat.nxd.parallel_layers` to split weights.
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
    """Accepted: activations are kept in memory, and not computed again.

    Args:
        options: ``preserve_rng_state``, ``pack_args_as_tuple`` and ``strategy``.

    Raises:
        SMPInvalidArgumentError: It is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise SMPInvalidArgumentError("activation checkpointing is for a torch.nn.Module", found=type(module).__name__)
    logger.info("activations of %s are kept: %s changes no result", type(module).__name__, options or "this")


def delay_param_initialization(
    enabled: bool = True,  # noqa: ARG001  # SMP's signature
) -> contextlib.AbstractContextManager[None]:
    """Accepted: a context without effect."""
    return contextlib.nullcontext()


def is_tracing() -> bool:
    """False: nothing is traced."""
    return False


def tensor_parallelism(
    enabled: bool = True,  # noqa: ARG001  # SMP's signature
    **_tp_config: Any,
) -> contextlib.AbstractContextManager[None]:
    """Accepted: a context without effect."""
    return contextlib.nullcontext()


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """Accepted."""


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,  # noqa: ARG001  # SMP's signature
    dtype: torch.dtype | None = None,
    **_tensor_parallel_config: Any,
) -> Iterator[None]:
    """A context in which floating-point parameters are of a type; None leaves torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
