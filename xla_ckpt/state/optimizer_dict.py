"""Several optimizers of one model, such as Muon for matrices and AdamW for the rest, or the two of a GAN.

They are stored as one: state by parameter name, and the param groups of all of them. A checkpoint does not record which
optimizer had a parameter, so a parameter may move to another optimizer of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.values import Json
from xla_ckpt.errors import UsageError
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state import optimizer_load, zero1
from xla_ckpt.state.model_state import add_tied_names, match_stored_names
from xla_ckpt.state.optimizer import get_optimizer_schema
from xla_ckpt.state.part_load import PartLoadPlan, StoredPart
from xla_ckpt.state.problems import LoadProblem
from xla_ckpt.state.shardings import OptimizerParameter
from xla_ckpt.state.values import CODEC
from xla_ckpt.state.wrappers import unwrap_optimizer


@dataclass(frozen=True, slots=True)
class OptimizerDict:
    """Unwrapped optimizers, by the names that the program uses."""

    members: Mapping[Any, Any]

    @property
    def param_groups(self) -> list[Any]:
        """The groups of all optimizers, as in a single one."""
        return [group for member in self.members.values() for group in member.param_groups]


def unwrap_optimizers(optimizer: Any, stored: StoredPart | None = None) -> Any:
    """Unwrap an optimizer, or a dict of optimizers, which becomes an `OptimizerDict`.

    `stored` is the state to load, if known.
    """
    common = [] if stored is None else [paths.unescape(key) for key in schema.find_shared_state(stored.skeleton)]
    if isinstance(optimizer, Mapping) and optimizer and all(map(optimizers.is_optimizer_like, optimizer.values())):
        return OptimizerDict({name: unwrap_optimizer(member, common) for name, member in optimizer.items()})
    return unwrap_optimizer(optimizer, common)


def list_optimizers(optimizer: Any) -> Sequence[Any]:
    """List the optimizers of an argument: one, or several."""
    return [*optimizer.members.values()] if isinstance(optimizer, OptimizerDict) else [optimizer]


def get_joint_tree(joint: OptimizerDict, names: optimizers.ParameterNames) -> dict[str, Any]:
    """Return the merged state of the optimizers, by name.

    Raises:
        UsageError: If an optimizer cannot be stored in this form.
    """
    whose: dict[str, Any] = {}
    state: dict[Any, Any] = {}
    groups: list[Any] = []
    for called, member in joint.members.items():
        tree = optimizers.get_optimizer_tree(member, names)
        _check_member(called, member, tree)
        for name in schema.get_parameter_names(tree):
            if name.startswith("#"):
                raise _create_refusal_error(
                    called, f"parameter {name} is none of the model's", "Give the model, too: names tell them apart."
                )
            if name in whose:
                raise _create_refusal_error(called, f"parameter {name} belongs to {whose[name]!r}, too", None)
            whose[name] = called
        if twice := sorted(map(str, tree[schema.STATE].keys() & state.keys())):
            raise _create_refusal_error(
                called,
                f"it has state {twice[0]!r} that belongs to no parameter, and another one has, too",
                _EXTRAS_HINT,
            )
        state |= tree[schema.STATE]
        groups += tree[schema.PARAM_GROUPS]
    return {schema.STATE: state, schema.PARAM_GROUPS: groups}


_EXTRAS_HINT = "Give it to extras, by a name of its own."


def _check_member(name: Any, member: Any, tree: Any) -> None:
    if zero1.is_zero1(member) or get_optimizer_schema(member).per_rank:
        own = f"Give it to extras, by a name of its own: extras={{{name!r}: xla_ckpt.PerRank(optimizer)}}."
        raise _create_refusal_error(name, "it has state that every rank has its own of", own)
    if not optimizers.is_keyed_by_name(member, tree) or tree.keys() != {schema.STATE, schema.PARAM_GROUPS}:
        raise _create_refusal_error(
            name, "its state has another structure than that of torch's optimizers", _EXTRAS_HINT
        )


def _create_refusal_error(name: Any, why: str, hint: str | None) -> UsageError:
    return UsageError(f"optimizer {name!r} cannot be stored beside others: {why}", leaf=schema.OPTIMIZER, hint=hint)


def get_joint_parameters(
    joint: OptimizerDict, names: optimizers.ParameterNames, placement: RankInfo
) -> dict[str, OptimizerParameter]:
    """Return the parameters of all optimizers, by path component."""
    return {
        component: parameter
        for member in joint.members.values()
        for component, parameter in optimizers.get_saved_parameters(member, None, names, placement).items()
    }


def plan_joint_load(
    stored: StoredPart, joint: OptimizerDict, names: optimizers.ParameterNames, model: Any
) -> list[PartLoadPlan]:
    """Plan the load of each optimizer, from its part of the stored state."""
    tree = stored.build()
    if (why := _explain_not_by_name(joint, tree)) is not None:
        refused = PartLoadPlan()
        refused.add_problem(stored.prefix, why)
        return [refused]
    names = match_stored_names(names, model, tree, stored.manifest.aliases)
    names_of_each = [set(optimizers.list_parameter_names(member, names)) for member in joint.members.values()]
    parts = [
        optimizer_load.plan_optimizer_load(_select_part(stored, tree, joint, member, own), member, names, model)
        for member, own in zip(joint.members.values(), names_of_each, strict=True)
    ]
    wanted = add_tied_names(set().union(*names_of_each), model)
    parts[0].unexpected = [
        LoadProblem(schema.get_state_path(name), "the stored optimizer has this parameter, none of these does")
        for group in tree[schema.PARAM_GROUPS]
        for name in group[schema.PARAMS]
        if name not in wanted
    ]
    return parts


def _explain_not_by_name(joint: OptimizerDict, tree: Any) -> str | None:
    """Return the reason why a stored state cannot be split among several optimizers; None if it can."""
    if not optimizers.is_keyed_by_name(joint, tree):
        return "several optimizers are wanted; stored is the state of one of another structure than torch's"
    if schema.PER_RANK_STATE in tree:
        return "several optimizers are wanted; stored is state that every rank has its own of"
    stored_names = schema.get_parameter_names(tree)
    if not all(isinstance(name, str) and not name.startswith("#") for name in stored_names):
        return "several optimizers are wanted; what is stored has numbers in place of the parameters' names"
    return None


def _select_part(stored: StoredPart, tree: Any, joint: OptimizerDict, member: Any, names: set[str]) -> StoredPart:
    """Select one optimizer's part of a stored state: groups keep their positions, and groups of other optimizers are
    empty.
    """
    parameters = set(schema.get_parameter_names(tree))

    def is_its(key: Any) -> bool:
        if key in parameters:
            return key in names
        holders = [m for m in joint.members.values() if key in m.state]
        return not holders or any(m is member for m in holders)

    groups = []
    for skeleton, group in zip(stored.skeleton[schema.PARAM_GROUPS], tree[schema.PARAM_GROUPS], strict=True):
        kept = [name for name in group[schema.PARAMS] if name in names]
        groups.append({**skeleton, schema.PARAMS: kept} if kept else {schema.PARAMS: []})
    state = _filter_keys(stored.skeleton[schema.STATE], is_its)
    return replace(stored, skeleton={schema.STATE: state, schema.PARAM_GROUPS: groups})


def _filter_keys(skeleton: Json, is_kept: Any) -> Json:
    """Filter the members of a stored dict by key."""
    if skeleton.keys() == {"$dict"}:
        return {"$dict": [[key, member] for key, member in skeleton["$dict"] if is_kept(CODEC.decode(key))]}
    return {key: member for key, member in skeleton.items() if is_kept(key)}
