"""Which job this process belongs to: its rank, its peers, its mesh."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.adapters.base import Placement
from xla_ckpt.coord.communicator import Solo
from xla_ckpt.coord.verdict import Round
from xla_ckpt.errors import UsageError
from xla_ckpt.layout.mesh import Mesh

TIMEOUT = 1800.0
"""Seconds that a rank waits for another before it gives up."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Round
    placement: Placement

    def shows(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def current_job(root: str, mesh: Mesh | None) -> Job:
    """The job of this process, for one save or load of `root`.

    Raises:
        UsageError: `mesh` does not fit to the number of processes.
    """
    exchange = Round(Solo(), root, TIMEOUT)
    if mesh is not None and mesh.size != exchange.size:
        raise UsageError(
            "the mesh does not fit the job", path=root, expected=f"{exchange.size} ranks", found=f"{mesh.size} ({mesh})"
        )
    return Job(exchange, Placement(exchange.rank, exchange.size, mesh))
