"""Optimizers: state by parameter *name*, whatever order and grouping the parameters have.

Stored is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own structure with names in
place of positions. Names come from the model; without a model from ``param_names`` (torch >= 2.6), else parameters
are numbered by group and position, ``#0.3``, and such a state only fits an optimizer of the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_ckpt.adapters.module import load_dict, name_of
from xla_ckpt.adapters.stored import Loading, Stored, arrays_of, plan_arrays
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.tree import path as paths

Names = Mapping[Any, str]
"""What `xla_ckpt.adapters.module.parameter_names` returns."""


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
    packed = optimizer.state_dict()
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
    state = {called[i] if type(i) is int else i: v for i, v in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def _is_standard(packed: Any) -> bool:
    if not isinstance(packed, Mapping) or not isinstance(packed.get("state"), Mapping):
        return False
    groups = packed.get("param_groups")
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def load(stored: Stored, optimizer: Any, names: Names) -> Loading:
    """Prepare to load an optimizer, or a plain dict."""
    if isinstance(optimizer, dict):
        return load_dict(stored, optimizer)
    held = stored.build()
    loading = Loading()
    if not _is_standard(held) or not hasattr(optimizer, "param_groups"):
        return _load_opaque(stored, optimizer, loading)
    order = _parameters(optimizer)
    called = _called(held, optimizer, names)
    group_of = {name: g for g in held["param_groups"] for name in g["params"]}
    for name in [n for n in called if n not in group_of]:
        loading.add_problem(_state_path(stored, name), "the optimizer has this parameter, the stored one does not")
    for name in [n for n in group_of if n not in set(called)]:
        loading.add_problem(_state_path(stored, name), "the stored optimizer has this parameter, this one does not")
    by_name = {name: parameter for name, (parameter, _) in zip(called, order, strict=True)}
    groups = _match_groups(stored, loading, optimizer, called)
    current = {name: optimizer.state[p] for name, p in by_name.items() if p in optimizer.state}
    tree_now = {
        "state": {name: v for name, v in current.items() if name in held["state"]},
        "param_groups": _groups_now(held, groups, optimizer),
    }
    devices = _Devices(stored, by_name, group_of)
    wanted = Loading()
    plan_arrays(stored, wanted, arrays_of(tree_now, stored.prefix), owned=True, device=devices.of)
    kept = {path: t for path, t in wanted.targets.items() if devices.is_kept(path)}
    loading.targets, loading.problems = kept, loading.problems + wanted.problems
    bad = {devices.name(p.leaf) for p in wanted.problems}

    def finish(arrays: Mapping[str, Any]) -> None:
        tree = stored.build(lambda path, _: arrays.get(path))
        state: dict[Any, Any] = collections.defaultdict(dict)
        for name, parameter in by_name.items():
            if name in bad or name not in group_of:
                if parameter in optimizer.state:  # not strict: what does not fit stays as it is
                    state[parameter] = optimizer.state[parameter]
            elif name in tree["state"]:
                state[parameter] = tree["state"][name]
        state.update({k: v for k, v in tree["state"].items() if k not in group_of})
        values = [None if g is None else tree["param_groups"][g] for g in groups]
        others = {k: v for k, v in tree.items() if k not in ("state", "param_groups")}
        _install(optimizer, order, state, values, others)

    loading.finish = finish
    return loading


def _called(held: Any, optimizer: Any, names: Names) -> list[Any]:
    """What the stored state calls this optimizer's parameters: names, or positions where it has only those."""
    stored_names = [n for g in held["param_groups"] for n in g["params"]]
    if stored_names and all(type(n) is int for n in stored_names):  # saved as a plain state dict: torch's packed ids
        return list(range(len(_parameters(optimizer))))
    if stored_names and all(isinstance(n, str) and n.startswith("#") for n in stored_names):
        return [place for _, place in _parameters(optimizer)]
    return names_of(optimizer, names)


def _component(name: Any) -> str:
    return paths.escape(name) if isinstance(name, str) else paths.escape_other(str(name))


def _state_path(stored: Stored, name: Any) -> str:
    return paths.join(paths.join(stored.prefix, "state"), _component(name))


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


class _Devices:
    """Where state goes that the optimizer does not have yet: torch's own rule."""

    def __init__(self, stored: Stored, by_name: Mapping[Any, Any], group_of: Mapping[Any, Any]) -> None:
        self._base = paths.join(stored.prefix, "state") + "/"
        self._by_component = {_component(n): (n, p) for n, p in by_name.items()}
        self._group_of = group_of

    def name(self, path: str) -> Any:
        """The parameter whose state this is; None for anything else."""
        if not path.startswith(self._base):
            return None
        return self._by_component.get(path[len(self._base) :].split("/", maxsplit=1)[0], (None, None))[0]

    def is_kept(self, path: str) -> bool:
        """Whether the program has a use for this array."""
        if not path.startswith(self._base):
            return True
        component = path[len(self._base) :].split("/", maxsplit=1)[0]
        return component in self._by_component

    def of(self, path: str) -> torch.device | None:
        name = self.name(path)
        if name is None:
            return None
        parameter = self._by_component[_component(name)][1]
        group = self._group_of.get(name, {})
        on_host = path.endswith("/step") and not (group.get("capturable") or group.get("fused"))
        return None if on_host else parameter.device


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
