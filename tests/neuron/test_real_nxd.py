"""Jobs of the real neuronx-distributed, by which tests judge the library."""

from __future__ import annotations

import pytest

from tests.neuron.real import meeting
from tests.neuron.real_nxd import needs_nxd, run_on_nxd
from tests.nursery import ProcessError

pytestmark = [needs_nxd, pytest.mark.xla]


def test_the_ranks_of_a_job_meet() -> None:
    assert run_on_nxd(meeting.stage_of, 2, 2) == [0, 1]


def test_what_a_rank_raises_is_raised_here() -> None:
    with pytest.raises(ProcessError, match="--- rank 1\n(?s:.)*ValueError: no part of the model is here"):
        run_on_nxd(meeting.refuses, 2, 1)
    assert run_on_nxd(meeting.stage_of, 2, 1) == [0, 0]
