"""From the state dicts of DCP's users to the tree of a training state. Pure.

DCP stores whatever its caller nests. `xla_ckpt.layouts.member_places` finds the members of a training state in it; here
they get the names of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from xla_ckpt.layouts.member_places import GROUPS_PREFIX, STATE_PREFIX, StateForm, is_nested_optimizer, member_places
from xla_ckpt.layouts.places import without_paths
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema
from xla_ckpt.tree.module_metadata import module_metadata, renamed_metadata, with_module_metadata
from xla_ckpt.tree.nested import Keys
from xla_ckpt.tree.parameter_names import canonical, program_names

_BASE_STATE = "base_state"
"""Where the state dict of torch_xla's ZeRO-1 optimizer has the states of its shards, by the numbers of parameters."""

_SHAPES = "shape_info"
"""What it says beside of the shapes of the parameters."""


def training_state(tree: Mapping[str, Any], hints: Hints, is_array: Callable[[Any], bool]) -> dict[str, Any]:
    """The members of a training state: model, optimizer, scheduler, and the rest as extras.

    A state in which nothing of a training state is recognised stays as it is.
    """
    places = member_places(tree, hints, StateForm(is_array=is_array))
    model, optimizer, scheduler = places.model, places.optimizer, places.scheduler
    if model is None and not places.optimizers:
        return dict(tree)
    parts: dict[str, Any] = {}
    if isinstance(model, UnknownArray):
        parts[schema.MODEL] = model
    elif model is not None:
        called = program_names(model.members, hints.arrays)
        members = {called.get(name, name): value for name, value in model.members.items()}
        metadata = module_metadata(reduce(operator.getitem, model.path, tree))
        if metadata is not None:
            members = with_module_metadata(members, renamed_metadata(metadata, called))
        parts[schema.MODEL] = members
    if isinstance(optimizer, UnknownArray):
        if hints.groups is not None:  # a program without one finds all of them among the extras
            parts[schema.OPTIMIZER] = optimizer
    elif optimizer is not None:
        known = parts.get(schema.MODEL)
        parts[schema.OPTIMIZER] = _optimizer(optimizer.members, list(known) if isinstance(known, dict) else [], hints)
    if scheduler is not None:
        parts[schema.SCHEDULER] = scheduler.members
    return parts | _rest(tree, places.taken)


def _rest(tree: Mapping[str, Any], taken: set[Keys]) -> dict[str, Any]:
    """What is no model, optimizer or scheduler: user content, and extras by their names at the top."""
    extras = without_paths(tree, taken)
    user_content = {name: extras.pop(name) for name in (schema.USER_CONTENT,) if name in extras}
    ours = extras.get(schema.EXTRAS)
    if isinstance(ours, dict) and ours.keys().isdisjoint(extras):
        extras = {**ours, **{name: value for name, value in extras.items() if name != schema.EXTRAS}}
    return user_content | ({schema.EXTRAS: extras} if extras else {})


def _optimizer(members: Mapping[str, Any], model: Sequence[str], hints: Hints) -> dict[str, Any]:
    """The state of an optimizer by the names of the program, nested."""
    tree = _of_shards(members) if is_nested_optimizer(members) else _unflattened(members, model)
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
        if key.startswith(GROUPS_PREFIX):
            name, _, option = key.removeprefix(GROUPS_PREFIX).rpartition(".")
            hyper.setdefault(name, {})[option] = value
    place = {canonical(name): i for i, name in enumerate(model)}
    order = sorted(hyper, key=lambda name: place.get(canonical(name), len(place)))
    groups: dict[str, dict[str, Any]] = {}
    for name in order:
        same = groups.setdefault(repr(sorted(hyper[name].items())), {**hyper[name], schema.PARAMS: []})
        same[schema.PARAMS].append(name)
    state: dict[str, dict[str, Any]] = {}
    for key, value in members.items():
        if key.startswith(STATE_PREFIX):
            name, kind = _split(key.removeprefix(STATE_PREFIX), hyper)
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
