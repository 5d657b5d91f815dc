"""Loading an optimizer: where each stored array goes, and what is put in.

Nothing of the optimizer is changed before all arrays are read: the last step, `Loading.finish`, does that.

An optimizer with a `load_state_dict` of its own takes its state twice. It is handed over before anything else of the
program is changed, because the optimizer may refuse it. It is given again at the end, because some optimizers copy the
model's weights then, and these are the old ones before.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xla_ckpt.arrays.registry import check_memory
from xla_ckpt.arrays.torch_objects import has_torchs, is_torch_tensor
from xla_ckpt.engine.target import Target
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.state import rank_states, zero1
from xla_ckpt.state.handover import Handover, kept_state
from xla_ckpt.state.loading import Loading, Stored, arrays_of, plan_arrays
from xla_ckpt.state.module import load_dict
from xla_ckpt.state.optimizer import (
    Names,
    is_by_name,
    parameters,
    parameters_of,
)
from xla_ckpt.state.optimizer_match import (
    DECOUPLED,
    OptimizerMatch,
    compare_parameters,
    match_groups,
    match_optimizer,
    other_groups,
    other_kind,
    settings_of,
)
from xla_ckpt.state.optimizer_state import StateTargets
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.ties import stored_names
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)


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
    compare_parameters(match, model, loading)
    for name, (parameter, _) in zip(match.called, match.order, strict=True):
        check_memory(parameter, schema.state(name))  # new state is made on the device of its parameter
    known = parameters(optimizer, match.called, stored.shardings.placement)
    stored = replace(stored, shardings=replace(stored.shardings, parameters=known))
    groups = match_groups(tree, loading, match)
    bad = _plan(stored, tree, match, groups, loading)
    own = rank_states.plan(whole, match, loading)
    loading.finish = _finishing(stored, match, groups, bad, own, frozenset(loading.targets))
    if _loads_itself(match):
        _hand_over(loading, optimizer, schema.OPTIMIZER)
    elif own.paths:
        loading.handover = Handover(
            leaf=schema.own_states(), take=own.make, keep=lambda: lambda: None, paths=frozenset(own.paths)
        )
    return loading


def _loads_itself(match: OptimizerMatch) -> bool:
    """Whether its state goes back through a `load_state_dict` of its own."""
    return not match.sharded and not has_torchs(match.optimizer, "load_state_dict")


def _hand_over(loading: Loading, optimizer: Any, leaf: str) -> None:
    """Have the end of a load happen before anything else is changed, too."""
    loading.handover = Handover(leaf=leaf, take=loading.finish, keep=lambda: kept_state(optimizer))


def _load_opaque(stored: Stored, optimizer: Any, loading: Loading) -> Loading:
    """An optimizer with a structure of its own: its state goes back through its own `load_state_dict`."""
    plan_arrays(stored, loading, {})
    loading.finish = lambda arrays: optimizer.load_state_dict(stored.build(lambda path, _: arrays[path]))
    _hand_over(loading, optimizer, stored.prefix)
    return loading


# Where the arrays go.

_WITH_THE_REST = "another part of the state of this parameter does not fit, and all of it stays as it is"


def _plan(
    stored: Stored, tree: Any, match: OptimizerMatch, groups: Sequence[int | None], loading: Loading
) -> frozenset[Any]:
    """Want every array that the program has a use for; the names of parameters with state that does not fit."""
    now = arrays_of(_tree_now(tree, match, groups), schema.OPTIMIZER)
    usual = all(type(holder).__module__.startswith("torch.optim.") for holder in match.holders)
    fresh = StateTargets(stored, match.by_name, match.group_of, now, usual=usual)
    # Shared state is never read into the tensors that are there. They may be parameters, or each other, and they may
    # have had other shapes when the state was saved.
    own = {path: value for path, value in now.items() if not fresh.is_common(path)}
    wanted = Loading(cast=stored.cast)
    if _loads_itself(match):  # it may refuse its state: what it has is not overwritten

        def new(path: str, record: ArrayRecord, kind: str) -> Target | None:
            return stored.like(path, own[path]) if path in own else fresh.target(path, record, kind)

        plan_arrays(stored, wanted, {}, new=new)
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


def _finishing(
    stored: Stored,
    match: OptimizerMatch,
    groups: Sequence[int | None],
    bad: frozenset[Any],
    own: rank_states.Own,
    restored: frozenset[str],
) -> Callable[[Mapping[str, Any]], None]:
    """What puts the restored arrays into the optimizer.

    Args:
        stored: What all ranks have in common.
        match: Which parameter is which.
        groups: The stored group of each of the optimizer's.
        bad: Names of parameters whose state stays as it is.
        own: The states that are this rank's own.
        restored: Leaf paths of the arrays that are restored.
    """

    def finish(arrays: Mapping[str, Any]) -> None:
        tree = stored.build(lambda path, _: arrays.get(path))
        own.fill(tree[schema.STATE], arrays)
        state = _new_state(tree, match, bad)
        values = [None if g is None else tree[schema.GROUPS][g] for g in groups]
        _tell_decay(match.holders[0], values)  # the groups of a ZeRO-1 optimizer itself lack this option
        if not match.sharded:
            others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
            _install(match, state, values, others)
            return
        _install_sharded(match, state, values)
        if not all(schema.master(name) in restored for name in match.called):
            zero1.take_weights(match.optimizer)  # no master weights are stored: the parameters are what there is

    return finish


def _tell_decay(optimizer: Any, groups: Sequence[Any]) -> None:
    """Say that torch's Adam becomes AdamW by what it loads, or the reverse: an option tells them apart."""
    for group, stored_group in zip(optimizer.param_groups, groups, strict=True):
        new = group.get(DECOUPLED) if stored_group is None else stored_group.get(DECOUPLED, group.get(DECOUPLED))
        if new != group.get(DECOUPLED):
            kind = "AdamW" if new else "Adam"
            logger.warning(
                "the stored state is that of torch's %s: this %s decays weights as %s does from now on (%s=%s), as "
                "after its load_state_dict",
                kind,
                type(optimizer).__name__,
                kind,
                DECOUPLED,
                new,
            )
            return


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


def _install_sharded(match: OptimizerMatch, state: Mapping[Any, Any], groups: Sequence[Any]) -> None:
    """Put state and hyper-parameters into a ZeRO-1 optimizer: both it and those that it wraps have groups."""
    values = [{} if new is None else settings_of(new) for new in groups]
    for part in zero1.parts_of(match.optimizer):
        holder = part.base_optimizer
        for program_groups in (match.optimizer.param_groups, part.param_groups, holder.param_groups):
            for group, new in zip(program_groups, values, strict=True):
                group.update(new)
        own = {shard for group in holder.param_groups for shard in group["params"]}
        shard_state = collections.defaultdict[Any, Any](dict)
        shard_state.update({k: v for k, v in state.items() if k in own or not is_torch_tensor(k)})
        holder.__setstate__({schema.STATE: shard_state, schema.GROUPS: holder.param_groups})


def _install(match: OptimizerMatch, state: Any, groups: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Put state and hyper-parameters into an optimizer; `others` are members of its state that torch does not know."""
    optimizer = match.optimizer
    values = [
        {**group, **({} if stored_group is None else settings_of(stored_group)), "params": group["params"]}
        for group, stored_group in zip(optimizer.param_groups, groups, strict=True)
    ]
    if has_torchs(optimizer, "load_state_dict"):
        # As torch's load_state_dict ends, but without its casts: state keeps the dtype that it was saved with.
        for group, new in zip(optimizer.param_groups, values, strict=True):
            group.update(new)
        optimizer.__setstate__({schema.STATE: state, schema.GROUPS: optimizer.param_groups})
        return
    number = {id(p): i for i, (p, _) in enumerate(match.order)}
    packed_state = {number.get(id(k), k): v for k, v in state.items()}
    packed_groups = [{**g, "params": [number[id(p)] for p in g["params"]]} for g in values]
    optimizer.load_state_dict({**others, schema.STATE: packed_state, schema.GROUPS: packed_groups})
