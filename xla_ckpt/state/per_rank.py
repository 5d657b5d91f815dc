"""Members of `extras` that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError, naming
from xla_ckpt.keywords import known_options
from xla_ckpt.logs import get_logger
from xla_ckpt.sharding.mesh import as_mesh
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state import stateful
from xla_ckpt.state.dealt import deal_of
from xla_ckpt.state.handover import Handover, kept_state
from xla_ckpt.state.loading import Loading, Stored, plan_arrays
from xla_ckpt.state.rng import RNGState
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import Reshard
from xla_ckpt.tree.skeleton import children

logger = get_logger(__name__)


class PerRank:
    """A member of `extras` of which every rank has a state of its own: a data loader over a part of the data.

    ``extras={"data": xla_ckpt.PerRank(loader)}`` stores the state of every rank's `loader`, and gives each rank its own
    back. Without it a member that differs between ranks fails the save, rather than one rank's state being kept.

    A job over another mesh cannot simply take over such states. For data loaders and samplers that the library knows
    (docs/objects.md) it makes those of the new ranks, so that no sample is repeated or left out, or refuses the load.
    For other objects one of these says how, and without them the load is refused:

    Args:
        member: The object, with ``state_dict`` and ``load_state_dict``, or with ``get_state`` and ``set_state``.
        reshard: It is called as ``reshard(states, rank, world)`` with the states of all ranks that saved, and returns
            this rank's.
        position: For a sampler of which data-parallel rank r of n takes the samples r, r + n, r + 2 n, ... of an order
            that does not depend on n: the key in its state of the number of samples that this rank has taken. The rest
            of the state, such as the epoch, is to be the same on all ranks.

    Raises:
        UsageError: Both are given, or a member that is wrapped already.
    """

    @known_options
    def __init__(self, member: Any, reshard: Reshard | None = None, *, position: str | None = None) -> None:
        if isinstance(member, PerRank):
            raise UsageError("a PerRank member is wrapped twice")
        if reshard is not None and position is not None:
            raise UsageError("reshard= and position= of PerRank both say how another number of ranks takes over")
        self.member = member
        self.reshard = reshard
        self.position = position


def is_per_rank(member: Any) -> bool:
    """Whether a member differs from rank to rank by its nature, or is said to."""
    return isinstance(member, PerRank) or getattr(member, schema.WORLD, False) is True


def _inner(member: Any) -> Any:
    return stateful.with_state_dict(member.member if isinstance(member, PerRank) else member)


def tree_of(member: Any, name: str, where: Placement) -> Any:
    """The state of a member; of one that differs between ranks, this rank's part of it."""
    state = stateful.tree_of(_inner(member), name)
    if not is_per_rank(member):
        return state
    return {schema.WORLD: where.world, schema.MESH: str(where.mesh), schema.RANKS: {str(where.rank): state}}


def path_of(name: str, rank: int) -> str:
    """Leaf path of what only this rank stores of such a member."""
    return schema.of_rank(schema.in_extras(name), rank)


def load(stored: Stored, member: Any) -> Loading:
    """Prepare to load a member of `extras`, whichever of both kinds it is and was."""
    where, inner = stored.shardings.placement, _inner(member)
    saved_by = schema.saved_by(stored.skeleton)
    if not is_per_rank(member):
        if saved_by is None:
            return stateful.load(stored, inner)
        return _refused(stored, "every rank's own state is stored; wrap the member in xla_ckpt.PerRank")
    if saved_by is None:  # by an older version, or by a job that did not wrap it: the state of all ranks
        saved_by, mesh, alike, parts = 1, None, where.world == 1, {0: stored}
    else:
        mesh = as_mesh(stored.skeleton.get(schema.MESH))
        alike = schema.same_ranks(stored.skeleton, where.world, str(where.mesh))
        parts = {r: part for r in range(saved_by) if (part := stored.at(schema.of_rank(paths.ROOT, r))) is not None}
    own = parts.get(where.rank)
    if isinstance(inner, RNGState) and own is not None and "python" not in (children(own.skeleton) or ()):
        # Its generators would be set last, when all other objects have their new state.
        return _refused(stored, "another object's state is stored under this name, and none of random generators")
    wrapped = member if isinstance(member, PerRank) else PerRank(member)
    if alike and where.rank in parts:
        return stateful.load(parts[where.rank], inner)
    if (reshard := wrapped.reshard) is not None:
        return _load_made(list(parts.values()), inner, lambda states: reshard(states, where.rank, where.world))
    if isinstance(inner, RNGState):
        return _left_alone(stored, where.rank, saved_by) if own is None else stateful.load(own, inner)
    deal = deal_of(wrapped.member, wrapped.position)
    replicas = [] if mesh is None else [parts[r] for i in range(mesh.dp) if (r := mesh.rank({"dp": i})) in parts]
    if deal is None or mesh is None or len(replicas) < mesh.dp:
        return _refused(
            stored,
            f"it is the state of {saved_by} ranks, this job has {where.world}"
            f"{'' if mesh is None else f' ({where.mesh} in the place of {mesh})'}: say with position= or reshard= of "
            "PerRank how they take it over",
        )
    rank, world = where.mesh.coordinates(where.rank)["dp"], where.mesh.dp
    if world == mesh.dp:
        return stateful.load(replicas[rank], inner)
    dealt = _load_made(replicas, inner, lambda states: deal(states, rank, world))
    if not dealt.targets:  # plain values: a refusal is told with all that does not fit, or left alone as that
        try:
            deal([part.build() for part in replicas], rank, world)
        except IncompatibleCheckpointError as error:
            return _refused(stored, f"{error.problem}. {error.hint}")
    return dealt


def _refused(stored: Stored, why: str) -> Loading:
    loading = Loading()
    loading.add_problem(stored.prefix, why, says_cure=True)
    return loading


def _left_alone(stored: Stored, rank: int, saved_by: int) -> Loading:
    """Random generators that nobody saved stay as they are."""
    text = (
        "%s: no state of random generators is stored for rank %d, since %d saved: they stay as they are. Seed them "
        "by the rank, if ranks are to draw different numbers: torch.manual_seed(seed + rank)"
    )
    return Loading(finish=lambda arrays: logger.warning(text, stored.prefix, rank, saved_by))


def _load_made(parts: Sequence[Stored], inner: Any, make: Callable[[list[Any]], Any]) -> Loading:
    """Have a member take a state that is made of those of several ranks."""
    loading = Loading()
    for part in parts:
        plan_arrays(part, loading, {})
        part.build()  # what may not be loaded is found out before anything is changed

    def take(arrays: Mapping[str, Any]) -> None:
        with naming(leaf=leaf):
            inner.load_state_dict(make([part.build(lambda path, _: arrays[path]) for part in parts]))

    leaf = next((schema.holder_of(part.prefix) or part.prefix for part in parts), schema.EXTRAS)
    loading.handover = Handover(leaf=leaf, take=take, keep=lambda: kept_state(inner))
    return loading
