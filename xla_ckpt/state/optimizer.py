"""Optimizers: state by parameter *name*, whatever order and grouping the parameters have.

Stored is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own structure with names in
place of positions. Names come from the model; without a model from ``param_names``, else parameters are numbered by
group and position, ``#0.3``, and such a state only fits an optimizer of the same order.

An optimizer may also keep state under keys of its own, ``optimizer.state["k"]``, which belongs to no parameter. It
stands beside the parameters' names in ``state``, and is called common here: it is that of all parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.arrays.pytree import has_methods
from xla_ckpt.arrays.registry import array_kind
from xla_ckpt.arrays.torch_objects import is_module, is_torch_tensor
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state import zero1
from xla_ckpt.state.module import parameter_name
from xla_ckpt.state.registered import schema_of
from xla_ckpt.state.shardings import Parameter
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.flatten import component

Names = Mapping[Any, str]
"""What `xla_ckpt.state.module.parameter_names` returns."""


def has_groups(optimizer: Any) -> bool:
    """Whether it keeps its parameters in groups, as torch's optimizers do. A dict does not: its keys are no groups."""
    return hasattr(optimizer, schema.GROUPS)


def acts_as_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, of whatever library."""
    return has_groups(value) and has_methods(value, "state_dict")


def parameters_in_order(optimizer: Any) -> list[tuple[Any, str]]:
    """(parameter, ``#group.position``) in the order of torch's packed ids: each parameter once."""
    places: dict[int, tuple[Any, str]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            places.setdefault(id(parameter), (parameter, f"#{g}.{i}"))
    return list(places.values())


def names_in_order(optimizer: Any, names: Names) -> list[str]:
    """The name of every parameter, in the order of torch's packed ids.

    Raises:
        UnsupportedStateError: Two parameters have the same name.
    """
    own: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            own.setdefault(id(parameter), name)
    of_parameters = [parameter_name(p, names) or own.get(id(p)) or place for p, place in parameters_in_order(optimizer)]
    if len(set(of_parameters)) != len(of_parameters):
        twice = next(name for name, n in collections.Counter(of_parameters).items() if n > 1)
        raise UnsupportedStateError("two parameters of the optimizer have the same name", leaf=schema.state(twice))
    return of_parameters


def tree_of(optimizer: Any, names: Names) -> Any:
    """The state of an optimizer, by name. Plain dicts, and optimizers of another structure, stay as they are."""
    if isinstance(optimizer, Mapping):
        return optimizer
    packed = zero1.outer_state(optimizer) if zero1.is_zero1(optimizer) else optimizer.state_dict()
    if not is_by_name(optimizer, packed):
        return packed
    called = names_in_order(optimizer, names)
    for holder in zero1.bases_of(optimizer) if zero1.is_zero1(optimizer) else [optimizer]:
        _check_common(holder, called)
    tree = schema.renamed_parameters(packed, dict(enumerate(called)))
    for group in tree[schema.GROUPS]:
        group.pop("param_names", None)
    if zero1.is_zero1(optimizer) and zero1.keeps_master(optimizer):
        shards = zero1.parameter_shards(optimizer)
        order = parameters_in_order(optimizer)
        tree[schema.MASTER] = {name: shards[id(p)] for name, (p, _) in zip(called, order, strict=True)}
    return tree


def _check_common(optimizer: Any, called: Sequence[str]) -> None:
    """Refuse keys of common state that would take the place of a parameter's state, or lose their own to it."""
    for key in getattr(optimizer, schema.STATE, ()):
        if is_torch_tensor(key):
            continue
        if isinstance(key, int):
            raise UnsupportedStateError(
                "the optimizer keeps state of its own under a number, which torch's state_dict gives to a parameter",
                leaf=paths.join(schema.OPTIMIZER, schema.STATE),
                found=repr(key),
                hint="Keep it under a string.",
            )
        if key in called:
            raise UnsupportedStateError(
                "the optimizer keeps state of its own under the name of a parameter",
                leaf=schema.state(key),
                found=repr(key),
                hint="Rename the parameter, or pass the optimizer without the model: then its parameters are numbered.",
            )


def is_by_name(optimizer: Any, tree: Any) -> bool:
    """Whether an optimizer's state has torch's structure, in which `tree_of` puts names in place of positions."""
    return has_groups(optimizer) and is_standard(tree)


def parameters_of(optimizer: Any, model: Any, names: Names, placement: Placement) -> dict[str, Parameter]:
    """The parameters of an optimizer that is about to be saved; of a plain dict those of the model.

    Raises:
        UsageError: It is a ZeRO-1 optimizer whose groups do not fit the mesh.
    """
    if has_groups(optimizer):
        return parameters(optimizer, names_in_order(optimizer, names), placement)
    arrays: Any = model.named_parameters() if is_module(model) else (model or {}).items()
    return {component(name): Parameter(name=str(name), value=v) for name, v in arrays if array_kind(v) is not None}


def parameters(optimizer: Any, called: Sequence[Any], placement: Placement) -> dict[str, Parameter]:
    """An optimizer's parameters by the path component that their state has, for the sake of its layout.

    Raises:
        UsageError: It is a ZeRO-1 optimizer whose groups do not fit the mesh.
    """
    axes: Mapping[int, tuple[str, ...]] = {}
    shards: Mapping[int, Any] = {}
    if zero1.is_zero1(optimizer):
        shards = zero1.parameter_shards(optimizer)
        axes = zero1.axes_by_parameter(optimizer, placement)
    states = schema_of(optimizer)
    return {
        component(name): Parameter(
            name=str(name),
            value=parameter,
            zero1=axes.get(id(parameter), ()),
            shard=tuple(shards[id(parameter)].shape) if axes.get(id(parameter)) else None,
            states=states,
        )
        for name, (parameter, _) in zip(called, parameters_in_order(optimizer), strict=True)
    }


def is_standard(packed: Any) -> bool:
    """Return True if a state has the structure of those of torch's optimizers."""
    if not isinstance(packed, Mapping) or not isinstance(packed.get(schema.STATE), Mapping):
        return False
    groups = packed.get(schema.GROUPS)
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)
