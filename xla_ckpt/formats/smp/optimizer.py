"""Merge the optimizers of all SMP parts, and check that the parts are from one save.

Parameters are numbered over the whole model, and each pipeline stage has the states of its own parameters. SMP
`shard_optimizer_state` stores pieces of flat buffers, which only the job that wrote them can locate; the rows in our
ZeRO-1 files can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import STEP
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.formats.numbered_parameters import (
    PARAM_NAMES_KEY,
    get_largest_shape,
    infer_names_by_order,
    read_group_names,
)
from xla_ckpt.formats.rank_files.file_names import RankCoords
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.layout import RankOptimizer, StoredTensor
from xla_ckpt.formats.rank_files.optimizer import UNNAMED_OPTIMIZER, name_stage_parameters
from xla_ckpt.formats.smp.model import EXTENSION_KEY, INNER_OPTIMIZER_KEY, MASTERS_KEY, SHAPES_KEY, MergedModel
from xla_ckpt.formats.smp.save_notes import make_two_saves_error
from xla_ckpt.formats.smp.writing import NUMBERS_KEY
from xla_ckpt.logs import get_logger


@dataclass(slots=True)
class OptimizerShare:
    """Optimizer state stored by one rank."""

    state: Any
    """State by parameter number."""

    groups: Any
    masters: list[Any] | None = None
    """fp32 copies of the rank's parameters, by group."""

    masters_by_number: Mapping[int, Any] | None = None
    """fp32 copies by parameter number, if the file records the numbers."""

    sharded: bool = False
    """True if ranks with the same model each have a part of the states."""


def iterate_shares(at: RankCoords, tree: Mapping[Any, Any]) -> Iterator[tuple[RankCoords, OptimizerShare]]:
    """Yield the optimizer states of the ranks in one file: one, or a list for ranks that differ only in rdp."""
    masters = tree.get(MASTERS_KEY)
    inner = tree.get(INNER_OPTIMIZER_KEY, tree)
    state, groups = inner.get(schema.STATE), inner.get(schema.PARAM_GROUPS)
    if isinstance(state, list) and isinstance(groups, list) and len(state) == len(groups):
        of_ranks = masters if isinstance(masters, list) and len(masters) == len(state) else [None] * len(state)
        for rdp, (one, some, its) in enumerate(zip(state, groups, of_ranks, strict=True)):
            yield RankCoords(pp=at.pp, tp=at.tp, dp=rdp), OptimizerShare(one, some, _get_list(its), sharded=True)
    else:
        yield at, OptimizerShare(state, groups, _get_list(masters), get_masters_by_number(tree), sharded=at.dp > 0)


def _get_list(masters: Any) -> list[Any] | None:
    return masters if isinstance(masters, list) else None


def is_optimizer_share(share: OptimizerShare) -> bool:
    """Return True for the state of an optimizer, whose groups number its parameters."""
    if not isinstance(share.state, Mapping) or not isinstance(share.groups, list):
        return False
    numbered = (isinstance(group, Mapping) and isinstance(group.get(schema.PARAMS), list) for group in share.groups)
    return all(numbered) and all(type(n) is int for numbers in get_group_numbers(share.groups) for n in numbers)


def check_same_save(shares: Mapping[RankCoords, OptimizerShare], *, same_save: bool) -> None:
    """Check that the parts can be from the same save.

    The options of the groups are equal on all ranks of a job, and so are step counts, except for parameters that a step
    skipped: two parts without a common step count are from different steps.

    Args:
        same_save: True if the save notes record that the files are from one save. Then step counts may differ, as in a
            job
        that begins to train a pipeline stage at a later step.

    Raises:
        CorruptCheckpointError: They are from different saves.
    """
    first, one = next(iter(shares.items()))
    steps: tuple[RankCoords, set[Any]] | None = None
    for at, share in shares.items():
        for n, (group, other) in enumerate(zip(one.groups, share.groups, strict=False)):
            for key in (group.keys() & other.keys()) - {schema.PARAMS, PARAM_NAMES_KEY}:
                if not _is_same_option(group[key], other[key]):
                    raise make_two_saves_error(
                        f"{key} of group {n} is {group[key]!r} at {_format_rank(first)}, "
                        f"and {other[key]!r} at {_format_rank(at)}"
                    )
        own_steps = set(_iterate_steps(share.state))
        if own_steps and steps is None:
            steps = (at, own_steps)
        elif own_steps and steps is not None and not same_save and not own_steps & steps[1]:
            raise make_two_saves_error(
                f"the step counts of the optimizer at {_format_rank(steps[0])} and at {_format_rank(at)} differ"
            )


def _is_same_option(one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) or isinstance(other, StoredTensor):
        return True  # options of a capturable optimizer are tensors, which are compared when the groups are read
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same_option, one, other))
    return bool(one == other)


def _format_rank(at: RankCoords) -> str:
    return f"pp {at.pp}, tp {at.tp}" + (f", rdp {at.dp}" if at.dp else "")


def _iterate_steps(state: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the step counts of parameters. The CRC-32 identifies a step count that is a scalar tensor."""
    for members in state.values():
        step = members.get(STEP) if isinstance(members, Mapping) else None
        if isinstance(step, StoredTensor) and step.location is not None and step.location.crc is not None:
            yield (step.dtype.name, step.shape, step.location.crc)
        elif type(step) in (int, float):
            yield step


def has_flat_buffers(shares: Mapping[RankCoords, OptimizerShare], model: MergedModel) -> bool:
    """Return True if states are pieces of flat buffers: all are 1-dim, and some match no parameter."""
    if not any(share.sharded for share in shares.values()):
        return False
    shapes = {
        shape
        for share in shares.values()
        for members in share.state.values()
        if (shape := get_parameter_shape(members))
    }
    tensor = {tensor.shape for copies in model.stage.copies.values() for tensor in copies.values()}
    return all(len(shape) == 1 for shape in shapes) and bool(tensor) and bool(shapes - tensor)


def get_parameter_shape(members: Any) -> tuple[int, ...] | None:
    """Return the shape of a parameter according to its stored states."""
    return get_largest_shape(members, lambda value: (value.shape or None) if isinstance(value, StoredTensor) else None)


def merge_shares(
    files: RankFiles, shares: Mapping[RankCoords, OptimizerShare]
) -> dict[RankCoords, OptimizerShare] | None:
    """Merge the states of ranks that differ only in rdp; None if their states of a parameter differ."""
    united: dict[RankCoords, OptimizerShare] = {}
    states: dict[RankCoords, dict[Any, Any]] = {}
    for at, share in sorted(shares.items()):
        key = RankCoords(pp=at.pp, tp=at.tp)
        state = states.setdefault(key, {})
        united.setdefault(key, OptimizerShare(state, share.groups, share.masters, share.masters_by_number))
        for number, members in share.state.items():
            if state.get(number) and members and not _is_same_state(files, state[number], members):
                return None
            state[number] = state.get(number) or members
    return united


def _is_same_state(files: RankFiles, one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        return files.is_same(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same_state(files, one[key], other[key]) for key in one)
    return bool(one == other)


def get_group_numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the parameter numbers of each group."""
    return [list(group[schema.PARAMS]) for group in groups]


# Rows of ZeRO-1 states, which this library writes to a file for each rdp rank. SMP `shard_optimizer_state` writes
# pieces of flat buffers, which only the job can locate. These files have the same names, but nothing else in common.


def has_zero1_rows(parts: Mapping[RankCoords, Mapping[Any, Any]]) -> bool:
    """Return True if the parts of an optimizer contain rows of its states."""
    return any(_get_extension(tree.get(INNER_OPTIMIZER_KEY, tree), SHAPES_KEY) is not None for tree in parts.values())


def merge_zero1_rows(parts: Mapping[RankCoords, Mapping[Any, Any]]) -> dict[RankCoords, RankOptimizer]:
    """Merge the optimizer of each tp and rdp rank over all pipeline stages.

    Raises:
        CorruptCheckpointError: Some of the parts contain no rows.
    """
    stored: dict[RankCoords, RankOptimizer] = {}
    for at, tree in sorted(parts.items()):
        inner = tree.get(INNER_OPTIMIZER_KEY, tree)
        shapes, groups, state = (
            _get_extension(inner, SHAPES_KEY),
            inner.get(schema.PARAM_GROUPS),
            inner.get(schema.STATE),
        )
        if not isinstance(shapes, Mapping) or not isinstance(groups, list) or not isinstance(state, Mapping):
            raise CorruptCheckpointError(
                "some parts of the optimizer hold rows of its states, and others do not: they are of two saves",
                leaf=schema.OPTIMIZER,
                found=f"none at pp {at.pp}, tp {at.tp}, rdp {at.dp}",
            )
        key, masters = RankCoords(tp=at.tp, dp=at.dp), get_masters_by_number(tree) or {}
        before = stored.get(key, RankOptimizer(groups=groups, states={}, local_shapes={}))
        stored[key] = replace(
            before,
            states={**before.states, **state},
            masters={**before.masters, **masters},
            local_shapes={**(before.local_shapes or {}), **shapes},
        )
    return stored


def get_masters_by_number(tree: Mapping[Any, Any]) -> dict[int, Any] | None:
    """Return the master weights of a part by parameter number; None if it does not record the numbers."""
    numbers, weights = _get_extension(tree, NUMBERS_KEY), tree.get(MASTERS_KEY)
    if not isinstance(numbers, list) or not isinstance(weights, list):
        return None
    groups = zip(numbers, weights, strict=False)
    return {
        n: weight
        for of_group, weights_of_group in groups
        for n, weight in zip(of_group, weights_of_group, strict=False)
    }


def _get_extension(tree: Mapping[Any, Any], key: str) -> Any:
    """Return a value that this library added to a file; None if it does not exist."""
    added = tree.get(EXTENSION_KEY)
    return added.get(key) if isinstance(added, Mapping) else None


logger = get_logger(__name__)

_FLAT_BUFFERS = UnreadableArray(
    problem="the stored optimizer has its states as pieces of SMP's flat buffers (shard_optimizer_state), and where a "
    "piece lies only the job knew that wrote them",
    hint="Load the model without the optimizer. Or resume the job with SMP itself, without shard_optimizer_state, and "
    "save again.",
)
_CONFLICTING_NUMBERS = UnreadableArray(
    problem="the parts of the pipeline stages number the parameters of the optimizer differently, so that no number "
    "means one parameter",
    hint="Load the model without the optimizer.",
)
_NOT_A_STATE = UnreadableArray(
    problem="what is stored as the optimizer is no state of one: its groups do not number their parameters",
    hint="Load the model without it.",
)
_MODEL_REQUIRED = UnreadableArray(
    problem="a tp rank numbers other parameters than tp rank 0, and no model that is stored with them says which",
    hint="SMP keeps some parameters on tp rank 0 alone: the set needs the model beside the optimizer.",
)


@dataclass(frozen=True, slots=True)
class MergedOptimizer:
    """Optimizers of all parts, merged."""

    by_rank: Mapping[RankCoords, RankOptimizer] = field(default_factory=dict)
    """Optimizer of each tp rank, over all pipeline stages; of each tp and rdp rank if rows were sharded."""

    unsplit_names: frozenset[str] = frozenset()
    """Names of parameters that each tp rank has in full: SMP empties their states on all tp ranks except the first."""

    problem: UnreadableArray | None = None
    """Reason why the optimizer cannot be read."""

    masters_problem: UnreadableArray | None = None
    """Reason why the master weights cannot be read, if there are any."""


def merge_optimizers(
    files: RankFiles,
    parts: Mapping[RankCoords, Mapping[Any, Any]],
    model: MergedModel,
    hints: LoadHints,
    *,
    same_save: bool,
) -> MergedOptimizer:
    """Merge the optimizers of all parts.

    Args:
        parts: The optimizer in each part.
        same_save: True if the save notes record that the files are from one save.

    Raises:
        CorruptCheckpointError: The parts are from different saves.
        IncompatibleCheckpointError: The program's optimizer has other parameters.
    """
    shares = {at: share for at, tree in sorted(parts.items()) for at, share in iterate_shares(at, tree)}
    if not all(map(is_optimizer_share, shares.values())):
        return MergedOptimizer(problem=_NOT_A_STATE)
    check_same_save(shares, same_save=same_save)
    if has_zero1_rows(parts):
        return MergedOptimizer(by_rank=merge_zero1_rows(parts))
    lost = _make_unreadable_masters(shares)
    united = None if has_flat_buffers(shares, model) else merge_shares(files, shares)
    if united is None:
        return MergedOptimizer(problem=_FLAT_BUFFERS, masters_problem=lost)
    if any(
        get_group_numbers(united[at].groups) != get_group_numbers(united[RankCoords(tp=at.tp)].groups) for at in united
    ):
        return MergedOptimizer(problem=_CONFLICTING_NUMBERS, masters_problem=lost)
    names = _resolve_names(united, model, hints)
    if names is None and len({tuple(map(tuple, get_group_numbers(share.groups))) for share in united.values()}) > 1:
        return MergedOptimizer(problem=UNNAMED_OPTIMIZER, masters_problem=lost)
    if names is not None and not all(_relabel_groups(s.groups, names, model, at.tp) for at, s in united.items()):
        return MergedOptimizer(problem=_MODEL_REQUIRED, masters_problem=lost)
    masters = _collect_masters(united)
    by_tp = {
        tp: _merge_pipeline_stages({at: share for at, share in united.items() if at.tp == tp}, names, model, masters)
        for tp in sorted({at.tp for at in united})
    }
    return MergedOptimizer(
        by_rank={RankCoords(tp=tp): tree for tp, tree in by_tp.items()},
        unsplit_names=_find_unsplit_names(by_tp, names or {}),
        masters_problem=None if masters is not None else lost,
    )


# Map parameter numbers to names.


def _resolve_names(
    united: Mapping[RankCoords, OptimizerShare], model: MergedModel, hints: LoadHints
) -> dict[int, str] | None:
    """Map the numbers on tp rank 0 to names; None if the names are unknown.

    Names in the files take precedence, then the order of the program's optimizer. If this does not fit, because its
    parameters are in another order or belong to one pipeline stage, the order and shapes of the stored model are used.

    Raises:
        IncompatibleCheckpointError: The program's optimizer has other parameters, and no other source has names.
    """
    groups = united[RankCoords()].groups
    stored = [number for numbers in get_group_numbers(groups) for number in numbers]
    if (names := read_group_names(groups)) is not None:
        return {number: str(name) for number, name in names.items()}
    guessed = _guess_names(united, model)
    if guessed is not None and set(guessed) != set(stored):
        guessed = None
    if hints.parameter_groups is None:
        return guessed
    try:
        named = name_stage_parameters(
            groups,
            separate_experts=False,
            hints=hints,
            model=model.stage.copies or None,
            shapes={number: get_parameter_shape(_find_state(united, number)) for number in stored},
            is_expert=lambda _: False,
        )
    except IncompatibleCheckpointError:
        if guessed is None:
            raise
        return guessed
    if guessed is not None and named != guessed and hints.rank == 0:
        number = next(n for n in stored if (named or {}).get(n) != guessed[n])
        logger.warning(
            "number %d of the stored optimizer is %s by the order of this program's optimizer, and %s by that of the "
            "stored model: the program's counts",
            number,
            (named or {}).get(number),
            guessed[number],
        )
    return named


def _find_state(united: Mapping[RankCoords, OptimizerShare], number: int) -> Any:
    """Return the state of a number on tp rank 0."""
    return next((share.state[number] for at, share in united.items() if not at.tp and share.state.get(number)), None)


def _guess_names(united: Mapping[RankCoords, OptimizerShare], model: MergedModel) -> dict[int, str] | None:
    """Infer names from order and shapes; None unless the result is unique.

    Each pipeline stage has the states of its own parameters, in the order of its model.
    """
    guessed: dict[int, str] = {}
    for at, share in united.items():
        if at.tp:
            continue
        numbers = [[n for n in group if n in share.state] for group in get_group_numbers(share.groups)]
        shapes = {n: get_parameter_shape(share.state[n]) for group in numbers for n in group}
        parameters = _list_parameter_shapes(model, at.pp)
        stepped = {name: shape for name, shape in parameters.items() if shape in shapes.values()}
        named = infer_names_by_order(numbers, shapes, parameters, stepped)
        if named is None:
            return None
        guessed |= named
    return guessed


def _list_parameter_shapes(model: MergedModel, pp: int) -> dict[str, tuple[int, ...]]:
    """Return the local shapes of possible parameters of a stage. For a tied parameter only the first name is used."""
    seen: set[tuple[str, int]] = set()
    shapes = {}
    for name in model.names_by_stage.get(pp, ()):
        tensor = model.stage.copies.get(name, {}).get((0, 0, 0))
        if tensor is None or tensor.location is None or not tensor.dtype.is_floating:
            continue
        place = (tensor.file, tensor.location.offset)
        if place not in seen or 0 in tensor.shape:
            seen.add(place)
            shapes[name] = tensor.shape
    return shapes


# Merge the optimizer of each tp rank.


def _merge_pipeline_stages(
    of_stages: Mapping[RankCoords, OptimizerShare],
    names: Mapping[int, str] | None,
    model: MergedModel,
    masters: Mapping[RankCoords, Mapping[int, Any]] | None,
) -> RankOptimizer:
    """Merge the optimizer of one tp rank over all stages, with the numbers of tp rank 0."""
    first = next(iter(of_stages.values()))
    tp = next(iter(of_stages)).tp
    numbers = {n: n for group in get_group_numbers(first.groups) for n in group}
    groups: list[Mapping[str, Any]] = list(first.groups)
    if names is not None and (renumbered := _relabel_groups(first.groups, names, model, tp)) is not None:
        numbers, groups = renumbered
    state: dict[Any, Any] = {}
    weights: dict[int, Any] = {}
    for at, share in of_stages.items():
        for number, members in share.state.items():
            key = numbers.get(number, number) if type(number) is int else number
            if members or key not in state:
                state[key] = members
        weights |= {numbers.get(n, n): weight for n, weight in (masters or {}).get(at, {}).items()}
    return RankOptimizer(groups=groups, states=state, masters=weights)


def _relabel_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], model: MergedModel, tp: int
) -> tuple[dict[int, int], list[Mapping[str, Any]]] | None:
    """Map a tp rank's numbers to the numbers on tp rank 0, and relabel its groups; None if its parameters are unknown.

    A parameter that SMP stores only on tp rank 0 has no number on other ranks, and later parameters have smaller ones.
    """
    by_name = {name: number for number, name in names.items()}
    absent = {name for name, copies in model.stage.copies.items() if (0, 0, tp) not in copies}
    present = [name for _, name in sorted(names.items()) if name not in absent]
    own_numbers = sorted(n for group in get_group_numbers(groups) for n in group)
    ordered = [name for _, name in sorted(names.items())] if len(own_numbers) == len(names) else present
    if len(ordered) != len(own_numbers):
        return None
    called = dict(zip(own_numbers, ordered, strict=True))
    renumbered: list[Mapping[str, Any]] = [
        {
            **group,
            schema.PARAMS: [by_name[called[n]] for n in group[schema.PARAMS]],
            PARAM_NAMES_KEY: [called[n] for n in group[schema.PARAMS]],
        }
        for group in groups
    ]
    return {n: by_name[name] for n, name in called.items()}, renumbered


def _find_unsplit_names(by_tp: Mapping[int, RankOptimizer], names: Mapping[int, str]) -> frozenset[str]:
    if len(by_tp) < 2:
        return frozenset()
    first, others = by_tp[0].states, [stored.states for tp, stored in by_tp.items() if tp]
    emptied = (n for n, members in first.items() if members and all(other.get(n, members) == {} for other in others))
    return frozenset(names[n] for n in emptied if n in names)


# Collect master weights.


def _collect_masters(united: Mapping[RankCoords, OptimizerShare]) -> dict[RankCoords, dict[int, StoredTensor]] | None:
    """Return the master weights of each rank by number; None if the lists do not match the parameters.

    A list contains the master weights of the rank's parameters in a group, in the order of the rank's state.
    """
    by_rank: dict[RankCoords, dict[int, StoredTensor]] = {}
    for at, share in united.items():
        if share.masters is None:
            continue
        if share.masters_by_number is not None:
            by_rank[at] = dict(share.masters_by_number)
            continue
        if len(share.masters) != len(share.groups):
            return None
        for weights, numbers in zip(share.masters, get_group_numbers(share.groups), strict=True):
            own_numbers = [n for n in numbers if n in share.state]
            if not isinstance(weights, list) or len(weights) != len(own_numbers):
                return None
            for number, weight in zip(own_numbers, weights, strict=True):
                shape = get_parameter_shape(share.state[number])
                if not isinstance(weight, StoredTensor) or (shape is not None and shape != weight.shape):
                    return None
                by_rank.setdefault(at, {})[number] = weight
    return by_rank


def _make_unreadable_masters(shares: Mapping[RankCoords, OptimizerShare]) -> UnreadableArray | None:
    """Return a placeholder for master weights that are not read; None if there are none."""
    if all(share.masters is None for share in shares.values()):
        return None
    weight = next((w for share in shares.values() for group in share.masters or [] if group for w in group), None)
    return UnreadableArray(
        problem="the master weights are lists in the order of the parameters that a rank had, and its states do not "
        "say which these were",
        hint="The model's own weights, in half precision, are whole.",
        dtype=weight.dtype if isinstance(weight, StoredTensor) else None,
        shape=weight.shape if isinstance(weight, StoredTensor) else None,
    )
