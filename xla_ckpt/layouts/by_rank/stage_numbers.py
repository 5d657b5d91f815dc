"""Which parameter a stored optimizer's number means. Nothing on disk says so: the program's own optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.parameter_numbers import names_by_number, names_in_groups
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.numbers_to_names import only_names
from xla_ckpt.tree import schema
from xla_ckpt.tree.path import listed


def names_of_stage(
    groups: Sequence[Mapping[str, Any]],
    *,
    experts_apart: bool,
    hints: Hints,
    model: Mapping[str, Mapping[Any, StoredTensor]] | None,
    shapes: Mapping[int, tuple[int, ...] | None],
    is_expert: Callable[[str], bool],
    pp: int | None = None,
) -> dict[int, Any] | None:
    """The name of each number of one pipeline stage's optimizer; None if nobody can tell.

    Numbers run through the groups. The parameters of the program's optimizer come in the same order, if those are left
    out that this stage does not have. The sizes of the groups and the shapes of the parameters are compared to be sure.

    Args:
        experts_apart: Whether the last groups are of experts only.
        model: The stage's own model, by name; None if no model is stored.
        shapes: Local shape of each number, where known.
        pp: Which of several pipeline stages it is.

    Raises:
        IncompatibleCheckpointError: Numbers or shapes differ.
    """
    if (names := names_in_groups(groups)) is not None:
        return names
    stored = [g["params"] for g in groups]
    if hints.groups is None and hints.sequence:
        local_shapes = {name: next(iter(copies.values())).shape for name, copies in (model or {}).items()}
        return only_names(stored, shapes, {name: local_shapes[name] for name in hints.sequence if name in local_shapes})
    if hints.groups is None:
        return names_by_number(stored, stored)  # without an optimizer that says more, a number is its own name
    of_stage = [_of_stage(names, hints, model) for names in hints.groups]
    if experts_apart:
        others = [[name for name in group if not is_expert(name)] for group in of_stage]
        experts = [[name for name in group if is_expert(name)] for group in of_stage]
        of_stage = others + experts
    if experts_apart or len(of_stage) != len(stored):
        # A group may have nothing in this stage, and groups without parameters are not always stored.
        of_stage = [names for names in of_stage if names]
        stored = [numbers for numbers in stored if numbers]
    missing = [] if model is None else [n for n in chain(*hints.groups) if _present(n, hints, model) not in model]
    _check_sizes([len(numbers) for numbers in stored], [len(names) for names in of_stage], missing, pp)
    by_number = names_by_number(stored, of_stage)
    for number, name in by_number.items():
        copies = (model or {}).get(_present(name, hints, model))
        if copies is not None:
            whole = hints.hint(name).shape
            _check_shape(number, name, shapes.get(number), next(iter(copies.values())).shape, whole)
    return by_number


def with_ties(
    hints: Hints,
    count: int,
    model: Mapping[str, Mapping[Any, StoredTensor]],
    same: Callable[[Mapping[Any, StoredTensor], Mapping[Any, StoredTensor]], bool],
) -> Hints:
    """What a pipeline says, with one name for each weight that is one parameter of the stored optimizer.

    Stages that share a weight may each have a name for it, and do not know of each other's. In the files of one stage
    such a weight is one parameter, and the model has it under all of its names. So matrices that are equal are taken
    for one, if there are then as many parameters as are stored. Vectors often are equal: biases are zeros at first.

    Args:
        count: Number of the stored parameters of this stage.
        same: Whether the tensors of two names are stored and are equal on all ranks.
    """
    groups = hints.groups or ()
    stored = [name for names in groups for name in names if name in model]
    if hints.mesh.pp == 1 or len(stored) <= count:
        return hints
    matrices = [name for name in stored if len(next(iter(model[name].values())).shape) > 1]
    first: dict[str, str] = {}
    for i, name in enumerate(matrices):
        equal = (earlier for earlier in matrices[:i] if same(model[earlier], model[name]))
        if (earlier := next(equal, None)) is not None:
            first[name] = earlier
    if len(stored) - len(first) != count:
        return hints
    # The state is wanted under the name that this rank has.
    called = {earlier: name for name, earlier in first.items() if name in hints.arrays and earlier not in hints.arrays}
    return replace(hints, groups=[[called.get(n, n) for n in names if n not in first] for names in groups])


def _check_sizes(counts: list[int], present: list[int], missing: Sequence[str], pp: int | None) -> None:
    """Compare the sizes of the groups; `missing` are the program's parameters that the stored model does not have."""
    if counts != present:
        named = [name for name in missing if not name.startswith("#")]  # without a model, names are places
        others = f". It has no {listed(named)}" if named and pp is None else ""  # another stage may have them
        whose = "the stored model" if pp is None else f"the stored model of pipeline stage {pp}"
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters, and its groups are not those of this optimizer",
            leaf=schema.group(),
            expected=f"groups of {counts} parameters, as stored",
            found=f"groups of {present}, counting parameters whose names {whose} has{others}",
            hint="Give the model, as it was in training, and make the optimizer with the same groups in their order.",
        )


def _check_shape(
    number: int, name: Any, shape: tuple[int, ...] | None, local: tuple[int, ...], whole: tuple[int, ...] | None
) -> None:
    """Compare the shape of a number with that of the model's tensor of this name, `local`.

    A program may have joined arrays of all ranks in each model file, adapters say, and left their states apart.
    """
    joined = local == whole and shape is not None and _divides(shape, local)
    if shape is not None and shape != local and not joined:
        raise IncompatibleCheckpointError(
            f"number {number} of the stored optimizer would be this parameter, and its shape is another",
            leaf=schema.state(name),
            expected=list(local),
            found=list(shape),
            hint="Make the optimizer with its parameters in the same order as in training.",
        )


def _divides(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor can be a rank's part of another one."""
    return len(part) == len(whole) and all(n and not of % n for n, of in zip(part, whole, strict=True))


def _of_stage(names: Sequence[str], hints: Hints, model: Mapping[str, Any] | None) -> list[str]:
    """The names of a group that a stage has, in the order of the stage's own optimizer."""
    if model is None or any(name.startswith("#") for name in names):
        return list(names)
    called = {name: other for name in names if (other := _present(name, hints, model)) in model}
    return in_stage(names, called, hints.order)


def _present(name: str, hints: Hints, model: Mapping[str, Any] | None) -> str:
    """The name under which a stage's model has a parameter; its first name if the model does not have it."""
    return next((other for other in (name, *hints.aliases.get(name, ())) if other in (model or ())), name)


def in_stage(names: Sequence[str], called: Mapping[str, str], order: Mapping[str, int]) -> list[str]:
    """The parameters of a group that a pipeline stage has, in the order of the stage's own optimizer.

    Args:
        called: The name under which the stage has each of its parameters: a tied one may have another name there.
        order: Place of each name in the model.

    >>> in_stage(["embed", "b", "c"], {"embed": "head", "c": "c"}, {"embed": 0, "b": 1, "c": 2, "head": 3})
    ['c', 'embed']
    """
    of_stage = [name for name in names if called.get(name) == name]
    for name in names:
        other = called.get(name, name)
        if other == name:
            continue
        # The optimizer of the stage found this parameter at the place of its other name.
        place = order.get(other, len(order))
        at = next((i for i, n in enumerate(of_stage) if order.get(n, -1) > place), len(of_stage))
        of_stage.insert(at, name)
    return of_stage
