"""What each rank stored of the optimizer, and whether all of it was stored together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import RankOptimizer, StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.parameter_numbers import PARAM_NAMES, largest_shape
from xla_ckpt.layouts.smp.file_contents import NUMBERS
from xla_ckpt.layouts.smp.members import INNER, MASTERS
from xla_ckpt.layouts.smp.model import ADDED_KEY, SHAPES, MergedModel
from xla_ckpt.layouts.smp.one_save import two_saves
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import STEP


@dataclass(slots=True)
class OptimizerShare:
    """What one rank stored of the optimizer."""

    state: Any
    """By the number of a parameter."""

    groups: Any
    masters: list[Any] | None = None
    """fp32 copies of the parameters that the rank has, by group."""

    numbered: Mapping[int, Any] | None = None
    """The same by number, where the file says which numbers they have."""

    sharded: bool = False
    """Whether ranks that have the same model have each a part of the states."""


def shares_of(at: RankAt, tree: Mapping[Any, Any]) -> Iterator[tuple[RankAt, OptimizerShare]]:
    """What the ranks of one group stored that differ in rdp only: one, or those whose shares are in lists."""
    masters = tree.get(MASTERS)
    inner = tree.get(INNER, tree)
    state, groups = inner.get(schema.STATE), inner.get(schema.GROUPS)
    if isinstance(state, list) and isinstance(groups, list) and len(state) == len(groups):
        of_ranks = masters if isinstance(masters, list) and len(masters) == len(state) else [None] * len(state)
        for rdp, (one, some, its) in enumerate(zip(state, groups, of_ranks, strict=True)):
            yield RankAt(pp=at.pp, tp=at.tp, dp=rdp), OptimizerShare(one, some, _listed(its), sharded=True)
    else:
        yield at, OptimizerShare(state, groups, _listed(masters), masters_by_number(tree), sharded=at.dp > 0)


def _listed(masters: Any) -> list[Any] | None:
    return masters if isinstance(masters, list) else None


def is_optimizer_share(share: OptimizerShare) -> bool:
    """Whether this is the state of an optimizer, whose groups number its parameters."""
    if not isinstance(share.state, Mapping) or not isinstance(share.groups, list):
        return False
    numbered = (isinstance(group, Mapping) and isinstance(group.get(schema.PARAMS), list) for group in share.groups)
    return all(numbered) and all(type(n) is int for numbers in numbers_of(share.groups) for n in numbers)


def check_one_save(shares: Mapping[RankAt, OptimizerShare], *, noted: bool) -> None:
    """Check that the parts may have been written together.

    The options of the groups are the same on all ranks of a job, and so are step counts, but for parameters that a
    step left out: two parts that have no step count in common are of different steps.

    Args:
        noted: Whether notes beside the files say that they are of one save. Then step counts may differ: a job that
            trains a pipeline stage from a later step on has such ones.

    Raises:
        CorruptCheckpointError: They were not.
    """
    first, one = next(iter(shares.items()))
    steps: tuple[RankAt, set[Any]] | None = None
    for at, share in shares.items():
        for n, (group, other) in enumerate(zip(one.groups, share.groups, strict=False)):
            for key in (group.keys() & other.keys()) - {schema.PARAMS, PARAM_NAMES}:
                if not _alike(group[key], other[key]):
                    raise two_saves(
                        f"{key} of group {n} is {group[key]!r} at {_called(first)}, and {other[key]!r} at {_called(at)}"
                    )
        own_steps = set(_steps(share.state))
        if own_steps and steps is None:
            steps = (at, own_steps)
        elif own_steps and steps is not None and not noted and not own_steps & steps[1]:
            raise two_saves(f"the step counts of the optimizer at {_called(steps[0])} and at {_called(at)} differ")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) or isinstance(other, StoredTensor):
        return True  # the options of a capturable optimizer are tensors; the reader of groups compares them
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _called(at: RankAt) -> str:
    return f"pp {at.pp}, tp {at.tp}" + (f", rdp {at.dp}" if at.dp else "")


def _steps(state: Mapping[Any, Any]) -> Iterator[Any]:
    """The step counts of parameters, or what tells them apart: of a tensor of one number its CRC-32 does."""
    for members in state.values():
        step = members.get(STEP) if isinstance(members, Mapping) else None
        if isinstance(step, StoredTensor) and step.at is not None and step.at.crc is not None:
            yield (step.dtype.name, step.shape, step.at.crc)
        elif type(step) in (int, float):
            yield step


def is_flat(shares: Mapping[RankAt, OptimizerShare], model: MergedModel) -> bool:
    """Whether states are pieces of flat buffers: none has more dims than one, and some fit to no parameter."""
    if not any(share.sharded for share in shares.values()):
        return False
    shapes = {shape for share in shares.values() for members in share.state.values() if (shape := largest(members))}
    tensor = {tensor.shape for copies in model.stage.copies.values() for tensor in copies.values()}
    return all(len(shape) == 1 for shape in shapes) and bool(tensor) and bool(shapes - tensor)


def largest(members: Any) -> tuple[int, ...] | None:
    """The shape of a parameter, as its stored states show it."""
    return largest_shape(members, lambda value: (value.shape or None) if isinstance(value, StoredTensor) else None)


def united_of(files: RankFiles, shares: Mapping[RankAt, OptimizerShare]) -> dict[RankAt, OptimizerShare] | None:
    """Shares of ranks that differ in rdp only, as one; None if several have one parameter, with different states."""
    united: dict[RankAt, OptimizerShare] = {}
    states: dict[RankAt, dict[Any, Any]] = {}
    for at, share in sorted(shares.items()):
        key = RankAt(pp=at.pp, tp=at.tp)
        state = states.setdefault(key, {})
        united.setdefault(key, OptimizerShare(state, share.groups, share.masters, share.numbered))
        for number, members in share.state.items():
            if state.get(number) and members and not _same(files, state[number], members):
                return None
            state[number] = state.get(number) or members
    return united


def _same(files: RankFiles, one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        return files.same(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(files, one[key], other[key]) for key in one)
    return bool(one == other)


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of the parameters of each group."""
    return [list(group[schema.PARAMS]) for group in groups]


# Rows of states, as this library writes those of ZeRO-1 into files for each rdp rank. SMP's own shard_optimizer_state
# deals out pieces of flat buffers, which only the job can find again: such files share no more than the names.


def are_rows(parts: Mapping[RankAt, Mapping[Any, Any]]) -> bool:
    """Whether the parts of an optimizer hold rows of its states."""
    return any(_ours(tree.get(INNER, tree), SHAPES) is not None for tree in parts.values())


def of_rows(parts: Mapping[RankAt, Mapping[Any, Any]]) -> dict[RankAt, RankOptimizer]:
    """One optimizer for each tp and rdp rank, of all pipeline stages.

    Raises:
        CorruptCheckpointError: Some of the parts hold no rows.
    """
    stored: dict[RankAt, RankOptimizer] = {}
    for at, tree in sorted(parts.items()):
        inner = tree.get(INNER, tree)
        shapes, groups, state = _ours(inner, SHAPES), inner.get(schema.GROUPS), inner.get(schema.STATE)
        if not isinstance(shapes, Mapping) or not isinstance(groups, list) or not isinstance(state, Mapping):
            raise CorruptCheckpointError(
                "some parts of the optimizer hold rows of its states, and others do not: they are of two saves",
                leaf=schema.OPTIMIZER,
                found=f"none at pp {at.pp}, tp {at.tp}, rdp {at.dp}",
            )
        key, masters = RankAt(tp=at.tp, dp=at.dp), masters_by_number(tree) or {}
        before = stored.get(key, RankOptimizer(groups=groups, states={}, shapes={}))
        stored[key] = replace(
            before,
            states={**before.states, **state},
            masters={**before.masters, **masters},
            shapes={**(before.shapes or {}), **shapes},
        )
    return stored


def masters_by_number(tree: Mapping[Any, Any]) -> dict[int, Any] | None:
    """The master weights of a part by number; None if it does not say which numbers they have."""
    numbers, weights = _ours(tree, NUMBERS), tree.get(MASTERS)
    if not isinstance(numbers, list) or not isinstance(weights, list):
        return None
    groups = zip(numbers, weights, strict=False)
    return {
        n: weight
        for of_group, weights_of_group in groups
        for n, weight in zip(of_group, weights_of_group, strict=False)
    }


def _ours(tree: Mapping[Any, Any], key: str) -> Any:
    """What this library has noted in a file; None if it has not."""
    added = tree.get(ADDED_KEY)
    return added.get(key) if isinstance(added, Mapping) else None
