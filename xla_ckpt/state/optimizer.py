"""Optimizers: state by parameter *name*, whatever order and grouping the parameters have.

Stored is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own structure with names in
place of positions. Names come from the model; without a model from ``param_names``, else parameters are numbered by
group and position, ``#0.3``, and such a state only fits an optimizer of the same order.

An optimizer may also keep state under keys of its own, ``optimizer.state["k"]``, which belongs to no parameter. It
stands beside the parameters' names in ``state``, and is called shared here: all parameters have it in common.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xla_ckpt.arrays.registry import array_kind, check_memory
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state import zero1
from xla_ckpt.state.loading import Loading, Problem, Stored, arrays_of, plan_arrays
from xla_ckpt.state.module import load_dict, name_of
from xla_ckpt.state.optimizer_state import StateTargets, component_of
from xla_ckpt.state.shardings import Parameter
from xla_ckpt.tree import path as paths

Names = Mapping[Any, str]
"""What `xla_ckpt.state.module.parameter_names` returns."""


def _parameters(optimizer: Any) -> list[tuple[Any, str]]:
    """(parameter, ``#group.position``) in the order of torch's packed ids: each parameter once."""
    found: dict[int, tuple[Any, str]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            found.setdefault(id(parameter), (parameter, f"#{g}.{i}"))
    return list(found.values())


def names_of(optimizer: Any, names: Names) -> list[str]:
    """The name of every parameter, in the order of torch's packed ids.

    Raises:
        UnsupportedStateError: Two parameters have the same name.
    """
    own: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            own.setdefault(id(parameter), name)
    made = [name_of(p, names) or own.get(id(p)) or place for p, place in _parameters(optimizer)]
    if len(set(made)) != len(made):
        twice = next(name for name, n in collections.Counter(made).items() if n > 1)
        raise UnsupportedStateError("two parameters of the optimizer have the same name", leaf=f"optimizer/{twice}")
    return made


def tree_of(optimizer: Any, names: Names) -> Any:
    """The state of an optimizer, by name. Plain dicts, and optimizers of another structure, stay as they are."""
    if isinstance(optimizer, Mapping):
        return optimizer
    packed = zero1.outer_state(optimizer) if zero1.is_zero1(optimizer) else optimizer.state_dict()
    if not _is_standard(packed) or not hasattr(optimizer, "param_groups"):
        return packed
    called = names_of(optimizer, names)
    groups = [
        {
            **{k: v for k, v in g.items() if k not in ("params", "param_names")},
            "params": [called[i] for i in g["params"]],
        }
        for g in packed["param_groups"]
    ]
    _check_shared(optimizer.base_optimizer if zero1.is_zero1(optimizer) else optimizer, called)
    state = {called[i] if type(i) is int else i: v for i, v in packed["state"].items()}
    tree = {**packed, "state": state, "param_groups": groups}
    if zero1.is_zero1(optimizer) and zero1.keeps_master(optimizer):
        shards = zero1.shards_of(optimizer)
        order = _parameters(optimizer)
        tree["master"] = {name: shards[id(p)] for name, (p, _) in zip(called, order, strict=True)}
    return tree


def _check_shared(optimizer: Any, called: Sequence[str]) -> None:
    """Refuse keys of shared state that would take the place of a parameter's state, or lose their own to it.

    Raises:
        UnsupportedStateError: There is such a key.
    """
    for key in optimizer.state:
        if isinstance(key, torch.Tensor):
            continue
        if isinstance(key, int):
            raise UnsupportedStateError(
                "the optimizer keeps state of its own under a number, which torch's state_dict gives to a parameter",
                leaf="optimizer/state",
                found=repr(key),
                hint="Keep it under a string.",
            )
        if key in called:
            raise UnsupportedStateError(
                "the optimizer keeps state of its own under the name of a parameter",
                leaf=f"optimizer/state/{component_of(key)}",
                found=repr(key),
                hint="Rename the parameter, or pass the optimizer without the model: then its parameters are numbered.",
            )


def is_by_name(optimizer: Any, tree: Any) -> bool:
    """Whether `tree_of` made this tree of an optimizer's state by name, rather than leaving it as it is."""
    return hasattr(optimizer, "param_groups") and _is_standard(tree)


def parameters_of(optimizer: Any, model: Any, names: Names, placement: Placement) -> dict[str, Parameter]:
    """The parameters of an optimizer that is about to be saved; of a plain dict those of the model.

    Raises:
        UsageError: It is a ZeRO-1 optimizer whose groups do not fit the mesh.
    """
    if hasattr(optimizer, "param_groups"):
        return parameters(optimizer, names_of(optimizer, names), placement)
    arrays: Any = model.named_parameters() if isinstance(model, torch.nn.Module) else (model or {}).items()
    return {component_of(name): Parameter(str(name), v) for name, v in arrays if array_kind(v) is not None}


def parameters(optimizer: Any, called: Sequence[Any], placement: Placement) -> dict[str, Parameter]:
    """An optimizer's parameters by the path component that their state has, for the sake of its layout.

    Raises:
        UsageError: It is a ZeRO-1 optimizer whose groups do not fit the mesh.
    """
    axes: tuple[str, ...] = ()
    shards: Mapping[int, Any] = {}
    if zero1.is_zero1(optimizer):
        shards = zero1.shards_of(optimizer)
        axes = zero1.mesh_axes(optimizer, placement)
    return {
        component_of(name): Parameter(str(name), parameter, axes, tuple(shards[id(parameter)].shape) if axes else None)
        for name, (parameter, _) in zip(called, _parameters(optimizer), strict=True)
    }


def _is_standard(packed: Any) -> bool:
    if not isinstance(packed, Mapping) or not isinstance(packed.get("state"), Mapping):
        return False
    groups = packed.get("param_groups")
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def load(stored: Stored, optimizer: Any, names: Names, model: Any = None) -> Loading:
    """Prepare to load an optimizer, or a plain dict (whose layout is that of the model's parameters)."""
    if isinstance(optimizer, dict):
        known = parameters_of(optimizer, model, names, stored.shardings.placement)
        return load_dict(replace(stored, shardings=replace(stored.shardings, parameters=known)), optimizer)
    held = stored.build()
    loading = Loading()
    keys = zero1.shards_of(optimizer) if zero1.is_zero1(optimizer) else {}
    if not _is_standard(held) or not hasattr(optimizer, "param_groups"):
        return _load_opaque(stored, optimizer, loading)
    if (other := _other_kind(held, optimizer)) is not None:
        loading.add_problem(paths.join(stored.prefix, "param_groups"), other)
        return loading
    order = _parameters(optimizer)
    called = _called(held, optimizer, names)
    group_of = {name: g for g in held["param_groups"] for name in g["params"]}
    for name in [n for n in called if n not in group_of]:
        loading.add_problem(_state_path(stored, name), "the optimizer has this parameter, the stored one does not")
    loading.unwanted = [
        Problem(_state_path(stored, name), "the stored optimizer has this parameter, this one does not")
        for name in group_of
        if name not in set(called)
    ]
    for name, (parameter, _) in zip(called, order, strict=True):
        check_memory(parameter, _state_path(stored, name))  # new state is made on the device of its parameter
    known = parameters(optimizer, called, stored.shardings.placement)
    stored = replace(stored, shardings=replace(stored.shardings, parameters=known))
    by_name = {name: keys.get(id(parameter), parameter) for name, (parameter, _) in zip(called, order, strict=True)}
    groups = _match_groups(stored, loading, optimizer, called)
    inner = optimizer.base_optimizer if keys else optimizer
    current = {name: inner.state[p] for name, p in by_name.items() if p in inner.state}
    shared = {k: inner.state[k] for k in held["state"] if k not in group_of and k in inner.state}
    tree_now = {
        "state": {**{name: v for name, v in current.items() if name in held["state"]}, **shared},
        "param_groups": _groups_now(held, groups, optimizer),
    }
    if keys:
        tree_now["master"] = {n: by_name[n] for n in held.get("master", {}) if n in by_name}
    arrays_now = arrays_of(tree_now, stored.prefix)
    fresh = StateTargets(stored, by_name, group_of, arrays_now)
    wanted = Loading()
    # Shared state is never read into the tensors that are there. They may be parameters, or each other, and they may
    # have had other shapes when the state was saved.
    plan_arrays(
        stored, wanted, {p: v for p, v in arrays_now.items() if not fresh.is_shared(p)}, owned=True, new=fresh.target
    )
    kept = {path: t for path, t in wanted.targets.items() if fresh.is_kept(path, masters=bool(keys))}
    loading.targets = kept
    loading.problems += [p for p in wanted.problems if fresh.is_kept(p.leaf, masters=bool(keys))]
    bad = {fresh.name(p.leaf) for p in wanted.problems}

    def finish(arrays: Mapping[str, Any]) -> None:
        tree = stored.build(lambda path, _: arrays.get(path))
        state: dict[Any, Any] = collections.defaultdict(dict)
        for name, parameter in by_name.items():
            if name in bad or name not in group_of:
                if parameter in inner.state:  # not strict: what does not fit stays as it is
                    state[parameter] = inner.state[parameter]
            elif name in tree["state"]:
                state[parameter] = tree["state"][name]
        state.update({k: v for k, v in tree["state"].items() if k not in group_of})
        values = [None if g is None else tree["param_groups"][g] for g in groups]
        others = {k: v for k, v in tree.items() if k not in ("state", "param_groups", "master")}
        if not keys:
            _install(optimizer, order, state, values, others)
            return
        for outer, mine, new in zip(optimizer.param_groups, inner.param_groups, values, strict=True):
            outer.update({} if new is None else _hyper(new))
            mine.update({} if new is None else _hyper(new))
        inner.__setstate__({"state": state, "param_groups": inner.param_groups})
        if not all(_state_path(stored, name, "master") in kept for name in called):
            zero1.take_weights(optimizer)  # no master weights are stored: the parameters are what there is

    loading.finish = finish
    return loading


_FLAGS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay", "amsgrad"}
)
"""Options that come and go with versions of torch, and do not tell one kind of optimizer from another."""


def _other_kind(held: Any, optimizer: Any) -> str | None:
    """Why the stored state is that of another kind of optimizer: both have options that the other does not know."""
    stored = {k for g in held["param_groups"] for k in g} - _FLAGS
    mine = set(getattr(optimizer, "defaults", {})) - _FLAGS
    here, there = mine - stored, stored - {k for g in optimizer.param_groups for k in g} - {"params", "initial_lr"}
    if not held["param_groups"] or not here or not there:
        return None
    return (
        f"the state of another kind of optimizer is stored: it has {', '.join(sorted(there))}, and "
        f"{type(optimizer).__name__} has {', '.join(sorted(here))}"
    )


def _called(held: Any, optimizer: Any, names: Names) -> list[Any]:
    """What the stored state calls this optimizer's parameters: names, or positions where it has only those."""
    stored_names = [n for g in held["param_groups"] for n in g["params"]]
    if stored_names and all(type(n) is int for n in stored_names):  # saved as a plain state dict: torch's packed ids
        return list(range(len(_parameters(optimizer))))
    if stored_names and all(isinstance(n, str) and n.startswith("#") for n in stored_names):
        return [place for _, place in _parameters(optimizer)]
    return names_of(optimizer, names)


def _state_path(stored: Stored, name: Any, kind: str = "state") -> str:
    return paths.join(paths.join(stored.prefix, kind), component_of(name))


def _match_groups(stored: Stored, loading: Loading, optimizer: Any, called: Sequence[Any]) -> list[int | None]:
    """For each of the optimizer's groups, the stored group whose hyper-parameters it takes: its parameters' one."""
    held = stored.build()["param_groups"]
    number = {name: i for i, g in enumerate(held) for name in g["params"]}
    position = {id(p): name for name, (p, _) in zip(called, _parameters(optimizer), strict=True)}
    matched: list[int | None] = []
    for g, group in enumerate(optimizer.param_groups):
        sources = sorted({number[n] for p in group["params"] if (n := position[id(p)]) in number})
        if not sources and not group["params"] and g < len(held) and not held[g]["params"]:
            sources = [g]
        differing = [s for s in sources[1:] if _hyper(held[s]) != _hyper(held[sources[0]])]
        if differing:
            keys = [k for k, v in _hyper(held[sources[0]]).items() if _hyper(held[differing[0]]).get(k) != v]
            loading.add_problem(
                paths.join(stored.prefix, f"param_groups/{sources[0]}"),
                f"group {g} of the optimizer unites stored groups {sources} that differ in {', '.join(keys)}",
            )
        matched.append(sources[0] if sources else None)
    return matched


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _groups_now(held: Any, groups: Sequence[int | None], optimizer: Any) -> list[Any]:
    """The hyper-parameters that the program has, in the stored order of groups."""
    now: list[Any] = [{} for _ in held["param_groups"]]
    for mine, source in zip(optimizer.param_groups, groups, strict=True):
        if source is not None and not now[source]:
            now[source] = {k: v for k, v in mine.items() if k in held["param_groups"][source] and k != "params"}
    return now


def _install(
    optimizer: Any, order: Sequence[tuple[Any, str]], state: Any, groups: Sequence[Any], others: Mapping[str, Any]
) -> None:
    values = [
        {**mine, **({} if theirs is None else _hyper(theirs)), "params": mine["params"]}
        for mine, theirs in zip(optimizer.param_groups, groups, strict=True)
    ]
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        # As torch's load_state_dict ends, but without its casts: state keeps the dtype that it was saved with.
        for mine, new in zip(optimizer.param_groups, values, strict=True):
            mine.update(new)
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})
        return
    number = {id(p): i for i, (p, _) in enumerate(order)}
    packed_state = {number.get(id(k), k): v for k, v in state.items()}
    packed_groups = [{**g, "params": [number[id(p)] for p in g["params"]]} for g in values]
    optimizer.load_state_dict({**others, "state": packed_state, "param_groups": packed_groups})


def _load_opaque(stored: Stored, optimizer: Any, loading: Loading) -> Loading:
    """An optimizer with a structure of its own: its state goes back through its own `load_state_dict`."""
    plan_arrays(stored, loading, {})
    loading.finish = lambda arrays: optimizer.load_state_dict(stored.build(lambda path, _: arrays[path]))
    return loading
