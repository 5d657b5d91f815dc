"""How the snapshot of a save is taken: what the caller wants of it, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.save import Writing
from xla_ckpt.errors import UsageError
from xla_ckpt.options import check_choice
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.snapshot.take import Mode, Snapshot, lasts, take
from xla_ckpt.state.describe import Description, local_shards, shards_apart
from xla_ckpt.state.guard import GUARD, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """What a caller wants of a snapshot."""

    mode: Mode
    waits: bool
    """Whether the caller waits until all is written."""

    budget: int
    """Host memory for what is copied in the background (bytes)."""

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: There is no such mode, or no such budget.
        """
        check_choice("snapshot", self.mode, get_args(Mode))
        if type(self.budget) is not int or self.budget <= 0:
            raise UsageError(
                "snapshot_budget is no number of bytes", expected="a positive int", found=repr(self.budget)
            )

    def take(self, description: Description, writing: Writing, phases: Phases) -> Snapshot:
        """Take the snapshot of a state. Whoever writes to what is copied later waits for that from now on."""
        arrays = {
            path: held.taken_whole(path) if path in writing.whole else held for path, held in description.arrays.items()
        }
        state, shards = description.state, local_shards(arrays)
        many = description.placement.world > 1
        written = None
        if many and not all(lasts(shard, waits=self.waits) for shard in shards.values()):
            # What another rank writes is not copied here, so it has to be known now who writes what.
            with phases.timed("plan"):
                written = writing.plan.extents
        guarded = {}
        if self.mode == "overlap" and not self.waits:
            guarded = stepped({path: held.value for path, held in description.arrays.items()}, state.optimizer)
        snapshot = take(
            shards,
            description.leaves if many else (),
            waits=self.waits,
            mode=self.mode,
            stepped=guarded,
            written=written,
            loose=state.buffers,
            apart=shards_apart(description, writing.whole, shards) if many else None,
            budget=self.budget,
        )
        later = {leaf for (leaf, _), data in snapshot.memory.items() if isinstance(data, Deferred)}
        with snapshot.released_on_failure():
            GUARD.watch(
                snapshot.freezing,
                [value for leaf, value in guarded.items() if leaf in later],
                model=state.model,
                with_optimizer=state.optimizer is not None,
            )
        return snapshot
