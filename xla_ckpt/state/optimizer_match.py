"""Match stored optimizer parameters and param groups with those of the current optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import UNSUPPORTED_OPTIONS, get_required_members
from xla_ckpt.state import zero1
from xla_ckpt.state.model_state import add_tied_names
from xla_ckpt.state.optimizer import (
    ParameterNames,
    list_parameter_names,
    list_parameters,
)
from xla_ckpt.state.optimizer_install import get_torch_class_name
from xla_ckpt.state.part_load import PartLoadPlan
from xla_ckpt.state.problems import LoadProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMatch:
    """An optimizer of the program, matched with the stored one."""

    optimizer: Any
    state_holders: Sequence[Any]
    """The optimizers that hold the states: the wrapped ones of a ZeRO-1 optimizer, otherwise the optimizer itself."""

    parameters: Sequence[tuple[Any, str]]
    """(parameter, position) in packed-id order, as in torch."""

    stored_names: Sequence[Any]
    """The stored name of each parameter."""

    tensors_by_name: Mapping[Any, Any]
    """Name -> the tensor that its state is keyed by: the parameter, or a ZeRO-1 rank's shard of it."""

    stored_groups: Mapping[Any, Any]
    """Name of each stored parameter -> its stored group."""

    def get_names_by_id(self) -> Mapping[int, Any]:
        """Return the stored name of each parameter, by its id."""
        return {id(p): name for name, (p, _) in zip(self.stored_names, self.parameters, strict=True)}

    @property
    def is_zero1(self) -> bool:
        """True for a ZeRO-1 optimizer."""
        return self.state_holders[0] is not self.optimizer

    @property
    def current_state(self) -> Mapping[Any, Any]:
        """The current state of the program, by tensor."""
        return {key: state for holder in self.state_holders for key, state in holder.state.items()}


DECOUPLED_WEIGHT_DECAY = "decoupled_weight_decay"


_VERSION_DEPENDENT_OPTIONS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "maximize", DECOUPLED_WEIGHT_DECAY, "amsgrad"}
)
"""Options that vary between versions of torch, and do not identify a kind of optimizer."""


def find_kind_mismatch(tree: Any, optimizer: Any) -> str | None:
    """Return the reason why the stored state is of another kind of optimizer: each has options that the other lacks."""
    stored = {k for g in tree[schema.PARAM_GROUPS] for k in g} - _VERSION_DEPENDENT_OPTIONS
    defaults = set(getattr(optimizer, "defaults", {})) - _VERSION_DEPENDENT_OPTIONS
    own_alone = defaults - stored
    stored_alone = stored - {k for g in optimizer.param_groups for k in g} - {"params", "initial_lr"}
    if not tree[schema.PARAM_GROUPS] or not own_alone or not stored_alone:
        return None
    return (
        f"the state of another kind of optimizer is stored: it has {', '.join(sorted(stored_alone))}, and "
        f"{type(optimizer).__name__} has {', '.join(sorted(own_alone))}"
    )


def find_state_mismatch(tree: Any, match: OptimizerMatch) -> LoadProblem | None:
    """Return a problem if a parameter's stored state lacks members that the optimizer's step requires.

    Such a state was saved by another kind of optimizer. Options do not always show it: Adamax has none that Adam lacks.
    Nothing is known about optimizers with a custom `step`.
    """
    kind = get_torch_class_name(match.state_holders[0])
    if kind is None:
        return None
    name_of = match.get_names_by_id()
    for group in match.optimizer.param_groups:
        for parameter in group[schema.PARAMS]:
            name = name_of[id(parameter)]
            members = tree[schema.STATE].get(name)
            if name not in match.stored_groups or not isinstance(members, Mapping) or not members:
                continue
            options = {**group, **match.stored_groups[name]}
            missing = get_required_members(kind, options, parameter.ndim) - members.keys()
            if missing:
                text = (
                    f"the state of another kind of optimizer is stored: it has {', '.join(sorted(map(str, members)))}, "
                    f"and {type(match.state_holders[0]).__name__} needs {', '.join(sorted(missing))}"
                )
                return LoadProblem(schema.get_state_path(name), text)
    return None


def find_unsupported_options(tree: Any, match: OptimizerMatch, groups: Sequence[int | None]) -> list[dict[str, Any]]:
    """Return for each group the current options that are kept instead of the stored ones.

    They select an implementation of the same step. With the stored options the next step would raise, because the
    devices of the parameters do not support them.
    """
    return [
        {
            option: group[option]
            for option, devices in UNSUPPORTED_OPTIONS.items()
            if source is not None
            and option in group
            and not group[option]
            and tree[schema.PARAM_GROUPS][source].get(option) is True
            and any(p.device.type in devices for p in group[schema.PARAMS])
        }
        for group, source in zip(match.optimizer.param_groups, groups, strict=True)
    ]


def find_group_mismatch(tree: Any, optimizer: Any) -> str | None:
    """Return the reason why the numbers of a stored optimizer refer to other parameters: torch numbers them by
    group.
    """
    if not schema.has_numbered_parameters(tree):
        return None
    stored = [len(group[schema.PARAMS]) for group in tree[schema.PARAM_GROUPS]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if stored == own:
        return None
    return (
        f"the stored optimizer numbers its parameters, in groups of {stored}, and this optimizer has groups of {own}: "
        "the numbers are those of other parameters. Make it with the groups that it had at the save; or convert the "
        "checkpoint with such a one and its model, which gives it names (optimizer=, model=)"
    )


def match_optimizer(tree: Any, optimizer: Any, names: ParameterNames) -> OptimizerMatch:
    """Match an optimizer with the tree of a stored one."""
    shards = zero1.get_parameter_shards(optimizer) if zero1.is_zero1(optimizer) else {}
    order, called = list_parameters(optimizer), _get_stored_names(tree, optimizer, names)
    return OptimizerMatch(
        optimizer=optimizer,
        state_holders=zero1.get_base_optimizers(optimizer) if shards else [optimizer],
        parameters=order,
        stored_names=called,
        tensors_by_name={name: shards.get(id(p), p) for name, (p, _) in zip(called, order, strict=True)},
        stored_groups={name: g for g in tree[schema.PARAM_GROUPS] for name in g[schema.PARAMS]},
    )


def _get_stored_names(tree: Any, optimizer: Any, names: ParameterNames) -> list[Any]:
    """Return the stored names of this optimizer's parameters: names, or positions if it only has those."""
    if schema.has_numbered_parameters(tree):
        return list(range(len(list_parameters(optimizer))))
    stored_names = schema.get_parameter_names(tree)
    if stored_names and all(isinstance(n, str) and n.startswith("#") for n in stored_names):
        return [place for _, place in list_parameters(optimizer)]
    return list_parameter_names(optimizer, names)


def compare_parameters(match: OptimizerMatch, model: Any, plan: PartLoadPlan) -> None:
    """Record parameters that only one of the two optimizers has."""
    own_names = add_tied_names(set(match.stored_names), model)
    for name in (n for n in match.stored_names if n not in match.stored_groups):
        plan.add_problem(schema.get_state_path(name), "the optimizer has this parameter, the stored one does not")
    plan.unexpected = [
        LoadProblem(schema.get_state_path(name), "the stored optimizer has this parameter, this one does not")
        for name in match.stored_groups
        if name not in own_names
    ]


def match_groups(tree: Any, plan: PartLoadPlan, match: OptimizerMatch) -> list[int | None]:
    """Return for each group the number of the stored group that contains its parameters, for its hyper-parameters."""
    stored_groups = tree[schema.PARAM_GROUPS]
    number = {name: i for i, g in enumerate(stored_groups) for name in g[schema.PARAMS]}
    name_of = match.get_names_by_id()
    matched: list[int | None] = []
    for g, group in enumerate(match.optimizer.param_groups):
        sources = sorted({number[n] for p in group["params"] if (n := name_of[id(p)]) in number})
        if not sources and not group["params"] and g < len(stored_groups) and not stored_groups[g][schema.PARAMS]:
            sources = [g]  # groups without parameters are matched by position
        differing = [
            s
            for s in sources[1:]
            if get_hyperparameters(stored_groups[s]) != get_hyperparameters(stored_groups[sources[0]])
        ]
        if differing:
            one, other = (
                get_hyperparameters(stored_groups[sources[0]]),
                get_hyperparameters(stored_groups[differing[0]]),
            )
            keys = [k for k, v in one.items() if other.get(k) != v]
            plan.add_problem(
                schema.get_group_path(sources[0]),
                f"group {g} of the optimizer unites stored groups {sources} that differ in {', '.join(keys)}",
            )
        matched.append(sources[0] if sources else None)
    return matched


def get_hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group."""
    return {k: v for k, v in group.items() if k != schema.PARAMS}
