"""Loading an optimizer: where each stored array goes, and what is put in.

Nothing of the optimizer is changed before all arrays are read: the last step, `Loading.finish`, does that.

If code of the program has a part in it (a `load_state_dict` or `__setstate__` of its own, hooks of `state_dict` and
`load_state_dict`), the optimizer takes its state twice. It is handed over before anything else of the program is
changed, because the code may refuse it. It is put in again at the end, because some optimizers copy the model's weights
then, and these are the old ones before. Hooks run once (see `optimizer_install.Installation`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.arrays.registry import check_memory
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.engine.target import Target
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.state import rank_states, zero1
from xla_ckpt.state.handover import Handover, PutBack, kept_state
from xla_ckpt.state.loading import Loading, Stored, arrays_of, plan_arrays, plan_freely
from xla_ckpt.state.module import load_dict
from xla_ckpt.state.optimizer import (
    Names,
    is_by_name,
    parameters,
    parameters_in_order,
    parameters_of,
)
from xla_ckpt.state.optimizer_install import Installation, has_load_hooks, kept, loads_itself, packs_state, runs_code
from xla_ckpt.state.optimizer_match import (
    DECOUPLED,
    OptimizerMatch,
    compare_parameters,
    match_groups,
    match_optimizer,
    other_groups,
    other_kind,
    other_members,
    settings_of,
    unsupported_options,
)
from xla_ckpt.state.optimizer_state import StateTargets
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.ties import stored_names
from xla_ckpt.tree import schema

logger = get_logger(__name__)


def load(stored: Stored, optimizer: Any, names: Names, model: Any = None) -> Loading:
    """Prepare to load an optimizer, or a plain dict (whose layout is that of the model's parameters)."""
    if isinstance(optimizer, dict):
        known = parameters_of(optimizer, model, names, stored.shardings.placement)
        return load_dict(replace(stored, shardings=replace(stored.shardings, parameters=known)), optimizer)
    tree = stored.build()
    loading = Loading()
    if not is_by_name(optimizer, tree):
        return _load_opaque(stored, optimizer, loading)
    if (other := other_kind(tree, optimizer) or other_groups(tree, optimizer)) is not None:
        loading.add_problem(schema.group(), other)
        return loading
    names = stored_names(names, model, tree, stored.manifest.aliases)
    match, whole = match_optimizer(tree, optimizer, names), stored
    stored = rank_states.less_own(stored)
    if (problem := other_members(tree, match)) is not None:
        loading.problems.append(problem)
        return loading
    compare_parameters(match, model, loading)
    for name, (parameter, _) in zip(match.called, match.order, strict=True):
        check_memory(parameter, schema.state(name))  # new state is made on the device of its parameter
    known = parameters(optimizer, match.called, stored.shardings.placement)
    stored = replace(stored, shardings=replace(stored.shardings, parameters=known))
    groups = match_groups(tree, loading, match)
    unsupported = unsupported_options(tree, match, groups)
    bad = _plan(stored, tree, match, groups, unsupported, loading)
    own = rank_states.plan(whole, match, loading)
    change = _Change(
        stored=stored,
        match=match,
        groups=groups,
        unsupported=unsupported,
        bad=bad,
        own=own,
        restored=frozenset(loading.targets),
        decoupled=[group.get(DECOUPLED) for group in match.holders[0].param_groups],
    )
    loading.finish = change.finish
    if _runs_code(match):
        masters = {p for p in loading.targets if schema.place_of(p).role is schema.Role.MASTER}
        loading.handover = Handover(
            leaf=schema.OPTIMIZER,
            take=change.try_out,
            keep=change.kept,
            paths=frozenset(loading.targets) - masters if masters else None,
        )
    elif own.paths:
        loading.handover = Handover(
            leaf=schema.own_states(), take=own.make, keep=lambda: lambda: None, paths=frozenset(own.paths)
        )
    return loading


def _optimizers_of(match: OptimizerMatch) -> list[Any]:
    """The optimizers that take a part of the state: of ZeRO-1 those that it wraps, and itself, if it has hooks."""
    if not match.sharded:
        return [match.optimizer]
    wrappers = [part for part in zero1.parts_of(match.optimizer) if has_load_hooks(part)]
    return [*wrappers, *match.holders]


def _runs_code(match: OptimizerMatch) -> bool:
    """Whether code of the program has a part in how the optimizer takes its state."""
    return any(map(runs_code, _optimizers_of(match)))


def _load_opaque(stored: Stored, optimizer: Any, loading: Loading) -> Loading:
    """An optimizer with a structure of its own: its state goes back through its own `load_state_dict`, or hooks."""
    plan_arrays(stored, loading, {})
    own_code = loads_itself(optimizer)
    _install_with(loading, stored, optimizer, lambda packed: Installation(optimizer, packed, own_code))
    return loading


def _install_with(
    loading: Loading,
    stored: Stored,
    optimizer: Any,
    make: Callable[[Any], Installation],
    after: Callable[[], object] = lambda: None,
) -> None:
    """Have a load try a stored state out in an optimizer before anything else is changed, and install it at the end.

    Args:
        loading: The load.
        stored: The state of the optimizer.
        optimizer: The optimizer.
        make: Makes the installation of the restored state. Called once.
        after: Called when the state is installed.
    """
    made: list[Installation] = []

    def installation(arrays: Mapping[str, Any]) -> Installation:
        if not made:
            made.append(make(stored.build(lambda path, _: arrays[path])))
        return made[0]

    def finish(arrays: Mapping[str, Any]) -> None:
        installation(arrays).finish()
        after()

    loading.finish = finish
    loading.handover = Handover(
        leaf=stored.prefix, take=lambda arrays: installation(arrays).try_out(), keep=lambda: _kept(optimizer)
    )


def _kept(optimizer: Any) -> PutBack:
    """Keep the state of an optimizer, and return a function that puts it back."""
    return kept_state(optimizer) if loads_itself(optimizer) else kept(optimizer)


def load_by_position(stored: Stored, optimizer: Any) -> Loading | None:
    """Prepare to load an optimizer without a model, whose parameters the stored state numbers, as torch loads it.

    None if the state has another structure, or code of the optimizer's own loads it.
    """
    tree = stored.build()
    if loads_itself(optimizer) or not is_by_name(optimizer, tree) or not schema.numbers_parameters(tree):
        return None
    loading, match = Loading(), match_optimizer(tree, optimizer, {})
    if (other := other_kind(tree, optimizer) or other_groups(tree, optimizer)) is not None:
        loading.add_problem(stored.prefix, other)
        return loading
    numbers = {str(number): number for number in match.called}
    if (problem := other_members({**tree, schema.STATE: _numbered(tree[schema.STATE], numbers)}, match)) is not None:
        loading.add_problem(stored.prefix, problem.text)
        return loading
    plan_freely(stored, loading, optimizer.state_dict())
    options = unsupported_options(tree, match, range(len(optimizer.param_groups)))

    def installation(packed: Any) -> Installation:
        groups = [{**group, **own} for group, own in zip(packed[schema.GROUPS], options, strict=True)]
        state = _numbered(packed[schema.STATE], numbers)
        packed = {**packed, schema.STATE: state, schema.GROUPS: groups}
        return Installation(optimizer, packed, own_code=False, casts=True)

    _install_with(loading, stored, optimizer, installation, after=lambda: _tell_unsupported(optimizer, options))
    return loading


def _numbered(state: Mapping[Any, Any], numbers: Mapping[str, int]) -> dict[Any, Any]:
    """State by the numbers of its parameters, of which torch.distributed.checkpoint makes text."""
    return {numbers.get(key, key) if isinstance(key, str) else key: value for key, value in state.items()}


# Where the arrays go.

_WITH_THE_REST = "another part of the state of this parameter does not fit, and all of it stays as it is"


def _plan(
    stored: Stored,
    tree: Any,
    match: OptimizerMatch,
    groups: Sequence[int | None],
    unsupported: Sequence[Mapping[str, Any]],
    loading: Loading,
) -> frozenset[Any]:
    """Want every array that the program has a use for; the names of parameters with state that does not fit."""
    now = arrays_of(_tree_now(tree, match, groups), schema.OPTIMIZER)
    usual = all(type(holder).__module__.startswith("torch.optim.") for holder in match.holders)
    packed = any(packs_state(holder) for holder in match.holders)
    options, name_of = dict(match.group_of), match.name_of()
    for group, own_options in zip(match.optimizer.param_groups, unsupported, strict=True):
        for name in (name_of[id(p)] for p in group[schema.PARAMS]):
            if name in options:
                options[name] = {**options[name], **own_options}
    fresh = StateTargets(
        stored,
        match.by_name,
        options,
        now,
        usual=usual and not packed,
        casts=not packed and not any(map(loads_itself, match.holders)),
    )
    # Shared state is never read into the tensors that are there. They may be parameters, or each other, and they may
    # have had other shapes when the state was saved.
    own = {path: value for path, value in now.items() if not fresh.is_common(path)}
    wanted = Loading(cast=stored.cast)
    if _runs_code(match):  # it may refuse its state: what it has is not overwritten

        def new(path: str, record: ArrayRecord, kind: str) -> Target | None:
            like = stored.like(path, own[path]) if path in own else None
            if like is not None and (not packed or (like.shape, like.dtype) == (record.shape, record.dtype)):
                return like
            return fresh.target(path, record, kind)

        masters = {path: value for path, value in own.items() if schema.place_of(path).role is schema.Role.MASTER}
        plan_arrays(stored, wanted, masters, owned=True, new=new)
    else:
        plan_arrays(stored, wanted, own, owned=True, new=fresh.target)
    kept = {p: target for p, target in wanted.targets.items() if fresh.is_kept(p, masters=match.sharded)}
    bad = frozenset(fresh.name(p.leaf) for p in wanted.problems) - {None}
    # Moments of one training under the step number of another one would be corrected wrongly.
    mixed = [p for p in kept if fresh.name(p) in bad and schema.place_of(p).role is schema.Role.STATE]
    loading.targets = {p: target for p, target in kept.items() if p not in mixed}
    loading.problems += [p for p in wanted.problems if fresh.is_kept(p.leaf, masters=match.sharded)]
    loading.problems += [Problem(p, _WITH_THE_REST, stays=True) for p in mixed]
    return bad


def _tree_now(stored: Any, match: OptimizerMatch, groups: Sequence[int | None]) -> dict[str, Any]:
    """What the program's optimizer has of the stored one's state, in the stored one's structure."""
    state, stored_state = match.now, stored[schema.STATE]
    owned = {name: state[p] for name, p in match.by_name.items() if p in state and name in stored_state}
    common = {k: state[k] for k in stored_state if k not in match.group_of and k in state}
    tree: dict[str, Any] = {
        schema.STATE: {**owned, **common},
        schema.GROUPS: _groups_now(stored, groups, match.optimizer),
    }
    if match.sharded:
        tree[schema.MASTER] = {n: match.by_name[n] for n in stored.get(schema.MASTER, {}) if n in match.by_name}
    return tree


def _groups_now(stored: Any, groups: Sequence[int | None], optimizer: Any) -> list[Any]:
    """The hyper-parameters that the program has, in the stored order of groups."""
    stored_groups = stored[schema.GROUPS]
    now: list[Any] = [{} for _ in stored_groups]
    for group, source in zip(optimizer.param_groups, groups, strict=True):
        if source is not None and not now[source]:
            now[source] = {k: v for k, v in settings_of(group).items() if k in stored_groups[source]}
    return now


# What is put in, when all is read.


@dataclass(slots=True, kw_only=True)
class _Change:
    """What a load changes of an optimizer: `finish`, and `try_out` before it, if `_runs_code`."""

    stored: Stored
    """What all ranks have in common."""

    match: OptimizerMatch
    groups: Sequence[int | None]
    """The stored group of each of the optimizer's."""

    unsupported: Sequence[Mapping[str, Any]]
    """The options of each group that it keeps."""

    bad: frozenset[Any]
    """Names of parameters whose state stays as it is."""

    own: rank_states.Own
    """The states that are this rank's own."""

    restored: frozenset[str]
    """Leaf paths of the arrays that are restored."""

    decoupled: Sequence[Any]
    """By group, whether it decayed weights as AdamW does."""

    _installations: list[Installation] = field(default_factory=list, init=False)

    def kept(self) -> PutBack:
        """Keep what the optimizer has, and return what puts it back."""
        wrappers = [self.match.optimizer, *zero1.parts_of(self.match.optimizer)] if self.match.sharded else []
        put_back = [kept(wrapper) for wrapper in wrappers]
        put_back += map(_kept, self.match.holders)
        return lambda: [put() for put in put_back]

    def try_out(self, arrays: Mapping[str, Any]) -> None:
        """Put the state in before anything else of the program is changed.

        Raises:
            Exception: Code of the program refuses it.
        """
        for installation in self._made(arrays):
            installation.try_out()

    def finish(self, arrays: Mapping[str, Any]) -> None:
        """Put the state in."""
        match = self.match
        for installation in self._made(arrays):
            installation.finish()
        self._tell_options()
        if match.sharded and not all(schema.master(name) in self.restored for name in match.called):
            zero1.take_weights(match.optimizer)  # no master weights are stored: the parameters are what there is

    def _made(self, arrays: Mapping[str, Any]) -> list[Installation]:
        """The state on its way into each optimizer that takes a part of it: the same in both calls."""
        if self._installations:
            return self._installations
        match = self.match
        tree = self.stored.build(lambda path, _: arrays.get(path))
        self.own.fill(tree[schema.STATE], arrays)
        state = _new_state(tree, match, self.bad)
        options = [
            {**({} if source is None else settings_of(tree[schema.GROUPS][source])), **own_options}
            for source, own_options in zip(self.groups, self.unsupported, strict=True)
        ]
        if match.sharded:
            others = {}
            for wrapper in (match.optimizer, *zero1.parts_of(match.optimizer)):  # it has groups of its own
                for group, new in zip(wrapper.param_groups, options, strict=True):
                    group.update(new)
        else:
            others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
        self._installations = [
            Installation(
                optimizer,
                {**others, **_packed(optimizer, state, options)},
                own_code=loads_itself(optimizer) and not zero1.is_zero1(optimizer),
            )
            for optimizer in _optimizers_of(match)
        ]
        return self._installations

    def _tell_options(self) -> None:
        """Warn of options by which the optimizer is another one than the program or the tag says."""
        optimizer = self.match.holders[0]  # the groups of a ZeRO-1 optimizer itself lack some options
        for group, old in zip(optimizer.param_groups, self.decoupled, strict=True):
            if old is not None and (new := group.get(DECOUPLED)) != old:
                logger.warning(
                    "the stored state is that of torch's %s: this %s decays weights as %s does from now on (%s=%s), "
                    "as after its load_state_dict",
                    *((kind := "AdamW" if new else "Adam"), type(optimizer).__name__, kind, DECOUPLED, new),
                )
                break
        _tell_unsupported(optimizer, self.unsupported)


def _tell_unsupported(optimizer: Any, unsupported: Sequence[Mapping[str, Any]]) -> None:
    """Warn of options of the program's own that stay in place of stored ones."""
    for option, own in {option: own for own_options in unsupported for option, own in own_options.items()}.items():
        logger.warning(
            "the stored optimizer has %s=True, with which the next step of torch's %s would raise on these devices: "
            "the optimizer keeps its own %s=%s. To train without this warning, make the optimizer without %s=True "
            "before the save",
            *(option, type(optimizer).__name__, option, own, option),
        )


def _packed(optimizer: Any, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A state as the optimizer's own `state_dict` would have it, with numbers in place of parameters.

    Args:
        optimizer: The optimizer.
        state: State by tensor, of other optimizers, too, and common state by its key.
        options: The new options of each group.
    """
    number = {id(p): i for i, (p, _) in enumerate(parameters_in_order(optimizer))}
    return {
        schema.STATE: {
            number.get(id(key), key): value
            for key, value in state.items()
            if id(key) in number or not is_torch_tensor(key)
        },
        schema.GROUPS: [
            {**group, **new, schema.PARAMS: [number[id(p)] for p in group[schema.PARAMS]]}
            for group, new in zip(optimizer.param_groups, options, strict=True)
        ],
    }


def _new_state(tree: Any, match: OptimizerMatch, bad: frozenset[Any]) -> dict[Any, Any]:
    """The optimizer's state as it will be: that of each parameter by its tensor, and common state by its key."""
    before, state = match.now, collections.defaultdict[Any, Any](dict)
    for name, parameter in match.by_name.items():
        if name in bad or name not in match.group_of:
            if parameter in before:  # not strict: what does not fit stays as it is
                state[parameter] = before[parameter]
        elif name in tree[schema.STATE]:
            state[parameter] = tree[schema.STATE][name]
    state.update({k: v for k, v in tree[schema.STATE].items() if k not in match.group_of})
    return state
