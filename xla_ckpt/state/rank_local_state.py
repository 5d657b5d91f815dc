"""Rank-local optimizer state, as declared with `register_optimizer`: each rank stores its own version.

It is stored separately from shared state: ``optimizer/state_per_rank/ranks/<rank>/<parameter>/<key>``, and
``.../ranks/<rank>/<key>`` for state that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.arrays.registry import create_array_target
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.optimizer_schema import OptimizerSchema
from xla_ckpt.core.tree.skeleton import find_arrays, get_children
from xla_ckpt.state.optimizer import get_optimizer_schema
from xla_ckpt.state.optimizer_match import OptimizerMatch
from xla_ckpt.state.part_load import PartLoadPlan, StoredPart, plan_arrays


@dataclass(slots=True)
class RankLocalState:
    """The rank-local states of this rank: built from restored arrays, or kept."""

    paths: list[str] = field(default_factory=list)
    """Leaf paths of the arrays that the states are built from."""

    builders: dict[tuple[Any, ...], Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """(parameter, key), or (key,) of shared state -> function that builds the state from restored arrays."""

    kept_states: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """The states that stay unchanged."""

    _built_states: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def build(self, arrays: Mapping[str, Any]) -> None:
        """Build the states. Registered functions of the program may raise."""
        self._built_states = {keys: make(arrays) for keys, make in self.builders.items()}

    def insert_into(self, tree: dict[Any, Any], arrays: Mapping[str, Any]) -> None:
        """Insert the states into a tree of states by parameter."""
        if self._built_states.keys() != self.builders.keys():
            self.build(arrays)
        for keys, value in {**self.kept_states, **self._built_states}.items():
            _set_nested(tree, keys, value)


def split_rank_local(tree: Mapping[str, Any], states: OptimizerSchema, placement: RankInfo) -> dict[str, Any]:
    """Split off the rank-local state in the state of an optimizer by name."""
    parameters = set(schema.get_parameter_names(tree))
    own: dict[Any, Any] = {}
    common: dict[Any, Any] = {}
    for name, members in tree[schema.STATE].items():
        if name not in parameters or not isinstance(members, Mapping):
            (own if name in states.per_rank else common)[name] = members
            continue
        common[name] = {k: v for k, v in members.items() if k not in states.per_rank}
        if own_members := {k: v for k, v in members.items() if k in states.per_rank}:
            own[name] = own_members
    parts = {
        schema.RANK_COUNT: placement.world_size,
        schema.MESH: str(placement.mesh),
        schema.RANKS: {str(placement.rank): own},
    }
    return {**tree, schema.STATE: common, schema.PER_RANK_STATE: parts}


def exclude_rank_local(stored: StoredPart) -> StoredPart:
    """Return the stored optimizer without rank-local state, so that no rank reads the state of other ranks."""
    skeleton = stored.skeleton
    if not isinstance(skeleton, dict) or schema.PER_RANK_STATE not in skeleton:
        return stored
    return stored.get_subpart({k: v for k, v in skeleton.items() if k != schema.PER_RANK_STATE}, stored.prefix)


def plan_rank_local_load(stored: StoredPart, match: OptimizerMatch, part_plan: PartLoadPlan) -> RankLocalState:
    """Plan the load of this rank's states, or of the states to build them from; mismatches become problems of the
    plan.
    """
    part = stored.find_part(schema.PER_RANK_STATE)
    saved_by = None if part is None else schema.get_saved_rank_count(part.skeleton)
    if part is None or saved_by is None:
        return RankLocalState()
    placement = stored.shardings.placement
    # In another mesh with as many ranks, a rank number refers to another part of the parameters.
    alike = schema.has_same_ranks(part.skeleton, placement.world_size, str(placement.mesh))
    ranks = [placement.rank] if alike else range(saved_by)
    parts = {r: p for r in ranks if (p := part.find_part(schema.get_rank_path(paths.ROOT, r))) is not None}
    return _RankLocalPlanner(
        stored=stored,
        match=match,
        states=get_optimizer_schema(match.optimizer),
        parts=parts,
        saved_by=saved_by,
        mesh=part.skeleton.get(schema.MESH),
        has_same_ranks=alike,
        part_plan=part_plan,
    ).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLocalPlanner:
    stored: StoredPart
    match: OptimizerMatch
    states: OptimizerSchema
    parts: Mapping[int, StoredPart]
    """The stored parts by rank: only this rank's if the job has the same ranks."""

    saved_by: int
    mesh: object
    has_same_ranks: bool
    """True if the ranks are arranged as in the saving job."""

    part_plan: PartLoadPlan
    rank_local: RankLocalState = field(default_factory=RankLocalState)

    def plan(self) -> RankLocalState:
        for keys in dict.fromkeys(keys for part in self.parts.values() for keys in self._iterate_keys(part)):
            self._plan_state(keys)
        return self.rank_local

    def _iterate_keys(self, part: StoredPart) -> Iterator[tuple[Any, ...]]:
        """Iterate over (parameter, key) of each stored state that this program uses; (key,) for shared state."""
        names = {format_key(name): name for name in self.match.tensors_by_name}
        strangers = {format_key(name) for name in self.match.stored_groups} - set(names)
        for owner, below in (get_children(part.skeleton) or {}).items():
            if owner in names:
                yield from ((names[owner], paths.unescape(key)) for key in get_children(below) or {})
            elif owner not in strangers:
                yield (paths.unescape(owner),)

    def _plan_state(self, keys: tuple[Any, ...]) -> None:
        placement = self.stored.shardings.placement
        rank, world = placement.rank, placement.world_size
        path = "/".join(format_key(key) for key in keys)
        states = {r: one for r, part in self.parts.items() if (one := part.find_part(path)) is not None}
        reshard = self.states.reshard(keys[-1])
        if keys[-1] not in self.states.per_rank:
            self._keep_current(keys, "each rank's own is stored: name it in per_rank= of xla_ckpt.register_optimizer")
        elif self.has_same_ranks:
            self._add_builder([states[rank]], keys, lambda states_made: states_made[0], self._choose_device(keys))
        elif reshard is not None:
            self._add_builder(list(states.values()), keys, lambda states_made: reshard(states_made, rank, world), None)
        else:
            self._keep_current(
                keys,
                f"it is what each of {self.saved_by} ranks had its own of, over {self.mesh}; "
                f"these are {world}, over {placement.mesh}: per_rank= of xla_ckpt.register_optimizer takes a function "
                "that makes theirs of it",
            )

    def _add_builder(
        self, parts: list[StoredPart], keys: tuple[Any, ...], build: Callable[[list[Any]], Any], device: Any
    ) -> None:
        """Add a builder of a state from stored ones, with its tensors on a device; None for host memory."""
        for part in parts:
            plan_arrays(
                part,
                self.part_plan,
                {},
                create_target=lambda _, r, kind: create_array_target(r.dtype, create_unsharded(r.shape), kind, device),
            )
            part.build()  # detect objects that may not be loaded before anything is changed
            self.rank_local.paths += find_arrays(part.skeleton, part.prefix)

        def made(arrays: Mapping[str, Any]) -> Any:
            value = build([part.build(lambda path, _: arrays[path]) for part in parts])
            return value.to(self._choose_device(keys)) if is_torch_tensor(value) else value

        self.rank_local.builders[keys] = made

    def _keep_current(self, keys: tuple[Any, ...], why: str) -> None:
        """Keep the optimizer's current state, which is a problem in strict loads."""
        self.part_plan.add_problem(schema.get_state_path(*keys), why)
        members = self._get_current_members(keys)
        if keys[-1] in members:
            self.rank_local.kept_states[keys] = members[keys[-1]]

    def _get_current_members(self, keys: tuple[Any, ...]) -> Mapping[Any, Any]:
        """Return the members of the optimizer's state that contain the last key."""
        now = self.match.current_state
        members: Mapping[Any, Any] = now if len(keys) == 1 else now.get(self.match.tensors_by_name[keys[0]], {})
        return members

    def _choose_device(self, keys: tuple[Any, ...]) -> Any:
        """Choose the device of a state: its current device, otherwise its parameter's, or the first parameter's."""
        value, parameters = self._get_current_members(keys).get(keys[-1]), self.match.tensors_by_name
        if is_torch_tensor(value):
            return value.device
        return (parameters[keys[0]] if len(keys) > 1 else next(iter(parameters.values()))).device


def _set_nested(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    *above, last = keys
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value
