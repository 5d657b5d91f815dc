"""Emulated jobs with grouped-query attention train as one process with the unsplit model does."""

from __future__ import annotations

import pytest

from tests.jobs import run_on_ranks
from tests.neuron.gqa import Job, Ranks, unsplit

STEPS = 3
ARRANGEMENTS = [
    arrangement._replace(fused=fused)
    for fused in (True, False)
    for arrangement in (
        Ranks(2),
        Ranks(2, copies=2, order=2),
        Ranks(4, kv_heads=4),
        Ranks(4, copies=2, order=2),
        Ranks(4, copies=2, order=2, kv_heads=4),
        Ranks(4, copies=2, adjacent=True),
        Ranks(4, copies=4, kv_heads=1),
    )
]


def trains(_rank: int) -> list[list[tuple[float, float]]]:
    """One arrangement after the other."""
    found = []
    for ranks in ARRANGEMENTS:
        job = Job(ranks)
        found.append(job.steps(0, STEPS))
        job.end()
    return found


def test_losses_and_norms_of_gradients_are_those_of_the_unsplit_model() -> None:
    every = run_on_ranks(trains, 4, xla=True)
    assert every[1:] == every[:1] * 3
    for ranks, found in zip(ARRANGEMENTS, every[0], strict=True):
        expected = unsplit(ranks, STEPS)
        assert expected[0][1] > 0.1  # the norm decides how far a step goes
        for step in range(STEPS):
            assert found[step] == pytest.approx(expected[step], rel=1e-10), (ranks, step)
    assert unsplit(Ranks(1, order=2), 1) != unsplit(Ranks(1), 1)  # which heads meet is in the losses
