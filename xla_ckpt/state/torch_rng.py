"""The random state of torch, its accelerators and XLA. Imported where torch is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

_ELSEWHERE = ("python", "numpy", "torch", "xla")
"""Keys of the state that name no kind of accelerator."""


def generators() -> dict[str, Any]:
    """The state of torch's generators, as they are now."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if _has_xla():
        import torch_xla.core.xla_model as xm

        state["xla"] = int(xm.get_rng_state())
    kind = _accelerator()
    if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        state[kind] = [torch.get_device_module(kind).get_rng_state(*device) for device in _devices(kind)]
    return state


def set_generators(state: Mapping[str, Any]) -> None:
    """Set those of torch's generators that `state` holds and that this process has."""
    torch.set_rng_state(state["torch"].cpu())
    if "xla" in state:
        if _has_xla():
            import torch_xla.core.xla_model as xm

            xm.set_rng_state(state["xla"])
        else:
            logger.warning("XLA's random generator was saved, and torch_xla is not loaded here: it is left out")
    for kind in (key for key in state if key not in _ELSEWHERE):
        _set_all(kind, [s.cpu() for s in state[kind]])


def _has_xla() -> bool:
    """Whether this process has loaded torch_xla. Whoever keeps it from being imported leaves None there."""
    return sys.modules.get("torch_xla") is not None


def _accelerator() -> str | None:
    """The kind of the accelerator of this process, such as ``cuda``; None if it has none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def _devices(kind: str) -> list[list[str]]:
    """How the devices of the accelerator are named to its module: one that is alone is not, as torch.mps names none."""
    count = torch.accelerator.device_count()
    return [[]] if count == 1 else [[f"{kind}:{number}"] for number in range(count)]


def _set_all(kind: str, states: Sequence[torch.Tensor]) -> None:
    """Set the generators of the devices of an accelerator, as far as they are here."""
    devices = _devices(kind) if _accelerator() == kind else []
    for device, state in zip(devices, states, strict=False):
        torch.get_device_module(kind).set_rng_state(state, *device)
    if len(devices) < len(states):
        logger.warning(
            "%d random generators of %s devices were saved, and %d are here: the others are left out",
            len(states),
            kind,
            len(devices),
        )
