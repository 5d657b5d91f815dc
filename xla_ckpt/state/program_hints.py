"""What a program's objects say about the arrays that they want, for tags whose files do not say everything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.arrays.registry import is_meta, is_spec
from xla_ckpt.arrays.torch_objects import is_lazy
from xla_ckpt.plan.hints import ArrayHint, Hints
from xla_ckpt.sharding.rules import decided
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.state import module
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.attributes import declared_sharding, true_shape
from xla_ckpt.state.registered import schema_of
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.ties import all_names
from xla_ckpt.state.wrappers import is_view, modules_in
from xla_ckpt.tree import schema


def hints_of(model: Any, optimizer: Any, shardings: StateShardings) -> Hints:
    """What a model and an optimizer say about the arrays that they want.

    Raises:
        UnsupportedStateError: Attributes, or a layer of the model, contradict themselves.
    """
    shardings = shardings.of_model(model)
    entries = {} if model is None else module.tree_of(model)
    if is_view(model):
        entries = {**entries, **model.other_names()}
    arrays = {
        str(name): _hint(schema.weight(str(name)), value, shardings)
        for name, value in (entries.items() if isinstance(entries, Mapping) else ())
        if (shardings.adapters.kind(value) is not None and not is_lazy(value)) or is_spec(value)
    }
    names = module.parameter_names(model)
    groups = _groups(optimizer, names)
    for name, parameter in itertools.chain(*groups or ()):
        if name not in arrays:
            arrays[name] = _hint(schema.weight(str(name)), parameter, shardings)
    aliases = {called[0]: called for called in all_names(model) if len(called) > 1}
    order = {name: i for i, name in enumerate(arrays)}
    return Hints(
        arrays=arrays,
        rules=shardings.rules,
        groups=None if groups is None else [[name for name, _ in group] for group in groups],
        aliases=aliases,
        order=order,
        optimizer=optimizer is not None,
        states=schema_of(optimizer),
        mesh=shardings.placement.mesh,
        rank=shardings.placement.rank,
        config=_config_of(model),
    )


def _config_of(model: Any) -> Mapping[str, Any]:
    """What the configuration of a model of transformers says; nothing if it is none."""
    configs: list[Any] = [getattr(module, "config", None) for module in modules_in(model)]
    return next((c.to_dict() for c in configs if hasattr(c, "to_dict") and hasattr(c, "model_type")), {})


def hints_of_tree(like: Any, shardings: StateShardings) -> Hints:
    """What the tree of a `restore` says; None wants everything."""
    if not isinstance(like, Mapping):
        return hints_of(None, {}, shardings)
    model, optimizer = like.get(schema.MODEL), like.get(schema.OPTIMIZER)
    hints = hints_of(model if isinstance(model, Mapping) else None, optimizer, shardings)
    if (groups := schema.groups_of(optimizer)) is not None:
        return replace(hints, groups=[[str(n) for n in g[schema.PARAMS]] for g in groups])
    return hints


def _hint(path: str, value: Any, shardings: StateShardings) -> ArrayHint:
    if is_spec(value):
        spec = getattr(value, "sharding", None)
        named = Sharding.parse(spec) if isinstance(spec, tuple | list | Sharding) else None
        return ArrayHint(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."), sharding=named)
    adapter = shardings.adapters.require(value, path)
    # Where a rule decides, attributes are not looked at: they may be wrong.
    ruled = decided(shardings.rules, path, schema.below_member(path)) is not None
    named = None if ruled else shardings.layers.get(id(value)) or declared_sharding(value, path)
    return ArrayHint(
        shape=shardings.local(path, value, adapter).shape,
        # A tensor on the meta device cannot be stored, but it says all that a description needs.
        dtype=str(value.dtype).removeprefix("torch.") if is_meta(value) else adapter.dtype(value, path).name,
        sharding=None if named is None or not named.axes else replace(named, shape=None),
        padded=true_shape(value) is not None,
        alone=adapter.place(value, path) is None,
    )


def _groups(optimizer: Any, names: Mapping[Any, str]) -> list[list[tuple[str, Any]]] | None:
    """An optimizer's parameters by group, each once, with their names; None if it has no groups."""
    if optimizer is None or isinstance(optimizer, Mapping) or not optimizers.has_groups(optimizer):
        return None
    called = iter(optimizers.names_in_order(optimizer, names))
    seen: set[int] = set()
    groups: list[list[tuple[str, Any]]] = []
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                groups[-1].append((next(called), parameter))
    return groups
