"""Infer names for the numbered parameters of a stored optimizer, as in torch's ``Optimizer.state_dict()``. Pure.

Names come from ``param_names`` in the groups, from the groups of the target optimizer, or from the order and the shapes
of the stored model if only one assignment fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.state_dict import infer_parameter_names

N = TypeVar("N")

_BUFFER_SUFFIXES = ("running_mean", "running_var")
"""Name suffixes of torch buffers that have the shapes of parameters."""

PARAM_NAMES_KEY = "param_names"
"""Key of the parameter names in a group. torch writes them for optimizers that were created with named parameters."""


def name_parameters(parts: dict[str, Any], hints: LoadHints, *, guess: bool) -> tuple[dict[str, Any], bool]:
    """Replace the parameter numbers of the optimizer in a training state with names, if they can be inferred.

    Args:
        parts: Members of the state, with a record for each array. An optimizer without numbers is not changed.
        hints: Information of the target program: the names in each group of its optimizer.
        guess: True to infer names from the order of the stored model, if only one assignment fits the shapes.

    Returns:
        The members, and True if the names were guessed.
    """
    optimizer = parts.get(schema.OPTIMIZER)
    if not isinstance(optimizer, dict) or not _has_numbered_parameters(optimizer):
        return parts, False
    names, guessed = _resolve_names(optimizer, parts.get(schema.MODEL), hints, guess=guess)
    if names is None:
        return parts, False
    named = schema.rename_parameters(optimizer, names)
    for group in named[schema.PARAM_GROUPS]:
        group.pop(PARAM_NAMES_KEY, None)
    return {**parts, schema.OPTIMIZER: named}, guessed


def _get_parameter_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array that can be a parameter or its state; None for any other value."""
    if isinstance(value, ArrayRecord | UnreadableArray) and value.dtype is not None:
        return value.shape if value.dtype.is_floating or value.dtype.name.startswith("complex") else None
    return None


def _has_numbered_parameters(optimizer: Mapping[str, Any]) -> bool:
    """Return True if a state has the structure of a torch optimizer with numbered parameters."""
    is_torchs = schema.get_groups(optimizer) is not None and isinstance(optimizer.get(schema.STATE), dict)
    return is_torchs and schema.has_numbered_parameters(optimizer)


def _resolve_names(
    optimizer: Mapping[str, Any], model: Any, hints: LoadHints, *, guess: bool
) -> tuple[dict[int, str] | None, bool]:
    """Return the name of each number, and True if they were guessed; None if the names cannot be inferred."""
    groups: list[Mapping[str, Any]] = optimizer[schema.PARAM_GROUPS]
    stored = [group[schema.PARAMS] for group in groups]
    sizes = [len(numbers) for numbers in stored]
    if (names := read_group_names(groups)) is not None:
        return names, False
    if hints.parameter_groups is not None:
        wanted = [list(names) for names in hints.parameter_groups]
        if any(name.startswith("#") for names in wanted for name in names):
            return None, False  # without a model the names are positions, which are equivalent to numbers
        called = map_numbers_to_names(stored, wanted) if [len(names) for names in wanted] == sizes else {}
        states = optimizer[schema.STATE]
        if called and all(
            _may_be_state_of(states.get(number), hints.get_hint(name).shape) for number, name in called.items()
        ):
            return called, False
    if not guess or not isinstance(model, dict) or not hints.wants_optimizer:
        return None, False
    shapes = {
        number: get_largest_shape(state, _get_parameter_shape) for number, state in optimizer[schema.STATE].items()
    }
    shapes_by_name = {
        name: own for name, value in _drop_tied_names(model).items() if (own := _get_parameter_shape(value)) is not None
    }
    by_order = infer_names_by_order(stored, shapes, shapes_by_name)
    return by_order, by_order is not None


def read_group_names(groups: Sequence[Mapping[str, Any]]) -> dict[int, Any] | None:
    """Return the recorded name of each number; None if a group does not record names."""
    names: list[Any] = [group.get(PARAM_NAMES_KEY) or [] for group in groups]
    numbers = [group[schema.PARAMS] for group in groups]
    named = all(isinstance(n, list) and len(n) == len(own) for n, own in zip(names, numbers, strict=True))
    return map_numbers_to_names(numbers, names) if named else None


def infer_names_by_order(
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    *models: Mapping[str, tuple[int, ...]],
) -> dict[int, str] | None:
    """Return the name of each number, if the order and shapes of the parameters of a model allow only one assignment.

    Args:
        shapes: Shape of each number, if known.
        models: Shapes of candidate parameters in model order; the likeliest candidates first. If nothing else
            matches, the last candidates are tried without buffers.
    """
    without_buffers = {name: shape for name, shape in models[-1].items() if not name.endswith(_BUFFER_SUFFIXES)}
    ways = (infer_parameter_names(numbers, shapes, model) for model in (*models, without_buffers))
    return next((names for names in ways if names is not None), None)


def _may_be_state_of(state: Any, wanted: tuple[int, ...] | None) -> bool:
    """Return True if this can be the state of a parameter with the given shape.

    State may have fewer dims than its parameter, and dims of size 1 in place of others, as in Adafactor.
    """
    if wanted is None or not isinstance(state, dict):
        return True
    shapes = [own for value in state.values() if (own := _get_parameter_shape(value)) is not None]
    alike = [own for own in shapes if len(own) == len(wanted)]
    fits = not alike or any(all(d in (1, w) for d, w in zip(own, wanted, strict=True)) for own in alike)
    return fits and all(len(own) <= len(wanted) for own in shapes)


def _drop_tied_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model with each array only under its first name: an optimizer contains a tied parameter once."""
    seen: set[int] = set()
    by_first_name = {}
    for name, value in model.items():
        if id(value) not in seen:
            seen.add(id(value))
            by_first_name[name] = value
    return by_first_name


def get_largest_shape(state: Any, get_shape: Callable[[Any], tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Return the shape of a parameter: the shape of its state with the most dims, because a step count is a scalar."""
    if not isinstance(state, Mapping):
        return None
    shapes = [own for value in state.values() if (own := get_shape(value)) is not None]
    return max(shapes, key=len, default=None)


def map_numbers_to_names(numbers: Sequence[Sequence[int]], names: Sequence[Sequence[N]]) -> dict[int, N]:
    """Return a mapping from number to name, given both by group."""
    return {
        number: name
        for some, called in zip(numbers, names, strict=True)
        for number, name in zip(some, called, strict=True)
    }


def sort_by_number(members: Mapping[Any, Any], number: Mapping[Any, int]) -> dict[Any, Any]:
    """Replace the names of parameters with their numbers, sorted by number; other members come last.

    >>> sort_by_number({"b": 1, "key": 2, "a": 3}, {"a": 0, "b": 1})
    {0: 3, 1: 1, 'key': 2}
    """
    ordered = sorted(members.items(), key=lambda item: number.get(item[0], len(number)))
    return {number.get(name, name): value for name, value in ordered}
