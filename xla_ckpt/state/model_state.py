"""Get the state of a model, and plan its load: a module or a dict of arrays, with its parameter names.

Modules are handled by `torch_module`, which imports torch. A parameter may have several names, as tied weights do, and
a checkpoint may contain it under any of them, or under a name with wrapper prefixes. Integers that identify a rank,
such as those of neuronx-distributed's `SPMDRank`, are only loaded by a job with the same arrangement of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.pytree import contains_registered
from xla_ckpt.arrays.registry import AdapterRegistry
from xla_ckpt.arrays.torch_objects import is_lazy, is_module, is_torch_tensor
from xla_ckpt.core.plan.manifest_views import find_rank_axes, has_rank_numbers, has_same_rank_numbers
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.nested import iterate_leaves
from xla_ckpt.core.tree.skeleton import NOT_STORED, BuildValue, find_arrays
from xla_ckpt.core.tree.state_dict import RESERVED_WRAPPERS, match_parameter_names
from xla_ckpt.state.part_load import (
    ArrayPlaceholder,
    PartLoadPlan,
    StoredPart,
    collect_arrays,
    plan_arrays,
    plan_like,
    reject_bare_value,
)
from xla_ckpt.state.problems import UNEXPECTED, LoadProblem
from xla_ckpt.state.values import CODEC
from xla_ckpt.state.wrappers import is_model_view

if TYPE_CHECKING:
    import torch


def get_model_tree(model: Any) -> Any:
    """Return the state of a model as a tree: a module's state dict with its own parameters in it, or the dict
    itself.
    """
    if not is_module(model):
        return model
    from xla_ckpt.state.torch_module import get_module_entries

    return get_module_entries(model)


def get_array_identity(value: Any, adapters: AdapterRegistry) -> Any:
    """Return a key that is equal for arrays that share all their elements; None for any other value."""
    adapter = adapters.find(value)
    return None if adapter is None or is_lazy(value) else adapter.get_identity(value)


def get_parameter_names(model: Any) -> dict[Any, str]:
    """Map the identity of each array of a model to its name, the first name of a tied array."""
    if model is None:
        return {}
    named: Any = model.named_parameters(remove_duplicate=False) if is_module(model) else model.items()
    names: dict[Any, str] = {}
    adapters = AdapterRegistry()
    for name, value in named:
        if adapters.find(value) is not None:
            names.setdefault(id(value), name)
            if (identity := get_array_identity(value, adapters)) is not None:
                names.setdefault(identity, name)
    return names


def get_buffer_names(model: Any) -> list[str]:
    """Return the names of a module's buffers: untrained state that may differ between data-parallel ranks."""
    return [n for n, _ in model.named_buffers(remove_duplicate=False)] if is_module(model) else []


def find_parameter_name(parameter: Any, names: Mapping[Any, str]) -> str | None:
    """Return the name of an optimizer's parameter in a model's `get_parameter_names`, or None."""
    if (name := names.get(id(parameter))) is not None:
        return name
    identity = get_array_identity(parameter, AdapterRegistry())
    return names.get(identity) if identity is not None else None


def match_renamed_members(stored: Collection[str], own: Collection[str], model: Any) -> dict[str, str]:
    """Return stored name -> the model's name, of members that are stored with or without wrapper prefixes.

    Args:
        stored: Names of parameters and buffers in a tag, in its model or optimizer.
        own: Their names in the program.
        model: The model of the program.
    """
    if set(own) == set(stored):
        return {}
    said = model.get_legacy_names() if is_model_view(model) else {}
    known = {name: plain for name, plain in said.items() if name != plain and name in stored and plain not in stored}
    left = {name: name for name in stored if name not in known}
    wanted = {name: name for name in own if name not in known.values()}
    names = match_parameter_names(left, wanted, RESERVED_WRAPPERS)
    return known | {name: plain for name, plain in names.items() if name != plain}


def plan_model_load(stored: StoredPart, model: Any) -> PartLoadPlan:
    """Plan the load of a module or a dict."""
    if not is_module(model):
        return plan_dict_load(stored, model)
    from xla_ckpt.state.torch_module import plan_module_load

    return plan_module_load(stored, model)


def convert_model_state(stored: StoredPart, module: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a stored state dict for the `load_state_dict` of a module: with its own names, and metadata."""
    from xla_ckpt.state.torch_module import convert_state_dict

    return convert_state_dict(stored, module, state)


def compare_keys(
    stored: StoredPart, plan: PartLoadPlan, expected: Mapping[Any, Any], stored_entries: Mapping[Any, Any]
) -> None:
    """Record unexpected and missing keys in a plan."""
    for key in (k for k in expected if k not in stored_entries):
        plan.add_problem(paths.join(stored.prefix, paths.escape(str(key))), NOT_STORED)
    left = [k for k in stored_entries if k not in expected]
    numbers = find_unexpected_numbers(stored, left)
    for key in (k for k in left if k not in numbers):
        plan.unexpected.append(LoadProblem(paths.join(stored.prefix, paths.escape(str(key))), UNEXPECTED))


def plan_dict_load(stored: StoredPart, target: dict[Any, Any]) -> PartLoadPlan:
    """Plan the load of a dict: its arrays are overwritten in place; an empty dict receives everything that is
    stored.
    """
    loading = PartLoadPlan(cast=stored.cast)
    stored_entries = stored.build()
    if not isinstance(stored_entries, Mapping):
        return reject_bare_value(stored)
    whole = not target
    if not whole:
        compare_keys(stored, loading, target, stored_entries)
    current = collect_arrays(target, stored.prefix)
    keys = [k for k in stored_entries if whole or k in target]
    makers = {} if whole else _plan_registered_members(stored, loading, {k: target[k] for k in keys})
    left = iterate_leaves([stored_entries[k] for k in stored_entries.keys() - (set(keys) - makers.keys())])
    plan_arrays(stored, loading, current, excluded={leaf.path for leaf in left if isinstance(leaf, ArrayPlaceholder)})
    before = {p.leaf for p in loading.problems}

    def finish(arrays: Mapping[str, Any]) -> None:
        for key in keys:
            path = paths.join(stored.prefix, paths.escape(str(key)))
            part = stored.find_part(format_key(CODEC.encode(key)))
            if key in makers:
                target[key] = makers[key](arrays)
            elif path not in before and part is not None:
                target[key] = part.build(lambda path, _: arrays.get(path, current.get(path)))

    loading.finish = finish
    return loading


def _plan_registered_members(stored: StoredPart, plan: PartLoadPlan, own: Mapping[Any, Any]) -> dict[Any, BuildValue]:
    """Plan the load of dict members that contain classes registered with jax, from the program's own as a pattern.

    Values that a file cannot contain, such as functions, come from the program's own.
    """
    makers: dict[Any, BuildValue] = {}
    for key, value in own.items():
        part = stored.find_part(format_key(CODEC.encode(key)))
        if part is None or not contains_registered(value):
            continue
        makers[key] = plan_like(part, plan, value)
        problems = {problem.leaf for problem in plan.problems}
        unwanted = find_arrays(part.skeleton, part.prefix).keys() - plan.targets.keys() - problems
        plan.unexpected += [LoadProblem(leaf, UNEXPECTED) for leaf in sorted(unwanted)]
    return makers


def get_tied_names(model: Any) -> list[list[str]]:
    """Return the names of each parameter of a module, in order."""
    if not is_module(model):
        return []
    by_object: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(value), []).append(name)
    return list(by_object.values())


def add_tied_names(names: Set[Any], model: Any) -> set[Any]:
    """Return names of parameters, and their other names in the model."""
    return {*names, *(name for called in get_tied_names(model) if not names.isdisjoint(called) for name in called)}


def match_stored_names(
    names: Mapping[Any, str], model: Any, optimizer: Any, aliases: Mapping[str, str]
) -> dict[Any, str]:
    """Return the stored names of a model's parameters, or the model's own names for unknown ones.

    Args:
        names: Identity -> first name of each parameter (`xla_ckpt.state.model_state.get_parameter_names`).
        model: The model.
        optimizer: The stored optimizer, by name.
        aliases: Leaf path -> leaf path of the same array, in the tag.
    """
    known = {name: name for name in schema.get_parameter_names(optimizer) if isinstance(name, str)}
    by_leaf = {_resolve_weight_alias(name, aliases): name for name in known}
    others = {called[0]: called for called in get_tied_names(model)}
    own = {*names.values(), *(name for called in others.values() for name in called)}
    known |= {plain: name for name, plain in match_renamed_members(known, own, model).items()}
    # Parameters that were tied when saved, and are not tied in the program, do not share one state.
    apart = {leaf: name for leaf, name in by_leaf.items() if name not in own}
    stored_name: dict[str, str] = {}
    for first in dict.fromkeys(names.values()):
        called = others.get(first, [first])
        places = (known.get(name) or apart.pop(_resolve_weight_alias(name, aliases), None) for name in called)
        stored_name[first] = next((name for name in places if name is not None), first)
    return {identity: stored_name[first] for identity, first in names.items()}


def _resolve_weight_alias(name: str, aliases: Mapping[str, str]) -> str:
    path = schema.get_weight_path(name)
    return aliases.get(path, path)


_KEPT_NUMBERS = (
    "it says something of each rank of a job, and the ranks that saved were arranged otherwise: it stays as it is"
)


def find_mismatched_numbers(stored: StoredPart, entries: Mapping[Any, Any]) -> dict[Any, LoadProblem]:
    """Return problems for entries that contain rank numbers of the saving job which do not fit the ranks of this
    job.
    """
    saved, here = Mesh.parse(stored.manifest.mesh or ""), stored.shardings.placement.mesh
    problems = {}
    for key, value, path in _iterate_integer_tensors(stored, entries):
        adapter = stored.shardings.adapters.find(value)
        if adapter is None:
            continue  # a composite tensor, such as a quantized one
        local = stored.shardings.locate(path, value, adapter)
        axes = find_rank_axes(adapter.get_dtype(value, path), local.shape, local.spec, here)
        record = stored.manifest.arrays.get(stored.manifest.aliases.get(path, path))
        fits = record is not None and record.shape == local.shape and has_same_rank_numbers(axes, saved, here)
        if not fits and (axes or (record is not None and has_rank_numbers(record, saved))):
            problems[key] = LoadProblem(path, _KEPT_NUMBERS, is_ignorable=True)
    return problems


def find_unexpected_numbers(stored: StoredPart, names: Iterable[Any]) -> set[Any]:
    """Return the stored members of a model that contain rank numbers of the saving job, and have no entry in this
    one.
    """
    saved = Mesh.parse(stored.manifest.mesh or "")
    numbers = set()
    for name in names:
        path = paths.join(stored.prefix, paths.escape(str(name)))
        array = stored.manifest.unreadable.get(path) or stored.manifest.arrays.get(path)
        if array is not None and has_rank_numbers(array, saved):
            numbers.add(name)
    return numbers


def _iterate_integer_tensors(stored: StoredPart, entries: Mapping[Any, Any]) -> Iterator[tuple[Any, torch.Tensor, str]]:
    for key, value in entries.items():
        if is_torch_tensor(value) and not (value.is_floating_point() or value.is_complex()):
            yield key, value, paths.join(stored.prefix, paths.escape(str(key)))
