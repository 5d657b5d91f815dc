"""Infer names for the numbered parameters of a stored optimizer, as torch's ``Optimizer.state_dict()`` has them. Pure.

Names come from ``param_names`` in the groups, from the groups of the program's own optimizer, or from the order and the
shapes of the stored model if only one assignment fits.
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
"""What torch calls arrays of its modules that have the shapes of parameters, and are none."""

PARAM_NAMES_KEY = "param_names"
"""Key of a group under which torch has the names of its parameters, if it was given them."""


def name_parameters(parts: dict[str, Any], hints: LoadHints, *, guess: bool) -> tuple[dict[str, Any], bool]:
    """The members of a training state with names in place of the optimizer's numbers, where somebody can tell them.

    Args:
        parts: The members, with a record for each array. An optimizer without numbers stays as it is.
        hints: What the program says that wants it: the names in each group of its optimizer.
        guess: Whether names may be those of the stored model in its order, if only one order fits the shapes.

    Returns:
        The members, and whether the names were guessed.
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
    """The shape of an array that may be a parameter, or a state of one; None for any other value."""
    if isinstance(value, ArrayRecord | UnreadableArray) and value.dtype is not None:
        return value.shape if value.dtype.is_floating or value.dtype.name.startswith("complex") else None
    return None


def _has_numbered_parameters(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state is torch's own, in which parameters have numbers."""
    is_torchs = schema.get_groups(optimizer) is not None and isinstance(optimizer.get(schema.STATE), dict)
    return is_torchs and schema.has_numbered_parameters(optimizer)


def _resolve_names(
    optimizer: Mapping[str, Any], model: Any, hints: LoadHints, *, guess: bool
) -> tuple[dict[int, str] | None, bool]:
    """(the name of each number, whether it was guessed); None where nobody can tell."""
    groups: list[Mapping[str, Any]] = optimizer[schema.PARAM_GROUPS]
    stored = [group[schema.PARAMS] for group in groups]
    sizes = [len(numbers) for numbers in stored]
    if (names := read_group_names(groups)) is not None:
        return names, False
    if hints.parameter_groups is not None:
        wanted = [list(names) for names in hints.parameter_groups]
        if any(name.startswith("#") for names in wanted for name in names):
            return None, False  # without a model the names are places, which are no better than numbers
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
    """The name of each number, where the groups say it: torch writes names for optimizers that were given them."""
    names: list[Any] = [group.get(PARAM_NAMES_KEY) or [] for group in groups]
    numbers = [group[schema.PARAMS] for group in groups]
    named = all(isinstance(n, list) and len(n) == len(own) for n, own in zip(names, numbers, strict=True))
    return map_numbers_to_names(numbers, names) if named else None


def infer_names_by_order(
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    *models: Mapping[str, tuple[int, ...]],
) -> dict[int, str] | None:
    """The name of each number, if the order and the shapes of a model's parameters leave only one choice.

    Args:
        shapes: The shape of each number, where known.
        models: The shapes of what may be parameters, in the order of the model: the likeliest first. Of the last of
            them buffers are left out, if nothing else fits.
    """
    without_buffers = {name: shape for name, shape in models[-1].items() if not name.endswith(_BUFFER_SUFFIXES)}
    ways = (infer_parameter_names(numbers, shapes, model) for model in (*models, without_buffers))
    return next((names for names in ways if names is not None), None)


def _may_be_state_of(state: Any, wanted: tuple[int, ...] | None) -> bool:
    """Whether this may be the state of a parameter of that shape.

    State may have fewer dims than its parameter, and dims of size 1 in the place of any, as Adafactor's has.
    """
    if wanted is None or not isinstance(state, dict):
        return True
    shapes = [own for value in state.values() if (own := _get_parameter_shape(value)) is not None]
    alike = [own for own in shapes if len(own) == len(wanted)]
    fits = not alike or any(all(d in (1, w) for d, w in zip(own, wanted, strict=True)) for own in alike)
    return fits and all(len(own) <= len(wanted) for own in shapes)


def _drop_tied_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model with each array under the first of its names: an optimizer has a tied parameter once."""
    seen: set[int] = set()
    by_first_name = {}
    for name, value in model.items():
        if id(value) not in seen:
            seen.add(id(value))
            by_first_name[name] = value
    return by_first_name


def get_largest_shape(state: Any, get_shape: Callable[[Any], tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape of a parameter: that of the state with the most dims, as a step count is a single number."""
    if not isinstance(state, Mapping):
        return None
    shapes = [own for value in state.values() if (own := get_shape(value)) is not None]
    return max(shapes, key=len, default=None)


def map_numbers_to_names(numbers: Sequence[Sequence[int]], names: Sequence[Sequence[N]]) -> dict[int, N]:
    """Name by number, from the groups of both."""
    return {
        number: name
        for some, called in zip(numbers, names, strict=True)
        for number, name in zip(some, called, strict=True)
    }


def sort_by_number(members: Mapping[Any, Any], number: Mapping[Any, int]) -> dict[Any, Any]:
    """Members by the number of their parameter, in that order; what belongs to no parameter comes last.

    >>> sort_by_number({"b": 1, "key": 2, "a": 3}, {"a": 0, "b": 1})
    {0: 3, 1: 1, 'key': 2}
    """
    ordered = sorted(members.items(), key=lambda item: number.get(item[0], len(number)))
    return {number.get(name, name): value for name, value in ordered}
