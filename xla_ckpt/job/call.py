"""One call of one process, among the same calls of the other ranks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from xla_ckpt.job.communicator import Communicator
from xla_ckpt.job.rounds import Rounds
from xla_ckpt.job.verdict import Round
from xla_ckpt.sharding.placement import Placement

LINGER = 10.0
"""Seconds that rank 0 waits at the exit of the program, at most, for ranks that have not heard of the last calls."""

_rounds: list[Rounds] = []
"""The rounds of the current process group, if there were any. A later group gets others."""


def rounds_over(communicator: Communicator) -> Rounds:
    """The rounds over a communicator. Their numbers go on from those of an earlier one, which used the same store."""
    if not _rounds or _rounds[0].communicator is not communicator:
        _rounds[:] = [Rounds(communicator, _rounds[0].last if _rounds else 0)]
    return _rounds[0]


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Round
    placement: Placement
    rounds: Rounds

    def taking_part(self) -> AbstractContextManager[None]:
        """A context around everything that this rank says and hears in its call."""
        return self.rounds.taking_part(self.exchange)

    def tidy(self) -> None:
        """Remove from the store what earlier calls left there. It asks the store, which takes its time."""
        self.rounds.tidy()

    def shows(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def leave() -> None:
    """Wait, at the end of the program, for ranks that still have to hear of its last calls.

    They hear through the store, and where there is no launcher, rank 0's process holds it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        for rounds in _rounds:
            rounds.linger(LINGER)
