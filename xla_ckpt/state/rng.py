"""Random number generator state of a process, as a member of extras."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from xla_ckpt.arrays.torch_objects import is_torch_loaded


class RNGState:
    """The random generators of Python, numpy, torch (CPU and the current accelerator) and XLA.

    ``extras={"rng": xla_ckpt.RNGState()}`` stores them on save and sets them on load. The accelerator is
    ``torch.accelerator`` (CUDA or any other), with one state per device. XLA's generator is included if torch_xla is
    loaded; a state without it leaves XLA's generator unchanged. On load, a process without such an accelerator, with
    fewer devices, or without torch_xla skips the generators that it does not have, with a warning. If the program has
    not imported torch, only the generators of Python and numpy are stored. jax has none: its keys are values of the
    program.

    The stored XLA state is the one with which the resumed run begins: after random operations of a step it is the state
    of the next step or, in a loop over torch_xla's `MpDeviceLoader`, the one from which the loader derives the next.

    Random draws between the load and the next step shift all following numbers. A torch `DataLoader` draws when an
    iteration over it begins, unless it has its own ``generator``.

    Every rank has a separate state (see `PerRank`). In a job with more ranks than saved, the generators of the
    additional ranks stay unchanged, with a warning, because two ranks must not draw the same numbers.
    """

    per_rank = True
    """Marks the member as different on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current state of all generators."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
        }
        if not is_torch_loaded():
            return state
        from xla_ckpt.state import torch_rng

        return {**state, **torch_rng.get_generator_states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators that `state` contains and that this process has."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "torch" in state and is_torch_loaded():
            from xla_ckpt.state import torch_rng

            torch_rng.set_generator_states(state)
