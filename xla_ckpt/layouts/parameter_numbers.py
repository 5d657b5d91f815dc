"""Names for the parameters of a stored optimizer that are numbers, as in torch's own `state_dict()`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.numbers_to_names import only_names
from xla_ckpt.tree import schema

N = TypeVar("N")

_BUFFERS = ("running_mean", "running_var")
"""What torch calls arrays of its modules that have the shapes of parameters, and are none."""

PARAM_NAMES = "param_names"
"""Key of a group under which torch has the names of its parameters, if it was given them."""


def with_names(parts: dict[str, Any], hints: Hints, *, guess: bool) -> tuple[dict[str, Any], bool]:
    """The members of a training state with names in place of the optimizer's numbers, where somebody can tell them.

    Args:
        parts: The members, with a record for each array. An optimizer without numbers stays as it is.
        hints: What the program says that wants it: the names in each group of its optimizer.
        guess: Whether names may be those of the stored model in its order, if only one order fits the shapes.

    Returns:
        The members, and whether the names were guessed.
    """
    optimizer = parts.get(schema.OPTIMIZER)
    if not isinstance(optimizer, dict) or not _has_numbers(optimizer):
        return parts, False
    names, guessed = _names(optimizer, parts.get(schema.MODEL), hints, guess=guess)
    if names is None:
        return parts, False
    named = schema.renamed_parameters(optimizer, names)
    for group in named[schema.GROUPS]:
        group.pop(PARAM_NAMES, None)
    return {**parts, schema.OPTIMIZER: named}, guessed


def _shape_of_numbers(value: Any) -> tuple[int, ...] | None:
    """The shape of an array that may be a parameter, or a state of one; None for any other value."""
    if isinstance(value, ArrayRecord | UnknownArray) and value.dtype is not None:
        return value.shape if value.dtype.floating or value.dtype.name.startswith("complex") else None
    return None


def _has_numbers(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state is torch's own, in which parameters have numbers."""
    is_torchs = schema.groups_of(optimizer) is not None and isinstance(optimizer.get(schema.STATE), dict)
    return is_torchs and schema.numbers_parameters(optimizer)


def _names(
    optimizer: Mapping[str, Any], model: Any, hints: Hints, *, guess: bool
) -> tuple[dict[int, str] | None, bool]:
    """(the name of each number, whether it was guessed); None where nobody can tell."""
    groups: list[Mapping[str, Any]] = optimizer[schema.GROUPS]
    stored = [group[schema.PARAMS] for group in groups]
    sizes = [len(numbers) for numbers in stored]
    if (names := names_in_groups(groups)) is not None:
        return names, False
    if hints.groups is not None:
        wanted = [list(names) for names in hints.groups]
        if any(name.startswith("#") for names in wanted for name in names):
            return None, False  # without a model the names are places, which are no better than numbers
        called = names_by_number(stored, wanted) if [len(names) for names in wanted] == sizes else {}
        states = optimizer[schema.STATE]
        if called and all(_may_be(states.get(number), hints.hint(name).shape) for number, name in called.items()):
            return called, False
    if not guess or not isinstance(model, dict) or not hints.optimizer:
        return None, False
    shapes = {number: largest_shape(state, _shape_of_numbers) for number, state in optimizer[schema.STATE].items()}
    shapes_by_name = {
        name: own for name, value in _first_names(model).items() if (own := _shape_of_numbers(value)) is not None
    }
    by_order = names_by_order(stored, shapes, shapes_by_name)
    return by_order, by_order is not None


def names_in_groups(groups: Sequence[Mapping[str, Any]]) -> dict[int, Any] | None:
    """The name of each number, where the groups say it: torch writes names for optimizers that were given them."""
    names: list[Any] = [group.get(PARAM_NAMES) or [] for group in groups]
    numbers = [group[schema.PARAMS] for group in groups]
    named = all(isinstance(n, list) and len(n) == len(own) for n, own in zip(names, numbers, strict=True))
    return names_by_number(numbers, names) if named else None


def names_by_order(
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
    without_buffers = {name: shape for name, shape in models[-1].items() if not name.endswith(_BUFFERS)}
    ways = (only_names(numbers, shapes, model) for model in (*models, without_buffers))
    return next((names for names in ways if names is not None), None)


def _may_be(state: Any, wanted: tuple[int, ...] | None) -> bool:
    """Whether this may be the state of a parameter of that shape.

    State may have fewer dims than its parameter, and dims of size 1 in the place of any, as Adafactor's has.
    """
    if wanted is None or not isinstance(state, dict):
        return True
    shapes = [own for value in state.values() if (own := _shape_of_numbers(value)) is not None]
    alike = [own for own in shapes if len(own) == len(wanted)]
    fits = not alike or any(all(d in (1, w) for d, w in zip(own, wanted, strict=True)) for own in alike)
    return fits and all(len(own) <= len(wanted) for own in shapes)


def _first_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model with each array under the first of its names: an optimizer has a tied parameter once."""
    seen: set[int] = set()
    by_first_name = {}
    for name, value in model.items():
        if id(value) not in seen:
            seen.add(id(value))
            by_first_name[name] = value
    return by_first_name


def largest_shape(state: Any, shape: Callable[[Any], tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape of a parameter: that of the state with the most dims, as a step count is a single number."""
    if not isinstance(state, Mapping):
        return None
    shapes = [own for value in state.values() if (own := shape(value)) is not None]
    return max(shapes, key=len, default=None)


def names_by_number(numbers: Sequence[Sequence[int]], names: Sequence[Sequence[N]]) -> dict[int, N]:
    """Name by number, from the groups of both."""
    return {
        number: name
        for some, called in zip(numbers, names, strict=True)
        for number, name in zip(some, called, strict=True)
    }


def by_number(members: Mapping[Any, Any], number: Mapping[Any, int]) -> dict[Any, Any]:
    """Members by the number of their parameter, in that order; what belongs to no parameter comes last.

    >>> by_number({"b": 1, "key": 2, "a": 3}, {"a": 0, "b": 1})
    {0: 3, 1: 1, 'key': 2}
    """
    ordered = sorted(members.items(), key=lambda item: number.get(item[0], len(number)))
    return {number.get(name, name): value for name, value in ordered}
