"""Calls of SMP's that save memory or time there, and have nothing to do here: results are the same without them."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from neuron_compat.smp.errors import SMPInvalidArgumentError

logger = logging.getLogger(__name__)


def set_activation_checkpointing(module: torch.nn.Module, **options: Any) -> None:
    """Accepted: activations are kept in memory, and not computed again.

    Args:
        module: A module of the model.
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
