"""Parse and encode the optimizer state in NxD rank files. Needs no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.tree import schema
from xla_ckpt.formats.numbered_parameters import sort_by_number
from xla_ckpt.formats.rank_files.layout import RankOptimizer, parse_numbered_optimizer

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.writing import RankState


_STATE_KEY = "base_state"
"""Key of the states of a ZeRO-1 optimizer, by parameter number."""

_SHAPES_KEY = "shape_info"
"""Key of the local shapes of its parameters, by parameter number."""

_MASTERS_KEY = "sharded_master_weights"
"""Key of its master weights, by parameter number."""

ZERO1_SHARDED_KEYS = (_STATE_KEY, _MASTERS_KEY)
"""Members whose tensors are sharded by rows; all others are replicated on all dp ranks."""

_GROUP_OFFSET_KEY = "ep_param_group_offset"
"""Key of the number of groups before the groups of experts."""


def _get_offset_key(key: str) -> str:
    """Return the key of the first number that belongs to experts in a member."""
    return f"ep_{key}_offset"


def parse_optimizer(tree: Mapping[Any, Any]) -> RankOptimizer:
    """Parse the optimizer in a rank file, and number its parameters consecutively through all groups.

    In the file, the numbers of experts begin at 0.

    Raises:
        CorruptCheckpointError: It has no param_groups.
    """
    stored = parse_numbered_optimizer(tree)
    ordinary = int(tree.get(_GROUP_OFFSET_KEY, len(stored.groups)))
    first = sum(len(group[schema.PARAMS]) for group in stored.groups[:ordinary])
    # Without the shift, the numbers of experts would collide with those of other parameters.
    experts = [{**g, schema.PARAMS: [first + number for number in g[schema.PARAMS]]} for g in stored.groups[ordinary:]]
    groups = [*stored.groups[:ordinary], *experts]
    if _STATE_KEY not in tree:
        return replace(stored, groups=groups, expert_group_count=len(experts))
    return RankOptimizer(
        groups=groups,
        states=_shift_numbers(tree, _STATE_KEY, first),
        masters=tree.get(_MASTERS_KEY, {}),
        local_shapes=_shift_numbers(tree, _SHAPES_KEY, first),
        expert_group_count=len(experts),
    )


def _shift_numbers(tree: Mapping[Any, Any], key: str, first: int) -> Mapping[Any, Any]:
    """Return a member of a rank file with the numbers of experts shifted to begin at `first`.

    In the file they follow the last other parameter in the member, which excludes parameters without states.
    """
    members, offset = tree.get(key, {}), tree.get(_get_offset_key(key))
    if offset is None:
        return members  # type: ignore[no-any-return]
    return {n + first - offset if type(n) is int and n >= offset else n: v for n, v in members.items()}


def encode_optimizer(state: RankState) -> dict[str, Any]:
    """Encode the optimizer's state in the form of neuronx-distributed: keyed by consecutive parameter numbers."""
    tree = state.parts[schema.OPTIMIZER]
    parts = _split_groups(tree[schema.PARAM_GROUPS], state.expert_names)
    names = [[name for group in part for name in group[schema.PARAMS]] for part in parts]
    number = {name: i for i, name in enumerate(name for part in names for name in part)}
    groups = []
    for part, called in zip(parts, names, strict=True):
        own = {name: i for i, name in enumerate(called)}
        groups += [{**group, schema.PARAMS: [own[name] for name in group[schema.PARAMS]]} for group in part]
    others = {k: v for k, v in tree.items() if k not in schema.OPTIMIZER_MEMBERS}
    if not state.zero1:
        return {schema.STATE: sort_by_number(tree[schema.STATE], number), schema.PARAM_GROUPS: groups, **others}
    content: dict[str, Any] = {
        schema.STATE: {},
        schema.PARAM_GROUPS: groups,
        _STATE_KEY: sort_by_number(tree[schema.STATE], number),
        _SHAPES_KEY: {i: list(state.local_shapes[name]) for name, i in number.items()},
    }
    if schema.MASTER in tree:
        content[_MASTERS_KEY] = sort_by_number(tree[schema.MASTER], number)
    if len(parts) > 1:
        content |= {_get_offset_key(key): len(names[0]) for key in (_STATE_KEY, _SHAPES_KEY)}
        content |= {"ep_param_id_offset": 1, _GROUP_OFFSET_KEY: len(parts[0])}
    return {**content, **others}


def _split_groups(groups: Sequence[Mapping[str, Any]], experts: frozenset[str] | None) -> list[list[dict[str, Any]]]:
    """Split the groups by optimizer: `NeuronEPZero1Optimizer` has a second optimizer for experts."""
    if experts is None:
        return [[*map(dict, groups)]]
    return [
        [{**g, schema.PARAMS: [name for name in g[schema.PARAMS] if (name in experts) is apart]} for g in groups]
        for apart in (False, True)
    ]
