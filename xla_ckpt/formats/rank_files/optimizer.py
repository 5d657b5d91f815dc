"""Merge the optimizers in rank files into one tree, and map parameter numbers to names.

Files number the parameters of an optimizer. The names come from the program's own optimizer: its parameters are in the
same order, without those that a pipeline stage does not have. Group sizes and shapes are compared to verify the
mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.stored_sharding import derive_state_sharding
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding, count_parts
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import MASTER_RULE, create_mismatch_error
from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.core.tree.state_dict import infer_parameter_names
from xla_ckpt.errors import IncompatibleCheckpointError, annotate_errors
from xla_ckpt.formats.numbered_parameters import PARAM_NAMES_KEY, map_numbers_to_names, read_group_names
from xla_ckpt.formats.rank_files.arrays import StoredArray, add_stored_shape, check_zero1_rows, merge_common_value
from xla_ckpt.formats.rank_files.file_names import RankCoords
from xla_ckpt.formats.rank_files.layout import RankOptimizer, StoredTensor
from xla_ckpt.formats.rank_files.model import RankStateBuilder, StageModel
from xla_ckpt.formats.rank_files.split_inference import resolve_sharding


def name_stage_parameters(
    groups: Sequence[Mapping[str, Any]],
    *,
    separate_experts: bool,
    hints: LoadHints,
    model: Mapping[str, Mapping[Any, StoredTensor]] | None,
    shapes: Mapping[int, tuple[int, ...] | None],
    is_expert: Callable[[str], bool],
    pp: int | None = None,
) -> dict[int, Any] | None:
    """Map the parameter numbers of one pipeline stage's optimizer to names; None if the names are unknown.

    Numbers are consecutive through the groups. The parameters of the program's optimizer are in the same order, without
    those that this stage does not have. Group sizes and parameter shapes are compared to verify the mapping.

    Args:
        separate_experts: True if the last groups contain only experts.
        model: The stage's own model, by name; None if no model is stored.
        shapes: Local shape of each number, if known.
        pp: The pipeline stage, if there are several.

    Raises:
        IncompatibleCheckpointError: Numbers or shapes differ.
    """
    if (names := read_group_names(groups)) is not None:
        return names
    stored = [g["params"] for g in groups]
    if hints.parameter_groups is None and hints.saved_parameters:
        local_shapes = {name: next(iter(copies.values())).shape for name, copies in (model or {}).items()}
        return infer_parameter_names(
            stored, shapes, {name: local_shapes[name] for name in hints.saved_parameters if name in local_shapes}
        )
    if hints.parameter_groups is None:
        return map_numbers_to_names(stored, stored)  # without names from an optimizer, a number is its own name
    of_stage = [_select_stage_names(names, hints, model) for names in hints.parameter_groups]
    if separate_experts:
        others = [[name for name in group if not is_expert(name)] for group in of_stage]
        experts = [[name for name in group if is_expert(name)] for group in of_stage]
        of_stage = others + experts
    if separate_experts or len(of_stage) != len(stored):
        # A group may be empty in this stage, and groups without parameters are not always stored.
        of_stage = [names for names in of_stage if names]
        stored = [numbers for numbers in stored if numbers]
    missing = (
        []
        if model is None
        else [n for n in chain(*hints.parameter_groups) if _find_present_name(n, hints, model) not in model]
    )
    _check_group_sizes([len(numbers) for numbers in stored], [len(names) for names in of_stage], missing, pp)
    by_number = map_numbers_to_names(stored, of_stage)
    for number, name in by_number.items():
        copies = (model or {}).get(_find_present_name(name, hints, model))
        if copies is not None:
            whole = hints.get_hint(name).shape
            _check_shape(number, name, shapes.get(number), next(iter(copies.values())).shape, whole)
    return by_number


def merge_tied_names(
    hints: LoadHints,
    count: int,
    model: Mapping[str, Mapping[Any, StoredTensor]],
    is_same: Callable[[Mapping[Any, StoredTensor], Mapping[Any, StoredTensor]], bool],
) -> LoadHints:
    """Return hints with one name for each weight that is one parameter of the stored optimizer.

    Stages that share a weight may use different names for it, without knowing the other name. In the files of one stage
    such a weight is one parameter, and the model contains it under all of its names. Therefore equal matrices are
    treated as one parameter if this gives the stored number of parameters. Vectors are not compared, because many are
    equal: biases are initially zero.

    Args:
        count: Number of the stored parameters of this stage.
        is_same: Function that returns True if the tensors of two names are stored and are equal on all ranks.
    """
    groups = hints.parameter_groups or ()
    stored = [name for names in groups for name in names if name in model]
    if hints.mesh.pp == 1 or len(stored) <= count:
        return hints
    matrices = [name for name in stored if len(next(iter(model[name].values())).shape) > 1]
    first: dict[str, str] = {}
    for i, name in enumerate(matrices):
        equal = (earlier for earlier in matrices[:i] if is_same(model[earlier], model[name]))
        if (earlier := next(equal, None)) is not None:
            first[name] = earlier
    if len(stored) - len(first) != count:
        return hints
    # The state is requested under the name that this rank uses.
    called = {earlier: name for name, earlier in first.items() if name in hints.arrays and earlier not in hints.arrays}
    return replace(hints, parameter_groups=[[called.get(n, n) for n in names if n not in first] for names in groups])


def _check_group_sizes(counts: list[int], present: list[int], missing: Sequence[str], pp: int | None) -> None:
    """Compare the sizes of the groups.

    Args:
        missing: The program's parameters that the stored model does not contain.
        pp: The pipeline stage, if there are several.

    Raises:
        IncompatibleCheckpointError: The sizes differ.
    """
    if counts != present:
        named = [name for name in missing if not name.startswith("#")]  # without a model, names are positions
        others = f". It has no {format_leaves(named)}" if named and pp is None else ""  # another stage may contain them
        whose = "the stored model" if pp is None else f"the stored model of pipeline stage {pp}"
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters, and its groups are not those of this optimizer",
            leaf=schema.get_group_path(),
            expected=f"groups of {counts} parameters, as stored",
            found=f"groups of {present}, counting parameters whose names {whose} has{others}",
            hint="Give the model, as it was in training, and make the optimizer with the same groups in their order.",
        )


def _check_shape(
    number: int, name: Any, shape: tuple[int, ...] | None, local: tuple[int, ...], whole: tuple[int, ...] | None
) -> None:
    """Compare the stored shape of a number with `local`, the shape of the model's tensor of this name.

    A program may have gathered arrays of all ranks in each model file (adapters, for example), but not their states.

    Raises:
        IncompatibleCheckpointError: The shapes differ.
    """
    joined = local == whole and shape is not None and _is_shard_of(shape, local)
    if shape is not None and shape != local and not joined:
        raise IncompatibleCheckpointError(
            f"number {number} of the stored optimizer would be this parameter, and its shape is another",
            leaf=schema.get_state_path(name),
            expected=list(local),
            found=list(shape),
            hint="Make the optimizer with its parameters in the same order as in training.",
        )


def _is_shard_of(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return True if a tensor of one shape can be a shard of a tensor of the other."""
    return len(part) == len(whole) and all(n and not of % n for n, of in zip(part, whole, strict=True))


def _select_stage_names(names: Sequence[str], hints: LoadHints, model: Mapping[str, Any] | None) -> list[str]:
    """Return the names of a group that are in a stage, in the order of the stage's own optimizer."""
    if model is None or any(name.startswith("#") for name in names):
        return list(names)
    called = {name: other for name in names if (other := _find_present_name(name, hints, model)) in model}
    return order_stage_parameters(names, called, hints.model_order)


def _find_present_name(name: str, hints: LoadHints, model: Mapping[str, Any] | None) -> str:
    """Return the name of a parameter in a stage's model; its first name if the model does not contain it."""
    return next((other for other in (name, *hints.aliases.get(name, ())) if other in (model or ())), name)


def order_stage_parameters(names: Sequence[str], stage_names: Mapping[str, str], order: Mapping[str, int]) -> list[str]:
    """Return the parameters of a group that are in a pipeline stage, in the order of the stage's own optimizer.

    Args:
        stage_names: Name of each parameter in the stage, which may be another one for a tied parameter.
        order: Position of each name in the model.

    >>> order = {"embed": 0, "b": 1, "c": 2, "head": 3}
    >>> order_stage_parameters(["embed", "b", "c"], {"embed": "head", "c": "c"}, order)
    ['c', 'embed']
    """
    of_stage = [name for name in names if stage_names.get(name) == name]
    for name in names:
        other = stage_names.get(name, name)
        if other == name:
            continue
        # The optimizer of the stage has this parameter at the position of its other name.
        place = order.get(other, len(order))
        at = next((i for i, n in enumerate(of_stage) if order.get(n, -1) > place), len(of_stage))
        of_stage.insert(at, name)
    return of_stage


UNNAMED_OPTIMIZER = UnreadableArray(
    problem="the stored optimizer numbers its parameters, and nothing says for certain what the numbers mean",
    hint="Give the model and its optimizer, whose names and groups say so: model= and optimizer= (--like).",
)


def build_optimizer(
    state: RankStateBuilder, files: Mapping[RankCoords, RankOptimizer], dp: int
) -> dict[str, Any] | UnreadableArray:
    """Build the optimizer by name: states, groups and master weights, if there are any.

    Args:
        state: The models that its parameters belong to.
        files: Contents of the optimizer's rank files.
        dp: Number of rank files along dp.

    Returns:
        The optimizer; an `UnreadableArray` if the parameter names are unknown.

    Raises:
        CorruptCheckpointError: Rank files do not add up to whole arrays.
        IncompatibleCheckpointError: The parameters of the stored groups are not the requested ones.
    """
    tree: dict[str, Any] = {schema.STATE: {}, schema.PARAM_GROUPS: []}
    master: dict[str, Any] = {}
    for pp in sorted({at.pp for at in files}):
        stage = _StageOptimizer(state, pp, {at: content for at, content in files.items() if at.pp == pp}, dp)
        if stage.is_unnamed:
            return UNNAMED_OPTIMIZER
        stage.add_to(tree, master)
    return {**tree, schema.MASTER: master} if master else tree


class _StageOptimizer:
    """The optimizer of one pipeline stage."""

    def __init__(self, state: RankStateBuilder, pp: int, files: Mapping[RankCoords, RankOptimizer], dp: int) -> None:
        self.builder = state
        self.first = files[min(files)]
        self.is_zero1 = self.first.local_shapes is not None
        """True if ZeRO-1 sharded the rows of the states over dp."""
        self.mesh = Mesh(dp=dp, ep=state.mesh.ep, tp=state.mesh.tp) if self.is_zero1 else state.mesh
        self.model = state.stages.get(pp, StageModel())
        self.files = files
        self.groups = self.first.groups
        numbers = [number for group in self.groups for number in group[schema.PARAMS]]
        names = name_stage_parameters(
            self.groups,
            separate_experts=self.first.expert_group_count > 0,
            hints=merge_tied_names(state.hints, len(numbers), self.model.copies, state.is_same),
            model=self.model.copies if state.stages else None,
            shapes={number: self.get_local_shape(number) for number in numbers},
            is_expert=self.is_expert,
            pp=pp if len(state.stages) > 1 else None,
        )
        self.is_unnamed = names is None
        """True if the parameter numbers cannot be mapped to names."""
        self.names = names or {}

    def is_expert(self, name: str) -> bool:
        """Return True if a parameter differs between expert-parallel ranks."""
        copies = self.model.copies.get(name)
        if copies is None:
            return False
        tensor = next(iter(copies.values()))
        if tensor.is_expert is not None:
            return tensor.is_expert
        sharding = resolve_sharding(name, tensor.shape, self.builder.mesh, None, self.builder.hints.get_hint(name))
        return isinstance(sharding, Sharding) and "ep" in sharding.axes

    def get_local_shape(self, number: int) -> tuple[int, ...] | None:
        """Return the local shape of a parameter; None if it has no stored state."""
        if self.first.local_shapes is not None:
            return tuple(map(int, self.first.local_shapes[number])) if number in self.first.local_shapes else None
        members = self.first.states.get(number, {})
        return next((v.shape for v in members.values() if isinstance(v, StoredTensor) and v.shape), None)

    def add_to(self, tree: dict[str, Any], master: dict[str, Any]) -> None:
        """Add this stage to the optimizer `tree`, and to its master weights."""
        self._add_groups(tree[schema.PARAM_GROUPS])
        self._add_states(tree[schema.STATE], master)
        self._add_common_state(tree[schema.STATE])

    def _add_groups(self, merged_groups: list[dict[str, Any]]) -> None:
        """Add the groups. A group may have parameters in several stages.

        Raises:
            IncompatibleCheckpointError: Stages have different numbers of groups.
        """
        if merged_groups and len(merged_groups) != len(self.groups):
            raise IncompatibleCheckpointError(
                "the optimizers of the pipeline stages have different numbers of groups",
                leaf=schema.get_group_path(),
                expected=len(merged_groups),
                found=len(self.groups),
            )
        for n, group in enumerate(self.groups):
            names = [self.names[i] for i in group[schema.PARAMS] if i in self.names]
            if n < len(merged_groups):
                merged = merged_groups[n][schema.PARAMS]
                merged += [name for name in names if name not in merged]
            else:
                merged_groups.append({**_get_hyperparameters(group), schema.PARAMS: names})

    def _add_states(self, states: dict[Any, Any], master: dict[str, Any]) -> None:
        """Add the states and master weights of the parameters."""
        for number, name in self.names.items():
            if name in states or not self.builder.hints.can_want_state(name):
                continue  # another stage also contains this tied parameter, or this rank has no parameter of that stage
            by_rank = {at: stored.states.get(number, {}) for at, stored in self.files.items()}
            state = self._merge_state(number, name, by_rank)
            if state:
                states[name] = state
            weights = {at: weight for at, stored in self.files.items() if (weight := stored.masters.get(number))}
            if weights:
                master[name] = self._merge_array(schema.get_master_path(name), number, name, weights)

    def _add_common_state(self, states: dict[Any, Any]) -> None:
        """Add state that belongs to no parameter. Its keys are not numbers, and it is equal on all ranks.

        Raises:
            IncompatibleCheckpointError: Such state is stored under the name of a parameter.
        """
        own = {at: stored.states for at, stored in self.files.items()}
        for name in dict.fromkeys(name for members in own.values() for name in members):
            if type(name) is int:
                continue
            if name in self.names.values():
                raise IncompatibleCheckpointError(
                    "the stored optimizer keeps state of its own under the name of a parameter",
                    leaf=schema.get_state_path(name),
                    hint="Load the tag without the model: then parameters are numbered.",
                )
            if name not in states:
                states[name] = merge_common_value(self.builder.files, own, name)

    def _merge_state(self, number: int, name: Any, by_rank: Mapping[RankCoords, Any]) -> dict[str, Any]:
        """Merge the state of one parameter from all ranks."""
        state: dict[str, Any] = {}
        with_state = {at: members for at, members in by_rank.items() if members}
        for what in dict.fromkeys(what for members in with_state.values() for what in members):
            copies = {at: m[what] for at, m in with_state.items() if isinstance(m.get(what), StoredTensor)}
            if copies and len(copies) == sum(what in members for members in with_state.values()):
                state[what] = self._merge_array(schema.get_state_path(name, what), number, name, copies)
            else:
                state[what] = merge_common_value(self.builder.files, with_state, what)
        return state

    def _merge_array(
        self, leaf: str, number: int, name: Any, tensors: Mapping[RankCoords, StoredTensor]
    ) -> ArrayRecord | UnreadableArray:
        """Merge one state of a parameter, or its master weights, from the tensors of all ranks."""
        copies = {(at.dp, at.ep, at.tp): tensor for at, tensor in tensors.items()}
        shape = next(iter(copies.values())).shape
        local = self.get_local_shape(number) or shape
        expert = self.is_expert(str(name)) if self.builder.mesh.ep > 1 else False
        rows = (("edp",) if expert else ("dp",)) if self.is_zero1 and shape else ()
        if self.is_zero1 and not shape:
            # A scalar is equal on all ranks that share the rows of a parameter.
            copies = {at: tensor for at, tensor in copies.items() if at[0] < self.mesh.ep}
        array = StoredArray(
            leaf=leaf, copies=copies, mesh=self.mesh, local_shape=local, row_axes=rows, per_dp_files=self.is_zero1
        )
        if rows:
            check_zero1_rows(array, count_parts(rows, self.mesh.sizes), self.builder.files.missing_rows_hint)
        sharding = resolve_sharding(str(name), local, self.builder.mesh, expert, self.builder.hints.get_hint(str(name)))
        if isinstance(sharding, UnreadableArray):
            if shape:
                # A rule cannot match a parameter that is a number.
                return add_stored_shape(UNNAMED_OPTIMIZER if type(name) is int else sharding, copies)
            sharding = Sharding()  # the sharding of the parameter is unknown, but a scalar has no shards
        of_state = None if rows else self._resolve_state_sharding(leaf, sharding, local, shape)
        with annotate_errors(leaf=leaf):
            return self.builder.build_record(array, str(name), sharding, of_state)

    def _resolve_state_sharding(
        self, leaf: str, sharding: Sharding, local: tuple[int, ...], shape: tuple[int, ...]
    ) -> Sharding:
        """Derive the sharding of a state from the sharding of its parameter; both shapes are local.

        Raises:
            IncompatibleCheckpointError: The shape of the state does not fit.
        """
        place = schema.parse_leaf_path(leaf)
        rule = (
            MASTER_RULE
            if place.role is schema.LeafRole.MASTER
            else self.builder.hints.optimizer_schema.rule(place.keys)
        )
        try:
            return derive_state_sharding(sharding, rule, local, shape)
        except ValueError as error:
            raise create_mismatch_error(IncompatibleCheckpointError, error, leaf, local, shape) from error


def _get_hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group."""
    options = {k: v for k, v in group.items() if k not in (schema.PARAMS, PARAM_NAMES_KEY)}
    if isinstance(options.get("betas"), list):  # some programs store lists instead of the tuples that torch expects
        options["betas"] = tuple(options["betas"])
    return options
