"""What the ranks stored of one item, as one value. Pure.

Ranks that have a dict in one place have one dict with the members of all of them. The parts of a DTensor become one
array, and what all ranks have alike is stored once. An item without DTensors in which ranks differ is a state that
every rank has its own of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import leaves, replaced_leaves

RankTensors = Mapping[int, TensorAt]
"""Rank -> what it has of one tensor."""

Combine = Callable[[RankTensors], Any]
"""Makes a record of what some ranks have of one tensor; None if they have different ones, of which none is a part."""

_APART = UnknownArray(
    problem="the ranks have different values here, and nothing says how they belong together",
    hint="Have the program save them in an item of their own, which has no DTensors: such an item is read as the state "
    "of each rank.",
)


class _DifferentError(Exception):
    """Ranks differ in an item."""


def item_of_ranks(of_rank: Mapping[int, Any], world: int, combine: Combine, same: Callable[[Any, Any], bool]) -> Any:
    """The value of an item.

    Args:
        of_rank: Rank -> what it stored, with a `TensorAt` for each tensor.
        same: Whether two values without tensors are equal.
    """
    cut = any(
        isinstance(leaf, TensorAt) and leaf.part is not None for tree in of_rank.values() for leaf in leaves(tree)
    )

    def different() -> Any:
        if cut:
            return _APART
        raise _DifferentError

    try:
        return _merged(of_rank, combine, same, different)
    except _DifferentError:
        ranks = {str(rank): _alone(rank, tree, combine) for rank, tree in of_rank.items()}
        return {schema.WORLD: world, schema.RANKS: ranks}


def _alone(rank: int, tree: Any, combine: Combine) -> Any:
    """What one rank stored."""
    return replaced_leaves(
        tree, lambda _, leaf: combine({rank: leaf}) if isinstance(leaf, TensorAt) else leaf, is_leaf=keeps_class
    )


def keeps_class(value: Any) -> bool:
    """Whether a container without tensors has a class that is to be kept."""
    return type(value) not in (dict, list, tuple) and not any(isinstance(leaf, TensorAt) for leaf in leaves(value))


def _merged(
    of_rank: Mapping[int, Any], combine: Combine, same: Callable[[Any, Any], bool], different: Callable[[], Any]
) -> Any:
    values = list(of_rank.values())
    first = values[0]

    def below(members: Mapping[int, Any]) -> Any:
        return _merged(members, combine, same, different)

    if any(isinstance(value, TensorAt) for value in values):
        record = combine(of_rank) if all(isinstance(value, TensorAt) for value in values) else None
        return different() if record is None else record
    if all(isinstance(value, Mapping) for value in values) and not keeps_class(first):
        keys = dict.fromkeys(key for value in values for key in value)
        return {k: below({rank: value[k] for rank, value in of_rank.items() if k in value}) for k in keys}
    if type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        return type(first)(below({rank: value[i] for rank, value in of_rank.items()}) for i in range(len(first)))
    return first if all(same(first, value) for value in values[1:]) else different()
