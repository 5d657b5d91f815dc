"""Parameters that have several names, as tied weights do: a stored optimizer may call one by any of them.

So may one that was saved with the steps of wrappers in its names, as earlier versions saved it.

A pipeline whose stages share a weight stores it under a name of each stage, with a state each; a program that is one
stage has one parameter of two names, and one state. So a load asks for a state under the name that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from xla_ckpt.arrays.torch_objects import is_module
from xla_ckpt.state.module import renamed_members
from xla_ckpt.tree import schema


def all_names(model: Any) -> list[list[str]]:
    """The names of each parameter of a module, in its order."""
    if not is_module(model):
        return []
    by_object: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(value), []).append(name)
    return list(by_object.values())


def with_other_names(names: Set[Any], model: Any) -> set[Any]:
    """Names of parameters, and the other names that these have in the model."""
    return {*names, *(name for called in all_names(model) if not names.isdisjoint(called) for name in called)}


def stored_names(names: Mapping[Any, str], model: Any, optimizer: Any, aliases: Mapping[str, str]) -> dict[Any, str]:
    """What a tag calls the parameters of a model; the model's own name where it knows none of them.

    Args:
        names: Identity -> first name of each parameter (`xla_ckpt.state.module.parameter_names`).
        model: The model.
        held: The stored optimizer, by name.
        aliases: Leaf path -> leaf path of the same array, in the tag.
    """
    known = {name: name for name in schema.grouped_names(optimizer) if isinstance(name, str)}
    by_leaf = {_leaf(name, aliases): name for name in known}
    others = {called[0]: called for called in all_names(model)}
    own = {*names.values(), *(name for called in others.values() for name in called)}
    known |= {plain: name for name, plain in renamed_members(known, own, model).items()}
    # Two parameters of the program that were one when they were saved do not get the same state.
    apart = {leaf: name for leaf, name in by_leaf.items() if name not in own}
    stored_name: dict[str, str] = {}
    for first in dict.fromkeys(names.values()):
        called = others.get(first, [first])
        places = (known.get(name) or apart.pop(_leaf(name, aliases), None) for name in called)
        stored_name[first] = next((name for name in places if name is not None), first)
    return {identity: stored_name[first] for identity, first in names.items()}


def _leaf(name: str, aliases: Mapping[str, str]) -> str:
    path = schema.weight(name)
    return aliases.get(path, path)
