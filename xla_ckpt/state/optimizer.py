"""Get the state of an optimizer by parameter name, independent of the order and grouping of parameters.

The stored form is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own structure with
names instead of numbers. Names come from the model, otherwise from ``param_names``; without either, parameters are
numbered by group and position (``#0.3``), and such a state only fits an optimizer with the same order.

State under a custom key (``optimizer.state["k"]``) belongs to no parameter. It is stored next to the parameters' names,
and is called shared state here. `register_optimizer` declares how the states of a class of optimizers are sharded.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.arrays.pytree import has_methods
from xla_ckpt.arrays.registry import get_array_kind
from xla_ckpt.arrays.torch_objects import is_module, is_torch_tensor
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.optimizer_schema import ASGD_SCHEMA, TORCH_SCHEMA, OptimizerSchema
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.state import zero1
from xla_ckpt.state.model_state import find_parameter_name
from xla_ckpt.state.shardings import OptimizerParameter

ParameterNames = Mapping[Any, str]
"""The result of `xla_ckpt.state.model_state.get_parameter_names`."""


def has_param_groups(optimizer: Any) -> bool:
    """Return True if parameters are in groups, as in torch's optimizers. A dict has no groups."""
    return hasattr(optimizer, schema.PARAM_GROUPS)


def is_optimizer_like(value: Any) -> bool:
    """Return True if a value is an optimizer of any library."""
    return has_param_groups(value) and has_methods(value, "state_dict")


def list_parameters(optimizer: Any) -> list[tuple[Any, str]]:
    """List (parameter, ``#group.position``) in packed-id order, as in torch, each parameter once."""
    places: dict[int, tuple[Any, str]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            places.setdefault(id(parameter), (parameter, f"#{g}.{i}"))
    return list(places.values())


def list_parameter_names(optimizer: Any, names: ParameterNames) -> list[str]:
    """List the name of every parameter, in packed-id order, as in torch.

    Raises:
        UnsupportedStateError: If two parameters have the same name.
    """
    own: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            own.setdefault(id(parameter), name)
    of_parameters = [
        find_parameter_name(p, names) or own.get(id(p)) or place for p, place in list_parameters(optimizer)
    ]
    if len(set(of_parameters)) != len(of_parameters):
        twice = next(name for name, n in collections.Counter(of_parameters).items() if n > 1)
        raise UnsupportedStateError(
            "two parameters of the optimizer have the same name", leaf=schema.get_state_path(twice)
        )
    return of_parameters


def get_optimizer_tree(optimizer: Any, names: ParameterNames) -> Any:
    """Return the state of an optimizer by name. Plain dicts, and optimizers with another structure, stay unchanged."""
    if isinstance(optimizer, Mapping):
        return optimizer
    packed = zero1.get_outer_state_dict(optimizer) if zero1.is_zero1(optimizer) else optimizer.state_dict()
    if not is_keyed_by_name(optimizer, packed):
        return packed
    called = list_parameter_names(optimizer, names)
    for holder in zero1.get_base_optimizers(optimizer) if zero1.is_zero1(optimizer) else [optimizer]:
        _check_shared_state(holder, called)
    tree = schema.rename_parameters(packed, dict(enumerate(called)))
    for group in tree[schema.PARAM_GROUPS]:
        group.pop("param_names", None)
    if zero1.is_zero1(optimizer) and zero1.has_master_weights(optimizer):
        shards = zero1.get_parameter_shards(optimizer)
        order = list_parameters(optimizer)
        tree[schema.MASTER] = {name: shards[id(p)] for name, (p, _) in zip(called, order, strict=True)}
    return tree


def _check_shared_state(optimizer: Any, names: Sequence[str]) -> None:
    """Check that the keys of shared state differ from parameter names.

    Raises:
        UnsupportedStateError: If shared state and a parameter's state would overwrite each other.
    """
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
        if key in names:
            raise UnsupportedStateError(
                "the optimizer keeps state of its own under the name of a parameter",
                leaf=schema.get_state_path(key),
                found=repr(key),
                hint="Rename the parameter, or pass the optimizer without the model: then its parameters are numbered.",
            )


def is_keyed_by_name(optimizer: Any, tree: Any) -> bool:
    """Return True if a state has torch's structure, where `get_optimizer_tree` replaces positions by names."""
    return has_param_groups(optimizer) and is_standard(tree)


def get_saved_parameters(
    optimizer: Any, model: Any, names: ParameterNames, placement: RankInfo
) -> dict[str, OptimizerParameter]:
    """Return the parameters of an optimizer to be saved, or for a plain dict the parameters of the model.

    Raises:
        UsageError: If the groups of a ZeRO-1 optimizer do not fit the mesh.
    """
    if has_param_groups(optimizer):
        return index_parameters(optimizer, list_parameter_names(optimizer, names), placement)
    arrays: Any = model.named_parameters() if is_module(model) else (model or {}).items()
    return {
        format_key(name): OptimizerParameter(name=str(name), value=v)
        for name, v in arrays
        if get_array_kind(v) is not None
    }


def index_parameters(optimizer: Any, names: Sequence[Any], placement: RankInfo) -> dict[str, OptimizerParameter]:
    """Return an optimizer's parameters by their path component in its state.

    Raises:
        UsageError: If the groups of a ZeRO-1 optimizer do not fit the mesh.
    """
    axes: Mapping[int, tuple[str, ...]] = {}
    shards: Mapping[int, Any] = {}
    if zero1.is_zero1(optimizer):
        shards = zero1.get_parameter_shards(optimizer)
        axes = zero1.get_axes_by_parameter(optimizer, placement)
    states = get_optimizer_schema(optimizer)
    return {
        format_key(name): OptimizerParameter(
            name=str(name),
            value=parameter,
            zero1_axes=axes.get(id(parameter), ()),
            shard_shape=tuple(shards[id(parameter)].shape) if axes.get(id(parameter)) else None,
            state_schema=states,
        )
        for name, (parameter, _) in zip(names, list_parameters(optimizer), strict=True)
    }


def is_standard(packed: Any) -> bool:
    """Return True if a state has the structure of torch optimizers."""
    if not isinstance(packed, Mapping) or not isinstance(packed.get(schema.STATE), Mapping):
        return False
    groups = packed.get(schema.PARAM_GROUPS)
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)


_registered_schemas: dict[type | str, OptimizerSchema] = {"torch.optim.asgd.ASGD": ASGD_SCHEMA}


def register_optimizer(kind: type | str, schema: OptimizerSchema) -> None:
    """Declare how the states of a class of optimizers are sharded over ranks.

    The declaration applies to all later saves and loads of this process, and must be the same on every rank. A later
    declaration for the same class replaces an earlier one.

    Args:
        kind: A class, or its name with or without its module, which need not be imported:
            ``"transformers.optimization.Adafactor"`` or ``"Adafactor"``. Also applies to subclasses without a
            declaration, and to the optimizer inside a ZeRO-1 optimizer.
        schema: Layout of its states.

    Raises:
        UsageError: If an argument has the wrong type.

    Example:
        ``register_optimizer("LowRank", OptimizerSchema(dims={"left": (0, None), "right": (None, 1)}))``
    """
    if not isinstance(kind, type | str):
        raise UsageError(
            "a kind of optimizer is named by its class", expected="a class, or its name", found=type(kind).__name__
        )
    if not isinstance(schema, OptimizerSchema):
        raise UsageError(
            "what is registered of an optimizer is an OptimizerSchema",
            expected="xla_ckpt.OptimizerSchema(...)",
            found=type(schema).__name__,
        )
    _registered_schemas[kind] = schema


def get_optimizer_schema(optimizer: Any) -> OptimizerSchema:
    """Return the layout of an optimizer's states, by default torch's."""
    if zero1.is_zero1(optimizer):
        optimizer = optimizer.base_optimizer
    for cls in type(optimizer).__mro__:
        for name in (cls, f"{cls.__module__}.{cls.__qualname__}", cls.__qualname__):
            if name in _registered_schemas:
                return _registered_schemas[name]
    return TORCH_SCHEMA
