"""What neuronx-distributed's files say of an optimizer: read, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xla_ckpt.layouts.by_rank.form import RankOptimizer, numbered_optimizer
from xla_ckpt.layouts.parameter_numbers import by_number
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.plan import RankState  # this loads torch

_ROWS = "base_state"
"""Key of the states of a ZeRO-1 optimizer, by number."""

_SHAPES = "shape_info"
"""Key of the local shapes of its parameters, by number."""

_MASTERS = "sharded_master_weights"
"""Key of its master weights, by number."""

DEALT_MEMBERS = (_ROWS, _MASTERS)
"""Members whose tensors are dealt out by rows; all others are the same on all dp ranks."""

_GROUP_OFFSET = "ep_param_group_offset"
"""Key of the number of groups that come before those of experts."""


def _offset(key: str) -> str:
    """Key of the number from which on the entries of a member are those of experts."""
    return f"ep_{key}_offset"


def stored_optimizer(tree: Mapping[Any, Any]) -> RankOptimizer:
    """The optimizer in a rank file, with numbers that run through all groups: those of experts begin at 0 in the file.

    Raises:
        CorruptCheckpointError: It has no groups.
    """
    stored = numbered_optimizer(tree)
    ordinary = int(tree.get(_GROUP_OFFSET, len(stored.groups)))
    first = sum(len(group[schema.PARAMS]) for group in stored.groups[:ordinary])
    # Without the shift the numbers of experts would be those of other parameters.
    experts = [{**g, schema.PARAMS: [first + number for number in g[schema.PARAMS]]} for g in stored.groups[ordinary:]]
    groups = [*stored.groups[:ordinary], *experts]
    if _ROWS not in tree:
        return replace(stored, groups=groups, experts=len(experts))
    return RankOptimizer(
        groups=groups,
        states=_shifted(tree, _ROWS, first),
        masters=tree.get(_MASTERS, {}),
        shapes=_shifted(tree, _SHAPES, first),
        experts=len(experts),
    )


def _shifted(tree: Mapping[Any, Any], key: str, first: int) -> Mapping[Any, Any]:
    """A member of a rank file, with experts counted from `first` on.

    In the file they follow the last of the other parameters that is in the member: one without states is in none.
    """
    members, offset = tree.get(key, {}), tree.get(_offset(key))
    if offset is None:
        return members  # type: ignore[no-any-return]
    return {n + first - offset if type(n) is int and n >= offset else n: v for n, v in members.items()}


def numbered(state: RankState) -> dict[str, Any]:
    """The optimizer's state as neuronx-distributed keeps it: by the running number of each parameter."""
    tree = state.parts[schema.OPTIMIZER]
    parts = _parts(tree[schema.GROUPS], state.experts)
    names = [[name for group in part for name in group[schema.PARAMS]] for part in parts]
    number = {name: i for i, name in enumerate(name for part in names for name in part)}
    groups = []
    for part, called in zip(parts, names, strict=True):
        own = {name: i for i, name in enumerate(called)}
        groups += [{**group, schema.PARAMS: [own[name] for name in group[schema.PARAMS]]} for group in part]
    others = {k: v for k, v in tree.items() if k not in schema.OF_OPTIMIZER}
    if not state.zero1:
        return {schema.STATE: by_number(tree[schema.STATE], number), schema.GROUPS: groups, **others}
    content: dict[str, Any] = {
        schema.STATE: {},
        schema.GROUPS: groups,
        _ROWS: by_number(tree[schema.STATE], number),
        _SHAPES: {i: list(state.shapes[name]) for name, i in number.items()},
    }
    if schema.MASTER in tree:
        content[_MASTERS] = by_number(tree[schema.MASTER], number)
    if len(parts) > 1:
        content |= {_offset(key): len(names[0]) for key in (_ROWS, _SHAPES)}
        content |= {"ep_param_id_offset": 1, _GROUP_OFFSET: len(parts[0])}
    return {**content, **others}


def _parts(groups: Sequence[Mapping[str, Any]], experts: frozenset[str] | None) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, ordinary parameters first: `NeuronEPZero1Optimizer` has another one for experts."""
    if experts is None:
        return [[*map(dict, groups)]]
    return [
        [{**g, schema.PARAMS: [name for name in g[schema.PARAMS] if (name in experts) is apart]} for g in groups]
        for apart in (False, True)
    ]
