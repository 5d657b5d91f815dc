"""Models: a module (see `torch_module`) or a plain dict of arrays, to a state tree and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from xla_ckpt.arrays.pytree import holds_registered
from xla_ckpt.arrays.registry import Adapters
from xla_ckpt.arrays.torch_objects import is_lazy, is_module
from xla_ckpt.state import rank_numbers
from xla_ckpt.state.loading import ArrayAt, Loading, Stored, arrays_of, plan_arrays, plan_like, refused_alone
from xla_ckpt.state.problems import UNWANTED, Problem
from xla_ckpt.state.values import CODEC
from xla_ckpt.state.wrappers import is_view
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.flatten import component
from xla_ckpt.tree.nested import leaves
from xla_ckpt.tree.parameter_names import UNMISTAKABLE, program_names
from xla_ckpt.tree.skeleton import ABSENT, Make, array_paths


def tree_of(model: Any) -> Any:
    """The state of a model as a tree: a module's state dict with its own parameters in it, or the dict itself."""
    if not is_module(model):
        return model
    from xla_ckpt.state.torch_module import entries_of

    return entries_of(model)


def identity_of(value: Any, adapters: Adapters) -> Any:
    """What is equal for two arrays that share all their elements; None for any other value."""
    adapter = adapters.of(value)
    return None if adapter is None or is_lazy(value) else adapter.identity(value)


def parameter_names(model: Any) -> dict[Any, str]:
    """Identity -> name of each array of a model, for an optimizer's sake; the first name of a tied one."""
    if model is None:
        return {}
    named: Any = model.named_parameters(remove_duplicate=False) if is_module(model) else model.items()
    names: dict[Any, str] = {}
    adapters = Adapters()
    for name, value in named:
        if adapters.of(value) is not None:
            names.setdefault(id(value), name)
            if (identity := identity_of(value, adapters)) is not None:
                names.setdefault(identity, name)
    return names


def buffer_names(model: Any) -> list[str]:
    """Names of the buffers of a module: state that is not trained, and may differ between data-parallel ranks."""
    return [n for n, _ in model.named_buffers(remove_duplicate=False)] if is_module(model) else []


def parameter_name(parameter: Any, names: Mapping[Any, str]) -> str | None:
    """The name of an optimizer's parameter in a model's `parameter_names`."""
    if (name := names.get(id(parameter))) is not None:
        return name
    identity = identity_of(parameter, Adapters())
    return names.get(identity) if identity is not None else None


def renamed_members(stored: Collection[str], own: Collection[str], model: Any) -> dict[str, str]:
    """Return stored name -> the model's name, of the members that are stored with the steps of wrappers, or without.

    Args:
        stored: Names of parameters and buffers in a tag: those of a model, or of an optimizer.
        own: The names that they have in the program.
        model: The model of the program.
    """
    if set(own) == set(stored):
        return {}
    said = model.said_names() if is_view(model) else {}
    known = {name: plain for name, plain in said.items() if name != plain and name in stored and plain not in stored}
    left = {name: name for name in stored if name not in known}
    wanted = {name: name for name in own if name not in known.values()}
    names = program_names(left, wanted, UNMISTAKABLE)
    return known | {name: plain for name, plain in names.items() if name != plain}


def load(stored: Stored, model: Any) -> Loading:
    """Prepare to load a module or a dict."""
    if not is_module(model):
        return load_dict(stored, model)
    from xla_ckpt.state.torch_module import load_module

    return load_module(stored, model)


def as_own_state(stored: Stored, module: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored state dict of a module as its `load_state_dict` takes it: by its own names, with metadata."""
    from xla_ckpt.state.torch_module import own_state

    return own_state(stored, module, state)


def compare_keys(
    stored: Stored, loading: Loading, wanted: Mapping[Any, Any], stored_entries: Mapping[Any, Any]
) -> None:
    """Note what is stored and not wanted, and what is wanted and not stored."""
    for key in (k for k in wanted if k not in stored_entries):
        loading.add_problem(paths.join(stored.prefix, paths.escape(str(key))), ABSENT)
    left = [k for k in stored_entries if k not in wanted]
    numbers = rank_numbers.unwanted(stored, left)
    for key in (k for k in left if k not in numbers):
        loading.unwanted.append(Problem(paths.join(stored.prefix, paths.escape(str(key))), UNWANTED))


def load_dict(stored: Stored, target: dict[Any, Any]) -> Loading:
    """Prepare to load a dict: its arrays are overwritten in place; an empty one receives everything that is stored."""
    loading = Loading(cast=stored.cast)
    stored_entries = stored.build()
    if not isinstance(stored_entries, Mapping):
        return refused_alone(stored)
    whole = not target
    if not whole:
        compare_keys(stored, loading, target, stored_entries)
    current = arrays_of(target, stored.prefix)
    keys = [k for k in stored_entries if whole or k in target]
    makers = {} if whole else _like_own(stored, loading, {k: target[k] for k in keys})
    left = leaves([stored_entries[k] for k in stored_entries.keys() - (set(keys) - makers.keys())])
    plan_arrays(stored, loading, current, without={leaf.path for leaf in left if isinstance(leaf, ArrayAt)})
    before = {p.leaf for p in loading.problems}

    def finish(arrays: Mapping[str, Any]) -> None:
        for key in keys:
            path = paths.join(stored.prefix, paths.escape(str(key)))
            part = stored.at(component(CODEC.encode(key)))
            if key in makers:
                target[key] = makers[key](arrays)
            elif path not in before and part is not None:
                target[key] = part.build(lambda path, _: arrays.get(path, current.get(path)))

    loading.finish = finish
    return loading


def _like_own(stored: Stored, loading: Loading, own: Mapping[Any, Any]) -> dict[Any, Make]:
    """Want those members of a dict like its own in which something is of a class that is registered with jax.

    What no file can hold of them, such as functions, is the program's.
    """
    makers: dict[Any, Make] = {}
    for key, value in own.items():
        part = stored.at(component(CODEC.encode(key)))
        if part is None or not holds_registered(value):
            continue
        makers[key] = plan_like(part, loading, value)
        problems = {problem.leaf for problem in loading.problems}
        unwanted = array_paths(part.skeleton, part.prefix).keys() - loading.targets.keys() - problems
        loading.unwanted += [Problem(leaf, UNWANTED) for leaf in sorted(unwanted)]
    return makers
