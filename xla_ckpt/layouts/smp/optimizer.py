"""The optimizers of all parts as one: numbers count over the whole model, and each stage has states of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.nxd.names import names_of_stage
from xla_ckpt.layouts.nxd.optimizer import NAMELESS
from xla_ckpt.layouts.nxd.rank_files import At, Scan, StoredTensor
from xla_ckpt.layouts.smp.rows import STORED_MASTERS, are_rows, of_rows
from xla_ckpt.layouts.smp.shares import (
    NAMES,
    Share,
    check_one_save,
    is_flat,
    is_whole,
    largest,
    numbers_of,
    shares_of,
    united_of,
)
from xla_ckpt.layouts.smp.stage import Merged
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.numbers import only_names
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)

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
_BUFFERS = ("running_mean", "running_var")
"""What torch calls arrays of its modules that have the shapes of parameters, and are none."""


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of all parts."""

    trees: Mapping[At, Mapping[str, Any]] = field(default_factory=dict)
    """One for each tp rank, of all pipeline stages; where rows were dealt out, one for each tp and rdp rank."""

    whole: frozenset[str] = frozenset()
    """Names of parameters that each tp rank has whole: SMP empties their states on all tp ranks but the first."""

    problem: UnknownArray | None = None
    """Why nothing can be read of them."""

    masters: UnknownArray | None = None
    """Why the master weights cannot be read, where there are any."""


def optimizers(
    scan: Scan, parts: Mapping[At, Mapping[Any, Any]], model: Merged, wanted: Hints, *, noted: bool
) -> Optimizers:
    """The optimizers of all parts.

    Args:
        scan: Where the files are.
        parts: What each part holds of the optimizer.
        model: The model.
        wanted: What the program says.
        noted: Whether notes beside the files say that they are of one save.

    Raises:
        CorruptCheckpointError: The parts are of two saves.
        IncompatibleCheckpointError: The program's optimizer has other parameters.
    """
    shares = {at: share for at, tree in sorted(parts.items()) for at, share in shares_of(at, tree)}
    if not all(map(is_whole, shares.values())):
        return Optimizers(problem=_NO_STATE)
    check_one_save(shares, noted=noted)
    if are_rows(parts):
        return Optimizers(trees=of_rows(parts))
    lost = _lost_masters(shares)
    united = None if is_flat(shares, model) else united_of(scan, shares)
    if united is None:
        return Optimizers(problem=_FLAT, masters=lost)
    if any(numbers_of(united[at].groups) != numbers_of(united[At(tp=at.tp)].groups) for at in united):
        return Optimizers(problem=_OTHER_NUMBERS, masters=lost)
    names = _names(united, model, wanted)
    if names is None and len({tuple(map(tuple, numbers_of(share.groups))) for share in united.values()}) > 1:
        return Optimizers(problem=NAMELESS, masters=lost)
    if names is not None and not all(_as_on_first(s.groups, names, model, at.tp) for at, s in united.items()):
        return Optimizers(problem=_NO_MODEL, masters=lost)
    masters = _masters(united)
    found = {
        tp: _of_rank({at: share for at, share in united.items() if at.tp == tp}, names, model, masters)
        for tp in sorted({at.tp for at in united})
    }
    return Optimizers(
        trees={At(tp=tp): tree for tp, tree in found.items()},
        whole=_whole(found, names or {}),
        masters=None if masters is not None else lost,
    )


# Which parameter a number means.


def _names(united: Mapping[At, Share], model: Merged, wanted: Hints) -> dict[int, str] | None:
    """The name of each number on tp rank 0; None if nobody can tell.

    Names in the files count first, then the order of the program's optimizer. Where that does not fit, because its
    parameters come in another order or are those of one pipeline stage, order and shapes of the stored model may tell.

    Raises:
        IncompatibleCheckpointError: The program's optimizer has other parameters, and nothing else names them.
    """
    groups = united[At()].groups
    stored = [number for numbers in numbers_of(groups) for number in numbers]
    if all(len(group.get(NAMES) or ()) == len(group[schema.PARAMS]) for group in groups):
        return {n: str(name) for group in groups for n, name in zip(group[schema.PARAMS], group[NAMES], strict=True)}
    guessed = _guessed(united, model)
    if guessed is not None and set(guessed) != set(stored):
        guessed = None
    if wanted.groups is None:
        return guessed
    try:
        named = names_of_stage(
            groups,
            ordinary=len(groups),
            wanted=wanted,
            model=model.stage.copies or None,
            shapes={number: largest(_state(united, number)) for number in stored},
            is_expert=lambda _: False,
        )
    except IncompatibleCheckpointError:
        if guessed is None:
            raise
        return guessed
    if guessed is not None and named != guessed and wanted.rank == 0:
        number = next(n for n in stored if (named or {}).get(n) != guessed[n])
        logger.warning(
            "number %d of the stored optimizer is %s by the order of this program's optimizer, and %s by that of the "
            "stored model: the program's counts",
            number,
            (named or {}).get(number),
            guessed[number],
        )
    return named


def _state(united: Mapping[At, Share], number: int) -> Any:
    """The state of a number on tp rank 0."""
    return next((share.state[number] for at, share in united.items() if not at.tp and share.state.get(number)), None)


def _guessed(united: Mapping[At, Share], model: Merged) -> dict[int, str] | None:
    """Names by order and shapes, stage by stage: each has states of its own parameters, whose order is that of its
    model; None unless there is only one way.
    """
    found: dict[int, str] = {}
    for at, share in united.items():
        if at.tp:
            continue
        numbers = [[n for n in group if n in share.state] for group in numbers_of(share.groups)]
        shapes = {n: largest(share.state[n]) for group in numbers for n in group}
        held = _parameters(model, at.pp)
        stepped = {name: shape for name, shape in held.items() if shape in shapes.values()}
        for names in (held, stepped, {n: shape for n, shape in stepped.items() if not n.endswith(_BUFFERS)}):
            named = only_names(numbers, shapes, names)
            if named is not None:
                break
        if named is None:
            return None
        found |= named
    return found


def _parameters(model: Merged, pp: int) -> dict[str, tuple[int, ...]]:
    """Local shapes of what may be parameters of a stage. Of several names of a shared one the first counts."""
    seen: set[tuple[str, int]] = set()
    made = {}
    for name in model.of_stage.get(pp, ()):
        held = model.stage.copies.get(name, {}).get((0, 0, 0))
        if held is None or held.at is None or not held.dtype.floating:
            continue
        place = (held.file, held.at.offset)
        if place not in seen or 0 in held.shape:
            seen.add(place)
            made[name] = held.shape
    return made


# One tree for each tp rank.


def _of_rank(
    of_stages: Mapping[At, Share],
    names: Mapping[int, str] | None,
    model: Merged,
    masters: Mapping[At, Mapping[int, Any]] | None,
) -> dict[str, Any]:
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
        weights |= {numbers.get(n, n): held for n, held in (masters or {}).get(at, {}).items()}
    made: dict[str, Any] = {schema.STATE: state, schema.GROUPS: groups}
    return {**made, STORED_MASTERS: weights} if weights else made


def _as_on_first(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], model: Merged, tp: int
) -> tuple[dict[int, int], list[Mapping[str, Any]]] | None:
    """For a tp rank: the number on tp rank 0 of each of its own, and its groups; None if nothing says which it has.

    A parameter that SMP keeps on tp rank 0 alone has no number elsewhere, and those behind it have smaller ones.
    """
    by_name = {name: number for number, name in names.items()}
    absent = {name for name, copies in model.stage.copies.items() if (0, 0, tp) not in copies}
    present = [name for _, name in sorted(names.items()) if name not in absent]
    mine = sorted(n for group in numbers_of(groups) for n in group)
    ordered = [name for _, name in sorted(names.items())] if len(mine) == len(names) else present
    if len(ordered) != len(mine):
        return None
    called = dict(zip(mine, ordered, strict=True))
    made: list[Mapping[str, Any]] = [
        {
            **group,
            schema.PARAMS: [by_name[called[n]] for n in group[schema.PARAMS]],
            NAMES: [called[n] for n in group[schema.PARAMS]],
        }
        for group in groups
    ]
    return {n: by_name[name] for n, name in called.items()}, made


def _whole(found: Mapping[int, Mapping[str, Any]], names: Mapping[int, str]) -> frozenset[str]:
    if len(found) < 2:
        return frozenset()
    first, others = found[0][schema.STATE], [tree[schema.STATE] for tp, tree in found.items() if tp]
    emptied = (n for n, members in first.items() if members and all(other.get(n, members) == {} for other in others))
    return frozenset(names[n] for n in emptied if n in names)


# Master weights.


def _masters(united: Mapping[At, Share]) -> dict[At, dict[int, StoredTensor]] | None:
    """The master weights of each rank by number; None if the lists do not say whose they are.

    A list has those of a group's parameters that the rank has, in their order; so does the rank's state.
    """
    made: dict[At, dict[int, StoredTensor]] = {}
    for at, share in united.items():
        if share.masters is None:
            continue
        if share.numbered is not None:
            made[at] = dict(share.numbered)
            continue
        if len(share.masters) != len(share.groups):
            return None
        for held, numbers in zip(share.masters, numbers_of(share.groups), strict=True):
            mine = [n for n in numbers if n in share.state]
            if not isinstance(held, list) or len(held) != len(mine):
                return None
            for number, weight in zip(mine, held, strict=True):
                shape = largest(share.state[number])
                if not isinstance(weight, StoredTensor) or (shape is not None and shape != weight.shape):
                    return None
                made.setdefault(at, {})[number] = weight
    return made


def _lost_masters(shares: Mapping[At, Share]) -> UnknownArray | None:
    """What stands for master weights that are not read; None if there are none."""
    if all(share.masters is None for share in shares.values()):
        return None
    held = next((w for share in shares.values() for group in share.masters or [] if group for w in group), None)
    return UnknownArray(
        problem="the master weights are lists in the order of the parameters that a rank had, and its states do not "
        "say which these were",
        hint="The model's own weights, in half precision, are whole.",
        dtype=held.dtype if isinstance(held, StoredTensor) else None,
        shape=held.shape if isinstance(held, StoredTensor) else None,
    )
