"""What callers save and load: the usual objects of a training run, or any tree.

`Objects`, `Tree` and `Like` are what a call was given. Each says what is saved of it, or how a stored state comes back
into it, and what it knows about the arrays that it wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.keywords import nearest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.state import mistakes, module, optimizer_load, per_rank, rank_states, several, stateful, zero1
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.frozen_base import split_base, without_base
from xla_ckpt.state.loading import Loading, Stored, absent_part, plan_arrays, plan_like, plan_whole
from xla_ckpt.state.loadings import Loadings
from xla_ckpt.state.program_hints import hints_of, hints_of_tree
from xla_ckpt.state.registered import schema_of
from xla_ckpt.state.several import Several, bare_optimizer
from xla_ckpt.state.shardings import Parameter, StateShardings
from xla_ckpt.state.wrappers import is_names_only, unwrapped_model
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import children, is_array, is_object, leaves_below, part_at


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state tree, and what is known about its members."""

    tree: Any
    model: Any = None
    """The module whose layers are asked how their parameters are split."""

    optimizer: Any = None
    """The optimizer, without what wraps it."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    """Leaf paths of buffers, which may differ between ranks."""

    alone: tuple[str, ...] = ()
    """Leaf paths of what this rank alone has: they begin the paths of its leaves."""

    parts: tuple[str, ...] = ("",)
    """Paths whose plain values all ranks have in common."""

    by_name: bool = False
    """Whether the optimizer's state is kept by parameter name."""

    zero1: tuple[str, ...] | None = None
    """Mesh axes over which a ZeRO-1 optimizer deals rows out; None for any other optimizer."""

    base: Mapping[str, Any] | None = None
    """The parameters that are left out, by name; None if nothing is."""

    experts: frozenset[str] | None = None
    """Names of the parameters that its part for experts has; None if it has no such part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """The usual objects of a training run, each of them optional. What wraps a model or an optimizer is looked into."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    user_content: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    """What a save stores of the model's parameters (`frozen_base.without_base`); nothing stands for all."""

    def __post_init__(self) -> None:
        mistakes.check_extras(self.extras)

    @property
    def given(self) -> str:
        """Which objects there are, as text. All ranks have the same ones, but for the user content, of which rank 0's
        is stored.
        """
        usual = {schema.MODEL: self.model, schema.OPTIMIZER: self.optimizer, schema.SCHEDULER: self.scheduler}
        names = [name for name, value in usual.items() if value is not None]
        names += [f"only {', '.join(self.only)}"] if self.only else []
        return ", ".join([*names, *map(schema.in_extras, sorted(map(str, self.extras)))])

    def left_behind(self, skeleton: Any) -> str | None:
        """What to say of a run that goes on with its optimizer or its scheduler alone, where both are stored."""
        stored = skeleton if isinstance(skeleton, Mapping) else {}
        if stored.get(schema.SCHEDULER) and self.optimizer is not None and self.scheduler is None:
            return (
                "an optimizer is loaded, and the scheduler of the tag is not. The learning rate is the stored one, and "
                "a scheduler of the program begins anew: give scheduler= to go on with the old one"
            )
        if stored.get(schema.OPTIMIZER) and self.scheduler is not None and self.optimizer is None:
            return "a scheduler is loaded, and the optimizer of the tag is not, which begins anew: give optimizer=, too"
        return None

    def state(self, placement: Placement) -> State:
        """Their state, as this rank has it.

        Raises:
            UsageError: There is nothing to save, or one of them is not what its place is for.
            UnsupportedStateError: One of them cannot be stored.
        """
        objects = [self.model, self.optimizer, self.scheduler, self.user_content, *self.extras.values()]
        mistakes.check_something(objects, placement)
        model, optimizer = unwrapped_model(self.model), bare_optimizer(self.optimizer)
        mistakes.check_members(model, optimizer)
        mistakes.check_scheduler(self.scheduler)
        rank = placement.rank
        tree: dict[str, Any] = {}
        parts, alone, buffers = [], [], frozenset[str]()
        parameters: Mapping[str, Parameter] = {}
        by_name, axes, experts, base = False, None, None, None
        if self.only:
            model, base = without_base(model, self.only, placement)
            alone.append(schema.of_rank(schema.BASE, rank))
        if model is not None and not is_names_only(model):
            tree[schema.MODEL] = module.tree_of(model)
            buffers = frozenset(map(schema.weight, module.buffer_names(model)))
            parts.append(schema.MODEL)
        if optimizer is not None:
            names = module.parameter_names(model)
            if isinstance(optimizer, Several):
                optimizer_tree = several.tree_of(optimizer, names)
                parameters = several.parameters_of(optimizer, names, placement)
            else:
                optimizer_tree = optimizers.tree_of(optimizer, names)
                parameters = optimizers.parameters_of(optimizer, model, names, placement)
            by_name = optimizers.is_by_name(optimizer, optimizer_tree)
            states = schema_of(optimizer)  # of several, none has any of its own
            if by_name and states.per_rank:
                optimizer_tree = rank_states.with_own_apart(optimizer_tree, states, placement)
                alone.append(schema.of_rank(schema.own_states(), rank))
            tree[schema.OPTIMIZER] = optimizer_tree
            if zero1.is_zero1(optimizer):
                axes, experts = zero1.mesh_axes(optimizer, placement), zero1.experts_of(optimizer, parameters.values())
            parts.append(schema.OPTIMIZER)
        if self.scheduler is not None:
            tree[schema.SCHEDULER] = stateful.tree_of(self.scheduler, schema.SCHEDULER)
            parts.append(schema.SCHEDULER)
        if self.extras:
            tree[schema.EXTRAS] = {
                n: per_rank.tree_of(m, schema.in_extras(n), placement) for n, m in self.extras.items()
            }
            own = [n for n, m in self.extras.items() if per_rank.is_per_rank(m)]
            alone += [per_rank.path_of(n, rank) for n in own]
            parts += [schema.in_extras(n) for n in self.extras if n not in own]
        if self.user_content is not None and rank == 0:
            tree[schema.USER_CONTENT] = self.user_content
            alone.append(schema.USER_CONTENT)
        return State(
            tree=tree,
            model=model,
            optimizer=optimizer,
            parameters=parameters,
            buffers=buffers,
            alone=tuple(alone),
            parts=tuple(parts),
            by_name=by_name,
            zero1=axes,
            experts=experts,
            base=base,
        )

    def hints(self, shardings: StateShardings) -> Hints:
        """What they know about the arrays that they want.

        Raises:
            UsageError: One of them is not what its place is for.
        """
        model, optimizer = unwrapped_model(self.model, loading=True), bare_optimizer(self.optimizer)
        mistakes.check_members(model, optimizer, loading=True)
        return hints_of(model, optimizer, shardings)

    def loadings(self, stored: Stored) -> Loadings:
        """Compare a stored state with them. The value of the load is the stored user content; where there is none, the
        plain values beside the objects.

        Raises:
            UsageError: One of them is not what its place is for.
            CheckpointError: Something stored cannot be loaded at all.
        """
        stored_model = stored.at(schema.MODEL)
        names = children(stored_model.skeleton) if stored_model is not None else None
        model = unwrapped_model(self.model, loading=True, stored={paths.unescape(n) for n in names or ()})
        optimizer = bare_optimizer(self.optimizer, stored.at(schema.OPTIMIZER))
        mistakes.check_members(model, optimizer, loading=True)
        model, base = split_base(stored, model)
        stored = replace(stored, shardings=stored.shardings.of_model(model))
        parts = []
        for path, load in self._members(model, optimizer):
            part = stored.at(path)
            is_module = part is not None and path == schema.MODEL and is_object(part.skeleton)
            parts += [absent_part(stored, path)] if part is None or is_module else load(part)
        content = stored.at(schema.USER_CONTENT)
        if content is None:
            beside = _plain_beside(stored, self.extras)
            return Loadings(parts, lambda arrays: beside or None, base)
        fresh = Loading()
        try:
            content.build()  # an object that may not be loaded is found out before anything is changed
        except IncompatibleCheckpointError as error:
            # A class of the program that saved is missing here. Weights can be loaded without it, if the load is told.
            left_out = "strict=False leaves all of the user content out."
            fresh.add_problem(error.leaf or content.prefix, f"{error.problem}. {error.hint or ''} {left_out}")
            return Loadings([*parts, fresh], lambda arrays: None, base)
        plan_arrays(content, fresh, {})
        return Loadings([*parts, fresh], lambda arrays: content.build(lambda leaf, _: arrays[leaf]), base)

    def _members(self, model: Any, optimizer: Any) -> list[tuple[str, _Load]]:
        """(leaf path, how it is loaded) of each object; model and optimizer without what wraps them."""
        members: list[tuple[str, _Load]] = []
        if model is not None and not is_names_only(model):
            members.append((schema.MODEL, _one(lambda part: module.load(part, model))))
        names = module.parameter_names(model) if optimizer is not None else {}
        if isinstance(optimizer, Several):
            members.append((schema.OPTIMIZER, lambda part: several.load(part, optimizer, names, model)))
        elif optimizer is not None:
            members.append((schema.OPTIMIZER, _one(lambda part: optimizer_load.load(part, optimizer, names, model))))
        if self.scheduler is not None:
            members.append((schema.SCHEDULER, _one(lambda part: stateful.load(part, self.scheduler))))
        for name, member in self.extras.items():
            members.append((schema.in_extras(name), _one(partial(per_rank.load, member=member))))
        return members


def _plain_beside(stored: Stored, taken: Collection[str]) -> dict[str, Any]:
    """The plain values in `extras` that no object of the call takes: a program that used another library has its step
    there.

    What has arrays in it is left out, as they may be large. So are pickled objects, which need trust, objects of
    classes that this program does not have, and what each rank has its own of.
    """
    extras = stored.at(schema.EXTRAS)
    plain: dict[str, Any] = {}
    for part, skeleton in (children(extras.skeleton) or {}).items() if extras is not None else ():
        name = paths.unescape(part)
        of_ranks = schema.saved_by(skeleton) is not None
        leaves = [leaf for _, leaf in leaves_below(skeleton)]
        if name in taken or of_ranks or any(is_array(leaf) or is_object(leaf) for leaf in leaves):
            continue
        with contextlib.suppress(IncompatibleCheckpointError):  # nobody has asked for it
            plain[name] = stored.part(skeleton, schema.in_extras(name)).build()
    return plain


_Load = Callable[[Stored], list[Loading]]
"""Prepares to load what is stored of a member."""


def _one(load: Callable[[Stored], Loading]) -> _Load:
    return lambda part: [load(part)]


@dataclass(frozen=True, slots=True)
class Tree:
    """Any tree of containers, arrays and plain values, to be saved."""

    tree: Any
    given: ClassVar[str] = "a tree"
    only: ClassVar[tuple[str, ...]] = ()

    def state(self, placement: Placement) -> State:
        """The tree; its plain values are the same on all ranks.

        Raises:
            UsageError: There is nothing in it.
        """
        mistakes.check_something([self.tree], placement)
        return State(tree=self.tree)


def _part_at(skeleton: Any, leaf: str) -> Any:
    """The part of the stored state at a leaf path."""
    try:
        return part_at(skeleton, leaf)
    except KeyError:
        names = ", ".join(list(children(skeleton) or ())[:8]) or "nothing"
        hint = f"Leaf paths begin with: {names}. xla_ckpt.Checkpoints(path).show() (xla-ckpt show) lists all."
        problem = f"the checkpoint has no such part{nearest(leaf, [path for path, _ in leaves_below(skeleton)])}"
        raise IncompatibleCheckpointError(problem, leaf=leaf, hint=hint) from None


@dataclass(frozen=True, slots=True)
class Like:
    """What a restored tree is to be like: a tree with arrays or specs in it; None for everything, as it was."""

    like: Any
    part: str = paths.ROOT
    """Leaf path of what is wanted, where `like` is None."""

    given: ClassVar[str] = "a tree"

    def __post_init__(self) -> None:
        mistakes.check_like(self.like)

    def hints(self, shardings: StateShardings) -> Hints:
        """What it knows about the arrays that it wants."""
        return hints_of_tree(self.like, shardings)

    def loadings(self, stored: Stored) -> Loadings:
        """Compare a stored state with it. The value of the load is the new tree."""
        loading = Loading(cast=stored.cast)

        if self.like is None:
            make = plan_whole(stored.part(_part_at(stored.skeleton, self.part), self.part), loading)
        else:
            make = plan_like(stored, loading, self.like)
        return Loadings([loading], make)
