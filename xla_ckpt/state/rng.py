"""Random number generator state of a process, as a member of extras."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from xla_ckpt.arrays.torch_objects import is_torch_loaded


class RNGState:
    """The generators of python, numpy, torch (CPU, and the accelerator that is in use) and XLA.

    ``extras={"rng": xla_ckpt.RNGState()}`` stores them with a save and sets them on a load. The accelerator is
    ``torch.accelerator``'s (CUDA, or any other), and each of its devices has a state. XLA's is included where torch_xla
    is loaded; a state without it leaves XLA's generator alone. On a load, a process without such an accelerator, with
    fewer devices, or without torch_xla leaves out what it has no generator for, with a warning. A program that has not
    imported torch has python's and numpy's alone. jax has none: its keys are values of the program.

    XLA's state is that with which the resumed run begins: after random operations of a step it is the state of the next
    step or, in a loop over torch_xla's `MpDeviceLoader`, the one from which the loader makes the next.

    What draws between the load and the next step shifts all that follows. A `DataLoader` of torch's does so when
    somebody begins to iterate over it, unless it has a ``generator`` of its own.

    Every rank has a state of its own (see `PerRank`). A job of more ranks than saved it leaves the generators of the
    others as they are, with a warning: two ranks must not draw the same numbers.
    """

    per_rank = True
    """Tells the saving side that this member differs from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, as they are now."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
        }
        if not is_torch_loaded():
            return state
        from xla_ckpt.state import torch_rng

        return {**state, **torch_rng.get_generator_states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators that `state` holds and that this process has."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "torch" in state and is_torch_loaded():
            from xla_ckpt.state import torch_rng

            torch_rng.set_generator_states(state)
