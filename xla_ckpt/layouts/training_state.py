"""From the state dicts of DCP's users to the tree of a training state. Pure.

DCP stores whatever its caller nests. The optimizer is known by its structure, whatever it is called; the model by the
names that a program says it has, else by what it is called, else by the names of the optimizer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.dcp.metadata import KeyPath
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema

MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module", "net")
"""What a model's state dict is called, the likeliest first."""

SCHEDULER_NAMES = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Steps of a name that stand for a wrapper around the module: DistributedDataParallel, torch.compile, FSDP."""

MAX_NESTING = 3
"""How deep in a state dict a model or an optimizer is looked for."""

MAX_MISSING_MEMBERS = 1000
"""Members of a list that may be missing: DCP stores nothing of an empty dict."""

_STATE = schema.STATE + "."
_GROUPS = schema.GROUPS + "."


_BASE_STATE = "base_state"
"""Where the state dict of torch_xla's ZeRO-1 optimizer has the states of its shards, by the numbers of parameters."""

_SHAPES = "shape_info"
"""What it says beside of the shapes of the parameters."""


class _Node(dict[str | int, Any]):
    """A container whose members have keys of their own, unlike a dict that is one value."""


def nested(items: Iterable[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """The values at their paths: strings are keys of dicts, integers are places in lists.

    Raises:
        CorruptCheckpointError: A path is that of a value and of a container, or of a dict and of a list.

    >>> nested([(("a", "b"), 1), (("c", 1, "d"), 2)])
    {'a': {'b': 1}, 'c': [None, {'d': 2}]}
    """
    root = _Node()
    for path, value in items:
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _Node())
            if not isinstance(below, _Node):
                raise _clash(path)
            node = below
        if node.setdefault(path[-1], value) is not value:
            raise _clash(path)
    state = _plain(root, ())
    if not isinstance(state, dict):
        raise CorruptCheckpointError("the state is a list, where DCP stores dicts")
    return state


def _clash(path: KeyPath) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "one place in the state has a value and is a container", leaf=".".join(map(str, path))
    )


def _plain(value: Any, path: KeyPath) -> Any:
    if not isinstance(value, _Node):
        return value
    if not value or any(isinstance(key, str) for key in value):
        if not all(isinstance(key, str) for key in value):
            raise CorruptCheckpointError(
                "one place in the state is a dict and a list", leaf=".".join(map(str, path)) or None
            )
        return {key: _plain(member, (*path, key)) for key, member in value.items()}
    size = 1 + max(key for key in value if isinstance(key, int))
    if size > len(value) + MAX_MISSING_MEMBERS:
        raise CorruptCheckpointError(
            "most of a list is not stored", leaf=".".join(map(str, path)), expected=f"{size} members", found=len(value)
        )
    return [_plain(value.get(i), (*path, i)) for i in range(size)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A dict somewhere in a state."""

    path: KeyPath
    members: Mapping[str, Any]
    keys: tuple[str, ...] | None = None
    """Which members of the dict there are meant; None: all of them."""

    @property
    def taken(self) -> set[KeyPath]:
        """The paths of what is meant."""
        return {self.path} if self.keys is None else {(*self.path, key) for key in self.keys}

    @property
    def name(self) -> str:
        """What it is called."""
        return ".".join(map(str, self.path)) or "the state itself"


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
    taken: set[KeyPath] = set()
    if isinstance(model, UnknownArray):
        parts[schema.MODEL] = model
    elif model is not None:
        parts[schema.MODEL] = _renamed(model.members, program_names(model.members, hints.arrays))
        taken |= model.taken
    if isinstance(optimizer, UnknownArray):
        parts[schema.OPTIMIZER] = optimizer
    elif optimizer is not None:
        known = parts.get(schema.MODEL)
        parts[schema.OPTIMIZER] = _optimizer(optimizer.members, list(known) if isinstance(known, dict) else [], hints)
        taken |= optimizer.taken
    above = {place.path[:-1] for place in (model, optimizer) if isinstance(place, _Place)}
    scheduler = _scheduler(tree, above, taken)
    if scheduler is not None:
        parts[schema.SCHEDULER] = scheduler.members
        taken.add(scheduler.path)
    return parts | _rest(tree, taken)


def _rest(tree: Mapping[str, Any], taken: set[KeyPath]) -> dict[str, Any]:
    """What is no model, optimizer or scheduler: user content, and extras by their names at the top."""
    extras = without_paths(tree, taken)
    user_content = {name: extras.pop(name) for name in (schema.USER_CONTENT,) if name in extras}
    ours = extras.get(schema.EXTRAS)
    if isinstance(ours, dict) and ours.keys().isdisjoint(extras):
        extras = {**ours, **{name: value for name, value in extras.items() if name != schema.EXTRAS}}
    return user_content | ({schema.EXTRAS: extras} if extras else {})


def without_paths(tree: Mapping[Any, Any], paths: Collection[Sequence[Any]]) -> dict[Any, Any]:
    """What lies in a tree of dicts beside some members, whose paths these are; dicts that are empty then are left out.

    >>> without_paths({"a": {"b": 1, "c": 2}, "d": {"e": 3}, "f": {}}, [("a", "b"), ("d", "e")])
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
        elif all(below[key]) and (members := without_paths(value, below[key])):
            others[key] = members
    return others


def _dicts(tree: Mapping[str, Any], path: KeyPath = ()) -> Iterator[_Place]:
    """The dicts in a state, those further up first within their branch. Those with other keys than texts are values."""
    yield _Place(path, tree)
    if len(path) < MAX_NESTING:
        for key, value in tree.items():
            if _has_names(value):
                yield from _dicts(value, (*path, key))


def _is_below(path: KeyPath, others: set[KeyPath]) -> bool:
    """Whether a path is one of others, or lies below one."""
    return any(path[:n] in others for n in range(len(path) + 1))


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


# Optimizers.


def _optimizers(tree: Mapping[str, Any]) -> Iterator[_Place]:
    """What has the structure of an optimizer's state, nested or flattened."""
    seen: set[KeyPath] = set()
    for place in _dicts(tree):
        if _is_below(place.path, seen):
            continue
        if _is_nested(place.members):
            seen.add(place.path)
            yield place if place.path else _Place((), place.members, tuple(place.members))
        elif any(key.startswith(_GROUPS) for key in place.members):
            seen.add(place.path)
            flat = {k: v for k, v in place.members.items() if k.startswith((_STATE, _GROUPS))}
            yield _Place(place.path, flat, tuple(flat) if not place.path or len(flat) < len(place.members) else None)


def _is_nested(members: Mapping[str, Any]) -> bool:
    groups, state = members.get(schema.GROUPS), members.get(schema.STATE, {})
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, dict) and _are_names(group.get(schema.PARAMS)) for group in groups)
        and isinstance(state, dict)
    )


def _are_names(params: Any) -> bool:
    return isinstance(params, list) and all(type(name) in (str, int) for name in params)


def _parameters(optimizer: Mapping[str, Any]) -> list[Any]:
    """Names, or numbers, of the parameters of an optimizer."""
    if _is_nested(optimizer):
        return [name for group in optimizer[schema.GROUPS] for name in group[schema.PARAMS]]
    return list(
        dict.fromkeys(key.removeprefix(_GROUPS).rpartition(".")[0] for key in optimizer if key.startswith(_GROUPS))
    )


def _chosen(
    optimizers: Sequence[_Place], model: _Place | UnknownArray | None, hints: Hints
) -> _Place | UnknownArray | None:
    """The optimizer that is meant; unknown if that cannot be told, and the program has one."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    candidates = list(optimizers)
    if hints.groups is not None:
        wanted = {_canonical(str(name)) for group in hints.groups for name in group}
        candidates = [
            o for o in optimizers if {_canonical(str(name)) for name in _parameters(o.members)} == wanted
        ] or candidates
    if len(candidates) > 1 and isinstance(model, _Place):
        beside = [o for o in candidates if o.path[:-1] == model.path[:-1]]
        names_of_model = {_canonical(str(name)) for name in model.members}
        of_model = [
            o for o in candidates if {_canonical(str(name)) for name in _parameters(o.members)} <= names_of_model
        ]
        candidates = next((some for some in (beside, of_model) if len(some) == 1), candidates)
    if len(candidates) == 1:
        return candidates[0]
    if hints.groups is None:
        return None
    return UnknownArray(
        problem=f"several optimizers are stored, and nothing says which one is meant: {_listed(candidates)}",
        hint="Read all of them with restore(path), and hand them over by their own load_state_dict.",
    )


def _listed(places: Sequence[_Place]) -> str:
    return ", ".join(place.name for place in places)


def _optimizer(members: Mapping[str, Any], model: Sequence[str], hints: Hints) -> dict[str, Any]:
    """The state of an optimizer by the names of the program, nested."""
    tree = _of_shards(members) if _is_nested(members) else _unflattened(members, model)
    groups, state = tree[schema.GROUPS], tree.get(schema.STATE, {})
    stored = [name for group in groups for name in group[schema.PARAMS]]
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
    return {
        **tree,
        schema.STATE: {called.get(name, name): value for name, value in state.items()},
        schema.GROUPS: [
            {**group, schema.PARAMS: [called.get(name, name) for name in group[schema.PARAMS]]} for group in groups
        ],
    }


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
    place = {_canonical(name): i for i, name in enumerate(model)}
    order = sorted(hyper, key=lambda name: place.get(_canonical(name), len(place)))
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
    tree: Mapping[str, Any], optimizers: Sequence[_Place], hints: Hints, is_array: Callable[[Any], bool]
) -> _Place | UnknownArray | None:
    """The state dict of the model; unknown if it cannot be told which one it is."""
    inside = {path for o in optimizers for path in o.taken}
    inside |= {path[:n] for path in inside for n in range(1, len(path))}
    known = {_canonical(name) for name in hints.arrays}
    places = [
        _beside(place, inside, known, is_array)
        for place in _dicts(tree)
        if not any(_is_below(place.path, o.taken) for o in optimizers)
    ]
    by_hints = _best(places, lambda place: sum(_canonical(name) in known for name in place.members))
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
    best = _best(places, lambda place: len(names & place.members.keys()))
    if len(best) == 1:
        return best[0]
    top = next((place for place in places if not place.path), _Place((), {}))
    # Nothing else is known of them: all that is stored are arrays with dotted names, or these and an optimizer.
    alone = bool(optimizers) or (len(top.members) == len(tree) and all(map(is_array, top.members.values())))
    return top if alone and any("." in name for name in top.members) else None


def _best(places: Sequence[_Place], score: Callable[[_Place], int]) -> list[_Place]:
    """Those that score highest, none of which is nothing."""
    scores = [score(place) for place in places]
    best = max(scores, default=0)
    return [place for place, n in zip(places, scores, strict=True) if n == best and best]


def _has_array(members: Mapping[str, Any], is_array: Callable[[Any], bool]) -> bool:
    return any(
        is_array(value) or (isinstance(value, dict) and _has_array(value, is_array)) for value in members.values()
    )


def _beside(place: _Place, taken: set[KeyPath], known: set[str], is_array: Callable[[Any], bool]) -> _Place:
    """Of a dict what may belong to a model: not what an optimizer is, or holds one.

    At the top of a state, where other things lie beside the parameters, these are arrays, and what the program knows.
    """
    keys = [key for key in place.members if (*place.path, key) not in taken]
    if not place.path:
        keys = [key for key in keys if _may_be_at_top(key, place.members[key], known, is_array)]
    members = _joined({key: place.members[key] for key in keys}, known)
    return _Place(place.path, members, tuple(keys) if not place.path or len(keys) < len(place.members) else None)


def _may_be_at_top(key: str, value: Any, known: set[str], is_array: Callable[[Any], bool]) -> bool:
    if is_array(value):
        return "." in key or not known or _canonical(key) in known
    return any(_canonical(name) in known for name in _joined({key: value}, known))


def _joined(members: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """A state dict with the dotted names of a model, where its modules are nested."""
    joined: dict[str, Any] = {}
    for key, value in members.items():
        if _has_names(value) and _canonical(key) not in wanted:
            below = {f"{key}.{k}": v for k, v in _joined(value, wanted).items()}
            apart = below.keys().isdisjoint(joined) and below.keys().isdisjoint(members)
            if apart and any(_canonical(name) in wanted for name in below):
                joined |= below
                continue
        joined[key] = value
    return joined


# Names of parameters.


def _canonical(name: str) -> str:
    """A name without the wrappers around the modules.

    >>> _canonical("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(step for step in name.split(".") if step not in WRAPPERS) if "mod" in name else name


def program_names(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """Stored name -> the program's name of the same parameter.

    Names that are equal are the same; so are those that are without wrappers, if only one of either side is.
    """
    same = {name: name for name in stored if name in wanted}
    stored_by_canonical = _unique(name for name in stored if name not in same)
    by_canonical = _unique(name for name in wanted if name not in same)
    return same | {
        stored_by_canonical[bare]: by_canonical[bare] for bare in stored_by_canonical if bare in by_canonical
    }


def _unique(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name, where there is only one."""
    ordered = sorted(names, key=_canonical)
    groups = ((bare, list(some)) for bare, some in groupby(ordered, key=_canonical))
    return {bare: some[0] for bare, some in groups if len(some) == 1}


def _renamed(members: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    return {called.get(name, name): value for name, value in members.items()}


# Schedulers.


def _scheduler(tree: Mapping[str, Any], above: set[KeyPath], taken: set[KeyPath]) -> _Place | None:
    """The state of a scheduler, at the top or beside the model or the optimizer, of which nothing is taken already."""
    parts = {path[:n] for path in taken for n in range(1, len(path))}
    for place in _dicts(tree):
        if not place.path or place.path in above:
            for name in SCHEDULER_NAMES:
                path = (*place.path, name)
                if isinstance(place.members.get(name), dict) and path not in parts and not _is_below(path, taken):
                    return _Place(path, place.members[name])
    return None
