"""From the state dicts of DCP's users to the tree of a training state. Pure.

DCP stores whatever its caller nests. The optimizer is known by its structure, whatever it is called; the model by the
names that a program says it has, else by what it is called, else by the names of the optimizer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema

Path = tuple[str | int, ...]

MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module", "net")
"""What a model's state dict is called, the likeliest first."""

SCHEDULER_NAMES = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Steps of a name that stand for a wrapper around the module: DistributedDataParallel, torch.compile, FSDP."""

MAX_NESTING = 3
"""How deep in a state dict a model or an optimizer is looked for."""

MAX_GAP = 1000
"""Members of a list that may be missing: DCP stores nothing of an empty dict."""

_STATE = schema.STATE + "."
_GROUPS = schema.GROUPS + "."


_BASE_STATE = "base_state"
"""Where the state dict of torch_xla's ZeRO-1 optimizer has the states of its shards, by the numbers of parameters."""

_SHAPES = "shape_info"
"""What it says beside of the shapes of the parameters."""


class _Node(dict[str | int, Any]):
    """A container whose members have keys of their own, unlike a dict that is one value."""


def nested(items: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
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
    made = _plain(root, ())
    if not isinstance(made, dict):
        raise CorruptCheckpointError("the state is a list, where DCP stores dicts")
    return made


def _clash(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "one place in the state has a value and is a container", leaf=".".join(map(str, path))
    )


def _plain(value: Any, path: Path) -> Any:
    if not isinstance(value, _Node):
        return value
    if not value or any(isinstance(key, str) for key in value):
        if not all(isinstance(key, str) for key in value):
            raise CorruptCheckpointError(
                "one place in the state is a dict and a list", leaf=".".join(map(str, path)) or None
            )
        return {key: _plain(member, (*path, key)) for key, member in value.items()}
    size = 1 + max(key for key in value if isinstance(key, int))
    if size > len(value) + MAX_GAP:
        raise CorruptCheckpointError(
            "most of a list is not stored", leaf=".".join(map(str, path)), expected=f"{size} members", found=len(value)
        )
    return [_plain(value.get(i), (*path, i)) for i in range(size)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A dict somewhere in a state."""

    path: Path
    held: Mapping[str, Any]
    keys: tuple[str, ...] | None = None
    """Which members of the dict there are meant; None: all of them."""

    @property
    def taken(self) -> set[Path]:
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
    taken: set[Path] = set()
    if isinstance(model, UnknownArray):
        parts[schema.MODEL] = model
    elif model is not None:
        parts[schema.MODEL] = _renamed(model.held, program_names(model.held, hints.arrays))
        taken |= model.taken
    if isinstance(optimizer, UnknownArray):
        parts[schema.OPTIMIZER] = optimizer
    elif optimizer is not None:
        known = parts.get(schema.MODEL)
        parts[schema.OPTIMIZER] = _optimizer(optimizer.held, list(known) if isinstance(known, dict) else [], hints)
        taken |= optimizer.taken
    above = {place.path[:-1] for place in (model, optimizer) if isinstance(place, _Place)}
    scheduler = _scheduler(tree, above, taken)
    if scheduler is not None:
        parts[schema.SCHEDULER] = scheduler.held
        taken.add(scheduler.path)
    return parts | _rest(tree, taken)


def _rest(tree: Mapping[str, Any], taken: set[Path]) -> dict[str, Any]:
    """What is no model, optimizer or scheduler: user content, and extras by their names at the top."""
    made: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    above = {path[:n] for path in taken for n in range(1, len(path))}
    for name, value in tree.items():
        left = _without(value, (name,), taken, above)
        if left is _TAKEN:
            continue
        if name == schema.USER_CONTENT:
            made[name] = left
        else:
            extras[name] = left
    ours = extras.get(schema.EXTRAS)
    if isinstance(ours, dict) and ours.keys().isdisjoint(extras):
        extras = {**ours, **{name: value for name, value in extras.items() if name != schema.EXTRAS}}
    return made | ({schema.EXTRAS: extras} if extras else {})


_TAKEN = object()


def _without(value: Any, path: Path, taken: set[Path], above: set[Path]) -> Any:
    """A value without the parts that have their place already, which lie below `above`; `_TAKEN` if nothing is left."""
    if path in taken:
        return _TAKEN
    if path not in above or not isinstance(value, dict):
        return value
    left = {key: _without(member, (*path, key), taken, above) for key, member in value.items()}
    left = {key: member for key, member in left.items() if member is not _TAKEN}
    return left or _TAKEN


def _dicts(tree: Mapping[str, Any], path: Path = ()) -> Iterator[_Place]:
    """The dicts in a state, those further up first within their branch. Those with other keys than texts are values."""
    yield _Place(path, tree)
    if len(path) < MAX_NESTING:
        for key, value in tree.items():
            if _has_names(value):
                yield from _dicts(value, (*path, key))


def _is_below(path: Path, others: set[Path]) -> bool:
    """Whether a path is one of others, or lies below one."""
    return any(path[:n] in others for n in range(len(path) + 1))


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


# Optimizers.


def _optimizers(tree: Mapping[str, Any]) -> Iterator[_Place]:
    """What has the structure of an optimizer's state, nested or flattened."""
    found: set[Path] = set()
    for place in _dicts(tree):
        if _is_below(place.path, found):
            continue
        if _is_nested(place.held):
            found.add(place.path)
            yield place if place.path else _Place((), place.held, tuple(place.held))
        elif any(key.startswith(_GROUPS) for key in place.held):
            found.add(place.path)
            held = {k: v for k, v in place.held.items() if k.startswith((_STATE, _GROUPS))}
            yield _Place(place.path, held, tuple(held) if not place.path or len(held) < len(place.held) else None)


def _is_nested(held: Mapping[str, Any]) -> bool:
    groups, state = held.get(schema.GROUPS), held.get(schema.STATE, {})
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, dict) and _are_names(group.get(schema.PARAMS)) for group in groups)
        and isinstance(state, dict)
    )


def _are_names(params: Any) -> bool:
    return isinstance(params, list) and all(type(name) in (str, int) for name in params)


def _parameters(held: Mapping[str, Any]) -> list[Any]:
    """Names, or numbers, of the parameters of an optimizer."""
    if _is_nested(held):
        return [name for group in held[schema.GROUPS] for name in group[schema.PARAMS]]
    return list(dict.fromkeys(key.removeprefix(_GROUPS).rpartition(".")[0] for key in held if key.startswith(_GROUPS)))


def _chosen(
    optimizers: Sequence[_Place], model: _Place | UnknownArray | None, hints: Hints
) -> _Place | UnknownArray | None:
    """The optimizer that is meant; unknown if that cannot be told, and the program has one."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    found = list(optimizers)
    if hints.groups is not None:
        wanted = {_canonical(str(name)) for group in hints.groups for name in group}
        found = [o for o in optimizers if {_canonical(str(name)) for name in _parameters(o.held)} == wanted] or found
    if len(found) > 1 and isinstance(model, _Place):
        beside = [o for o in found if o.path[:-1] == model.path[:-1]]
        held = {_canonical(str(name)) for name in model.held}
        of_model = [o for o in found if {_canonical(str(name)) for name in _parameters(o.held)} <= held]
        found = next((some for some in (beside, of_model) if len(some) == 1), found)
    if len(found) == 1:
        return found[0]
    if hints.groups is None:
        return None
    return UnknownArray(
        problem=f"several optimizers are stored, and nothing says which one is meant: {_listed(found)}",
        hint="Read all of them with restore(path), and hand them over by their own load_state_dict.",
    )


def _listed(places: Sequence[_Place]) -> str:
    return ", ".join(place.name for place in places)


def _optimizer(held: Mapping[str, Any], model: Sequence[str], hints: Hints) -> dict[str, Any]:
    """The state of an optimizer by the names of the program, nested."""
    nested_ = _of_shards(held) if _is_nested(held) else _unflattened(held, model)
    groups, state = nested_[schema.GROUPS], nested_.get(schema.STATE, {})
    stored = [name for group in groups for name in group[schema.PARAMS]]
    if stored and all(type(name) is int for name in stored):
        # DCP writes all keys as strings.
        numbers = {str(name): name for name in stored if name not in state}
        return {**nested_, schema.STATE: {numbers.get(key, key): value for key, value in state.items()}}
    called = program_names(dict.fromkeys(map(str, stored)), hints.arrays)
    first = {name: names[0] for names in hints.aliases.values() for name in names}
    taken = {*called.values(), *state}
    called = {n: theirs if first.get(theirs) in taken else first.get(theirs, theirs) for n, theirs in called.items()}
    return {
        **nested_,
        schema.STATE: {called.get(name, name): value for name, value in state.items()},
        schema.GROUPS: [
            {**group, schema.PARAMS: [called.get(name, name) for name in group[schema.PARAMS]]} for group in groups
        ],
    }


def _of_shards(held: Mapping[str, Any]) -> dict[str, Any]:
    """A nested optimizer. torch_xla's ZeRO-1 has an empty `state`, and its states in the optimizer that it wraps."""
    made = dict(held)
    if not made.get(schema.STATE) and isinstance(made.get(_BASE_STATE), dict):
        made[schema.STATE] = made.pop(_BASE_STATE)
        made.pop(_SHAPES, None)
    return made


def _unflattened(held: Mapping[str, Any], model: Sequence[str]) -> dict[str, Any]:
    """A flattened optimizer's state with its groups: parameters with equal hyper-parameters are one group."""
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in held.items():
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
    for key, value in held.items():
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
    by_hints = _best(places, lambda place: sum(_canonical(name) in known for name in place.held))
    if len(by_hints) == 1:
        return by_hints[0]
    beside = {o.path[:-1] for o in optimizers}
    for candidates in filter(None, (by_hints, places)):
        named = [p for p in candidates if p.path and p.path[-1] in MODEL_NAMES and _has_array(p.held, is_array)]
        named = [p for p in named if p.path[:-1] in beside] or named
        named.sort(key=lambda p: (len(p.path), MODEL_NAMES.index(str(p.path[-1]))))
        if named:
            return named[0]
    if by_hints:
        return UnknownArray(
            problem=f"several models of these names are stored, and nothing says which is meant: {_listed(by_hints)}",
            hint="Read all of them with restore(path), and hand them over by their own load_state_dict.",
        )
    names = {name for o in optimizers for name in map(str, _parameters(o.held)) if not name.isdecimal()}
    found = _best(places, lambda place: len(names & place.held.keys()))
    if len(found) == 1:
        return found[0]
    top = next((place for place in places if not place.path), _Place((), {}))
    # Nothing else is known of them: all that is stored are arrays with dotted names, or these and an optimizer.
    alone = bool(optimizers) or (len(top.held) == len(tree) and all(map(is_array, top.held.values())))
    return top if alone and any("." in name for name in top.held) else None


def _best(places: Sequence[_Place], score: Callable[[_Place], int]) -> list[_Place]:
    """Those that score highest, none of which is nothing."""
    scores = [score(place) for place in places]
    best = max(scores, default=0)
    return [place for place, n in zip(places, scores, strict=True) if n == best and best]


def _has_array(held: Mapping[str, Any], is_array: Callable[[Any], bool]) -> bool:
    return any(is_array(value) or (isinstance(value, dict) and _has_array(value, is_array)) for value in held.values())


def _beside(place: _Place, taken: set[Path], known: set[str], is_array: Callable[[Any], bool]) -> _Place:
    """Of a dict what may belong to a model: not what an optimizer is, or holds one.

    At the top of a state, where other things lie beside the parameters, these are arrays, and what the program knows.
    """
    keys = [key for key in place.held if (*place.path, key) not in taken]
    if not place.path:
        keys = [key for key in keys if _may_be_at_top(key, place.held[key], known, is_array)]
    held = _joined({key: place.held[key] for key in keys}, known)
    return _Place(place.path, held, tuple(keys) if not place.path or len(keys) < len(place.held) else None)


def _may_be_at_top(key: str, value: Any, known: set[str], is_array: Callable[[Any], bool]) -> bool:
    if is_array(value):
        return "." in key or not known or _canonical(key) in known
    return any(_canonical(name) in known for name in _joined({key: value}, known))


def _joined(held: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """A state dict with the dotted names of a model, where its modules are nested."""
    made: dict[str, Any] = {}
    for key, value in held.items():
        if _has_names(value) and _canonical(key) not in wanted:
            below = {f"{key}.{k}": v for k, v in _joined(value, wanted).items()}
            apart = below.keys().isdisjoint(made) and below.keys().isdisjoint(held)
            if apart and any(_canonical(name) in wanted for name in below):
                made |= below
                continue
        made[key] = value
    return made


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
    theirs = _unique(name for name in stored if name not in same)
    mine = _unique(name for name in wanted if name not in same)
    return same | {theirs[bare]: mine[bare] for bare in theirs if bare in mine}


def _unique(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name, where there is only one."""
    ordered = sorted(names, key=_canonical)
    groups = ((bare, list(some)) for bare, some in groupby(ordered, key=_canonical))
    return {bare: some[0] for bare, some in groups if len(some) == 1}


def _renamed(held: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    return {called.get(name, name): value for name, value in held.items()}


# Schedulers.


def _scheduler(tree: Mapping[str, Any], above: set[Path], taken: set[Path]) -> _Place | None:
    """The state of a scheduler, at the top or beside the model or the optimizer, of which nothing is taken already."""
    parts = {path[:n] for path in taken for n in range(1, len(path))}
    for place in _dicts(tree):
        if not place.path or place.path in above:
            for name in SCHEDULER_NAMES:
                path = (*place.path, name)
                if isinstance(place.held.get(name), dict) and path not in parts and not _is_below(path, taken):
                    return _Place(path, place.held[name])
    return None
