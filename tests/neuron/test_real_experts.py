"""Mixtures of experts of the real neuronx-distributed, saved and loaded over experts, data and tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neuron.real import experts
from tests.neuron.real_nxd import needs_nxd, run_on_nxd

pytestmark = [needs_nxd, pytest.mark.xla]


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize(
    ("world", "tp", "ep", "others"),
    [
        (4, 2, 2, [(2, 1, 1), (4, 1, 2), (2, 2, 1)]),
        (4, 1, 2, [(4, 2, 2)]),
        (2, 1, 1, [(4, 2, 2)]),
    ],
)
def test_any_topology_to_any(
    world: int, tp: int, ep: int, others: list[tuple[int, int, int]], zero1: bool, tmp_path: Path
) -> None:
    for told in run_on_nxd(experts.saves, world, tmp_path, tp, ep, zero1):
        assert {how: wrong for how, wrong in told.items() if wrong} == {}
    for ranks, other_tp, other_ep in others:
        for told in run_on_nxd(experts.loads, ranks, tmp_path, other_tp, other_ep, zero1):
            assert {how: wrong for how, wrong in told.items() if wrong} == {}
