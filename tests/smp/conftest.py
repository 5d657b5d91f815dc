"""What tests of SageMaker model parallel's names have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def clean() -> Iterator[None]:
    """`smp` is as before `init`, and is so again afterwards."""
    import neuron_compat.smp as smp  # it cannot be loaded without torch_xla

    smp.shutdown()
    yield
    smp.shutdown()
