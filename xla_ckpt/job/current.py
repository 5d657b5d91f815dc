"""Which job this process belongs to: its rank, its peers, its mesh."""

from __future__ import annotations

import threading

from xla_ckpt.errors import UsageError, naming
from xla_ckpt.job import peers
from xla_ckpt.job.communicator import Solo
from xla_ckpt.job.job import Job, rounds_over
from xla_ckpt.job.mesh_source import current_mesh
from xla_ckpt.job.rounds import TIMEOUT, Rounds
from xla_ckpt.sharding.mesh import Mesh, as_mesh
from xla_ckpt.sharding.placement import Placement

_SOLO = Solo()


def job_alone(timeout: float) -> Job:
    """A job of this process alone, for a load in which its peers take no part.

    Its rounds are its own: those of the process are numbered as those of the other ranks.
    """
    rounds = Rounds(_SOLO)
    return Job(rounds.begin("load", timeout), Placement(0, 1, Mesh()), rounds)


class Played(threading.local):
    """The job in which the saves and loads of this thread take part, if it is given: whatever process this is.

    Tests play the ranks of a job with it, each in a thread of one process. Programs have no use for it.
    """

    job: Job | None = None


PLAYED = Played()


def world_size(root: str) -> int:
    """Return the number of ranks of this process's job, without beginning a call.

    Raises:
        UsageError: This rank cannot meet the others.
    """
    with naming(path=root):
        peers.check_can_meet()
    return (peers.channel() or _SOLO).size


def current_job(root: str, mesh: Mesh | str | None, *, doing: str, timeout: float = TIMEOUT) -> Job:
    """The job of this process, for one save or load of `root`.

    All ranks make the same calls in the same order; that is how they find each other's messages.

    Raises:
        UsageError: `mesh` does not fit to the number of processes, or this rank cannot meet the others.
    """
    if PLAYED.job is not None:
        return PLAYED.job
    if not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", path=root, found=timeout)
    peers.check_can_meet()
    communicator = peers.channel() or _SOLO
    mesh = as_mesh(mesh)
    if mesh is None:
        mesh = current_mesh(communicator.rank, communicator.size) or Mesh(dp=communicator.size)
    if mesh.size != communicator.size:
        raise UsageError(
            "the mesh does not fit the job",
            path=root,
            expected=f"{communicator.size} rank{'s' * (communicator.size > 1)}",
            found=f"{mesh.size} ({mesh})",
            hint="Start the job with as many ranks (with torchrun, or jax.distributed), or leave mesh= out.",
        )
    rounds = rounds_over(communicator)
    return Job(rounds.begin(doing, timeout), Placement(communicator.rank, communicator.size, mesh), rounds)
