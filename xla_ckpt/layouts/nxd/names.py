"""Which parameter an optimizer's number means: nothing on disk says so, the program's own optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.nxd.rank_files import StoredTensor
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema


def names_of_stage(
    groups: Sequence[Mapping[str, Any]],
    ordinary: int,
    wanted: Hints,
    model: Mapping[str, Mapping[Any, StoredTensor]] | None,
    shapes: Mapping[int, tuple[int, ...] | None],
    is_expert: Callable[[str], bool],
) -> dict[int, Any]:
    """The name of each number of one pipeline stage's optimizer.

    Numbers run through the groups. Those of the program's optimizer, less the parameters that this stage does not
    have, come in the same order; numbers of parts, shapes of all are compared.

    Args:
        groups: The stored groups.
        ordinary: Number of groups that come before those of experts only.
        wanted: What the program says.
        model: The stage's own model, by name; None if no model is stored.
        shapes: Local shape of each number, where known.
        is_expert: Whether a parameter is an expert's.

    Raises:
        IncompatibleCheckpointError: Numbers or shapes differ.
    """
    if all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        return {i: name for g in groups for i, name in zip(g["params"], g["param_names"], strict=True)}
    if wanted.groups is None:
        return {i: i for g in groups for i in g["params"]}
    mine = [_of_stage(names, wanted, model) for names in wanted.groups]
    if ordinary < len(groups):
        mine = [[n for n in g if not is_expert(n)] for g in mine] + [[n for n in g if is_expert(n)] for g in mine]
        mine, stored = [g for g in mine if g], [g for g in groups if g["params"]]
    else:
        stored = list(groups)
        if len(mine) != len(stored):
            mine, stored = [g for g in mine if g], [g for g in groups if g["params"]]
    counts, found = [len(g["params"]) for g in stored], [len(g) for g in mine]
    if counts != found:
        raise IncompatibleCheckpointError(
            "the stored optimizer numbers its parameters, and its groups are not those of this optimizer",
            leaf=schema.group(),
            expected=f"groups of {counts} parameters, as stored",
            found=f"groups of {found}, counting parameters whose names the stored model has",
            hint="Give the model, too, and make the optimizer with the same groups in the same order as in training.",
        )
    names = {i: n for g, called in zip(stored, mine, strict=True) for i, n in zip(g["params"], called, strict=True)}
    for i, name in names.items():
        shape, copies = shapes.get(i), (model or {}).get(_present(name, wanted, model))
        held = None if copies is None else next(iter(copies.values())).shape
        if None not in (shape, held) and shape != held:
            raise IncompatibleCheckpointError(
                f"number {i} of the stored optimizer would be this parameter, and its shape is another",
                leaf=schema.state(name),
                expected=list(held or ()),
                found=list(shape or ()),
                hint="Make the optimizer with its parameters in the same order as in training.",
            )
    return names


def _of_stage(names: Sequence[str], wanted: Hints, model: Mapping[str, Any] | None) -> list[str]:
    """The names of a group that a stage has. A shared parameter may stand where another of its names stands."""
    if model is None or any(n.startswith("#") for n in names):
        return list(names)
    here = [n for n in names if n in model]
    for name in names:
        other = _present(name, wanted, model)
        if name in model or other == name:
            continue
        place = wanted.order.get(other, len(wanted.order))
        at = next((i for i, n in enumerate(here) if wanted.order.get(n, -1) > place), len(here))
        here.insert(at, name)
    return here


def _present(name: str, wanted: Hints, model: Mapping[str, Any] | None) -> str:
    """The name that a stage's model has for a parameter."""
    return next((n for n in (name, *wanted.aliases.get(name, ())) if n in (model or {})), name)
