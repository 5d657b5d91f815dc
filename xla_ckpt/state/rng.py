"""The random state of a process, as a member of `extras`."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch


class RNGState:
    """The generators of python, numpy, torch (CPU, and CUDA where it is in use) and XLA.

    ``extras={"rng": xla_ckpt.RNGState()}`` stores them with a save and sets them on a load. XLA's is included where
    torch_xla is loaded; a state without it leaves XLA's generator alone.

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
            "torch": torch.get_rng_state(),
        }
        if "torch_xla" in sys.modules:
            import torch_xla.core.xla_model as xm

            state["xla"] = int(xm.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators that `state` holds and that this process has."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        if "xla" in state and "torch_xla" in sys.modules:
            import torch_xla.core.xla_model as xm

            xm.set_rng_state(state["xla"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
