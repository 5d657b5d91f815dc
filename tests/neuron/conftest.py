"""What tests of neuronx-distributed's names have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def clean() -> Iterator[None]:
    """No ranks are arranged, and none are left so."""
    from neuron_compat.nxd.parallel_layers import parallel_state  # it cannot be loaded without torch_xla

    parallel_state.destroy_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
