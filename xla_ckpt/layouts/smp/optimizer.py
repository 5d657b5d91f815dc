"""The optimizers of all parts as one: numbers count over the whole model, and each stage has states of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import RankOptimizer, StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.optimizer import NAMELESS
from xla_ckpt.layouts.by_rank.stage_numbers import names_of_stage
from xla_ckpt.layouts.parameter_numbers import PARAM_NAMES, names_by_order, names_in_groups
from xla_ckpt.layouts.smp.model import MergedModel
from xla_ckpt.layouts.smp.optimizer_shares import (
    OptimizerShare,
    are_rows,
    check_one_save,
    is_flat,
    is_optimizer_share,
    largest,
    numbers_of,
    of_rows,
    shares_of,
    united_of,
)
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema

logger = get_logger(__name__)

_FLAT = UnknownArray(
    problem="the stored optimizer has its states as pieces of SMP's flat buffers (shard_optimizer_state), and where a "
    "piece lies only the job knew that wrote them",
    hint="Load the model without the optimizer. Or resume the job with SMP itself, without shard_optimizer_state, and "
    "save again.",
)
_OTHER_NUMBERS = UnknownArray(
    problem="the parts of the pipeline stages number the parameters of the optimizer differently, so that no number "
    "means one parameter",
    hint="Load the model without the optimizer.",
)
_NO_STATE = UnknownArray(
    problem="what is stored as the optimizer is no state of one: its groups do not number their parameters",
    hint="Load the model without it.",
)
_NO_MODEL = UnknownArray(
    problem="a tp rank numbers other parameters than tp rank 0, and no model that is stored with them says which",
    hint="SMP keeps some parameters on tp rank 0 alone: the set needs the model beside the optimizer.",
)


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of all parts."""

    trees: Mapping[RankAt, RankOptimizer] = field(default_factory=dict)
    """One for each tp rank, of all pipeline stages; where rows were dealt out, one for each tp and rdp rank."""

    whole: frozenset[str] = frozenset()
    """Names of parameters that each tp rank has whole: SMP empties their states on all tp ranks but the first."""

    problem: UnknownArray | None = None
    """Why nothing can be read of them."""

    masters: UnknownArray | None = None
    """Why the master weights cannot be read, where there are any."""


def optimizers(
    files: RankFiles, parts: Mapping[RankAt, Mapping[Any, Any]], model: MergedModel, hints: Hints, *, noted: bool
) -> Optimizers:
    """The optimizers of all parts.

    Args:
        parts: What each part holds of the optimizer.
        noted: Whether notes beside the files say that they are of one save.

    Raises:
        CorruptCheckpointError: The parts are of two saves.
        IncompatibleCheckpointError: The program's optimizer has other parameters.
    """
    shares = {at: share for at, tree in sorted(parts.items()) for at, share in shares_of(at, tree)}
    if not all(map(is_optimizer_share, shares.values())):
        return Optimizers(problem=_NO_STATE)
    check_one_save(shares, noted=noted)
    if are_rows(parts):
        return Optimizers(trees=of_rows(parts))
    lost = _lost_masters(shares)
    united = None if is_flat(shares, model) else united_of(files, shares)
    if united is None:
        return Optimizers(problem=_FLAT, masters=lost)
    if any(numbers_of(united[at].groups) != numbers_of(united[RankAt(tp=at.tp)].groups) for at in united):
        return Optimizers(problem=_OTHER_NUMBERS, masters=lost)
    names = _names(united, model, hints)
    if names is None and len({tuple(map(tuple, numbers_of(share.groups))) for share in united.values()}) > 1:
        return Optimizers(problem=NAMELESS, masters=lost)
    if names is not None and not all(_as_on_first(s.groups, names, model, at.tp) for at, s in united.items()):
        return Optimizers(problem=_NO_MODEL, masters=lost)
    masters = _masters(united)
    by_tp = {
        tp: _of_rank({at: share for at, share in united.items() if at.tp == tp}, names, model, masters)
        for tp in sorted({at.tp for at in united})
    }
    return Optimizers(
        trees={RankAt(tp=tp): tree for tp, tree in by_tp.items()},
        whole=_whole(by_tp, names or {}),
        masters=None if masters is not None else lost,
    )


# Which parameter a number means.


def _names(united: Mapping[RankAt, OptimizerShare], model: MergedModel, hints: Hints) -> dict[int, str] | None:
    """The name of each number on tp rank 0; None if nobody can tell.

    Names in the files count first, then the order of the program's optimizer. Where that does not fit, because its
    parameters come in another order or are those of one pipeline stage, order and shapes of the stored model may tell.

    Raises:
        IncompatibleCheckpointError: The program's optimizer has other parameters, and nothing else names them.
    """
    groups = united[RankAt()].groups
    stored = [number for numbers in numbers_of(groups) for number in numbers]
    if (names := names_in_groups(groups)) is not None:
        return {number: str(name) for number, name in names.items()}
    guessed = _guessed(united, model)
    if guessed is not None and set(guessed) != set(stored):
        guessed = None
    if hints.groups is None:
        return guessed
    try:
        named = names_of_stage(
            groups,
            experts_apart=False,
            hints=hints,
            model=model.stage.copies or None,
            shapes={number: largest(_state(united, number)) for number in stored},
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


def _state(united: Mapping[RankAt, OptimizerShare], number: int) -> Any:
    """The state of a number on tp rank 0."""
    return next((share.state[number] for at, share in united.items() if not at.tp and share.state.get(number)), None)


def _guessed(united: Mapping[RankAt, OptimizerShare], model: MergedModel) -> dict[int, str] | None:
    """Names by order and shapes, stage by stage: each has states of its own parameters, whose order is that of its
    model; None unless there is only one way.
    """
    guessed: dict[int, str] = {}
    for at, share in united.items():
        if at.tp:
            continue
        numbers = [[n for n in group if n in share.state] for group in numbers_of(share.groups)]
        shapes = {n: largest(share.state[n]) for group in numbers for n in group}
        parameters = _parameters(model, at.pp)
        stepped = {name: shape for name, shape in parameters.items() if shape in shapes.values()}
        named = names_by_order(numbers, shapes, parameters, stepped)
        if named is None:
            return None
        guessed |= named
    return guessed


def _parameters(model: MergedModel, pp: int) -> dict[str, tuple[int, ...]]:
    """Local shapes of what may be parameters of a stage. Of several names of a tied one the first counts."""
    seen: set[tuple[str, int]] = set()
    shapes = {}
    for name in model.of_stage.get(pp, ()):
        tensor = model.stage.copies.get(name, {}).get((0, 0, 0))
        if tensor is None or tensor.at is None or not tensor.dtype.floating:
            continue
        place = (tensor.file, tensor.at.offset)
        if place not in seen or 0 in tensor.shape:
            seen.add(place)
            shapes[name] = tensor.shape
    return shapes


# One tree for each tp rank.


def _of_rank(
    of_stages: Mapping[RankAt, OptimizerShare],
    names: Mapping[int, str] | None,
    model: MergedModel,
    masters: Mapping[RankAt, Mapping[int, Any]] | None,
) -> RankOptimizer:
    """The optimizer of one tp rank, of all stages, with the numbers of tp rank 0."""
    first = next(iter(of_stages.values()))
    tp = next(iter(of_stages)).tp
    numbers = {n: n for group in numbers_of(first.groups) for n in group}
    groups: list[Mapping[str, Any]] = list(first.groups)
    if names is not None and (renumbered := _as_on_first(first.groups, names, model, tp)) is not None:
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


def _as_on_first(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], model: MergedModel, tp: int
) -> tuple[dict[int, int], list[Mapping[str, Any]]] | None:
    """For a tp rank: the number on tp rank 0 of each of its own, and its groups; None if nothing says which it has.

    A parameter that SMP keeps on tp rank 0 alone has no number elsewhere, and those behind it have smaller ones.
    """
    by_name = {name: number for number, name in names.items()}
    absent = {name for name, copies in model.stage.copies.items() if (0, 0, tp) not in copies}
    present = [name for _, name in sorted(names.items()) if name not in absent]
    own_numbers = sorted(n for group in numbers_of(groups) for n in group)
    ordered = [name for _, name in sorted(names.items())] if len(own_numbers) == len(names) else present
    if len(ordered) != len(own_numbers):
        return None
    called = dict(zip(own_numbers, ordered, strict=True))
    renumbered: list[Mapping[str, Any]] = [
        {
            **group,
            schema.PARAMS: [by_name[called[n]] for n in group[schema.PARAMS]],
            PARAM_NAMES: [called[n] for n in group[schema.PARAMS]],
        }
        for group in groups
    ]
    return {n: by_name[name] for n, name in called.items()}, renumbered


def _whole(by_tp: Mapping[int, RankOptimizer], names: Mapping[int, str]) -> frozenset[str]:
    if len(by_tp) < 2:
        return frozenset()
    first, others = by_tp[0].states, [stored.states for tp, stored in by_tp.items() if tp]
    emptied = (n for n, members in first.items() if members and all(other.get(n, members) == {} for other in others))
    return frozenset(names[n] for n in emptied if n in names)


# Master weights.


def _masters(united: Mapping[RankAt, OptimizerShare]) -> dict[RankAt, dict[int, StoredTensor]] | None:
    """The master weights of each rank by number; None if the lists do not say whose they are.

    A list has those of a group's parameters that the rank has, in their order; so does the rank's state.
    """
    by_rank: dict[RankAt, dict[int, StoredTensor]] = {}
    for at, share in united.items():
        if share.masters is None:
            continue
        if share.numbered is not None:
            by_rank[at] = dict(share.numbered)
            continue
        if len(share.masters) != len(share.groups):
            return None
        for weights, numbers in zip(share.masters, numbers_of(share.groups), strict=True):
            own_numbers = [n for n in numbers if n in share.state]
            if not isinstance(weights, list) or len(weights) != len(own_numbers):
                return None
            for number, weight in zip(own_numbers, weights, strict=True):
                shape = largest(share.state[number])
                if not isinstance(weight, StoredTensor) or (shape is not None and shape != weight.shape):
                    return None
                by_rank.setdefault(at, {})[number] = weight
    return by_rank


def _lost_masters(shares: Mapping[RankAt, OptimizerShare]) -> UnknownArray | None:
    """What stands for master weights that are not read; None if there are none."""
    if all(share.masters is None for share in shares.values()):
        return None
    weight = next((w for share in shares.values() for group in share.masters or [] if group for w in group), None)
    return UnknownArray(
        problem="the master weights are lists in the order of the parameters that a rank had, and its states do not "
        "say which these were",
        hint="The model's own weights, in half precision, are whole.",
        dtype=weight.dtype if isinstance(weight, StoredTensor) else None,
        shape=weight.shape if isinstance(weight, StoredTensor) else None,
    )
