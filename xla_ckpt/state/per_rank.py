"""Members of `extras` that differ from rank to rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.state import stateful
from xla_ckpt.state.handover import Handover, kept_state
from xla_ckpt.state.loading import Loading, Stored, plan_arrays
from xla_ckpt.state.rng import RNGState
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)


class PerRank:
    """A member of `extras` of which every rank has a state of its own: a data loader over a part of the data.

    ``extras={"data": xla_ckpt.PerRank(loader)}`` stores the state of every rank's `loader`, and gives each rank its own
    back. Without it a member that differs between ranks fails the save, rather than one rank's state being kept.

    A job of another number of ranks cannot take over such states, and its load is refused, unless `reshard` says how:
    it is called as ``reshard(states, rank, world)`` with the states of all ranks that saved, and returns this rank's.
    """

    def __init__(self, member: Any, reshard: Callable[[Sequence[Any], int, int], Any] | None = None) -> None:
        if isinstance(member, PerRank):
            raise UsageError("a PerRank member is wrapped twice")
        self.member = member
        self.reshard = reshard


def is_per_rank(member: Any) -> bool:
    """Whether a member differs from rank to rank by its nature, or is said to."""
    return isinstance(member, PerRank) or getattr(member, schema.WORLD, False) is True


def _inner(member: Any) -> Any:
    return member.member if isinstance(member, PerRank) else member


def tree_of(member: Any, name: str, rank: int, world: int) -> Any:
    """The state of a member; of one that differs between ranks, this rank's part of it."""
    state = stateful.tree_of(_inner(member), name)
    if not is_per_rank(member):
        return state
    return {schema.WORLD: world, schema.RANKS: {str(rank): state}}


def path_of(name: str, rank: int) -> str:
    """Leaf path of what only this rank stores of such a member."""
    return schema.of_rank(schema.in_extras(name), rank)


def load(stored: Stored, member: Any, rank: int, world: int) -> Loading:
    """Prepare to load a member of `extras`, whichever of both kinds it is and was."""
    saved_by = schema.saved_by(stored.skeleton)
    if not is_per_rank(member):
        if saved_by is None:
            return stateful.load(stored, member)
        one = Loading()
        one.add_problem(stored.prefix, "every rank's own state is stored; wrap the member in xla_ckpt.PerRank")
        return one
    inner = _inner(member)
    if saved_by is None:  # by an older version, or by a job that did not wrap it: the state of all ranks
        saved_by, parts = 1, {0: stored}
    else:
        parts = {r: part for r in range(saved_by) if (part := stored.at(schema.of_rank(paths.ROOT, r))) is not None}
    if saved_by == world and rank in parts:
        return stateful.load(parts[rank], inner)
    if isinstance(member, PerRank) and member.reshard is not None:
        return _load_resharded(parts, member, rank, world)
    loading = Loading()
    if not isinstance(inner, RNGState):
        loading.add_problem(
            stored.prefix, f"it is the state of {saved_by} ranks, this job has {world}: give PerRank a reshard function"
        )
    elif rank in parts:
        return stateful.load(parts[rank], inner)
    else:
        text = (
            "%s: no state of random generators is stored for rank %d, since %d saved: they stay as they are. Seed them "
            "by the rank, if ranks are to draw different numbers: torch.manual_seed(seed + rank)"
        )
        loading.finish = lambda arrays: logger.warning(text, stored.prefix, rank, saved_by)
    return loading


def _load_resharded(parts: dict[int, Stored], member: PerRank, rank: int, world: int) -> Loading:
    loading = Loading()
    for part in parts.values():
        plan_arrays(part, loading, {})
        part.build()  # what may not be loaded is found out before anything is changed
    reshard = member.reshard
    assert reshard is not None

    def take(arrays: Any) -> None:
        states = [parts[r].build(lambda path, _: arrays[path]) for r in sorted(parts)]
        member.member.load_state_dict(reshard(states, rank, world))

    leaf = next((part.prefix for part in parts.values()), schema.EXTRAS)
    loading.handover = Handover(leaf=leaf, take=take, keep=lambda: kept_state(member.member))
    return loading
