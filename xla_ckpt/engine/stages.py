"""What the pipeline stages of a job tell each other in a save, before they write.

The first rank of each stage speaks for it: its other ranks hold leaves of the same names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.writing import Staged, Writing
from xla_ckpt.errors import CheckpointError
from xla_ckpt.job.messages import Message
from xla_ckpt.job.round import LEAD, Deadline, Round
from xla_ckpt.manifest.digest import digest, to_hex
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StageLeaves(Message):
    """What the first rank of a pipeline stage tells the others."""

    leaves: tuple[str, ...]
    """Digests of the leaf paths that the stage holds."""

    about: Any
    """What a layout's files have to say of it (`Staged.told`); None if they say nothing."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages of a job, as one rank meets them."""

    exchange: Round
    mesh: Mesh

    @property
    def _own(self) -> int:
        return self.mesh.coordinates(self.exchange.rank)["pp"]

    @property
    def _speaks(self) -> bool:
        """Whether this rank tells the other stages about its own."""
        return self.mesh.pp > 1 and self.exchange.rank == self.mesh.first_of_stage(self.exchange.rank)

    def plan(self, writing: Writing, leaves: Iterable[str], phases: Phases) -> SavePlan:
        """What this rank writes: without what an earlier stage holds, too, so that it is stored once.

        Args:
            writing: How it writes its state.
            leaves: Leaf paths of its arrays.
            phases: Where the time goes.

        Raises:
            CheckpointError: The first rank of another stage has failed.
        """
        if self.mesh.pp == 1 or self.exchange.size == 1:
            with phases.timed("plan"), collector_paused():
                return writing.plan
        staged = writing if isinstance(writing, Staged) else None
        with phases.timed("meet"):
            names = {path: to_hex(digest(path.encode())) for path in leaves}
            if self._speaks:
                own = StageLeaves(tuple(names.values()), None if staged is None else staged.told)
                self.exchange.say(self._key(self._own), own.to_json())
            stages = self._hear(self._own if staged is None else self.mesh.pp)
        with phases.timed("plan"), collector_paused():
            plan = writing.plan if staged is None else staged.among([stage.about for stage in stages])
        earlier = {leaf for stage in stages[: self._own] for leaf in stage.leaves}
        return plan.minus(frozenset(path for path, name in names.items() if name in earlier))

    def _hear(self, count: int) -> list[StageLeaves]:
        """What the first so many stages have told."""
        # Rank 0 gives up before the others do, so that they hear its verdict.
        deadline = Deadline(self.exchange.timeout * (LEAD if self.exchange.rank == 0 else 1))
        said = (self.exchange.hear(self._key(s), self.mesh.rank({"pp": s}), deadline) for s in range(count))
        return [StageLeaves.from_json(stage) for stage in said]

    def tell_failure(self, error: CheckpointError) -> None:
        """Tell the other stages an error, if they would wait for this rank. Otherwise they would do so in vain."""
        if self._speaks and not self.exchange.has_said(self._key(self._own)):
            self.exchange.say(self._key(self._own), error=error)

    @staticmethod
    def _key(stage: int) -> str:
        return f"names/{stage}"
