"""Snapshot of the random number generators, saved or restored at a later point of a run."""

from __future__ import annotations

from typing import Any

from xla_ckpt.state.rng import RNGState


class CapturedRNGState(RNGState):
    """States of all random number generators at the last `capture`; before the first one, their current states.

    A trainer draws random numbers between the callback that loads a checkpoint and the next step, for example seeds of
    samplers and data loader workers. A load therefore only keeps the states, and `restore` sets them.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def capture(self) -> None:
        """Capture the states of all generators."""
        self._state = super().state_dict()

    def restore(self) -> None:
        """Set the generators to the captured or loaded states. Do nothing if there are none."""
        if self._state is not None:
            super().load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the captured or loaded states."""
        return super().state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep states for `restore`, without setting the generators."""
        self._state = state
