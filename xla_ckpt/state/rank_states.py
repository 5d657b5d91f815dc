"""State of an optimizer that every rank has its own of, as somebody registered it.

It stands apart from what the ranks have in common: ``optimizer/state_per_rank/ranks/<rank>/<parameter>/<key>``, and
``.../ranks/<rank>/<key>`` for state that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.arrays.registry import new_array
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state.loading import Loading, Stored, plan_arrays
from xla_ckpt.state.optimizer_match import OptimizerMatch
from xla_ckpt.state.registered import schema_of
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.flatten import component
from xla_ckpt.tree.optimizer_schema import OptimizerSchema
from xla_ckpt.tree.skeleton import array_paths, children


@dataclass(slots=True)
class Own:
    """This rank's own states, which are made of restored arrays, and of those that it keeps."""

    paths: list[str] = field(default_factory=list)
    """Leaf paths of the arrays that they are made of."""

    makes: dict[tuple[Any, ...], Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """(parameter, key), or (key,) of a common one -> what makes the state of restored arrays."""

    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """The states that stay as they are."""

    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def make(self, arrays: Mapping[str, Any]) -> None:
        """Make the states. Functions that somebody registered do it, and may raise."""
        self._made = {keys: make(arrays) for keys, make in self.makes.items()}

    def fill(self, tree: dict[Any, Any], arrays: Mapping[str, Any]) -> None:
        """Put them into a tree of states by parameter."""
        if self._made.keys() != self.makes.keys():
            self.make(arrays)
        for keys, value in {**self.kept, **self._made}.items():
            _put(tree, keys, value)


def with_own_apart(tree: Mapping[str, Any], states: OptimizerSchema, placement: Placement) -> dict[str, Any]:
    """The state of an optimizer by name, with what this rank has its own of set apart."""
    parameters = set(schema.grouped_names(tree))
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
        schema.WORLD: placement.world,
        schema.MESH: str(placement.mesh),
        schema.RANKS: {str(placement.rank): own},
    }
    return {**tree, schema.STATE: common, schema.OWN: parts}


def less_own(stored: Stored) -> Stored:
    """What is stored of an optimizer, less what every rank has its own of: no rank reads that of the others."""
    skeleton = stored.skeleton
    if not isinstance(skeleton, dict) or schema.OWN not in skeleton:
        return stored
    return stored.part({k: v for k, v in skeleton.items() if k != schema.OWN}, stored.prefix)


def plan(stored: Stored, match: OptimizerMatch, loading: Loading) -> Own:
    """Want this rank's own states, or those that its own are made of; differences become problems of the loading."""
    part = stored.at(schema.OWN)
    saved_by = None if part is None else schema.saved_by(part.skeleton)
    if part is None or saved_by is None:
        return Own()
    placement = stored.shardings.placement
    # A number of a rank means another part of the parameters in another mesh of as many ranks.
    alike = schema.same_ranks(part.skeleton, placement.world, str(placement.mesh))
    ranks = [placement.rank] if alike else range(saved_by)
    parts = {r: p for r in ranks if (p := part.at(schema.of_rank(paths.ROOT, r))) is not None}
    return _Wanted(
        stored=stored,
        match=match,
        states=schema_of(match.optimizer),
        parts=parts,
        saved_by=saved_by,
        mesh=part.skeleton.get(schema.MESH),
        alike=alike,
        loading=loading,
    ).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    stored: Stored
    match: OptimizerMatch
    states: OptimizerSchema
    parts: Mapping[int, Stored]
    """What ranks saved: this one alone, where it was the same job."""

    saved_by: int
    mesh: object
    alike: bool
    """Whether the ranks were arranged as they are now."""

    loading: Loading
    own: Own = field(default_factory=Own)

    def plan(self) -> Own:
        for keys in dict.fromkeys(keys for part in self.parts.values() for keys in self._keys(part)):
            self._plan_one(keys)
        return self.own

    def _keys(self, part: Stored) -> Iterator[tuple[Any, ...]]:
        """(parameter, key) of each state that a rank saved and this program can use; (key,) where it is common."""
        names = {component(name): name for name in self.match.by_name}
        strangers = {component(name) for name in self.match.group_of} - set(names)
        for owner, below in (children(part.skeleton) or {}).items():
            if owner in names:
                yield from ((names[owner], paths.unescape(key)) for key in children(below) or {})
            elif owner not in strangers:
                yield (paths.unescape(owner),)

    def _plan_one(self, keys: tuple[Any, ...]) -> None:
        placement = self.stored.shardings.placement
        rank, world = placement.rank, placement.world
        path = "/".join(component(key) for key in keys)
        states = {r: one for r, part in self.parts.items() if (one := part.at(path)) is not None}
        reshard = self.states.reshard(keys[-1])
        if keys[-1] not in self.states.per_rank:
            self._keep(keys, "each rank's own is stored: name it in per_rank= of xla_ckpt.register_optimizer")
        elif self.alike:
            self._make([states[rank]], keys, lambda states_made: states_made[0], self._device(keys))
        elif reshard is not None:
            self._make(list(states.values()), keys, lambda states_made: reshard(states_made, rank, world), None)
        else:
            self._keep(
                keys,
                f"it is what each of {self.saved_by} ranks had its own of, over {self.mesh}; "
                f"these are {world}, over {placement.mesh}: per_rank= of xla_ckpt.register_optimizer takes a function "
                "that makes theirs of it",
            )

    def _make(self, parts: list[Stored], keys: tuple[Any, ...], make: Callable[[list[Any]], Any], device: Any) -> None:
        """Have a state made of stored ones, whose tensors lie on a device; None for host memory."""
        for part in parts:
            plan_arrays(part, self.loading, {}, new=lambda _, r, kind: new_array(r.dtype, whole(r.shape), kind, device))
            part.build()  # what may not be loaded is found out before anything is changed
            self.own.paths += array_paths(part.skeleton, part.prefix)

        def made(arrays: Mapping[str, Any]) -> Any:
            value = make([part.build(lambda path, _: arrays[path]) for part in parts])
            return value.to(self._device(keys)) if is_torch_tensor(value) else value

        self.own.makes[keys] = made

    def _keep(self, keys: tuple[Any, ...], why: str) -> None:
        """Leave the optimizer what it has; strict loads fail for it."""
        self.loading.add_problem(schema.state(*keys), why)
        members = self._now(keys)
        if keys[-1] in members:
            self.own.kept[keys] = members[keys[-1]]

    def _now(self, keys: tuple[Any, ...]) -> Mapping[Any, Any]:
        """The members of the optimizer's state beside which the last of the keys stands."""
        now = self.match.now
        members: Mapping[Any, Any] = now if len(keys) == 1 else now.get(self.match.by_name[keys[0]], {})
        return members

    def _device(self, keys: tuple[Any, ...]) -> Any:
        """Where a state lies: where the optimizer has it, else with its parameter, or the first one."""
        value, parameters = self._now(keys).get(keys[-1]), self.match.by_name
        if is_torch_tensor(value):
            return value.device
        return (parameters[keys[0]] if len(keys) > 1 else next(iter(parameters.values()))).device


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    *above, last = keys
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value
