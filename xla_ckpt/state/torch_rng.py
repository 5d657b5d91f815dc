"""Get and set the random number generators of torch, its accelerators and XLA. Imports torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

_SEED_COUNT = 1 << 64
"""Number of seeds of the XLA generator."""

_OTHER_KEYS = ("python", "numpy", "torch", "xla")
"""Keys of the state other than kinds of accelerators."""


def get_generator_states() -> dict[str, Any]:
    """Return the current state of the torch generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if _is_xla_loaded():
        state["xla"] = _get_xla_seed()
    kind = _get_accelerator_type()
    if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        state[kind] = [torch.get_device_module(kind).get_rng_state(*device) for device in _list_device_arguments(kind)]
    return state


def set_generator_states(state: Mapping[str, Any]) -> None:
    """Set the torch generators that `state` contains and that this process has."""
    torch.set_rng_state(state["torch"].cpu())
    if "xla" in state:
        if _is_xla_loaded():
            import torch_xla.core.xla_model as xm

            xm.set_rng_state(state["xla"])
        else:
            logger.warning("XLA's random generator was saved, and torch_xla is not loaded here: it is left out")
    for kind in (key for key in state if key not in _OTHER_KEYS):
        _set_device_states(kind, [s.cpu() for s in state[kind]])


def _is_xla_loaded() -> bool:
    """Return True if this process has loaded torch_xla. A blocked import leaves None in `sys.modules`."""
    return sys.modules.get("torch_xla") is not None


def _get_xla_seed() -> int:
    """Return the seed with which a resumed run draws the numbers that this run is going to draw.

    A draw advances the seed within a step, and a sync derives the seed of the next step from the first seed of this
    one. If a save precedes the sync of its step, the resumed run begins after that sync, except with a loader, which
    syncs before the first batch. In eager mode without a loader no sync ends the step.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.experimental import is_eager_mode

    seed = int(xm.get_rng_state())
    loader = None
    if is_eager_mode() and (loader := _find_active_loader()) is None:
        return seed
    device = torch_xla._XLAC._xla_get_default_device()
    first: int = torch_xla._XLAC._get_base_seed_as_tensor(str(device)).item() % _SEED_COUNT
    if seed == first:
        return seed
    while xm.get_rng_state() != seed:  # the call above has set the generator to the first seed
        torch.rand((), device=device)
    loader = loader or _find_active_loader()
    if loader is None:
        return (1012031 + first * 7012063) % _SEED_COUNT  # as torch_xla.sync() does, and torch_xla's bridge to dynamo
    if loader._sync_batch_count == 0:
        return first
    if loader._batches_yielded:
        logger.warning(
            "XLA's random generator is saved in the middle of a step of MpDeviceLoader: expected a save after a "
            "multiple of batches_per_execution=%d batches, got %d more. A resumed run draws other random numbers. "
            "Save after a multiple, or pass batches_per_execution=1.",
            loader._sync_batch_count + 1,
            loader._batches_yielded,
        )
    xm.set_rng_state(seed)  # the rest of the step, and the next one, begin from this seed in both runs
    return seed


def _find_active_loader() -> Any | None:
    """Return the iterator of a torch_xla loader over which the program iterates, or None."""
    module = sys.modules.get("torch_xla.distributed.parallel_loader")
    if module is None:
        return None
    kind = module.PerDeviceLoader
    # A "for" loop holds the only reference to it.
    return next((found for found in gc.get_referrers(kind) if type(found) is kind), None)


def _get_accelerator_type() -> str | None:
    """Return the kind of the accelerator of this process, such as ``cuda``; None if it has none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def _list_device_arguments(kind: str) -> list[list[str]]:
    """List the arguments that select each device of the accelerator: none for a single device, as in torch.mps."""
    count = torch.accelerator.device_count()
    return [[]] if count == 1 else [[f"{kind}:{number}"] for number in range(count)]


def _set_device_states(kind: str, states: Sequence[torch.Tensor]) -> None:
    """Set the generators of the accelerator devices that this process has."""
    devices = _list_device_arguments(kind) if _get_accelerator_type() == kind else []
    for device, state in zip(devices, states, strict=False):
        torch.get_device_module(kind).set_rng_state(state, *device)
    if len(devices) < len(states):
        logger.warning(
            "%d random generators of %s devices were saved, and %d are here: the others are left out",
            len(states),
            kind,
            len(devices),
        )
