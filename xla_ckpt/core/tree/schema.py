"""Schema of a training state: the leaf paths of models, optimizers, extras and adapters.

::

    model/<parameter or buffer>
    optimizer/state/<parameter>/<key>...     state of one parameter
    optimizer/state/<key>...                 state that all parameters share, under a key of the optimizer
    optimizer/master/<parameter>             master weights of a ZeRO-1 optimizer
    optimizer/state_per_rank                 {per_rank, mesh, ranks}: rank-local state
    optimizer/state_per_rank/ranks/<rank>/<parameter>/<key>...
    optimizer/param_groups                   hyper-parameters, and names of the parameters, by group
    scheduler
    extras/<name>                            {per_rank, mesh, ranks}, if the state is rank-local
    extras/<name>/ranks/<rank>
    user_content
    base                                     {per_rank, ranks}: each rank's record of the parameters that are not stored
    base/ranks/<rank>

All other paths belong to a tree of the caller (`xla_ckpt.save`), or to an optimizer of another structure. A LoRA
checkpoint may contain only adapters. Their names are defined here, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.skeleton import get_children

MODEL = "model"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
EXTRAS = "extras"
USER_CONTENT = "user_content"

BASE = "base"
"""Record of the base model in a checkpoint that contains only adapters."""

MEMBERS = (MODEL, OPTIMIZER, SCHEDULER, EXTRAS, USER_CONTENT, BASE)
"""Members of the tree of a training state."""

STAGE_MEMBERS = frozenset({paths.ROOT, MODEL, OPTIMIZER})
"""Members that differ between pipeline stages. All others are equal on all stages."""

STATE = "state"
PARAM_GROUPS = "param_groups"
MASTER = "master"

PER_RANK_STATE = "state_per_rank"

OPTIMIZER_MEMBERS = frozenset({STATE, PARAM_GROUPS, MASTER, PER_RANK_STATE})
"""Members of an optimizer that is stored by name. The first two are in torch's `state_dict`."""

PARAMS = "params"
"""Key of the parameters of a group, as in torch's groups."""

RANKS = "ranks"
"""Key of rank-local states by rank."""

RANK_COUNT = "per_rank"
"""Key of the number of ranks with rank-local states."""

MESH = "mesh"
"""Key of the mesh of the ranks with rank-local states, if the rank number does not determine the state."""


class LeafRole(enum.Enum):
    """Role of a leaf path."""

    WEIGHT = "a parameter or buffer of a model"
    STATE = "state of an optimizer: of one parameter, or common to all"
    MASTER = "the master weight of a parameter"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class LeafPath:
    """A parsed leaf path."""

    role: LeafRole
    owner: str | None = None
    """Path component of the parameter, or of the key of shared state."""

    keys: tuple[str, ...] = ()
    """Path components below the owner."""


_OTHER = LeafPath(LeafRole.OTHER)
_ROLES = {STATE: LeafRole.STATE, MASTER: LeafRole.MASTER}


def parse_leaf_path(path: str) -> LeafPath:
    """Parse a leaf path.

    >>> place = parse_leaf_path("optimizer/state/w/exp_avg")
    >>> place.role.name, place.owner, place.keys
    ('STATE', 'w', ('exp_avg',))
    """
    parts = paths.split(path)
    if len(parts) > 1 and parts[0] == MODEL:
        return LeafPath(LeafRole.WEIGHT, parts[1], parts[2:])
    if len(parts) > 2 and parts[0] == OPTIMIZER and parts[1] in _ROLES:
        return LeafPath(_ROLES[parts[1]], parts[2], parts[3:])
    return _OTHER


def get_member(path: str) -> str:
    """Return the member of the tree that a leaf belongs to.

    >>> get_member("model/w"), get_member("")
    ('model', '')
    """
    return path.partition("/")[0]


def strip_member(path: str) -> str:
    """Return a leaf path without its member. Sharding rules also match this form.

    >>> strip_member("model/layers.0.up"), strip_member("w")
    ('layers.0.up', '')
    """
    return path.partition("/")[2]


def get_owner(path: str) -> str | None:
    """Return the path component of the parameter that owns an optimizer state or master weight, or None for other
    arrays.

    For state that all parameters share it is the state's own key, which the path cannot distinguish.

    >>> get_owner("optimizer/master/a~1b"), get_owner("model/w")
    ('a~1b', None)
    """
    place = parse_leaf_path(path)
    return place.owner if place.role in (LeafRole.STATE, LeafRole.MASTER) else None


def find_grouped_parameters(optimizer: Any) -> frozenset[str] | None:
    """Return the path components of the parameters in the groups of a stored optimizer (skeleton), or None without
    groups.

    >>> sorted(find_grouped_parameters({"state": {}, "param_groups": [{"params": ["w"]}, {"params": ["b"]}]}))
    ['b', 'w']
    """
    groups = (get_children(optimizer) or {}).get(PARAM_GROUPS)
    if not isinstance(groups, list):
        return None
    named = [(get_children(group) or {}).get(PARAMS) for group in groups]
    return frozenset(format_key(name) for names in named if isinstance(names, list) for name in names)


def find_shared_state(optimizer: Any) -> frozenset[str]:
    """Return the path components of the state that belongs to no parameter, from the skeleton of a stored optimizer.

    >>> sorted(find_shared_state({"state": {"w": {"step": 1}, "k": 2}, "param_groups": [{"params": ["w"]}]}))
    ['k']
    >>> len(find_shared_state({"another": "structure"}))
    0
    """
    owners = find_grouped_parameters(optimizer)
    if owners is None:
        return frozenset()
    return frozenset(get_children((get_children(optimizer) or {}).get(STATE)) or ()) - owners


def get_parameter_path(path: str) -> str | None:
    """Return the leaf path of the parameter that owns an optimizer state, or None for other arrays.

    >>> get_parameter_path("optimizer/state/w/exp_avg")
    'model/w'
    """
    owner = get_owner(path)
    return None if owner is None else paths.join(MODEL, owner)


def get_weight_path(name: Any) -> str:
    """Return the leaf path of a parameter or buffer, by its name or number.

    >>> get_weight_path("a/b"), get_weight_path(0)
    ('model/a~1b', 'model/~(0)')
    """
    return paths.join(MODEL, format_key(name))


def get_state_path(name: Any, *keys: Any) -> str:
    """Return the leaf path of an optimizer state, by the parameter's name and the keys below it.

    >>> get_state_path("w", "exp_avg")
    'optimizer/state/w/exp_avg'
    """
    return _join_keys(paths.join(OPTIMIZER, STATE), name, *keys)


def get_master_path(name: Any) -> str:
    """Return the leaf path of a master weight.

    >>> get_master_path("w")
    'optimizer/master/w'
    """
    return _join_keys(paths.join(OPTIMIZER, MASTER), name)


def get_group_path(number: int | None = None) -> str:
    """Return the leaf path of an optimizer's groups, or of one group.

    >>> get_group_path(), get_group_path(1)
    ('optimizer/param_groups', 'optimizer/param_groups/1')
    """
    groups = paths.join(OPTIMIZER, PARAM_GROUPS)
    return groups if number is None else paths.join(groups, str(number))


def get_extras_path(name: str) -> str:
    """Return the leaf path of a member of `extras`.

    >>> get_extras_path("rng")
    'extras/rng'
    """
    return _join_keys(EXTRAS, name)


def get_per_rank_state_path() -> str:
    """Return the leaf path of an optimizer's rank-local state.

    >>> get_rank_path(get_per_rank_state_path(), 0)
    'optimizer/state_per_rank/ranks/0'
    """
    return paths.join(OPTIMIZER, PER_RANK_STATE)


def get_rank_path(path: str, rank: int) -> str:
    """Return the leaf path of one rank's part of rank-local state.

    >>> get_rank_path("extras/rng", 3)
    'extras/rng/ranks/3'
    """
    return _join_keys(path, RANKS, str(rank))


def get_rank_parent(path: str) -> str | None:
    """Return the leaf path of rank-local state from the path of one rank's part, or None for other paths.

    >>> get_rank_parent("extras/rng/ranks/3"), get_rank_parent("user_content")
    ('extras/rng', None)
    """
    *above, ranks, _ = ("", "", *paths.split(path))
    return "/".join(above[2:]) if ranks == RANKS else None


def get_saved_rank_count(skeleton: Any) -> int | None:
    """Return the number of ranks that saved rank-local state, or None if the skeleton is not rank-local state.

    >>> get_saved_rank_count({"per_rank": 2, "ranks": {"0": 1, "1": 2}}), get_saved_rank_count({"ranks": 1})
    (2, None)
    """
    if (
        isinstance(skeleton, dict)
        and set(skeleton) - {MESH} == {RANK_COUNT, RANKS}
        and type(skeleton[RANK_COUNT]) is int
    ):
        return int(skeleton[RANK_COUNT])
    return None


def has_same_ranks(skeleton: Any, world: int, mesh: str) -> bool:
    """Return True if rank-local state was saved by the same number of ranks on the same mesh.

    Members of `extras` saved by older versions do not record the mesh, and match any.

    >>> has_same_ranks({"per_rank": 2, "mesh": "dp=2", "ranks": {}}, 2, "tp=2")
    False
    """
    return get_saved_rank_count(skeleton) == world and skeleton.get(MESH, mesh) == mesh


def is_without_base(skeleton: Any) -> bool:
    """Return True if a state contains only a part of its model, such as adapters.

    >>> is_without_base({"model": {}, "base": {"per_rank": 1, "ranks": {}}}), is_without_base({"base": 1})
    (True, False)
    """
    return get_saved_rank_count((get_children(skeleton) or {}).get(BASE)) is not None


def is_base_info(path: str) -> bool:
    """Return True if a leaf belongs to the record of the base model in a checkpoint that contains only adapters.

    >>> is_base_info("base/ranks/0/w"), is_base_info("base/per_rank"), is_base_info("base/w")
    (True, True, False)
    """
    return paths.split(path)[:2] in ((BASE, RANKS), (BASE, RANK_COUNT))


def _join_keys(path: str, *keys: Any) -> str:
    for key in keys:
        path = paths.join(path, format_key(key))
    return path


def get_groups(optimizer: Any) -> list[Any] | None:
    """Return the groups of an optimizer's state in the structure of torch's `state_dict`, or None for other structures.

    >>> get_groups({"param_groups": [{"params": [0]}]}), get_groups({"param_groups": 1})
    ([{'params': [0]}], None)
    """
    groups = optimizer.get(PARAM_GROUPS) if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list):
        return None
    return groups if all(isinstance(g, Mapping) and isinstance(g.get(PARAMS), list) for g in groups) else None


def get_parameter_names(optimizer: Mapping[str, Any]) -> list[Any]:
    """Return the names of the parameters in the groups of an optimizer's state, in their order.

    >>> get_parameter_names({"param_groups": [{"params": ["w"]}, {"params": ["b", "c"]}]})
    ['w', 'b', 'c']
    """
    return [name for group in optimizer[PARAM_GROUPS] for name in group[PARAMS]]


def has_numbered_parameters(optimizer: Mapping[str, Any]) -> bool:
    """Return True if the groups of an optimizer contain torch's packed ids instead of names, as in its `state_dict`.

    >>> [has_numbered_parameters({"param_groups": [{"params": names}]}) for names in ([0, 1], ["w"])]
    [True, False]
    """
    names = get_parameter_names(optimizer)
    return bool(names) and all(type(name) is int for name in names)


def rename_parameters(optimizer: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the parameters in `names` renamed.

    >>> rename_parameters({"state": {0: 1.0}, "param_groups": [{"params": [0]}]}, {0: "w"})
    {'state': {'w': 1.0}, 'param_groups': [{'params': ['w']}]}
    """
    members = {
        # A key of shared state may equal a number, as 1.0 equals 1, without being a parameter.
        member: {names.get(k, k) if type(k) in (int, str) else k: value for k, value in optimizer[member].items()}
        for member in (STATE, MASTER)
        if isinstance(optimizer.get(member), Mapping)
    }
    groups = [{**group, PARAMS: [names.get(name, name) for name in group[PARAMS]]} for group in optimizer[PARAM_GROUPS]]
    return {**optimizer, **members, PARAM_GROUPS: groups}


LORA_CONFIG = "lora_config"
"""Name of the adapter configuration in the state of a neuronx-distributed model."""

ADAPTER_PREFIX = "lora_"
"""Substring that only the names of adapter weights contain."""

BASE_LAYER_SUFFIX = ".base_layer"
"""Suffix that an adapter adds to the name of its base layer."""


def has_only_adapters(skeleton: Any) -> bool:
    """Return True if a state contains adapters with their configuration, but not the weights of their base layers.

    >>> alone = dict.fromkeys(("lora_config", "q.lora_A.weight", "q.base_layer.bias", "head.weight"))
    >>> has_only_adapters({"model": alone}), has_only_adapters({"model": {**alone, "q.base_layer.weight": None}})
    (True, False)
    """
    names = get_children((get_children(skeleton) or {}).get(MODEL)) or {}
    adapted = {name.partition(f".{ADAPTER_PREFIX}")[0] for name in names if f".{ADAPTER_PREFIX}" in name}
    weights = {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
    return LORA_CONFIG in names and not adapted <= {name.removesuffix(BASE_LAYER_SUFFIX) for name in weights}


def sort_lora_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter configuration with sorted lists, because some are created from sets and differ between ranks.

    >>> sort_lora_config({"r": 8, "target_modules": ["v", "q"]})
    {'r': 8, 'target_modules': ['q', 'v']}
    """
    return {k: sorted(v, key=str) if isinstance(v, set | list) else v for k, v in config.items()}
