"""Objects that callers save and load: a training run's model, optimizer, scheduler and extras, or any pytree.

`TrainingObjects`, `PyTree` and `Template` hold the arguments of a call. Each captures its state for a save (`capture`)
or plans how a stored state is loaded into it (`plan_load`), and provides hints for checkpoints whose files do not
record every shape, sharding or name (`get_hints`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from xla_ckpt.arrays.registry import is_array_spec, is_meta
from xla_ckpt.arrays.torch_objects import is_lazy
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.sharding.sharding import Sharding, find_sharding
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import get_children, get_part, is_array, is_object, iterate_leaf_parts
from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.keywords import suggest_leaf
from xla_ckpt.state import (
    argument_checks,
    model_state,
    optimizer_dict,
    optimizer_load,
    per_rank,
    rank_local_state,
    stateful,
    zero1,
)
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.base_model import exclude_base, exclude_stored_base
from xla_ckpt.state.load_plan import LoadPlan
from xla_ckpt.state.model_state import get_tied_names
from xla_ckpt.state.optimizer import get_optimizer_schema
from xla_ckpt.state.optimizer_dict import OptimizerDict, unwrap_optimizers
from xla_ckpt.state.part_load import (
    PartLoadPlan,
    StoredPart,
    plan_arrays,
    plan_as_saved,
    plan_like,
    report_missing_part,
)
from xla_ckpt.state.shardings import OptimizerParameter, StateShardings, get_declared_sharding, get_unpadded_shape
from xla_ckpt.state.wrappers import get_modules, is_model_view, is_names_only, unwrap_model


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """A state tree with metadata about its members."""

    tree: Any
    model: Any = None
    """Module whose layers declare how their parameters are sharded."""

    optimizer: Any = None
    """The unwrapped optimizer."""

    parameters: Mapping[str, OptimizerParameter] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    """Leaf paths of buffers, which may differ between ranks."""

    rank_local_prefixes: tuple[str, ...] = ()
    """Leaf path prefixes of rank-local state."""

    shared_parts: tuple[str, ...] = ("",)
    """Paths whose plain values must be equal on all ranks."""

    is_keyed_by_name: bool = False
    """True if the optimizer state is keyed by parameter name."""

    zero1_axes: tuple[str, ...] | None = None
    """Mesh axes over which a ZeRO-1 optimizer shards rows; None for other optimizers."""

    base_parameters: Mapping[str, Any] | None = None
    """The excluded base parameters, by name; None if none are excluded."""

    expert_parameters: frozenset[str] | None = None
    """Names of the optimizer's expert parameters; None if it has no separate part for experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObjects:
    """The objects of a training run, all of them optional. Models and optimizers are unwrapped."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    user_content: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    """Patterns of the model parameters to save (`base_model.exclude_base`); empty for all."""

    def __post_init__(self) -> None:
        argument_checks.check_extras(self.extras)

    @property
    def object_names(self) -> str:
        """Names of the objects, as text. All ranks have the same, except for the user content, which rank 0 stores."""
        usual = {schema.MODEL: self.model, schema.OPTIMIZER: self.optimizer, schema.SCHEDULER: self.scheduler}
        names = [name for name, value in usual.items() if value is not None]
        names += [f"only {', '.join(self.only)}"] if self.only else []
        return ", ".join([*names, *map(schema.get_extras_path, sorted(map(str, self.extras)))])

    def get_unused_state_warning(self, skeleton: Any) -> str | None:
        """Return a warning if only one of a stored optimizer and scheduler is loaded, otherwise None."""
        stored = skeleton if isinstance(skeleton, Mapping) else {}
        if stored.get(schema.SCHEDULER) and self.optimizer is not None and self.scheduler is None:
            return (
                "an optimizer is loaded, and the scheduler of the tag is not. The learning rate is the stored one, and "
                "a scheduler of the program begins anew: give scheduler= to go on with the old one"
            )
        if stored.get(schema.OPTIMIZER) and self.scheduler is not None and self.optimizer is None:
            return "a scheduler is loaded, and the optimizer of the tag is not, which begins anew: give optimizer=, too"
        return None

    def capture(self, placement: RankInfo) -> CapturedState:
        """Capture the state on this rank.

        Raises:
            UsageError: If there is nothing to save, or an argument has the wrong type.
            UnsupportedStateError: If an object cannot be stored.
        """
        objects = [self.model, self.optimizer, self.scheduler, self.user_content, *self.extras.values()]
        argument_checks.check_not_empty(objects, placement)
        model, optimizer = unwrap_model(self.model), unwrap_optimizers(self.optimizer)
        argument_checks.check_members(model, optimizer)
        argument_checks.check_scheduler(self.scheduler)
        rank = placement.rank
        tree: dict[str, Any] = {}
        parts, alone, buffers = [], [], frozenset[str]()
        parameters: Mapping[str, OptimizerParameter] = {}
        by_name, axes, experts, base = False, None, None, None
        if self.only:
            model, base = exclude_base(model, self.only, placement)
            alone.append(schema.get_rank_path(schema.BASE, rank))
        if model is not None and not is_names_only(model):
            tree[schema.MODEL] = model_state.get_model_tree(model)
            buffers = frozenset(map(schema.get_weight_path, model_state.get_buffer_names(model)))
            parts.append(schema.MODEL)
        if optimizer is not None:
            names = model_state.get_parameter_names(model)
            if isinstance(optimizer, OptimizerDict):
                optimizer_tree = optimizer_dict.get_joint_tree(optimizer, names)
                parameters = optimizer_dict.get_joint_parameters(optimizer, names, placement)
            else:
                optimizer_tree = optimizers.get_optimizer_tree(optimizer, names)
                parameters = optimizers.get_saved_parameters(optimizer, model, names, placement)
            by_name = optimizers.is_keyed_by_name(optimizer, optimizer_tree)
            states = get_optimizer_schema(optimizer)  # an `OptimizerDict` has no schema
            if by_name and states.per_rank:
                optimizer_tree = rank_local_state.split_rank_local(optimizer_tree, states, placement)
                alone.append(schema.get_rank_path(schema.get_per_rank_state_path(), rank))
            tree[schema.OPTIMIZER] = optimizer_tree
            if zero1.is_zero1(optimizer):
                axes, experts = (
                    zero1.get_mesh_axes(optimizer, placement),
                    zero1.find_expert_parameters(optimizer, parameters.values()),
                )
            parts.append(schema.OPTIMIZER)
        if self.scheduler is not None:
            tree[schema.SCHEDULER] = stateful.get_member_tree(self.scheduler, schema.SCHEDULER)
            parts.append(schema.SCHEDULER)
        if self.extras:
            tree[schema.EXTRAS] = {
                n: per_rank.get_extra_tree(m, schema.get_extras_path(n), placement) for n, m in self.extras.items()
            }
            own = [n for n, m in self.extras.items() if per_rank.is_per_rank(m)]
            alone += [per_rank.get_extra_rank_path(n, rank) for n in own]
            parts += [schema.get_extras_path(n) for n in self.extras if n not in own]
        if self.user_content is not None and rank == 0:
            tree[schema.USER_CONTENT] = self.user_content
            alone.append(schema.USER_CONTENT)
        return CapturedState(
            tree=tree,
            model=model,
            optimizer=optimizer,
            parameters=parameters,
            buffers=buffers,
            rank_local_prefixes=tuple(alone),
            shared_parts=tuple(parts),
            is_keyed_by_name=by_name,
            zero1_axes=axes,
            expert_parameters=experts,
            base_parameters=base,
        )

    def get_hints(self, shardings: StateShardings) -> LoadHints:
        """Return hints about the arrays to load.

        Raises:
            UsageError: If an argument has the wrong type.
        """
        model, optimizer = unwrap_model(self.model, loading=True), unwrap_optimizers(self.optimizer)
        argument_checks.check_members(model, optimizer, loading=True)
        return get_program_hints(model, optimizer, shardings)

    def plan_load(self, stored: StoredPart) -> LoadPlan:
        """Compare a stored state with these objects. The load returns the stored user content, or without one the plain
        values stored next to the objects.

        Raises:
            UsageError: If an argument has the wrong type.
            CheckpointError: If a stored value cannot be loaded at all.
        """
        stored_model = stored.find_part(schema.MODEL)
        names = get_children(stored_model.skeleton) if stored_model is not None else None
        model = unwrap_model(self.model, loading=True, stored={paths.unescape(n) for n in names or ()})
        optimizer = unwrap_optimizers(self.optimizer, stored.find_part(schema.OPTIMIZER))
        argument_checks.check_members(model, optimizer, loading=True)
        model, base = exclude_stored_base(stored, model)
        stored = replace(stored, shardings=stored.shardings.with_model(model))
        parts = []
        for path, load in self._get_member_loads(model, optimizer):
            part = stored.find_part(path)
            is_module = part is not None and path == schema.MODEL and is_object(part.skeleton)
            parts += [report_missing_part(stored, path)] if part is None or is_module else load(part)
        content = stored.find_part(schema.USER_CONTENT)
        if content is None:
            beside = _read_plain_extras(stored, self.extras)
            return LoadPlan(parts, lambda arrays: beside or None, base)
        fresh = PartLoadPlan()
        try:
            content.build()  # detect objects that cannot be loaded before anything is changed
        except IncompatibleCheckpointError as error:
            # This program does not have a class of the saved state. With strict=False the weights load without it.
            left_out = "strict=False leaves all of the user content out."
            fresh.add_problem(error.leaf or content.prefix, f"{error.problem}. {error.hint or ''} {left_out}")
            return LoadPlan([*parts, fresh], lambda arrays: None, base)
        plan_arrays(content, fresh, {})
        return LoadPlan([*parts, fresh], lambda arrays: content.build(lambda leaf, _: arrays[leaf]), base)

    def _get_member_loads(self, model: Any, optimizer: Any) -> list[tuple[str, _PlanMemberLoad]]:
        """Return (leaf path, load function) for each object; model and optimizer are unwrapped."""
        members: list[tuple[str, _PlanMemberLoad]] = []
        if model is not None and not is_names_only(model):
            members.append((schema.MODEL, _wrap_in_list(lambda part: model_state.plan_model_load(part, model))))
        names = model_state.get_parameter_names(model) if optimizer is not None else {}
        if isinstance(optimizer, OptimizerDict):
            members.append(
                (schema.OPTIMIZER, lambda part: optimizer_dict.plan_joint_load(part, optimizer, names, model))
            )
        elif optimizer is not None:
            members.append(
                (
                    schema.OPTIMIZER,
                    _wrap_in_list(lambda part: optimizer_load.plan_optimizer_load(part, optimizer, names, model)),
                )
            )
        if self.scheduler is not None:
            members.append(
                (schema.SCHEDULER, _wrap_in_list(lambda part: stateful.plan_member_load(part, self.scheduler)))
            )
        for name, member in self.extras.items():
            members.append(
                (schema.get_extras_path(name), _wrap_in_list(partial(per_rank.plan_extra_load, member=member)))
            )
        return members


def _read_plain_extras(stored: StoredPart, requested: Collection[str]) -> dict[str, Any]:
    """Read the plain values in `extras` that no object of the call requests, such as the step stored by a program that
    used another library.

    Values with arrays are skipped, because they may be large. Also skipped are pickled objects, which need trust,
    objects of unknown classes, and rank-local state.
    """
    extras = stored.find_part(schema.EXTRAS)
    plain: dict[str, Any] = {}
    for part, skeleton in (get_children(extras.skeleton) or {}).items() if extras is not None else ():
        name = paths.unescape(part)
        of_ranks = schema.get_saved_rank_count(skeleton) is not None
        leaves = [leaf for _, leaf in iterate_leaf_parts(skeleton)]
        if name in requested or of_ranks or any(is_array(leaf) or is_object(leaf) for leaf in leaves):
            continue
        with contextlib.suppress(IncompatibleCheckpointError):  # not requested by the caller
            plain[name] = stored.get_subpart(skeleton, schema.get_extras_path(name)).build()
    return plain


_PlanMemberLoad = Callable[[StoredPart], list[PartLoadPlan]]
"""Function that plans the load of a stored member."""


def _wrap_in_list(plan: Callable[[StoredPart], PartLoadPlan]) -> _PlanMemberLoad:
    return lambda part: [plan(part)]


@dataclass(frozen=True, slots=True)
class PyTree:
    """A tree of containers, arrays and plain values to save."""

    tree: Any
    object_names: ClassVar[str] = "a tree"
    only: ClassVar[tuple[str, ...]] = ()

    def capture(self, placement: RankInfo) -> CapturedState:
        """Capture the tree. Its plain values must be equal on all ranks.

        Raises:
            UsageError: If the tree is empty.
        """
        argument_checks.check_not_empty([self.tree], placement)
        return CapturedState(tree=self.tree)


def _find_part(skeleton: Any, leaf: str) -> Any:
    """Return the part of the stored state at a leaf path.

    Raises:
        IncompatibleCheckpointError: If the path is not stored.
    """
    try:
        return get_part(skeleton, leaf)
    except KeyError:
        names = ", ".join(list(get_children(skeleton) or ())[:8]) or "nothing"
        hint = f"Leaf paths begin with: {names}. xla_ckpt.Checkpoints(path).show() (xla-ckpt show) lists all."
        problem = (
            f"the checkpoint has no such part{suggest_leaf(leaf, [path for path, _ in iterate_leaf_parts(skeleton)])}"
        )
        raise IncompatibleCheckpointError(problem, leaf=leaf, hint=hint) from None


@dataclass(frozen=True, slots=True)
class Template:
    """A template for the restored tree: a tree of arrays or specs, or None to restore everything as saved."""

    like: Any
    path: str = paths.ROOT
    """Leaf path of the part to restore if `like` is None."""

    object_names: ClassVar[str] = "a tree"

    def __post_init__(self) -> None:
        argument_checks.check_like(self.like)

    def get_hints(self, shardings: StateShardings) -> LoadHints:
        """Return hints about the arrays to load."""
        return get_template_hints(self.like, shardings)

    def plan_load(self, stored: StoredPart) -> LoadPlan:
        """Compare a stored state with the template. The load returns the new tree."""
        loading = PartLoadPlan(cast=stored.cast)

        if self.like is None:
            make = plan_as_saved(stored.get_subpart(_find_part(stored.skeleton, self.path), self.path), loading)
        else:
            make = plan_like(stored, loading, self.like)
        return LoadPlan([loading], make)


def get_program_hints(model: Any, optimizer: Any, shardings: StateShardings) -> LoadHints:
    """Return hints from a model and an optimizer about the arrays to load.

    Raises:
        UnsupportedStateError: If attributes or a layer of the model are contradictory.
    """
    shardings = shardings.with_model(model)
    entries = {} if model is None else model_state.get_model_tree(model)
    if is_model_view(model):
        entries = {**entries, **model.get_aliased_entries()}
    arrays = {
        str(name): _create_array_hint(schema.get_weight_path(str(name)), value, shardings)
        for name, value in (entries.items() if isinstance(entries, Mapping) else ())
        if (shardings.adapters.get_kind(value) is not None and not is_lazy(value)) or is_array_spec(value)
    }
    names = model_state.get_parameter_names(model)
    groups = _get_named_groups(optimizer, names)
    for name, parameter in itertools.chain(*groups or ()):
        if name not in arrays:
            arrays[name] = _create_array_hint(schema.get_weight_path(str(name)), parameter, shardings)
    aliases = {called[0]: called for called in get_tied_names(model) if len(called) > 1}
    order = {name: i for i, name in enumerate(arrays)}
    return LoadHints(
        arrays=arrays,
        rules=shardings.rules,
        parameter_groups=None if groups is None else [[name for name, _ in group] for group in groups],
        aliases=aliases,
        model_order=order,
        wants_optimizer=optimizer is not None,
        optimizer_schema=get_optimizer_schema(optimizer),
        mesh=shardings.placement.mesh,
        rank=shardings.placement.rank,
        model_config=_read_model_config(model),
    )


def _read_model_config(model: Any) -> Mapping[str, Any]:
    """Return the configuration of a transformers model; empty for other models."""
    configs: list[Any] = [getattr(module, "config", None) for module in get_modules(model)]
    return next((c.to_dict() for c in configs if hasattr(c, "to_dict") and hasattr(c, "model_type")), {})


def get_template_hints(like: Any, shardings: StateShardings) -> LoadHints:
    """Return hints from the template of a `restore`; none for None, which restores everything."""
    if not isinstance(like, Mapping):
        return get_program_hints(None, {}, shardings)
    model, optimizer = like.get(schema.MODEL), like.get(schema.OPTIMIZER)
    hints = get_program_hints(model if isinstance(model, Mapping) else None, optimizer, shardings)
    if (groups := schema.get_groups(optimizer)) is not None:
        return replace(hints, parameter_groups=[[str(n) for n in g[schema.PARAMS]] for g in groups])
    return hints


def _create_array_hint(path: str, value: Any, shardings: StateShardings) -> ArrayHint:
    if is_array_spec(value):
        spec = getattr(value, "sharding", None)
        named = Sharding.parse(spec) if isinstance(spec, tuple | list | Sharding) else None
        return ArrayHint(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."), sharding=named)
    adapter = shardings.adapters.require(value, path)
    # A matching rule takes precedence over attributes, which may be wrong.
    ruled = find_sharding(shardings.rules, path, schema.strip_member(path)) is not None
    named = None if ruled else shardings.layers.get(id(value)) or get_declared_sharding(value, path)
    return ArrayHint(
        shape=shardings.locate(path, value, adapter).shape,
        # A meta tensor cannot be stored, but provides everything that a description needs.
        dtype=str(value.dtype).removeprefix("torch.") if is_meta(value) else adapter.get_dtype(value, path).name,
        sharding=None if named is None or not named.axes else replace(named, shape=None),
        shape_excludes_padding=get_unpadded_shape(value) is not None,
        is_rank_local=adapter.locate(value, path) is None,
    )


def _get_named_groups(optimizer: Any, names: Mapping[Any, str]) -> list[list[tuple[str, Any]]] | None:
    """Return the parameters of each group with their names, each parameter once; None without groups."""
    if optimizer is None or isinstance(optimizer, Mapping) or not optimizers.has_param_groups(optimizer):
        return None
    called = iter(optimizers.list_parameter_names(optimizer, names))
    seen: set[int] = set()
    groups: list[list[tuple[str, Any]]] = []
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                groups[-1].append((next(called), parameter))
    return groups
