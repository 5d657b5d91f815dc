"""RNG states for tensor parallelism: one that differs between tensor-parallel ranks, and one that does not.

A state contains the state of torch's CPU generator and, once torch_xla is loaded, of the XLA device, because dropout on
a device draws from there. (neuronx-distributed keeps only the first one.)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from neuron_compat.emulated import parallel_state
from xla_ckpt import UsageError

RNGStates: TypeAlias = dict[str, Any]
"""``cpu``: the value of `torch.get_rng_state`; ``xla``: the seed of the XLA device, if torch_xla is loaded."""

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


def get_rng_states(include_xla: bool) -> RNGStates:
    """Return the current states, including the XLA device's if requested."""
    current: RNGStates = {"cpu": torch.get_rng_state()}
    if include_xla:
        import torch_xla.core.xla_model as xm

        current["xla"] = xm.get_rng_state()
    return current


def _get_loaded_rng_states() -> RNGStates:
    """Return the current states of all loaded generators."""
    return get_rng_states(include_xla="torch_xla" in sys.modules)


def _set_seed(seed: int) -> None:
    """Seed all loaded generators."""
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed)


def set_rng_states(states: RNGStates | torch.Tensor) -> None:
    """Set the states to values of `get_rng_states`.

    A tensor, as in neuronx-distributed, contains no state of the device.
    """
    states = {"cpu": states} if isinstance(states, torch.Tensor) else states
    torch.set_rng_state(states["cpu"])
    if "xla" in states:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(states["xla"])


class XLARNGStatesTracker:
    """Named states of the random number generators. ``with tracker.fork(name)`` activates one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Any]:
        """Return the states by name: plain values and tensors, which can be stored in a checkpoint."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Set the states to values of `get_states`."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create a state from a seed. The active state is unchanged.

        Raises:
            xla_ckpt.UsageError: The name or the seed was added before.
        """
        if seed in self.seeds_:
            raise UsageError("this seed was added before, and two states would give the same numbers", found=seed)
        if name in self.states_:
            raise UsageError("there is a state of this name", found=name)
        before = _get_loaded_rng_states()
        _set_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = _get_loaded_rng_states()
        set_rng_states(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Activate a state within a block. The next block with this name continues from the end of this one.

        Raises:
            xla_ckpt.UsageError: The name is unknown.
        """
        if name not in self.states_:
            raise UsageError(
                "there is no state of this name",
                expected=", ".join(self.states_) or "model_parallel_xla_manual_seed() before",
                found=name,
            )
        before = _get_loaded_rng_states()
        set_rng_states(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_loaded_rng_states()
            set_rng_states(before)


_XLA_RNG_STATE_TRACKER = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """Return the tracker of this process."""
    return _XLA_RNG_STATE_TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seed the default state, the same on all ranks, and the tracker's state, different on each tp rank.

    `seed` may differ between data-parallel ranks, so that their dropout does. Call it instead of `torch.manual_seed`,
    after `initialize_model_parallel`.

    Raises:
        AssertionError: `parallel_state` is not initialized.
    """
    own = seed + 2718 + parallel_state.get_rank("tp")  # neuronx-distributed's offset
    _XLA_RNG_STATE_TRACKER.reset()
    _set_seed(seed)
    _XLA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own)
