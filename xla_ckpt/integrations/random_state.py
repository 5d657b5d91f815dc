"""Random state captured at one point of a run, to be saved or restored at a later one."""

from __future__ import annotations

from typing import Any

from xla_ckpt.state.rng import RNGState


class CapturedRNGState(RNGState):
    """The state of all generators at the moment of the last `capture`; before the first one, as they are now.

    A trainer draws random numbers between the moment at which a callback loads a checkpoint and the moment of the next
    step: seeds of samplers and of workers. So a load keeps the state, and `restore` sets it.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def capture(self) -> None:
        """Remember the state of all generators."""
        self._state = super().state_dict()

    def restore(self) -> None:
        """Set the generators to the state that was taken or loaded; without one they stay as they are."""
        if self._state is not None:
            super().load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """The state that was taken or loaded."""
        return super().state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember a state; `restore` sets it."""
        self._state = state
