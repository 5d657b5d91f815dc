"""Which job this process belongs to: its rank, its peers, its mesh."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from xla_ckpt.arrays.base import Placement
from xla_ckpt.engine.background import install_exit_hook
from xla_ckpt.errors import UsageError
from xla_ckpt.job import process_group as dist
from xla_ckpt.job.communicator import Communicator, Solo
from xla_ckpt.job.mesh_source import current_mesh
from xla_ckpt.job.rounds import Rounds
from xla_ckpt.job.verdict import Round
from xla_ckpt.sharding.mesh import Mesh

TIMEOUT = 1800.0
"""Seconds that a rank waits for another before it gives up, by default."""

_SOLO = Solo()

LINGER = 10.0
"""Seconds that rank 0 waits at the exit of the program, at most, for ranks that have not heard of the last calls."""

_rounds: list[Rounds] = []
"""Of the current process group: a later one gets others."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Round
    placement: Placement
    rounds: Rounds

    def taking_part(self) -> AbstractContextManager[None]:
        """Around everything that this rank says and hears in its call."""
        return self.rounds.taking_part(self.exchange)

    def tidy(self) -> None:
        """Remove from the store what earlier calls left there. Reaches the store: not for a caller in a hurry."""
        self.rounds.tidy()

    def shows(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def as_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """A mesh as callers give it: ``Mesh(dp=2, tp=4)`` or ``"dp=2,tp=4"``.

    Raises:
        UsageError: It is neither.
    """
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        return Mesh.parse(mesh)
    except (ValueError, AttributeError) as error:
        raise UsageError(
            f"a mesh makes no sense: {error}", expected='Mesh(dp=2, tp=4), or "dp=2,tp=4"', found=repr(mesh)
        ) from error


def current_job(root: str, mesh: Mesh | str | None, *, doing: str, timeout: float = TIMEOUT) -> Job:
    """The job of this process, for one save or load of `root`.

    All ranks make the same calls in the same order; that is how they find each other's messages.

    Raises:
        UsageError: `mesh` does not fit to the number of processes, or this rank cannot meet the others.
    """
    if not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", path=root, found=timeout)
    dist.check_ranks()
    communicator: Communicator = dist.communicator() if dist.is_distributed() else _SOLO
    mesh = as_mesh(mesh)
    if mesh is None:
        mesh = current_mesh(communicator.rank, communicator.size) or Mesh(dp=communicator.size)
    if mesh.size != communicator.size:
        raise UsageError(
            "the mesh does not fit the job", path=root, expected=f"{communicator.size} ranks",
            found=f"{mesh.size} ({mesh})",
        )  # fmt: skip
    if not _rounds or _rounds[0].communicator is not communicator:
        _rounds[:] = [Rounds(communicator, _rounds[0].last if _rounds else 0)]
    install_exit_hook(leave)
    return Job(_rounds[0].begin(doing, timeout), Placement(communicator.rank, communicator.size, mesh), _rounds[0])


def leave() -> None:
    """Wait, at the end of the program, for ranks that still have to hear of its last calls.

    They hear through the store, and where there is no launcher, rank 0's process holds it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        for rounds in _rounds:
            rounds.linger(LINGER)
