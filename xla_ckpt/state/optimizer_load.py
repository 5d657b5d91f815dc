"""Plan the load of an optimizer: the target of each stored array, and the installation at the end.

The optimizer does not change before all arrays are read; `PartLoadPlan.finish` installs the state. State that the
optimizer does not have yet is allocated like its parameter, on the device that torch would use.

If code of the program takes part (a custom `load_state_dict` or `__setstate__`, hooks), the optimizer loads its state
twice: once before anything else changes, because the code may raise, and again at the end, because some optimizers copy
the model's weights, which are not loaded before. Hooks run once (see `OptimizerInstallation`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.arrays.registry import check_has_memory, create_array_target, get_array_kind
from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import format_key
from xla_ckpt.core.tree.optimizer_schema import STEP_ON_DEVICE_OPTIONS, StateLayout, StateRule
from xla_ckpt.loading.target import Target, can_cast
from xla_ckpt.logs import get_logger
from xla_ckpt.state import rank_local_state, zero1
from xla_ckpt.state.model_state import match_stored_names, plan_dict_load
from xla_ckpt.state.optimizer import (
    ParameterNames,
    get_saved_parameters,
    index_parameters,
    is_keyed_by_name,
    list_parameters,
)
from xla_ckpt.state.optimizer_install import (
    OptimizerInstallation,
    backup_optimizer,
    has_custom_load,
    has_custom_state_dict,
    has_load_hooks,
    has_program_code,
)
from xla_ckpt.state.optimizer_match import (
    DECOUPLED_WEIGHT_DECAY,
    OptimizerMatch,
    compare_parameters,
    find_group_mismatch,
    find_kind_mismatch,
    find_state_mismatch,
    find_unsupported_options,
    get_hyperparameters,
    match_groups,
    match_optimizer,
)
from xla_ckpt.state.part_load import PartLoadPlan, StoredPart, collect_arrays, plan_arrays, plan_flexible
from xla_ckpt.state.problems import LoadProblem
from xla_ckpt.state.state_dict_load import Rollback, StateDictLoad, backup_state_dict

logger = get_logger(__name__)


def plan_optimizer_load(stored: StoredPart, optimizer: Any, names: ParameterNames, model: Any = None) -> PartLoadPlan:
    """Plan the load of an optimizer, or of a plain dict (whose layout follows the model's parameters)."""
    if isinstance(optimizer, dict):
        known = get_saved_parameters(optimizer, model, names, stored.shardings.placement)
        return plan_dict_load(replace(stored, shardings=replace(stored.shardings, parameters=known)), optimizer)
    tree = stored.build()
    loading = PartLoadPlan()
    if not is_keyed_by_name(optimizer, tree):
        return _plan_opaque_load(stored, optimizer, loading)
    if (other := find_kind_mismatch(tree, optimizer) or find_group_mismatch(tree, optimizer)) is not None:
        loading.add_problem(schema.get_group_path(), other)
        return loading
    names = match_stored_names(names, model, tree, stored.manifest.aliases)
    match, whole = match_optimizer(tree, optimizer, names), stored
    stored = rank_local_state.exclude_rank_local(stored)
    if (problem := find_state_mismatch(tree, match)) is not None:
        loading.problems.append(problem)
        return loading
    compare_parameters(match, model, loading)
    for name, (parameter, _) in zip(match.stored_names, match.parameters, strict=True):
        check_has_memory(parameter, schema.get_state_path(name))  # new state is created on the device of its parameter
    known = index_parameters(optimizer, match.stored_names, stored.shardings.placement)
    stored = replace(stored, shardings=replace(stored.shardings, parameters=known))
    groups = match_groups(tree, loading, match)
    unsupported = find_unsupported_options(tree, match, groups)
    bad = _plan_targets(stored, tree, match, groups, unsupported, loading)
    own = rank_local_state.plan_rank_local_load(whole, match, loading)
    change = _OptimizerChange(
        stored=stored,
        match=match,
        groups=groups,
        unsupported=unsupported,
        mismatched_names=bad,
        rank_local=own,
        restored_paths=frozenset(loading.targets),
        former_decoupled=[group.get(DECOUPLED_WEIGHT_DECAY) for group in match.state_holders[0].param_groups],
    )
    loading.finish = change.finish
    if _has_program_code(match):
        masters = {p for p in loading.targets if schema.parse_leaf_path(p).role is schema.LeafRole.MASTER}
        loading.state_dict_load = StateDictLoad(
            leaf=schema.OPTIMIZER,
            load=change.try_load,
            backup=change.backup,
            paths=frozenset(loading.targets) - masters if masters else None,
        )
    elif own.paths:
        loading.state_dict_load = StateDictLoad(
            leaf=schema.get_per_rank_state_path(),
            load=own.build,
            backup=lambda: lambda: None,
            paths=frozenset(own.paths),
        )
    return loading


def _list_receiving_optimizers(match: OptimizerMatch) -> list[Any]:
    """List the optimizers that load a part of the state: the wrapped ones of ZeRO-1, and ZeRO-1 wrappers with hooks."""
    if not match.is_zero1:
        return [match.optimizer]
    wrappers = [part for part in zero1.get_zero1_parts(match.optimizer) if has_load_hooks(part)]
    return [*wrappers, *match.state_holders]


def _has_program_code(match: OptimizerMatch) -> bool:
    """Return True if code of the program runs when the optimizer loads its state."""
    return any(map(has_program_code, _list_receiving_optimizers(match)))


def _plan_opaque_load(stored: StoredPart, optimizer: Any, plan: PartLoadPlan) -> PartLoadPlan:
    """Plan the load of an optimizer with a custom structure, through its own `load_state_dict` or hooks."""
    plan_arrays(stored, plan, {})
    own_code = has_custom_load(optimizer)
    _plan_installation(plan, stored, optimizer, lambda packed: OptimizerInstallation(optimizer, packed, own_code))
    return plan


def _plan_installation(
    plan: PartLoadPlan,
    stored: StoredPart,
    optimizer: Any,
    create_installation: Callable[[Any], OptimizerInstallation],
    after: Callable[[], object] = lambda: None,
) -> None:
    """Plan a trial load of a stored state before anything else changes, and its installation at the end.

    Args:
        plan: The load plan.
        stored: The stored state of the optimizer.
        optimizer: The optimizer.
        create_installation: Creates the installation of the restored state. Called once.
        after: Called after the state is installed.
    """
    made: list[OptimizerInstallation] = []

    def installation(arrays: Mapping[str, Any]) -> OptimizerInstallation:
        if not made:
            made.append(create_installation(stored.build(lambda path, _: arrays[path])))
        return made[0]

    def finish(arrays: Mapping[str, Any]) -> None:
        installation(arrays).finish()
        after()

    plan.finish = finish
    plan.state_dict_load = StateDictLoad(
        leaf=stored.prefix, load=lambda arrays: installation(arrays).try_load(), backup=lambda: _backup(optimizer)
    )


def _backup(optimizer: Any) -> Rollback:
    """Back up the state of an optimizer, and return the rollback."""
    return backup_state_dict(optimizer) if has_custom_load(optimizer) else backup_optimizer(optimizer)


def plan_load_by_position(stored: StoredPart, optimizer: Any) -> PartLoadPlan | None:
    """Plan the load of an optimizer without a model, whose stored parameters are numbered, as torch loads it.

    Returns:
        The plan, or None if the state has another structure, or a custom method loads it.
    """
    tree = stored.build()
    if has_custom_load(optimizer) or not is_keyed_by_name(optimizer, tree) or not schema.has_numbered_parameters(tree):
        return None
    loading, match = PartLoadPlan(), match_optimizer(tree, optimizer, {})
    if (other := find_kind_mismatch(tree, optimizer) or find_group_mismatch(tree, optimizer)) is not None:
        loading.add_problem(stored.prefix, other)
        return loading
    numbers = {str(number): number for number in match.stored_names}
    if (
        problem := find_state_mismatch({**tree, schema.STATE: _renumber_state(tree[schema.STATE], numbers)}, match)
    ) is not None:
        loading.add_problem(stored.prefix, problem.text)
        return loading
    plan_flexible(stored, loading, optimizer.state_dict())
    options = find_unsupported_options(tree, match, range(len(optimizer.param_groups)))

    def installation(packed: Any) -> OptimizerInstallation:
        groups = [{**group, **own} for group, own in zip(packed[schema.PARAM_GROUPS], options, strict=True)]
        state = _renumber_state(packed[schema.STATE], numbers)
        packed = {**packed, schema.STATE: state, schema.PARAM_GROUPS: groups}
        return OptimizerInstallation(optimizer, packed, uses_custom_load=False, cast_state=True)

    _plan_installation(
        loading, stored, optimizer, installation, after=lambda: _warn_unsupported_options(optimizer, options)
    )
    return loading


def _renumber_state(state: Mapping[Any, Any], numbers: Mapping[str, int]) -> dict[Any, Any]:
    """Convert parameter numbers in a state to integers: torch.distributed.checkpoint stores them as strings."""
    return {numbers.get(key, key) if isinstance(key, str) else key: value for key, value in state.items()}


# Targets of arrays.

_PARTIAL_MISMATCH = "another part of the state of this parameter does not fit, and all of it stays as it is"


def _plan_targets(
    stored: StoredPart,
    tree: Any,
    match: OptimizerMatch,
    groups: Sequence[int | None],
    unsupported: Sequence[Mapping[str, Any]],
    plan: PartLoadPlan,
) -> frozenset[Any]:
    """Plan targets for every array that the program uses. Return the names of parameters whose state does not fit."""
    now = collect_arrays(_build_current_tree(tree, match, groups), schema.OPTIMIZER)
    usual = all(type(holder).__module__.startswith("torch.optim.") for holder in match.state_holders)
    packed = any(has_custom_state_dict(holder) for holder in match.state_holders)
    options, name_of = dict(match.stored_groups), match.get_names_by_id()
    for group, own_options in zip(match.optimizer.param_groups, unsupported, strict=True):
        for name in (name_of[id(p)] for p in group[schema.PARAMS]):
            if name in options:
                options[name] = {**options[name], **own_options}
    fresh = StateTargetFactory(
        stored,
        match.tensors_by_name,
        options,
        now,
        is_torch_optimizer=usual and not packed,
        cast_state=not packed and not any(map(has_custom_load, match.state_holders)),
    )
    # Shared state is never read into the existing tensors. They may be parameters, or each other, and they may have had
    # other shapes when the state was saved.
    own = {path: value for path, value in now.items() if not fresh.is_shared_state(path)}
    wanted = PartLoadPlan(cast=stored.cast)
    if _has_program_code(match):  # it may reject the state, so the current state is not overwritten

        def new(path: str, record: ArrayRecord, kind: str) -> Target | None:
            like = stored.create_target_like(path, own[path]) if path in own else None
            if like is not None and (not packed or (like.shape, like.dtype) == (record.shape, record.dtype)):
                return like
            return fresh.create_target(path, record, kind)

        masters = {
            path: value for path, value in own.items() if schema.parse_leaf_path(path).role is schema.LeafRole.MASTER
        }
        plan_arrays(stored, wanted, masters, owned=True, create_target=new)
    else:
        plan_arrays(stored, wanted, own, owned=True, create_target=fresh.create_target)
    kept = {p: target for p, target in wanted.targets.items() if fresh.is_needed(p, has_master_weights=match.is_zero1)}
    bad = frozenset(fresh.get_parameter_name(p.leaf) for p in wanted.problems) - {None}
    # Moments must not be combined with the step number of another run: the bias correction would be wrong.
    mixed = [
        p
        for p in kept
        if fresh.get_parameter_name(p) in bad and schema.parse_leaf_path(p).role is schema.LeafRole.STATE
    ]
    plan.targets = {p: target for p, target in kept.items() if p not in mixed}
    plan.problems += [p for p in wanted.problems if fresh.is_needed(p.leaf, has_master_weights=match.is_zero1)]
    plan.problems += [LoadProblem(p, _PARTIAL_MISMATCH, is_ignorable=True) for p in mixed]
    return bad


def _build_current_tree(stored: Any, match: OptimizerMatch, groups: Sequence[int | None]) -> dict[str, Any]:
    """Build a tree of the optimizer's current state in the structure of the stored one."""
    state, stored_state = match.current_state, stored[schema.STATE]
    owned = {name: state[p] for name, p in match.tensors_by_name.items() if p in state and name in stored_state}
    common = {k: state[k] for k in stored_state if k not in match.stored_groups and k in state}
    tree: dict[str, Any] = {
        schema.STATE: {**owned, **common},
        schema.PARAM_GROUPS: _get_current_groups(stored, groups, match.optimizer),
    }
    if match.is_zero1:
        tree[schema.MASTER] = {
            n: match.tensors_by_name[n] for n in stored.get(schema.MASTER, {}) if n in match.tensors_by_name
        }
    return tree


def _get_current_groups(stored: Any, groups: Sequence[int | None], optimizer: Any) -> list[Any]:
    """Return the current hyper-parameters, in the stored order of groups."""
    stored_groups = stored[schema.PARAM_GROUPS]
    now: list[Any] = [{} for _ in stored_groups]
    for group, source in zip(optimizer.param_groups, groups, strict=True):
        if source is not None and not now[source]:
            now[source] = {k: v for k, v in get_hyperparameters(group).items() if k in stored_groups[source]}
    return now


# Installation, after all arrays are read.


@dataclass(slots=True, kw_only=True)
class _OptimizerChange:
    """The changes of a load to an optimizer: `finish`, preceded by `try_load` if `_has_program_code`."""

    stored: StoredPart
    """The state that all ranks share."""

    match: OptimizerMatch
    groups: Sequence[int | None]
    """The stored group of each of the optimizer's groups."""

    unsupported: Sequence[Mapping[str, Any]]
    """The current options that each group keeps."""

    mismatched_names: frozenset[Any]
    """Names of parameters whose state stays unchanged."""

    rank_local: rank_local_state.RankLocalState
    """The rank-local states."""

    restored_paths: frozenset[str]
    """Leaf paths of the restored arrays."""

    former_decoupled: Sequence[Any]
    """By group, the previous value of `decoupled_weight_decay` (AdamW)."""

    _installations: list[OptimizerInstallation] = field(default_factory=list, init=False)

    def backup(self) -> Rollback:
        """Back up the optimizer, and return the rollback."""
        wrappers = [self.match.optimizer, *zero1.get_zero1_parts(self.match.optimizer)] if self.match.is_zero1 else []
        put_back = [backup_optimizer(wrapper) for wrapper in wrappers]
        put_back += map(_backup, self.match.state_holders)
        return lambda: [put() for put in put_back]

    def try_load(self, arrays: Mapping[str, Any]) -> None:
        """Install the state before anything else of the program is changed.

        Raises:
            Exception: If code of the program rejects it.
        """
        for installation in self._get_installations(arrays):
            installation.try_load()

    def finish(self, arrays: Mapping[str, Any]) -> None:
        """Install the state."""
        match = self.match
        for installation in self._get_installations(arrays):
            installation.finish()
        self._warn_changed_options()
        if match.is_zero1 and not all(
            schema.get_master_path(name) in self.restored_paths for name in match.stored_names
        ):
            # Without stored master weights, the shards are copied from the parameters.
            zero1.refresh_shards(match.optimizer)

    def _get_installations(self, arrays: Mapping[str, Any]) -> list[OptimizerInstallation]:
        """Return the installation for each optimizer that loads a part of the state, the same objects in both calls."""
        if self._installations:
            return self._installations
        match = self.match
        tree = self.stored.build(lambda path, _: arrays.get(path))
        self.rank_local.insert_into(tree[schema.STATE], arrays)
        state = _build_new_state(tree, match, self.mismatched_names)
        options = [
            {**({} if source is None else get_hyperparameters(tree[schema.PARAM_GROUPS][source])), **own_options}
            for source, own_options in zip(self.groups, self.unsupported, strict=True)
        ]
        if match.is_zero1:
            others = {}
            # A ZeRO-1 wrapper has its own groups.
            for wrapper in (match.optimizer, *zero1.get_zero1_parts(match.optimizer)):
                for group, new in zip(wrapper.param_groups, options, strict=True):
                    group.update(new)
        else:
            others = {k: v for k, v in tree.items() if k not in schema.OPTIMIZER_MEMBERS}
        self._installations = [
            OptimizerInstallation(
                optimizer,
                {**others, **_pack_state(optimizer, state, options)},
                uses_custom_load=has_custom_load(optimizer) and not zero1.is_zero1(optimizer),
            )
            for optimizer in _list_receiving_optimizers(match)
        ]
        return self._installations

    def _warn_changed_options(self) -> None:
        """Log warnings for options that differ from the program's, or from the stored ones."""
        optimizer = self.match.state_holders[0]  # the groups of a ZeRO-1 optimizer itself lack some options
        for group, old in zip(optimizer.param_groups, self.former_decoupled, strict=True):
            if old is not None and (new := group.get(DECOUPLED_WEIGHT_DECAY)) != old:
                logger.warning(
                    "the stored state is that of torch's %s: this %s decays weights as %s does from now on (%s=%s), "
                    "as after its load_state_dict",
                    *(
                        (kind := "AdamW" if new else "Adam"),
                        type(optimizer).__name__,
                        kind,
                        DECOUPLED_WEIGHT_DECAY,
                        new,
                    ),
                )
                break
        _warn_unsupported_options(optimizer, self.unsupported)


def _warn_unsupported_options(optimizer: Any, unsupported: Sequence[Mapping[str, Any]]) -> None:
    """Log warnings for current options that are kept instead of the stored ones."""
    for option, own in {option: own for own_options in unsupported for option, own in own_options.items()}.items():
        logger.warning(
            "the stored optimizer has %s=True, with which the next step of torch's %s would raise on these devices: "
            "the optimizer keeps its own %s=%s. To train without this warning, make the optimizer without %s=True "
            "before the save",
            *(option, type(optimizer).__name__, option, own, option),
        )


def _pack_state(optimizer: Any, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state in the structure of the optimizer's own `state_dict`, with numbers for parameters.

    Args:
        optimizer: The optimizer.
        state: State by tensor, including tensors of other optimizers, and shared state by its key.
        options: The new options of each group.
    """
    number = {id(p): i for i, (p, _) in enumerate(list_parameters(optimizer))}
    return {
        schema.STATE: {
            number.get(id(key), key): value
            for key, value in state.items()
            if id(key) in number or not is_torch_tensor(key)
        },
        schema.PARAM_GROUPS: [
            {**group, **new, schema.PARAMS: [number[id(p)] for p in group[schema.PARAMS]]}
            for group, new in zip(optimizer.param_groups, options, strict=True)
        ],
    }


def _build_new_state(tree: Any, match: OptimizerMatch, mismatched_names: frozenset[Any]) -> dict[Any, Any]:
    """Build the new state of the optimizer: by tensor for parameters, and shared state by its key."""
    before, state = match.current_state, collections.defaultdict[Any, Any](dict)
    for name, parameter in match.tensors_by_name.items():
        if name in mismatched_names or name not in match.stored_groups:
            if parameter in before:  # not strict: state that does not fit is kept
                state[parameter] = before[parameter]
        elif name in tree[schema.STATE]:
            state[parameter] = tree[schema.STATE][name]
    state.update({k: v for k, v in tree[schema.STATE].items() if k not in match.stored_groups})
    return state


class StateTargetFactory:
    """A factory of targets for new optimizer state: sharded like its parameter, on the device that torch would use."""

    def __init__(
        self,
        stored: StoredPart,
        tensors_by_name: Mapping[Any, Any],
        group_options: Mapping[Any, Any],
        current_arrays: Mapping[str, Any],
        *,
        is_torch_optimizer: bool,
        cast_state: bool,
    ) -> None:
        """Initialize the factory.

        Args:
            stored: The stored part to load.
            tensors_by_name: Name of each parameter -> the tensor that its state is keyed by.
            group_options: Name of each stored parameter -> the new options of its group.
            current_arrays: The arrays of the current state, by leaf path.
            is_torch_optimizer: True for a torch.optim optimizer, whose states have standard shapes.
            cast_state: True if state is cast to the dtype of its parameter; otherwise code of the program decides.
        """
        self._is_torch_optimizer = is_torch_optimizer
        self._cast_state = cast_state
        self._stored = stored
        self._current_arrays = current_arrays
        self._shardings = stored.shardings
        self._by_component = {format_key(n): (n, p) for n, p in tensors_by_name.items()}
        self._group_options = group_options
        self._owners = {format_key(name) for name in group_options}
        self._device = next((p.device for p in tensors_by_name.values()), None)

    def is_shared_state(self, path: str) -> bool:
        """Return True if a path is state that belongs to no parameter of the stored optimizer."""
        place = schema.parse_leaf_path(path)
        return place.role is schema.LeafRole.STATE and place.owner not in self._owners

    def get_parameter_name(self, path: str) -> Any:
        """Return the name of the parameter that a state belongs to; None for anything else."""
        if self.is_shared_state(path):
            return None
        return self._find_parameter(schema.parse_leaf_path(path))[0]

    def _find_parameter(self, place: schema.LeafPath) -> tuple[Any, Any]:
        """Return (name, tensor) of the parameter that a state or master weight belongs to; (None, None) for anything
        else.
        """
        if place.owner is None or place.role not in (schema.LeafRole.STATE, schema.LeafRole.MASTER):
            return None, None
        return self._by_component.get(place.owner, (None, None))

    def is_needed(self, path: str, *, has_master_weights: bool) -> bool:
        """Return True if the program uses this array."""
        place = schema.parse_leaf_path(path)
        if place.role is schema.LeafRole.MASTER and not has_master_weights:
            return False
        return schema.get_owner(path) is None or place.owner in self._by_component or self.is_shared_state(path)

    def create_target(self, path: str, record: ArrayRecord, kind: str) -> Target | None:
        """Create a target for one array of the state; None for an array that is not part of it."""
        if self.is_shared_state(path):
            return self._create_shared_target(path, record, kind)
        place = schema.parse_leaf_path(path)
        name, parameter = self._find_parameter(place)
        known = self._shardings.find_parameter(path)
        if parameter is None or known is None:
            return None
        group = self._group_options.get(name, {})
        rule, full = known.get_rule(path), self._shardings.locate_parameter(known).shape
        dtype = self._choose_dtype(path, record, rule, parameter)
        if (
            rule.layout is StateLayout.ELEMENTWISE
            and record.shape != full
            and self._is_saved_elementwise(path, record, rule)
        ):
            # The caller then finds that it does not fit.
            return create_array_target(dtype, create_unsharded(full), kind)
        on_device = not rule.declared and any(group.get(option) for option in STEP_ON_DEVICE_OPTIONS)
        if rule.layout is StateLayout.ON_HOST and not on_device:
            return create_array_target(record.dtype, create_unsharded(record.shape), kind)
        if not self._is_saved_whole(path, record, rule):
            like = self._shardings.create_state_target(path, record, known, dtype)
            if like is not None:
                return like
        return create_array_target(dtype, create_unsharded(record.shape), kind, parameter.device)

    def _choose_dtype(self, path: str, record: ArrayRecord, rule: StateRule, parameter: Any) -> DType:
        """Choose the dtype of a state: the dtype of its parameter, as in torch's `load_state_dict`, if both were equal
        when saved.

        State of a higher precision than its parameters keeps its dtype. The call must request a cast for state of
        master weights whose parameters have none, and for state of torch's own optimizers stored without parameters.
        """
        if not self._cast_state or rule.layout in (StateLayout.ON_HOST, StateLayout.REPLICATED, StateLayout.PER_RANK):
            return record.dtype
        master = self._stored.manifest.arrays.get(
            schema.get_master_path(self._find_parameter(schema.parse_leaf_path(path))[0])
        )
        weight = self._find_weight_record(path)
        if master is None and weight is not None:
            alike = weight.dtype == record.dtype
        else:
            alike = self._stored.cast and (self._is_torch_optimizer if master is None else master.dtype == record.dtype)
        adapter = self._shardings.adapters.find(parameter)
        if not alike or adapter is None:
            return record.dtype
        own = adapter.get_dtype(parameter, path)
        return own if can_cast(record.dtype, own) else record.dtype

    def _find_weight_record(self, path: str) -> ArrayRecord | None:
        """Return the record of the stored parameter that a state belongs to; None if only the optimizer is stored."""
        manifest, leaf = self._stored.manifest, schema.get_parameter_path(path) or ""
        return manifest.arrays.get(manifest.aliases.get(leaf, leaf))

    def _is_saved_elementwise(self, path: str, record: ArrayRecord, rule: StateRule) -> bool:
        """Return True if a state had the shape of its parameter when it was saved.

        Low-rank optimizers store factors under torch's usual keys, and others one number per parameter. The stored
        shapes decide, because the program's parameter does not determine them.
        """
        if self._is_torch_optimizer or rule.declared or schema.parse_leaf_path(path).role is schema.LeafRole.MASTER:
            return True
        weight = self._find_weight_record(path)
        if weight is not None:
            return bool(weight.shape == record.shape)
        return len(record.shape) == int(self._find_parameter(schema.parse_leaf_path(path))[1].ndim)

    def _is_saved_whole(self, path: str, record: ArrayRecord, rule: StateRule) -> bool:
        """Return True if ranks with a shard of a parameter each stored all of its state, and its layout is not
        declared.

        The shape could also be a shard's: a factor with as many rows as the parameter, and one column.
        """
        weight = self._find_weight_record(path)
        by_shape = rule.layout is StateLayout.BY_SHAPE or (rule.layout is StateLayout.ELEMENTWISE and not rule.declared)
        if not by_shape or weight is None or weight.shape == record.shape:
            return False
        own = (*(record.spec or ()), *(None,) * len(record.shape))
        split = [d for d, axes in enumerate(weight.spec or ()) if axes is not None and d < len(record.shape)]
        return any(own[d] is None and record.shape[d] == weight.shape[d] for d in split)

    def _create_shared_target(self, path: str, record: ArrayRecord, kind: str) -> Target:
        """Create a target like the current array if that fits, otherwise an unsharded one on the parameters' device."""
        value = self._current_arrays.get(path)
        if get_array_kind(value) == kind and PartLoadPlan().add_target(
            path, like := self._stored.create_target_like(path, value), record.metadata
        ):
            return like
        device = value.device if is_torch_tensor(value) else self._device
        return create_array_target(record.dtype, create_unsharded(record.shape), kind, device)
