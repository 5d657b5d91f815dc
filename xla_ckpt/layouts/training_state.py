"""From the state dicts of DCP's users to the tree of a training state. Pure.

DCP stores whatever its caller nests. The optimizer is known by its structure, whatever it is called; the model by the
names that a program says it has, else by what it is called, else by the names of the optimizer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from xla_ckpt.layouts.places import (
    MODEL_NAMES,
    SCHEDULER_NAMES,
    DictAt,
    best,
    canonical,
    has_names,
    is_below,
    places_in,
    program_names,
    without_paths,
)
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys

_STATE = schema.STATE + "."
_GROUPS = schema.GROUPS + "."


_BASE_STATE = "base_state"
"""Where the state dict of torch_xla's ZeRO-1 optimizer has the states of its shards, by the numbers of parameters."""

_SHAPES = "shape_info"
"""What it says beside of the shapes of the parameters."""


def training_state(tree: Mapping[str, Any], hints: Hints, is_array: Callable[[Any], bool]) -> dict[str, Any]:
    """The members of a training state: model, optimizer, scheduler, and the rest as extras.

    A state in which nothing of a training state is recognised stays as it is.

    Args:
        tree: The nested state.
        hints: What the program says that wants it.
        is_array: Whether a value of the tree is an array.
    """
    optimizers = list(_optimizers(tree))
    model = _model(tree, optimizers, hints, is_array)
    optimizer = _chosen(optimizers, model, hints)
    if model is None and not optimizers:
        return dict(tree)
    parts: dict[str, Any] = {}
    taken: set[Keys] = set()
    if isinstance(model, UnknownArray):
        parts[schema.MODEL] = model
    elif model is not None:
        called = program_names(model.members, hints.arrays)
        parts[schema.MODEL] = {called.get(name, name): value for name, value in model.members.items()}
        taken |= model.taken
    if isinstance(optimizer, UnknownArray):
        parts[schema.OPTIMIZER] = optimizer
    elif optimizer is not None:
        known = parts.get(schema.MODEL)
        parts[schema.OPTIMIZER] = _optimizer(optimizer.members, list(known) if isinstance(known, dict) else [], hints)
        taken |= optimizer.taken
    above = {place.path[:-1] for place in (model, optimizer) if isinstance(place, DictAt)}
    scheduler = _scheduler(tree, above, taken)
    if scheduler is not None:
        parts[schema.SCHEDULER] = scheduler.members
        taken.add(scheduler.path)
    return parts | _rest(tree, taken)


def _rest(tree: Mapping[str, Any], taken: set[Keys]) -> dict[str, Any]:
    """What is no model, optimizer or scheduler: user content, and extras by their names at the top."""
    extras = without_paths(tree, taken)
    user_content = {name: extras.pop(name) for name in (schema.USER_CONTENT,) if name in extras}
    ours = extras.get(schema.EXTRAS)
    if isinstance(ours, dict) and ours.keys().isdisjoint(extras):
        extras = {**ours, **{name: value for name, value in extras.items() if name != schema.EXTRAS}}
    return user_content | ({schema.EXTRAS: extras} if extras else {})


# Optimizers.


def _optimizers(tree: Mapping[str, Any]) -> Iterator[DictAt]:
    """What has the structure of an optimizer's state, nested or flattened."""
    seen: set[Keys] = set()
    for place in places_in(tree):
        if is_below(place.path, seen):
            continue
        if _is_nested(place.members):
            seen.add(place.path)
            yield place if place.path else DictAt((), place.members, tuple(place.members))
        elif any(key.startswith(_GROUPS) for key in place.members):
            seen.add(place.path)
            flat = {k: v for k, v in place.members.items() if k.startswith((_STATE, _GROUPS))}
            yield DictAt(place.path, flat, tuple(flat) if not place.path or len(flat) < len(place.members) else None)


def _is_nested(members: Mapping[str, Any]) -> bool:
    groups = schema.groups_of(members)
    if not groups or not isinstance(members.get(schema.STATE, {}), dict):
        return False
    return all(type(name) in (str, int) for group in groups for name in group[schema.PARAMS])


def _parameters(optimizer: Mapping[str, Any]) -> list[Any]:
    """Names, or numbers, of the parameters of an optimizer."""
    if _is_nested(optimizer):
        return schema.grouped_names(optimizer)
    return list(
        dict.fromkeys(key.removeprefix(_GROUPS).rpartition(".")[0] for key in optimizer if key.startswith(_GROUPS))
    )


def _chosen(
    optimizers: Sequence[DictAt], model: DictAt | UnknownArray | None, hints: Hints
) -> DictAt | UnknownArray | None:
    """The optimizer that is meant; unknown if that cannot be told, and the program has one."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    candidates = list(optimizers)
    names = {o.path: {canonical(str(name)) for name in _parameters(o.members)} for o in optimizers}
    if hints.groups is not None:
        wanted = {canonical(str(name)) for group in hints.groups for name in group}
        candidates = [o for o in optimizers if names[o.path] == wanted] or candidates
    if len(candidates) > 1 and isinstance(model, DictAt):
        beside = [o for o in candidates if o.path[:-1] == model.path[:-1]]
        of_model = [o for o in candidates if names[o.path] <= {canonical(str(name)) for name in model.members}]
        candidates = next((some for some in (beside, of_model) if len(some) == 1), candidates)
    if len(candidates) == 1:
        return candidates[0]
    if hints.groups is None:
        return None
    return UnknownArray(
        problem=f"several optimizers are stored, and nothing says which one is meant: {_listed(candidates)}",
        hint="Read all of them with restore(path), and hand them over by their own load_state_dict.",
    )


def _listed(places: Sequence[DictAt]) -> str:
    return ", ".join(place.name for place in places)


def _optimizer(members: Mapping[str, Any], model: Sequence[str], hints: Hints) -> dict[str, Any]:
    """The state of an optimizer by the names of the program, nested."""
    tree = _of_shards(members) if _is_nested(members) else _unflattened(members, model)
    state = tree.setdefault(schema.STATE, {})
    stored = schema.grouped_names(tree)
    if stored and all(type(name) is int for name in stored):
        # DCP writes all keys as strings.
        numbers = {str(name): name for name in stored if name not in state}
        return {**tree, schema.STATE: {numbers.get(key, key): value for key, value in state.items()}}
    called = program_names(dict.fromkeys(map(str, stored)), hints.arrays)
    first = {name: names[0] for names in hints.aliases.values() for name in names}
    taken = {*called.values(), *state}
    called = {
        n: program_name if first.get(program_name) in taken else first.get(program_name, program_name)
        for n, program_name in called.items()
    }
    return schema.renamed_parameters(tree, called)


def _of_shards(members: Mapping[str, Any]) -> dict[str, Any]:
    """A nested optimizer. torch_xla's ZeRO-1 has an empty `state`, and its states in the optimizer that it wraps."""
    unwrapped = dict(members)
    if not unwrapped.get(schema.STATE) and isinstance(unwrapped.get(_BASE_STATE), dict):
        unwrapped[schema.STATE] = unwrapped.pop(_BASE_STATE)
        unwrapped.pop(_SHAPES, None)
    return unwrapped


def _unflattened(members: Mapping[str, Any], model: Sequence[str]) -> dict[str, Any]:
    """A flattened optimizer's state with its groups: parameters with equal hyper-parameters are one group."""
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in members.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            hyper.setdefault(name, {})[option] = value
    place = {canonical(name): i for i, name in enumerate(model)}
    order = sorted(hyper, key=lambda name: place.get(canonical(name), len(place)))
    groups: dict[str, dict[str, Any]] = {}
    for name in order:
        same = groups.setdefault(repr(sorted(hyper[name].items())), {**hyper[name], schema.PARAMS: []})
        same[schema.PARAMS].append(name)
    state: dict[str, dict[str, Any]] = {}
    for key, value in members.items():
        if key.startswith(_STATE):
            name, kind = _split(key.removeprefix(_STATE), hyper)
            state.setdefault(name, {})[kind] = value
    return {schema.STATE: state, schema.GROUPS: list(groups.values())}


def _split(key: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """(parameter, name of the state) of a flattened key. Both may have dots: the parameters are known."""
    parts = key.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:n])) in names:
            return name, ".".join(parts[n:])
    name, _, kind = key.rpartition(".")
    return name, kind


# Models.


def _model(
    tree: Mapping[str, Any], optimizers: Sequence[DictAt], hints: Hints, is_array: Callable[[Any], bool]
) -> DictAt | UnknownArray | None:
    """The state dict of the model; unknown if it cannot be told which one it is."""
    inside = {path for o in optimizers for path in o.taken}
    inside |= {path[:n] for path in inside for n in range(1, len(path))}
    known = {canonical(name) for name in hints.arrays}
    places = [
        _beside(place, inside, known, is_array)
        for place in places_in(tree)
        if not any(is_below(place.path, o.taken) for o in optimizers)
    ]
    by_hints = best(places, lambda place: sum(canonical(name) in known for name in place.members))
    if len(by_hints) == 1:
        return by_hints[0]
    beside = {o.path[:-1] for o in optimizers}
    for candidates in filter(None, (by_hints, places)):
        named = [p for p in candidates if p.path and p.path[-1] in MODEL_NAMES and _has_array(p.members, is_array)]
        named = [p for p in named if p.path[:-1] in beside] or named
        named.sort(key=lambda p: (len(p.path), MODEL_NAMES.index(str(p.path[-1]))))
        if named:
            return named[0]
    if by_hints:
        return UnknownArray(
            problem=f"several models of these names are stored, and nothing says which is meant: {_listed(by_hints)}",
            hint="Read all of them with restore(path), and hand them over by their own load_state_dict.",
        )
    names = {name for o in optimizers for name in map(str, _parameters(o.members)) if not name.isdecimal()}
    by_optimizer = best(places, lambda place: len(names & place.members.keys()))
    if len(by_optimizer) == 1:
        return by_optimizer[0]
    top = next((place for place in places if not place.path), DictAt((), {}))
    # Nothing else is known of them: all that is stored are arrays with dotted names, or these and an optimizer.
    alone = bool(optimizers) or (len(top.members) == len(tree) and all(map(is_array, top.members.values())))
    return top if alone and any("." in name for name in top.members) else None


def _has_array(members: Mapping[str, Any], is_array: Callable[[Any], bool]) -> bool:
    return any(is_array(value) or (has_names(value) and _has_array(value, is_array)) for value in members.values())


def _beside(place: DictAt, taken: set[Keys], known: set[str], is_array: Callable[[Any], bool]) -> DictAt:
    """Of a dict what may belong to a model: not what an optimizer is, or holds one.

    At the top of a state, where other things lie beside the parameters, these are arrays, and what the program knows.
    """
    keys = [key for key in place.members if (*place.path, key) not in taken]
    if not place.path:
        keys = [key for key in keys if _may_be_at_top(key, place.members[key], known, is_array)]
    members = _joined({key: place.members[key] for key in keys}, known)
    return DictAt(place.path, members, tuple(keys) if not place.path or len(keys) < len(place.members) else None)


def _may_be_at_top(key: str, value: Any, known: set[str], is_array: Callable[[Any], bool]) -> bool:
    if is_array(value):
        return "." in key or not known or canonical(key) in known
    return any(canonical(name) in known for name in _joined({key: value}, known))


def _joined(members: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """A state dict with the dotted names of a model, where its modules are nested."""
    joined: dict[str, Any] = {}
    for key, value in members.items():
        if has_names(value) and canonical(key) not in wanted:
            below = {f"{key}.{k}": v for k, v in _joined(value, wanted).items()}
            apart = below.keys().isdisjoint(joined) and below.keys().isdisjoint(members)
            if apart and any(canonical(name) in wanted for name in below):
                joined |= below
                continue
        joined[key] = value
    return joined


# Schedulers.


def _scheduler(tree: Mapping[str, Any], above: set[Keys], taken: set[Keys]) -> DictAt | None:
    """The state of a scheduler, at the top or beside the model or the optimizer, of which nothing is taken already."""
    parts = {path[:n] for path in taken for n in range(1, len(path))}
    for place in places_in(tree):
        if not place.path or place.path in above:
            for name in SCHEDULER_NAMES:
                path = (*place.path, name)
                if isinstance(place.members.get(name), dict) and path not in parts and not is_below(path, taken):
                    return DictAt(path, place.members[name])
    return None
