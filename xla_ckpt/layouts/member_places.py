"""Where model, optimizer and scheduler lie in what a program nested. Pure.

This is decided here alone, for all layouts whose programs nest what they like, in one order of precedence. An optimizer
is known by its structure, whatever it is called. The model is what the files themselves say, else what has the names of
the program that wants it, else what is called so, else what has the names of the optimizer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.layouts.places import (
    MODEL_NAMES,
    OPTIMIZER_NAMES,
    SCHEDULER_NAMES,
    DictAt,
    best,
    has_names,
    is_below,
    places_in,
)
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys
from xla_ckpt.tree.parameter_names import canonical

STATE_PREFIX = schema.STATE + "."
"""How the keys of the states begin in a flattened optimizer."""

GROUPS_PREFIX = schema.GROUPS + "."
"""How those of its options begin."""


def is_nested_optimizer(members: Mapping[str, Any]) -> bool:
    """Whether this is the state of an optimizer as torch has it, by names or numbers of parameters."""
    groups = schema.groups_of(members)
    if not groups or not isinstance(members.get(schema.STATE, {}), dict):
        return False
    return all(type(name) in (str, int) for group in groups for name in group[schema.PARAMS])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """What a layout knows of the states that its files hold."""

    is_array: Callable[[Any], bool]
    is_optimizer: Callable[[Mapping[str, Any]], bool] = is_nested_optimizer
    is_model: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Whether the files themselves say that a dict is a model."""

    of_training: bool = False
    """Whether it is certain that a state is one of a training: then the only dict of arrays is the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlaces:
    """Where the members of a training state lie; None for what is not there, or cannot be told."""

    model: DictAt | UnknownArray | None
    """Unknown if several models have the names that the program wants."""

    optimizer: DictAt | UnknownArray | None
    """Unknown if there are several that the program may mean."""

    scheduler: DictAt | None

    optimizers: Sequence[DictAt]
    """All that have the structure of an optimizer."""

    @property
    def taken(self) -> set[Keys]:
        """The paths of all that is a member."""
        return {path for place in (self.model, self.optimizer, self.scheduler) for path in _taken(place)}


def member_places(tree: Mapping[str, Any], hints: Hints, form: StateForm) -> MemberPlaces:
    """Find the members of a training state."""
    optimizers = [*_optimizers(tree, form)]
    model = _model(tree, optimizers, hints, form)
    optimizer = _chosen(optimizers, model, hints)
    above = {place.path[:-1] for place in (model, optimizer) if isinstance(place, DictAt)}
    scheduler = _scheduler(tree, above, {*_taken(model), *_taken(optimizer)})
    return MemberPlaces(model=model, optimizer=optimizer, scheduler=scheduler, optimizers=optimizers)


def _taken(place: DictAt | UnknownArray | None) -> set[Keys]:
    return place.taken if isinstance(place, DictAt) else set()


# Optimizers.


def _optimizers(tree: Mapping[str, Any], form: StateForm) -> Iterator[DictAt]:
    """What has the structure of an optimizer's state, nested or flattened."""
    seen: set[Keys] = set()
    for place in places_in(tree):
        if is_below(place.path, seen):
            continue
        if form.is_optimizer(place.members):
            seen.add(place.path)
            yield place if place.path else DictAt((), place.members, tuple(place.members))
        elif any(key.startswith(GROUPS_PREFIX) for key in place.members):
            seen.add(place.path)
            flat = {k: v for k, v in place.members.items() if k.startswith((STATE_PREFIX, GROUPS_PREFIX))}
            yield DictAt(place.path, flat, tuple(flat) if not place.path or len(flat) < len(place.members) else None)


def _parameters(optimizer: Mapping[str, Any]) -> list[Any]:
    """Names, or numbers, of the parameters of an optimizer."""
    if is_nested_optimizer(optimizer):
        return schema.grouped_names(optimizer)
    return list(
        dict.fromkeys(
            key.removeprefix(GROUPS_PREFIX).rpartition(".")[0] for key in optimizer if key.startswith(GROUPS_PREFIX)
        )
    )


def _chosen(
    optimizers: Sequence[DictAt], model: DictAt | UnknownArray | None, hints: Hints
) -> DictAt | UnknownArray | None:
    """The optimizer that is meant; unknown if that cannot be told."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    candidates = list(optimizers)
    names = {o.path: {canonical(str(name)) for name in _parameters(o.members)} for o in optimizers}
    if hints.groups is not None:
        wanted = {canonical(str(name)) for group in hints.groups for name in group}
        candidates = [o for o in optimizers if names[o.path] == wanted] or candidates
    if len(candidates) > 1 and isinstance(model, DictAt):
        beside = [o for o in candidates if o.path[:-1] == model.path[:-1]]
        of_model = [o for o in candidates if set() < names[o.path] <= {canonical(str(n)) for n in model.members}]
        candidates = next((some for some in (beside, of_model) if len(some) == 1), candidates)
    called = [o for o in candidates if o.path and o.path[-1] in OPTIMIZER_NAMES]
    candidates = called if len(called) == 1 else candidates
    if len(candidates) == 1:
        return candidates[0]
    return UnknownArray(
        problem=f"several optimizers are stored, and nothing says which one is meant: {_listed(candidates)}",
        hint="In a program, xla_ckpt.restore reads all of them: hand them over by their own load_state_dict.",
    )


def _listed(places: Sequence[DictAt]) -> str:
    return ", ".join(place.name for place in places)


def _model(
    tree: Mapping[str, Any], optimizers: Sequence[DictAt], hints: Hints, form: StateForm
) -> DictAt | UnknownArray | None:
    """The state dict of the model; unknown if it cannot be told which one it is."""
    inside = {path for o in optimizers for path in o.taken}
    inside |= {path[:n] for path in inside for n in range(1, len(path))}
    known = {canonical(name) for name in hints.arrays}
    apart = [place for place in places_in(tree) if not any(is_below(place.path, o.taken) for o in optimizers)]
    marked = [place for place in apart if form.is_model(place.members)]
    places = marked or [_beside(place, inside, known, form.is_array) for place in apart]
    by_hints = best(places, lambda place: sum(canonical(name) in known for name in place.members))
    if len(by_hints) == 1:
        return by_hints[0]
    beside = {o.path[:-1] for o in optimizers}
    for candidates in filter(None, (by_hints, places)):
        named = [p for p in candidates if p.path and p.path[-1] in MODEL_NAMES and _has_array(p.members, form.is_array)]
        named = [p for p in named if p.path[:-1] in beside] or named
        named.sort(key=lambda p: (len(p.path), MODEL_NAMES.index(str(p.path[-1]))))
        if named:
            return named[0]
    if several := by_hints or (marked if len(marked) > 1 else []):
        return UnknownArray(
            problem=f"several models are stored, and nothing says which one is meant: {_listed(several)}",
            hint="In a program, xla_ckpt.restore reads all of them: hand them over by their own load_state_dict.",
        )
    if marked or form.of_training:
        # Dicts of arrays beside each other may be anything: none is taken for the model by chance.
        certain = marked or [place for place in places if any(map(form.is_array, place.members.values()))]
        return certain[0] if len(certain) == 1 else None
    names = {name for o in optimizers for name in map(str, _parameters(o.members)) if not name.isdecimal()}
    by_optimizer = best(places, lambda place: len(names & place.members.keys()))
    if len(by_optimizer) == 1:
        return by_optimizer[0]
    top = next((place for place in places if not place.path), DictAt((), {}))
    # Nothing else is known of them: all that is stored are arrays with dotted names, or these and an optimizer.
    alone = bool(optimizers) or (len(top.members) == len(tree) and all(map(form.is_array, top.members.values())))
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
