"""Which job this process belongs to: its rank, its peers, its mesh."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass

from xla_ckpt.adapters import dist
from xla_ckpt.adapters.base import Placement
from xla_ckpt.adapters.parallel_state import current_mesh
from xla_ckpt.coord.communicator import Communicator, Solo
from xla_ckpt.coord.verdict import KEPT_ROUNDS, Round
from xla_ckpt.errors import UsageError
from xla_ckpt.layout.mesh import Mesh

TIMEOUT = 1800.0
"""Seconds that a rank waits for another before it gives up, by default."""

_rounds: collections.deque[Round] = collections.deque()
"""The latest rounds of this process, oldest first."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Round
    placement: Placement
    outdated: tuple[Round, ...] = ()
    """Rounds of earlier calls that all ranks have done with."""

    def tidy(self) -> None:
        """Remove from the store what earlier calls left there. Reaches the store: not for a caller in a hurry."""
        for old in self.outdated:
            old.forget()

    def shows(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def current_job(root: str, mesh: Mesh | None, *, doing: str, timeout: float = TIMEOUT) -> Job:
    """The job of this process, for one save or load of `root`.

    All ranks make the same calls in the same order; that is how they find each other's messages.

    Raises:
        UsageError: `mesh` does not fit to the number of processes.
    """
    if not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", path=root, found=timeout)
    if dist.is_distributed():
        communicator: Communicator = dist.communicator()
    else:
        dist.check_alone()
        communicator = Solo()
    if mesh is None:
        mesh = current_mesh(communicator.rank, communicator.size) or Mesh(dp=communicator.size)
    if mesh.size != communicator.size:
        raise UsageError(
            "the mesh does not fit the job", path=root, expected=f"{communicator.size} ranks",
            found=f"{mesh.size} ({mesh})",
        )  # fmt: skip
    exchange, outdated = _round(communicator, doing, timeout)
    return Job(exchange, Placement(communicator.rank, communicator.size, mesh), outdated)


def _round(communicator: Communicator, doing: str, timeout: float) -> tuple[Round, tuple[Round, ...]]:
    """The round of a call, and those that are outdated by it."""
    if communicator.size == 1:
        return Round(communicator, doing, timeout), ()
    if _rounds and _rounds[-1].communicator is not communicator:
        _rounds.clear()
    made = Round(communicator, f"{doing}/{next(_numbers)}", timeout)
    _rounds.append(made)
    return made, tuple(_rounds.popleft() for _ in range(len(_rounds) - KEPT_ROUNDS))
