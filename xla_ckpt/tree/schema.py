"""What stands where in the tree of a training state, and what it is there. Pure data, and functions of leaf paths.

::

    model/<parameter or buffer>
    optimizer/state/<parameter>/<key>...     state of one parameter
    optimizer/state/<key>...                 state that all parameters share, under a key of the optimizer's own
    optimizer/master/<parameter>             master weights that a ZeRO-1 optimizer keeps
    optimizer/state_per_rank                 {per_rank, mesh, ranks}: state that every rank has its own of
    optimizer/state_per_rank/ranks/<rank>/<parameter>/<key>...
    optimizer/param_groups                   hyper-parameters, and names of the parameters, group by group
    scheduler
    extras/<name>                            {per_rank, mesh, ranks}, where each rank has a state of its own
    extras/<name>/ranks/<rank>
    user_content
    base                                     {per_rank, ranks}: what each rank says of the parameters that are left out
    base/ranks/<rank>

Everything else is a tree of the caller's own (`xla_ckpt.save`), or state of an optimizer of another structure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.tree import path as paths
from xla_ckpt.tree.flatten import component
from xla_ckpt.tree.skeleton import children

MODEL = "model"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
EXTRAS = "extras"
USER_CONTENT = "user_content"

BASE = "base"
"""What a tag that has adapters alone says of the rest of the model."""

MEMBERS = (MODEL, OPTIMIZER, SCHEDULER, EXTRAS, USER_CONTENT, BASE)
"""Members of the tree of a training state."""

STAGED = frozenset({paths.ROOT, MODEL, OPTIMIZER})
"""Parts that differ between pipeline stages. All other members are the same on all of them."""

STATE = "state"
GROUPS = "param_groups"
MASTER = "master"

OWN = "state_per_rank"

OF_OPTIMIZER = frozenset({STATE, GROUPS, MASTER, OWN})
"""Members of an optimizer that is stored by name. The first two are those of torch's `state_dict`."""

PARAMS = "params"
"""Key of a group under which its parameters stand, as in torch's own groups."""

RANKS = "ranks"
"""Key of the states by rank, of what every rank has its own of."""

WORLD = "per_rank"
"""Key beside it of how many ranks there are."""

MESH = "mesh"
"""Key beside it of how they were arranged, where a number of a rank alone does not say what it had."""


class Role(enum.Enum):
    """What stands at a leaf path."""

    WEIGHT = "a parameter or buffer of a model"
    STATE = "state of an optimizer: of one parameter, or common to all"
    MASTER = "the master weight of a parameter"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """A leaf path, taken apart."""

    role: Role
    owner: str | None = None
    """Path component of the parameter, or of the key of common state."""

    keys: tuple[str, ...] = ()
    """Path components below that."""


_OTHER = LeafPlace(Role.OTHER)
_ROLES = {STATE: Role.STATE, MASTER: Role.MASTER}


def place_of(path: str) -> LeafPlace:
    """A leaf path, taken apart.

    >>> place = place_of("optimizer/state/w/exp_avg")
    >>> place.role.name, place.owner, place.keys
    ('STATE', 'w', ('exp_avg',))
    """
    parts = paths.split(path)
    if len(parts) > 1 and parts[0] == MODEL:
        return LeafPlace(Role.WEIGHT, parts[1], parts[2:])
    if len(parts) > 2 and parts[0] == OPTIMIZER and parts[1] in _ROLES:
        return LeafPlace(_ROLES[parts[1]], parts[2], parts[3:])
    return _OTHER


def member_of(path: str) -> str:
    """The member of the tree that a leaf belongs to.

    >>> member_of("model/w"), member_of("")
    ('model', '')
    """
    return path.partition("/")[0]


def below_member(path: str) -> str:
    """A leaf path without its member: rules of sharding are found in it, too.

    >>> below_member("model/layers.0.up"), below_member("w")
    ('layers.0.up', '')
    """
    return path.partition("/")[2]


def owner_of(path: str) -> str | None:
    """The path component of the parameter whose state, or master weight, an array is; None for any other array.

    Of state that is common to all parameters it is that of its own key: a path alone does not tell.

    >>> owner_of("optimizer/master/a~1b"), owner_of("model/w")
    ('a~1b', None)
    """
    place = place_of(path)
    return place.owner if place.role in (Role.STATE, Role.MASTER) else None


def named_owners(optimizer: Any) -> frozenset[str] | None:
    """Path components of the parameters in the groups of a stored optimizer, by its skeleton; None without groups.

    >>> sorted(named_owners({"state": {}, "param_groups": [{"params": ["w"]}, {"params": ["b"]}]}))
    ['b', 'w']
    """
    groups = (children(optimizer) or {}).get(GROUPS)
    if not isinstance(groups, list):
        return None
    named = [(children(group) or {}).get(PARAMS) for group in groups]
    return frozenset(component(name) for names in named if isinstance(names, list) for name in names)


def common_state(optimizer: Any) -> frozenset[str]:
    """Path components of the state that belongs to no parameter, from the skeleton of a stored optimizer.

    >>> sorted(common_state({"state": {"w": {"step": 1}, "k": 2}, "param_groups": [{"params": ["w"]}]}))
    ['k']
    >>> len(common_state({"another": "structure"}))
    0
    """
    owners = named_owners(optimizer)
    if owners is None:
        return frozenset()
    return frozenset(children((children(optimizer) or {}).get(STATE)) or ()) - owners


def parameter_of(path: str) -> str | None:
    """The leaf path of that parameter.

    >>> parameter_of("optimizer/state/w/exp_avg")
    'model/w'
    """
    owner = owner_of(path)
    return None if owner is None else paths.join(MODEL, owner)


def weight(name: Any) -> str:
    """The leaf path of a parameter or buffer, by its name; by its number, where it has only that.

    >>> weight("a/b"), weight(0)
    ('model/a~1b', 'model/~(0)')
    """
    return paths.join(MODEL, component(name))


def state(name: Any, *keys: Any) -> str:
    """The leaf path of an optimizer's state, by the parameter's name and the keys below it.

    >>> state("w", "exp_avg")
    'optimizer/state/w/exp_avg'
    """
    return _below(paths.join(OPTIMIZER, STATE), name, *keys)


def master(name: Any) -> str:
    """The leaf path of a master weight.

    >>> master("w")
    'optimizer/master/w'
    """
    return _below(paths.join(OPTIMIZER, MASTER), name)


def group(number: int | None = None) -> str:
    """The leaf path of an optimizer's groups, or of one of them.

    >>> group(), group(1)
    ('optimizer/param_groups', 'optimizer/param_groups/1')
    """
    groups = paths.join(OPTIMIZER, GROUPS)
    return groups if number is None else paths.join(groups, str(number))


def in_extras(name: str) -> str:
    """The leaf path of a member of `extras`.

    >>> in_extras("rng")
    'extras/rng'
    """
    return _below(EXTRAS, name)


def own_states() -> str:
    """The leaf path of what every rank has its own of, of an optimizer's state.

    >>> of_rank(own_states(), 0)
    'optimizer/state_per_rank/ranks/0'
    """
    return paths.join(OPTIMIZER, OWN)


def of_rank(path: str, rank: int) -> str:
    """The leaf path of one rank's own, of something that every rank has its own of.

    >>> of_rank("extras/rng", 3)
    'extras/rng/ranks/3'
    """
    return _below(path, RANKS, str(rank))


def holder_of(path: str) -> str | None:
    """The leaf path of that something, from the path of one rank's own; None for any other path.

    >>> holder_of("extras/rng/ranks/3"), holder_of("user_content")
    ('extras/rng', None)
    """
    *above, ranks, _ = ("", "", *paths.split(path))
    return "/".join(above[2:]) if ranks == RANKS else None


def saved_by(skeleton: Any) -> int | None:
    """How many ranks saved their own of something; None if a skeleton is that of one state for all.

    >>> saved_by({"per_rank": 2, "ranks": {"0": 1, "1": 2}}), saved_by({"ranks": 1})
    (2, None)
    """
    if isinstance(skeleton, dict) and set(skeleton) - {MESH} == {WORLD, RANKS} and type(skeleton[WORLD]) is int:
        return int(skeleton[WORLD])
    return None


def same_ranks(skeleton: Any, world: int, mesh: str) -> bool:
    """Whether as many ranks, arranged alike, saved their own of something. Members of `extras` did not say how, once.

    >>> same_ranks({"per_rank": 2, "mesh": "dp=2", "ranks": {}}, 2, "tp=2")
    False
    """
    return saved_by(skeleton) == world and skeleton.get(MESH, mesh) == mesh


def is_without_base(skeleton: Any) -> bool:
    """Whether a state has a part of its model alone, as adapters are one.

    >>> is_without_base({"model": {}, "base": {"per_rank": 1, "ranks": {}}}), is_without_base({"base": 1})
    (True, False)
    """
    return saved_by((children(skeleton) or {}).get(BASE)) is not None


def is_said_of_base(path: str) -> bool:
    """Whether a leaf is what a tag of adapters alone says of the base model that it leaves out.

    >>> is_said_of_base("base/ranks/0/w"), is_said_of_base("base/per_rank"), is_said_of_base("base/w")
    (True, True, False)
    """
    return paths.split(path)[:2] in ((BASE, RANKS), (BASE, WORLD))


def _below(path: str, *keys: Any) -> str:
    for key in keys:
        path = paths.join(path, component(key))
    return path


def groups_of(optimizer: Any) -> list[Any] | None:
    """The groups of an optimizer's state, if they lie there as torch's own `state_dict` has them; else None.

    >>> groups_of({"param_groups": [{"params": [0]}]}), groups_of({"param_groups": 1})
    ([{'params': [0]}], None)
    """
    groups = optimizer.get(GROUPS) if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list):
        return None
    return groups if all(isinstance(g, Mapping) and isinstance(g.get(PARAMS), list) for g in groups) else None


def grouped_names(optimizer: Mapping[str, Any]) -> list[Any]:
    """What the groups of an optimizer's state call its parameters, in their order.

    >>> grouped_names({"param_groups": [{"params": ["w"]}, {"params": ["b", "c"]}]})
    ['w', 'b', 'c']
    """
    return [name for group in optimizer[GROUPS] for name in group[PARAMS]]


def numbers_parameters(optimizer: Mapping[str, Any]) -> bool:
    """Whether the groups of an optimizer have torch's packed ids in the place of names, as its own `state_dict` has.

    >>> [numbers_parameters({"param_groups": [{"params": names}]}) for names in ([0, 1], ["w"])]
    [True, False]
    """
    names = grouped_names(optimizer)
    return bool(names) and all(type(name) is int for name in names)


def renamed_parameters(optimizer: Mapping[str, Any], called: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other names for its parameters, where `called` has one.

    >>> renamed_parameters({"state": {0: 1.0}, "param_groups": [{"params": [0]}]}, {0: "w"})
    {'state': {'w': 1.0}, 'param_groups': [{'params': ['w']}]}
    """
    members = {
        # A key of its own may be equal to a number, as 1.0 is to 1, and mean no parameter.
        member: {called.get(k, k) if type(k) in (int, str) else k: value for k, value in optimizer[member].items()}
        for member in (STATE, MASTER)
        if isinstance(optimizer.get(member), Mapping)
    }
    groups = [{**group, PARAMS: [called.get(name, name) for name in group[PARAMS]]} for group in optimizer[GROUPS]]
    return {**optimizer, **members, GROUPS: groups}
