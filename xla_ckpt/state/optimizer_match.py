"""Which stored parameter is which of the program's, and which stored group its groups take their options from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.state import zero1
from xla_ckpt.state.loading import Loading
from xla_ckpt.state.optimizer import (
    Names,
    names_in_order,
    parameters_in_order,
)
from xla_ckpt.state.optimizer_install import torch_kind
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.ties import with_other_names
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import UNSUPPORTED_ON, needed_members


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMatch:
    """An optimizer of the program's beside the stored one."""

    optimizer: Any
    holders: Sequence[Any]
    """The optimizers that hold the states: those that a ZeRO-1 optimizer wraps, else itself."""

    order: Sequence[tuple[Any, str]]
    """(parameter, place) in the order of torch's packed ids."""

    called: Sequence[Any]
    """The stored name of each of them."""

    by_name: Mapping[Any, Any]
    """Name -> the tensor under which its state is kept: the parameter, or a ZeRO-1 rank's shard of it."""

    group_of: Mapping[Any, Any]
    """Name of each stored parameter -> its stored group."""

    def name_of(self) -> Mapping[int, Any]:
        """The stored name of each parameter, by its id."""
        return {id(p): name for name, (p, _) in zip(self.called, self.order, strict=True)}

    @property
    def sharded(self) -> bool:
        """Whether it is a ZeRO-1 optimizer."""
        return self.holders[0] is not self.optimizer

    @property
    def now(self) -> Mapping[Any, Any]:
        """The state that the program has, by the tensor that it belongs to."""
        return {key: state for holder in self.holders for key, state in holder.state.items()}


DECOUPLED = "decoupled_weight_decay"


_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", DECOUPLED, "amsgrad"})
"""Options that come and go with versions of torch, and do not tell one kind of optimizer from another."""


def other_kind(tree: Any, optimizer: Any) -> str | None:
    """Why the stored state is that of another kind of optimizer: both have options that the other does not know."""
    stored = {k for g in tree[schema.GROUPS] for k in g} - _FLAGS
    defaults = set(getattr(optimizer, "defaults", {})) - _FLAGS
    own_alone = defaults - stored
    stored_alone = stored - {k for g in optimizer.param_groups for k in g} - {"params", "initial_lr"}
    if not tree[schema.GROUPS] or not own_alone or not stored_alone:
        return None
    return (
        f"the state of another kind of optimizer is stored: it has {', '.join(sorted(stored_alone))}, and "
        f"{type(optimizer).__name__} has {', '.join(sorted(own_alone))}"
    )


def other_members(tree: Any, match: OptimizerMatch) -> Problem | None:
    """That a parameter's stored state lacks what a step of this optimizer asks for: another kind of optimizer saved it.

    Options do not always tell: Adamax has none that Adam lacks. Of an optimizer with a `step` of its own nothing is
    known.
    """
    kind = torch_kind(match.holders[0])
    if kind is None:
        return None
    name_of = match.name_of()
    for group in match.optimizer.param_groups:
        for parameter in group[schema.PARAMS]:
            name = name_of[id(parameter)]
            members = tree[schema.STATE].get(name)
            if name not in match.group_of or not isinstance(members, Mapping) or not members:
                continue
            options = {**group, **match.group_of[name]}
            missing = needed_members(kind, options, parameter.ndim) - members.keys()
            if missing:
                text = (
                    f"the state of another kind of optimizer is stored: it has {', '.join(sorted(map(str, members)))}, "
                    f"and {type(match.holders[0]).__name__} needs {', '.join(sorted(missing))}"
                )
                return Problem(schema.state(name), text)
    return None


def unsupported_options(tree: Any, match: OptimizerMatch, groups: Sequence[int | None]) -> list[dict[str, Any]]:
    """For each of the optimizer's groups, the options of its own that stay in place of the stored ones.

    They choose between implementations of the same step. With the stored ones the next step would raise, since the
    devices of the parameters do not support them.
    """
    return [
        {
            option: group[option]
            for option, devices in UNSUPPORTED_ON.items()
            if source is not None
            and option in group
            and not group[option]
            and tree[schema.GROUPS][source].get(option) is True
            and any(p.device.type in devices for p in group[schema.PARAMS])
        }
        for group, source in zip(match.optimizer.param_groups, groups, strict=True)
    ]


def other_groups(tree: Any, optimizer: Any) -> str | None:
    """Why the numbers of a stored optimizer are those of other parameters: torch counts them group by group."""
    if not schema.numbers_parameters(tree):
        return None
    stored = [len(group[schema.PARAMS]) for group in tree[schema.GROUPS]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if stored == own:
        return None
    return (
        f"the stored optimizer numbers its parameters, in groups of {stored}, and this optimizer has groups of {own}: "
        "the numbers are those of other parameters. Make it with the groups that it had at the save; or convert the "
        "checkpoint with such a one and its model, which gives it names (optimizer=, model=)"
    )


def match_optimizer(tree: Any, optimizer: Any, names: Names) -> OptimizerMatch:
    """An optimizer beside a stored one, whose tree this is."""
    shards = zero1.parameter_shards(optimizer) if zero1.is_zero1(optimizer) else {}
    order, called = parameters_in_order(optimizer), _called(tree, optimizer, names)
    return OptimizerMatch(
        optimizer=optimizer,
        holders=zero1.bases_of(optimizer) if shards else [optimizer],
        order=order,
        called=called,
        by_name={name: shards.get(id(p), p) for name, (p, _) in zip(called, order, strict=True)},
        group_of={name: g for g in tree[schema.GROUPS] for name in g[schema.PARAMS]},
    )


def _called(tree: Any, optimizer: Any, names: Names) -> list[Any]:
    """What the stored state calls this optimizer's parameters: names, or positions where it has only those."""
    if schema.numbers_parameters(tree):
        return list(range(len(parameters_in_order(optimizer))))
    stored_names = schema.grouped_names(tree)
    if stored_names and all(isinstance(n, str) and n.startswith("#") for n in stored_names):
        return [place for _, place in parameters_in_order(optimizer)]
    return names_in_order(optimizer, names)


def compare_parameters(match: OptimizerMatch, model: Any, loading: Loading) -> None:
    """Note parameters that only one of the two optimizers has."""
    own_names = with_other_names(set(match.called), model)
    for name in (n for n in match.called if n not in match.group_of):
        loading.add_problem(schema.state(name), "the optimizer has this parameter, the stored one does not")
    loading.unwanted = [
        Problem(schema.state(name), "the stored optimizer has this parameter, this one does not")
        for name in match.group_of
        if name not in own_names
    ]


def match_groups(tree: Any, loading: Loading, match: OptimizerMatch) -> list[int | None]:
    """For each of the optimizer's groups, the stored group whose hyper-parameters it takes: its parameters' one."""
    stored_groups = tree[schema.GROUPS]
    number = {name: i for i, g in enumerate(stored_groups) for name in g[schema.PARAMS]}
    name_of = match.name_of()
    matched: list[int | None] = []
    for g, group in enumerate(match.optimizer.param_groups):
        sources = sorted({number[n] for p in group["params"] if (n := name_of[id(p)]) in number})
        if not sources and not group["params"] and g < len(stored_groups) and not stored_groups[g][schema.PARAMS]:
            sources = [g]  # groups without parameters stand for each other by their place
        differing = [s for s in sources[1:] if settings_of(stored_groups[s]) != settings_of(stored_groups[sources[0]])]
        if differing:
            one, other = settings_of(stored_groups[sources[0]]), settings_of(stored_groups[differing[0]])
            keys = [k for k, v in one.items() if other.get(k) != v]
            loading.add_problem(
                schema.group(sources[0]),
                f"group {g} of the optimizer unites stored groups {sources} that differ in {', '.join(keys)}",
            )
        matched.append(sources[0] if sources else None)
    return matched


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    return {k: v for k, v in group.items() if k != schema.PARAMS}
