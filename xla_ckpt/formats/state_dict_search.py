"""Find the model, the optimizer and the scheduler in a nested state dict. Pure.

One order of precedence applies to all formats with arbitrarily nested states. An optimizer is recognized by its
structure, independent of its key. The model is located by, in order: the file's own metadata, the parameter names of
the target, a conventional key such as ``model``, and the parameter names of the optimizer. `build_training_state` then
renames the members to the names in the program and unflattens the optimizer; all other values become extras.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath
from xla_ckpt.core.tree.state_dict import (
    attach_module_metadata,
    get_module_metadata,
    match_parameter_names,
    rename_module_metadata,
    strip_wrappers,
)

MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module", "net")
"""Conventional keys of the state dict of a model, the likeliest first."""

OPTIMIZER_NAMES = (
    "optimizer",
    "optimizer_state_dict",
    "optimizer_state",
    "optimizer_states",
    "optim",
    "optim_state_dict",
)
"""Conventional keys of the state dict of an optimizer, if there are several optimizers."""

SCHEDULER_NAMES = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "sched")
"""Conventional keys of the state dict of a scheduler, the likeliest first."""

MAX_NESTING = 3
"""Maximum depth in a state dict at which models and optimizers are searched."""


@dataclass(frozen=True, slots=True)
class LocatedDict:
    """Dict at a path in a state."""

    path: KeyPath
    members: Mapping[str, Any]
    selected_keys: tuple[str, ...] | None = None
    """Keys of the dict that are selected; None for all."""

    @property
    def selected_paths(self) -> set[KeyPath]:
        """Paths of the selected members."""
        return {self.path} if self.selected_keys is None else {(*self.path, key) for key in self.selected_keys}

    @property
    def name(self) -> str:
        """Dotted path, for messages."""
        return ".".join(map(str, self.path)) or "the state itself"


def iterate_dicts(tree: Mapping[str, Any], path: KeyPath = ()) -> Iterator[LocatedDict]:
    """Yield the dicts in a state, parents before their children. Dicts with non-string keys are values."""
    yield LocatedDict(path, tree)
    if len(path) < MAX_NESTING:
        for key, value in tree.items():
            if has_string_keys(value):
                yield from iterate_dicts(value, (*path, key))


def is_below(path: KeyPath, others: Collection[KeyPath]) -> bool:
    """Return True if a path equals one of the others, or is below one."""
    return any(path[:n] in others for n in range(len(path) + 1))


def has_string_keys(value: Any) -> bool:
    """Return True if a value is a container of a state: a dict with only string keys."""
    return isinstance(value, dict) and all(type(key) is str for key in value)


def remove_paths(tree: Mapping[Any, Any], paths: Collection[Sequence[Any]]) -> dict[Any, Any]:
    """Return a tree of dicts without the members at these paths, and without dicts that become empty by that.

    >>> remove_paths({"a": {"b": 1, "c": 2}, "d": {"e": 3}, "f": {}}, [("a", "b"), ("d", "e")])
    {'a': {'c': 2}, 'f': {}}
    """
    below: dict[Any, list[Sequence[Any]]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    others: dict[Any, Any] = {}
    for key, value in tree.items():
        if key not in below or not isinstance(value, Mapping):
            if key not in below or all(below[key]):
                others[key] = value
        elif all(below[key]) and (members := remove_paths(value, below[key])):
            others[key] = members
    return others


def select_best(places: Sequence[LocatedDict], score: Callable[[LocatedDict], int]) -> list[LocatedDict]:
    """Return all places with the highest score; empty if it is 0."""
    scores = [score(place) for place in places]
    highest = max(scores, default=0)
    return [place for place, n in zip(places, scores, strict=True) if n == highest and highest]


STATE_PREFIX = schema.STATE + "."
"""Key prefix of states in a flattened optimizer."""

GROUPS_PREFIX = schema.PARAM_GROUPS + "."
"""Key prefix of hyperparameters in a flattened optimizer."""


def is_nested_optimizer(members: Mapping[str, Any]) -> bool:
    """Return True if this is a torch optimizer state, with names or numbers of parameters."""
    groups = schema.get_groups(members)
    if not groups or not isinstance(members.get(schema.STATE, {}), dict):
        return False
    return all(type(name) in (str, int) for group in groups for name in group[schema.PARAMS])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateClassifier:
    """Predicates of a layout about the states in its files."""

    is_array: Callable[[Any], bool]
    is_optimizer: Callable[[Mapping[str, Any]], bool] = is_nested_optimizer
    is_model: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Predicate that is True if the files themselves identify a dict as a model."""

    always_training: bool = False
    """True if a state is always a training state: the only dict of arrays is the model in that case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLocations:
    """Locations of the members of a training state; None for a member that is missing or ambiguous."""

    model: LocatedDict | UnreadableArray | None
    """`UnreadableArray` if several models have the names in the target program."""

    optimizer: LocatedDict | UnreadableArray | None
    """`UnreadableArray` if several optimizers match the target program."""

    scheduler: LocatedDict | None

    optimizers: Sequence[LocatedDict]
    """All dicts with the structure of an optimizer."""

    @property
    def member_paths(self) -> set[KeyPath]:
        """Paths of all members."""
        return {path for place in (self.model, self.optimizer, self.scheduler) for path in _get_member_paths(place)}


def find_members(tree: Mapping[str, Any], hints: LoadHints, classifier: StateClassifier) -> MemberLocations:
    """Find the members of a training state."""
    optimizers = [*_find_optimizers(tree, classifier)]
    model = _find_model(tree, optimizers, hints, classifier)
    optimizer = _choose_optimizer(optimizers, model, hints)
    above = {place.path[:-1] for place in (model, optimizer) if isinstance(place, LocatedDict)}
    scheduler = _find_scheduler(tree, above, {*_get_member_paths(model), *_get_member_paths(optimizer)})
    return MemberLocations(model=model, optimizer=optimizer, scheduler=scheduler, optimizers=optimizers)


def _get_member_paths(place: LocatedDict | UnreadableArray | None) -> set[KeyPath]:
    return place.selected_paths if isinstance(place, LocatedDict) else set()


def _find_optimizers(tree: Mapping[str, Any], classifier: StateClassifier) -> Iterator[LocatedDict]:
    """Yield dicts with the structure of an optimizer state, nested or flattened."""
    seen: set[KeyPath] = set()
    for place in iterate_dicts(tree):
        if is_below(place.path, seen):
            continue
        if classifier.is_optimizer(place.members):
            seen.add(place.path)
            yield place if place.path else LocatedDict((), place.members, tuple(place.members))
        elif any(key.startswith(GROUPS_PREFIX) for key in place.members):
            seen.add(place.path)
            flat = {k: v for k, v in place.members.items() if k.startswith((STATE_PREFIX, GROUPS_PREFIX))}
            yield LocatedDict(
                place.path, flat, tuple(flat) if not place.path or len(flat) < len(place.members) else None
            )


def _list_parameters(optimizer: Mapping[str, Any]) -> list[Any]:
    """Return the names or numbers of the parameters of an optimizer."""
    if is_nested_optimizer(optimizer):
        return schema.get_parameter_names(optimizer)
    return list(
        dict.fromkeys(
            key.removeprefix(GROUPS_PREFIX).rpartition(".")[0] for key in optimizer if key.startswith(GROUPS_PREFIX)
        )
    )


def _choose_optimizer(
    optimizers: Sequence[LocatedDict], model: LocatedDict | UnreadableArray | None, hints: LoadHints
) -> LocatedDict | UnreadableArray | None:
    """Return the optimizer of the target program; an `UnreadableArray` if it is ambiguous."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    candidates = list(optimizers)
    names = {o.path: {strip_wrappers(str(name)) for name in _list_parameters(o.members)} for o in optimizers}
    if hints.parameter_groups is not None:
        wanted = {strip_wrappers(str(name)) for group in hints.parameter_groups for name in group}
        candidates = [o for o in optimizers if names[o.path] == wanted] or candidates
    if len(candidates) > 1 and isinstance(model, LocatedDict):
        beside = [o for o in candidates if o.path[:-1] == model.path[:-1]]
        of_model = [o for o in candidates if set() < names[o.path] <= {strip_wrappers(str(n)) for n in model.members}]
        candidates = next((some for some in (beside, of_model) if len(some) == 1), candidates)
    called = [o for o in candidates if o.path and o.path[-1] in OPTIMIZER_NAMES]
    candidates = called if len(called) == 1 else candidates
    if len(candidates) == 1:
        return candidates[0]
    return UnreadableArray(
        problem=f"several optimizers are stored, and nothing says which one is meant: {_join_names(candidates)}",
        hint="In a program, xla_ckpt.restore reads all of them: hand them over by their own load_state_dict.",
    )


def _join_names(places: Sequence[LocatedDict]) -> str:
    return ", ".join(place.name for place in places)


def _find_model(
    tree: Mapping[str, Any], optimizers: Sequence[LocatedDict], hints: LoadHints, classifier: StateClassifier
) -> LocatedDict | UnreadableArray | None:
    """Return the state dict of the model; an `UnreadableArray` if it is ambiguous."""
    inside = {path for o in optimizers for path in o.selected_paths}
    inside |= {path[:n] for path in inside for n in range(1, len(path))}
    known = {strip_wrappers(name) for name in hints.arrays}
    apart = [
        place for place in iterate_dicts(tree) if not any(is_below(place.path, o.selected_paths) for o in optimizers)
    ]
    marked = [place for place in apart if classifier.is_model(place.members)]
    places = marked or [_exclude_optimizers(place, inside, known, classifier.is_array) for place in apart]
    by_hints = select_best(places, lambda place: sum(strip_wrappers(name) in known for name in place.members))
    if len(by_hints) == 1:
        return by_hints[0]
    beside = {o.path[:-1] for o in optimizers}
    for candidates in filter(None, (by_hints, places)):
        named = [
            p for p in candidates if p.path and p.path[-1] in MODEL_NAMES and _has_array(p.members, classifier.is_array)
        ]
        named = [p for p in named if p.path[:-1] in beside] or named
        named.sort(key=lambda p: (len(p.path), MODEL_NAMES.index(str(p.path[-1]))))
        if named:
            return named[0]
    if several := by_hints or (marked if len(marked) > 1 else []):
        return UnreadableArray(
            problem=f"several models are stored, and nothing says which one is meant: {_join_names(several)}",
            hint="In a program, xla_ckpt.restore reads all of them: hand them over by their own load_state_dict.",
        )
    if marked or classifier.always_training:
        # Sibling dicts of arrays can be anything: none is selected as the model by chance.
        certain = marked or [place for place in places if any(map(classifier.is_array, place.members.values()))]
        return certain[0] if len(certain) == 1 else None
    names = {name for o in optimizers for name in map(str, _list_parameters(o.members)) if not name.isdecimal()}
    by_optimizer = select_best(places, lambda place: len(names & place.members.keys()))
    if len(by_optimizer) == 1:
        return by_optimizer[0]
    top = next((place for place in places if not place.path), LocatedDict((), {}))
    # No other evidence exists: the state contains only arrays with dotted names, or these and an optimizer.
    alone = bool(optimizers) or (len(top.members) == len(tree) and all(map(classifier.is_array, top.members.values())))
    return top if alone and any("." in name for name in top.members) else None


def _has_array(members: Mapping[str, Any], is_array: Callable[[Any], bool]) -> bool:
    return any(
        is_array(value) or (has_string_keys(value) and _has_array(value, is_array)) for value in members.values()
    )


def _exclude_optimizers(
    place: LocatedDict, excluded: set[KeyPath], known: set[str], is_array: Callable[[Any], bool]
) -> LocatedDict:
    """Return the members of a dict that can belong to a model: members that are or contain an optimizer are excluded.

    At the top of a state, which has other members than parameters, only arrays and known parameter names are included.
    """
    keys = [key for key in place.members if (*place.path, key) not in excluded]
    if not place.path:
        keys = [key for key in keys if _may_be_top_level(key, place.members[key], known, is_array)]
    members = _join_nested_names({key: place.members[key] for key in keys}, known)
    return LocatedDict(place.path, members, tuple(keys) if not place.path or len(keys) < len(place.members) else None)


def _may_be_top_level(key: str, value: Any, known: set[str], is_array: Callable[[Any], bool]) -> bool:
    if is_array(value):
        return "." in key or not known or strip_wrappers(key) in known
    return any(strip_wrappers(name) in known for name in _join_nested_names({key: value}, known))


def _join_nested_names(members: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Return a state dict with nested modules joined to the dotted names of a model."""
    joined: dict[str, Any] = {}
    for key, value in members.items():
        if has_string_keys(value) and strip_wrappers(key) not in wanted:
            below = {f"{key}.{k}": v for k, v in _join_nested_names(value, wanted).items()}
            apart = below.keys().isdisjoint(joined) and below.keys().isdisjoint(members)
            if apart and any(strip_wrappers(name) in wanted for name in below):
                joined |= below
                continue
        joined[key] = value
    return joined


def _find_scheduler(tree: Mapping[str, Any], above: set[KeyPath], taken: set[KeyPath]) -> LocatedDict | None:
    """Return the scheduler state at the top level or next to a member, unless it is part of another member."""
    parts = {path[:n] for path in taken for n in range(1, len(path))}
    for place in iterate_dicts(tree):
        if not place.path or place.path in above:
            for name in SCHEDULER_NAMES:
                path = (*place.path, name)
                if isinstance(place.members.get(name), dict) and path not in parts and not is_below(path, taken):
                    return LocatedDict(path, place.members[name])
    return None


_BASE_STATE = "base_state"
"""Key of the states of the parameter shards in torch_xla's ZeRO-1 optimizer, by parameter number."""

_SHAPE_INFO = "shape_info"
"""Key of the shapes of the parameters in torch_xla's ZeRO-1 optimizer."""


def build_training_state(tree: Mapping[str, Any], hints: LoadHints, is_array: Callable[[Any], bool]) -> dict[str, Any]:
    """Build the members of a training state: model, optimizer, scheduler, and all other values as extras.

    A state without a recognized model or optimizer is returned unchanged.
    """
    places = find_members(tree, hints, StateClassifier(is_array=is_array))
    model, optimizer, scheduler = places.model, places.optimizer, places.scheduler
    if model is None and not places.optimizers:
        return dict(tree)
    parts: dict[str, Any] = {}
    if isinstance(model, UnreadableArray):
        parts[schema.MODEL] = model
    elif model is not None:
        called = match_parameter_names(model.members, hints.arrays)
        members = {called.get(name, name): value for name, value in model.members.items()}
        metadata = get_module_metadata(reduce(operator.getitem, model.path, tree))
        if metadata is not None:
            members = attach_module_metadata(members, rename_module_metadata(metadata, called))
        parts[schema.MODEL] = members
    if isinstance(optimizer, UnreadableArray):
        if hints.parameter_groups is not None:  # for a program without an optimizer, all of them are in the extras
            parts[schema.OPTIMIZER] = optimizer
    elif optimizer is not None:
        known = parts.get(schema.MODEL)
        parts[schema.OPTIMIZER] = _build_optimizer(
            optimizer.members, list(known) if isinstance(known, dict) else [], hints
        )
    if scheduler is not None:
        parts[schema.SCHEDULER] = scheduler.members
    return parts | _collect_extras(tree, places.member_paths)


def _collect_extras(tree: Mapping[str, Any], member_paths: set[KeyPath]) -> dict[str, Any]:
    """Return user content, and all values that are not part of a member as extras, by their top-level names."""
    extras = remove_paths(tree, member_paths)
    user_content = {name: extras.pop(name) for name in (schema.USER_CONTENT,) if name in extras}
    ours = extras.get(schema.EXTRAS)
    if isinstance(ours, dict) and ours.keys().isdisjoint(extras):
        extras = {**ours, **{name: value for name, value in extras.items() if name != schema.EXTRAS}}
    return user_content | ({schema.EXTRAS: extras} if extras else {})


def _build_optimizer(members: Mapping[str, Any], model: Sequence[str], hints: LoadHints) -> dict[str, Any]:
    """Return the nested state of an optimizer, by the parameter names of the program."""
    tree = _unwrap_zero1_state(members) if is_nested_optimizer(members) else _unflatten_optimizer(members, model)
    state = tree.setdefault(schema.STATE, {})
    stored = schema.get_parameter_names(tree)
    if stored and all(type(name) is int for name in stored):
        # DCP writes all keys as strings.
        numbers = {str(name): name for name in stored if name not in state}
        return {**tree, schema.STATE: {numbers.get(key, key): value for key, value in state.items()}}
    called = match_parameter_names(dict.fromkeys(map(str, stored)), hints.arrays)
    first = {name: names[0] for names in hints.aliases.values() for name in names}
    taken = {*called.values(), *state}
    called = {
        n: program_name if first.get(program_name) in taken else first.get(program_name, program_name)
        for n, program_name in called.items()
    }
    return schema.rename_parameters(tree, called)


def _unwrap_zero1_state(members: Mapping[str, Any]) -> dict[str, Any]:
    """Unwrap a nested optimizer: torch_xla's ZeRO-1 stores states in the wrapped optimizer, not in `state`."""
    unwrapped = dict(members)
    if not unwrapped.get(schema.STATE) and isinstance(unwrapped.get(_BASE_STATE), dict):
        unwrapped[schema.STATE] = unwrapped.pop(_BASE_STATE)
        unwrapped.pop(_SHAPE_INFO, None)
    return unwrapped


def _unflatten_optimizer(members: Mapping[str, Any], model: Sequence[str]) -> dict[str, Any]:
    """Unflatten an optimizer state: parameters with equal hyperparameters form one group."""
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in members.items():
        if key.startswith(GROUPS_PREFIX):
            name, _, option = key.removeprefix(GROUPS_PREFIX).rpartition(".")
            hyper.setdefault(name, {})[option] = value
    place = {strip_wrappers(name): i for i, name in enumerate(model)}
    order = sorted(hyper, key=lambda name: place.get(strip_wrappers(name), len(place)))
    groups: dict[str, dict[str, Any]] = {}
    for name in order:
        same = groups.setdefault(repr(sorted(hyper[name].items())), {**hyper[name], schema.PARAMS: []})
        same[schema.PARAMS].append(name)
    state: dict[str, dict[str, Any]] = {}
    for key, value in members.items():
        if key.startswith(STATE_PREFIX):
            name, kind = _split_key(key.removeprefix(STATE_PREFIX), hyper)
            state.setdefault(name, {})[kind] = value
    return {schema.STATE: state, schema.PARAM_GROUPS: list(groups.values())}


def _split_key(key: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Split a flattened key into (parameter, state name). Both may contain dots, so known parameters are matched."""
    parts = key.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:n])) in names:
            return name, ".".join(parts[n:])
    name, _, kind = key.rpartition(".")
    return name, kind
