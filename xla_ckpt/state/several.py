"""Several optimizers of one model, such as Muon for its matrices and AdamW for the rest, or those of a GAN.

They are stored as one: state by parameter name, and the groups of all of them. So a tag does not say which optimizer a
parameter had, and a parameter may have moved to another one of the same kind. The names under which they are given are
the program's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state import optimizer_load, zero1
from xla_ckpt.state.loading import Loading, Stored
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.registered import schema_of
from xla_ckpt.state.shardings import Parameter
from xla_ckpt.state.ties import stored_names, with_other_names
from xla_ckpt.state.values import CODEC
from xla_ckpt.state.wrappers import unwrapped_optimizer
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import Json


@dataclass(frozen=True, slots=True)
class Several:
    """Optimizers by the name that the program gives them, without what wraps them."""

    members: Mapping[Any, Any]

    @property
    def param_groups(self) -> list[Any]:
        """The groups of all of them, as if they were those of one."""
        return [group for member in self.members.values() for group in member.param_groups]


def bare_optimizer(optimizer: Any, stored: Stored | None = None) -> Any:
    """What a caller gave for an optimizer, without what wraps it: `Several`, if it is a dict of optimizers.

    `stored` is what it is to load, where that is known.
    """
    common = [] if stored is None else [paths.unescape(key) for key in schema.common_state(stored.skeleton)]
    if isinstance(optimizer, Mapping) and optimizer and all(map(optimizers.acts_as_optimizer, optimizer.values())):
        return Several({name: unwrapped_optimizer(member, common) for name, member in optimizer.items()})
    return unwrapped_optimizer(optimizer, common)


def optimizers_in(optimizer: Any) -> Sequence[Any]:
    """The optimizers that a caller gave: one, or several."""
    return [*optimizer.members.values()] if isinstance(optimizer, Several) else [optimizer]


def tree_of(several: Several, names: optimizers.Names) -> dict[str, Any]:
    """Their state as that of one, by name.

    Raises:
        UsageError: One of them cannot be stored so.
    """
    whose: dict[str, Any] = {}
    state: dict[Any, Any] = {}
    groups: list[Any] = []
    for called, member in several.members.items():
        tree = optimizers.tree_of(member, names)
        _check_member(called, member, tree)
        for name in schema.grouped_names(tree):
            if name.startswith("#"):
                raise _refused(
                    called, f"parameter {name} is none of the model's", "Give the model, too: names tell them apart."
                )
            if name in whose:
                raise _refused(called, f"parameter {name} belongs to {whose[name]!r}, too", None)
            whose[name] = called
        if twice := sorted(map(str, tree[schema.STATE].keys() & state.keys())):
            raise _refused(
                called, f"it has state {twice[0]!r} that belongs to no parameter, and another one has, too", _ALONE
            )
        state |= tree[schema.STATE]
        groups += tree[schema.GROUPS]
    return {schema.STATE: state, schema.GROUPS: groups}


_ALONE = "Give it to extras, by a name of its own."


def _check_member(called: Any, member: Any, tree: Any) -> None:
    if zero1.is_zero1(member) or schema_of(member).per_rank:
        own = f"Give it to extras, by a name of its own: extras={{{called!r}: xla_ckpt.PerRank(optimizer)}}."
        raise _refused(called, "it has state that every rank has its own of", own)
    if not optimizers.is_by_name(member, tree) or tree.keys() != {schema.STATE, schema.GROUPS}:
        raise _refused(called, "its state has another structure than that of torch's optimizers", _ALONE)


def _refused(called: Any, why: str, hint: str | None) -> UsageError:
    return UsageError(f"optimizer {called!r} cannot be stored beside others: {why}", leaf=schema.OPTIMIZER, hint=hint)


def parameters_of(several: Several, names: optimizers.Names, placement: Placement) -> dict[str, Parameter]:
    """The parameters of all of them, by path component."""
    return {
        component: parameter
        for member in several.members.values()
        for component, parameter in optimizers.parameters_of(member, None, names, placement).items()
    }


def load(stored: Stored, several: Several, names: optimizers.Names, model: Any) -> list[Loading]:
    """Prepare to load each of them, from the part of the stored state that is its own."""
    tree = stored.build()
    if (why := _not_by_name(several, tree)) is not None:
        refused = Loading()
        refused.add_problem(stored.prefix, why)
        return [refused]
    names = stored_names(names, model, tree, stored.manifest.aliases)
    names_of_each = [set(optimizers.names_in_order(member, names)) for member in several.members.values()]
    parts = [
        optimizer_load.load(_part(stored, tree, several, member, own), member, names, model)
        for member, own in zip(several.members.values(), names_of_each, strict=True)
    ]
    wanted = with_other_names(set().union(*names_of_each), model)
    parts[0].unwanted = [
        Problem(schema.state(name), "the stored optimizer has this parameter, none of these does")
        for group in tree[schema.GROUPS]
        for name in group[schema.PARAMS]
        if name not in wanted
    ]
    return parts


def _not_by_name(several: Several, tree: Any) -> str | None:
    """Why a stored state cannot be dealt out to several optimizers; None if it can."""
    if not optimizers.is_by_name(several, tree):
        return "several optimizers are wanted; stored is the state of one of another structure than torch's"
    if schema.OWN in tree:
        return "several optimizers are wanted; stored is state that every rank has its own of"
    stored_names = schema.grouped_names(tree)
    if not all(isinstance(name, str) and not name.startswith("#") for name in stored_names):
        return "several optimizers are wanted; what is stored has numbers in place of the parameters' names"
    return None


def _part(stored: Stored, tree: Any, several: Several, member: Any, own: set[str]) -> Stored:
    """The part of a stored optimizer that is one member's: groups keep their places, those of others are empty."""
    parameters = set(schema.grouped_names(tree))

    def is_its(key: Any) -> bool:
        if key in parameters:
            return key in own
        holders = [m for m in several.members.values() if key in m.state]
        return not holders or any(m is member for m in holders)

    groups = []
    for skeleton, group in zip(stored.skeleton[schema.GROUPS], tree[schema.GROUPS], strict=True):
        kept = [name for name in group[schema.PARAMS] if name in own]
        groups.append({**skeleton, schema.PARAMS: kept} if kept else {schema.PARAMS: []})
    state = _filtered(stored.skeleton[schema.STATE], is_its)
    return replace(stored, skeleton={schema.STATE: state, schema.GROUPS: groups})


def _filtered(skeleton: Json, keeps: Any) -> Json:
    """The members of a stored dict whose keys are wanted."""
    if skeleton.keys() == {"$dict"}:
        return {"$dict": [[key, member] for key, member in skeleton["$dict"] if keeps(CODEC.decode(key))]}
    return {key: member for key, member in skeleton.items() if keeps(key)}
