"""The optimizers in rank files, as one tree with records in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError, naming
from xla_ckpt.layouts.by_rank.arrays import RankArray, check_zero1_rows, with_stored_shape
from xla_ckpt.layouts.by_rank.copies import in_common
from xla_ckpt.layouts.by_rank.form import RankOptimizer, StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.splits import resolve
from xla_ckpt.layouts.by_rank.stage_numbers import names_of_stage, with_ties
from xla_ckpt.layouts.by_rank.state import ScannedState, Stage
from xla_ckpt.layouts.parameter_numbers import PARAM_NAMES
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.stored_shardings import state_sharding
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding, number_of_parts
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import MASTER_RULE, misfit

NAMELESS = UnknownArray(
    problem="the stored optimizer numbers its parameters, and nothing says for certain what the numbers mean",
    hint="Give the model and its optimizer, whose names and groups say so: model= and optimizer= (--like).",
)


def optimizer_of(state: ScannedState, files: Mapping[RankAt, RankOptimizer], dp: int) -> dict[str, Any] | UnknownArray:
    """The optimizer by name: states, groups and, if there are any, master weights. Unknown if nobody can name them.

    Args:
        state: The models that its parameters belong to.
        files: What the rank files of the optimizer hold.
        dp: Number of rank files along dp.

    Raises:
        CorruptCheckpointError: Rank files do not add up to whole arrays.
        IncompatibleCheckpointError: The parameters of the stored groups are not those that are wanted.
    """
    tree: dict[str, Any] = {schema.STATE: {}, schema.GROUPS: []}
    master: dict[str, Any] = {}
    for pp in sorted({at.pp for at in files}):
        stage = _StageOptimizer(state, pp, {at: content for at, content in files.items() if at.pp == pp}, dp)
        if stage.nameless:
            return NAMELESS
        stage.add_to(tree, master)
    return {**tree, schema.MASTER: master} if master else tree


class _StageOptimizer:
    """The optimizer of one pipeline stage."""

    def __init__(self, state: ScannedState, pp: int, files: Mapping[RankAt, RankOptimizer], dp: int) -> None:
        self.of = state
        self.first = files[min(files)]
        self.zero = self.first.shapes is not None
        """Whether ZeRO-1 dealt out the rows of the states over dp."""
        self.mesh = Mesh(dp=dp, ep=state.mesh.ep, tp=state.mesh.tp) if self.zero else state.mesh
        self.model = state.stages.get(pp, Stage())
        self.files = files
        self.groups = self.first.groups
        numbers = [number for group in self.groups for number in group[schema.PARAMS]]
        names = names_of_stage(
            self.groups,
            experts_apart=self.first.experts > 0,
            hints=with_ties(state.hints, len(numbers), self.model.copies, state.same),
            model=self.model.copies if state.stages else None,
            shapes={number: self.local_shape(number) for number in numbers},
            is_expert=self.is_expert,
            pp=pp if len(state.stages) > 1 else None,
        )
        self.nameless = names is None
        """Whether nobody can tell which parameters the numbers are."""
        self.names = names or {}

    def is_expert(self, name: str) -> bool:
        """Whether a parameter differs between expert-parallel ranks."""
        copies = self.model.copies.get(name)
        if copies is None:
            return False
        tensor = next(iter(copies.values()))
        if tensor.expert is not None:
            return tensor.expert
        sharding = resolve(name, tensor.shape, self.of.mesh, None, self.of.hints.hint(name))
        return isinstance(sharding, Sharding) and "ep" in sharding.axes

    def local_shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of a parameter on each rank; None if nothing of it is stored."""
        if self.first.shapes is not None:
            return tuple(map(int, self.first.shapes[number])) if number in self.first.shapes else None
        members = self.first.states.get(number, {})
        return next((v.shape for v in members.values() if isinstance(v, StoredTensor) and v.shape), None)

    def add_to(self, tree: dict[str, Any], master: dict[str, Any]) -> None:
        """Add this stage to the optimizer `tree`, and to its master weights."""
        self._add_groups(tree[schema.GROUPS])
        self._add_states(tree[schema.STATE], master)
        self._add_common_state(tree[schema.STATE])

    def _add_groups(self, merged_groups: list[dict[str, Any]]) -> None:
        """Add the groups: a group of parameters has members in several stages."""
        if merged_groups and len(merged_groups) != len(self.groups):
            raise IncompatibleCheckpointError(
                "the optimizers of the pipeline stages have different numbers of groups",
                leaf=schema.group(),
                expected=len(merged_groups),
                found=len(self.groups),
            )
        for n, group in enumerate(self.groups):
            names = [self.names[i] for i in group[schema.PARAMS] if i in self.names]
            if n < len(merged_groups):
                merged = merged_groups[n][schema.PARAMS]
                merged += [name for name in names if name not in merged]
            else:
                merged_groups.append({**_hyper(group), schema.PARAMS: names})

    def _add_states(self, states: dict[Any, Any], master: dict[str, Any]) -> None:
        """Add states and master weights of the parameters."""
        for number, name in self.names.items():
            if name in states or not self.of.hints.knows(name):
                continue  # another stage has this tied parameter, too; or this rank has no parameter of that stage
            by_rank = {at: stored.states.get(number, {}) for at, stored in self.files.items()}
            state = self._state(number, name, by_rank)
            if state:
                states[name] = state
            weights = {at: weight for at, stored in self.files.items() if (weight := stored.masters.get(number))}
            if weights:
                master[name] = self._array(schema.master(name), number, name, weights)

    def _add_common_state(self, states: dict[Any, Any]) -> None:
        """Add state that belongs to no parameter. Its keys are no numbers, and every rank has the same."""
        own = {at: stored.states for at, stored in self.files.items()}
        for name in dict.fromkeys(name for members in own.values() for name in members):
            if type(name) is int:
                continue
            if name in self.names.values():
                raise IncompatibleCheckpointError(
                    "the stored optimizer keeps state of its own under the name of a parameter",
                    leaf=schema.state(name),
                    hint="Load the tag without the model: then parameters are numbered.",
                )
            if name not in states:
                states[name] = in_common(self.of.files, own, name)

    def _state(self, number: int, name: Any, by_rank: Mapping[RankAt, Any]) -> dict[str, Any]:
        """The state of one parameter, from that of all ranks."""
        state: dict[str, Any] = {}
        with_state = {at: members for at, members in by_rank.items() if members}
        for what in dict.fromkeys(what for members in with_state.values() for what in members):
            copies = {at: m[what] for at, m in with_state.items() if isinstance(m.get(what), StoredTensor)}
            if copies and len(copies) == sum(what in members for members in with_state.values()):
                state[what] = self._array(schema.state(name, what), number, name, copies)
            else:
                state[what] = in_common(self.of.files, with_state, what)
        return state

    def _array(
        self, leaf: str, number: int, name: Any, tensors: Mapping[RankAt, StoredTensor]
    ) -> ArrayRecord | UnknownArray:
        """A state of one parameter, or its master weights, from the tensors of all ranks."""
        copies = {(at.dp, at.ep, at.tp): tensor for at, tensor in tensors.items()}
        shape = next(iter(copies.values())).shape
        local = self.local_shape(number) or shape
        expert = self.is_expert(str(name)) if self.of.mesh.ep > 1 else False
        rows = (("edp",) if expert else ("dp",)) if self.zero and shape else ()
        if self.zero and not shape:
            # A single number is the same on all ranks that share the rows of a parameter.
            copies = {at: tensor for at, tensor in copies.items() if at[0] < self.mesh.ep}
        array = RankArray(leaf=leaf, copies=copies, mesh=self.mesh, local=local, rows=rows, dealt=self.zero)
        if rows:
            check_zero1_rows(array, number_of_parts(rows, self.mesh.sizes), self.of.files.lost_rows)
        sharding = resolve(str(name), local, self.of.mesh, expert, self.of.hints.hint(str(name)))
        if isinstance(sharding, UnknownArray):
            if shape:
                # No rule is for a parameter that is a number.
                return with_stored_shape(NAMELESS if type(name) is int else sharding, copies)
            sharding = Sharding()  # nobody knows how the parameter was split, but a single number has no parts
        of_state = None if rows else self._split(leaf, sharding, local, shape)
        with naming(leaf=leaf):
            return self.of.record(array, str(name), sharding, of_state)

    def _split(self, leaf: str, sharding: Sharding, local: tuple[int, ...], shape: tuple[int, ...]) -> Sharding:
        """How a state is split of a parameter that is split like this; both shapes are those on each rank."""
        place = schema.place_of(leaf)
        rule = MASTER_RULE if place.role is schema.Role.MASTER else self.of.hints.states.rule(place.keys)
        try:
            return state_sharding(sharding, rule, local, shape)
        except ValueError as error:
            raise misfit(IncompatibleCheckpointError, error, leaf, local, shape) from error


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    options = {k: v for k, v in group.items() if k not in (schema.PARAMS, PARAM_NAMES)}
    if isinstance(options.get("betas"), list):  # some programs make lists of tuples, and torch wants a tuple
        options["betas"] = tuple(options["betas"])
    return options
