"""Which process this is, among which others."""

from __future__ import annotations

from dataclasses import dataclass, field

from xla_ckpt.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Placement:
    """What a process knows about the job when it describes its arrays."""

    rank: int = 0
    world: int = 1
    mesh: Mesh = field(default_factory=Mesh)
    """How the ranks are arranged; pure data parallelism where nobody says otherwise."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for its pipeline stage."""
        return self.rank == self.mesh.first_of_stage(self.rank)
