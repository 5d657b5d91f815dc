"""The optimizers of all parts as one: numbers count over the whole model, and each stage has states of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.nxd.names import names_of_stage
from xla_ckpt.layouts.nxd.optimizer import NAMELESS
from xla_ckpt.layouts.nxd.rank_files import At, Scan, StoredTensor
from xla_ckpt.layouts.smp.contents import INNER, MASTERS
from xla_ckpt.layouts.smp.parts import two_saves
from xla_ckpt.layouts.smp.rows import STORED_MASTERS, are_rows, masters_by_number, of_rows
from xla_ckpt.layouts.smp.stage import Merged
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.plan.numbers import only_names
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import STEP

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
_NAMES = "param_names"
"""Key of a group under which the names of its parameters are, if somebody knew them."""

_BUFFERS = ("running_mean", "running_var")
"""What torch calls arrays of its modules that have the shapes of parameters, and are none."""


@dataclass(slots=True)
class _Share:
    """What one rank stored of the optimizer."""

    state: Mapping[Any, Any]
    groups: list[Mapping[str, Any]]
    masters: list[Any] | None = None
    """fp32 copies of the parameters that the rank has, by group."""

    numbered: Mapping[int, Any] | None = None
    """The same by number, where the file says which numbers they have."""


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


def optimizers(scan: Scan, parts: Mapping[At, Mapping[Any, Any]], model: Merged, wanted: Hints) -> Optimizers:
    """The optimizers of all parts.

    Args:
        scan: Where the files are.
        parts: What each part holds of the optimizer.
        model: The model.
        wanted: What the program says.

    Raises:
        CorruptCheckpointError: The parts are of two saves, or one is no state of an optimizer.
        IncompatibleCheckpointError: The program's optimizer has other parameters.
    """
    shares = {at: share for at, tree in sorted(parts.items()) for at, share in _shares(at, tree)}
    check_one_save(shares)
    if are_rows(parts):
        return Optimizers(of_rows(parts))
    if _is_flat(shares, model):
        return Optimizers(problem=_FLAT)
    united = _united(scan, shares)
    if united is None:
        return Optimizers(problem=_FLAT)
    if any(_numbers(united[at].groups) != _numbers(united[At(tp=at.tp)].groups) for at in united):
        return Optimizers(problem=_OTHER_NUMBERS)
    names = _names(united, model, wanted)
    if names is None and len({tuple(map(tuple, _numbers(share.groups))) for share in united.values()}) > 1:
        return Optimizers(problem=NAMELESS)
    masters = _masters(united)
    found = {
        tp: _of_rank({at: share for at, share in united.items() if at.tp == tp}, names, model, masters)
        for tp in sorted({at.tp for at in united})
    }
    lost = None if masters is not None else _lost_masters(united)
    return Optimizers({At(tp=tp): tree for tp, tree in found.items()}, _whole(found, names or {}), None, lost)


def _shares(at: At, tree: Mapping[Any, Any]) -> Iterator[tuple[At, _Share]]:
    """What the ranks of one group stored that differ in rdp only: one, or those whose shares are in lists."""
    masters = tree.get(MASTERS)
    inner = tree.get(INNER, tree)
    state, groups = inner.get(schema.STATE), inner.get(schema.GROUPS)
    if isinstance(state, list) and isinstance(groups, list) and len(state) == len(groups):
        of_ranks = masters if isinstance(masters, list) and len(masters) == len(state) else [None] * len(state)
        for rdp, (one, some, its) in enumerate(zip(state, groups, of_ranks, strict=True)):
            yield At(pp=at.pp, tp=at.tp, dp=rdp), _share(at, one, some, its)
    else:
        yield at, replace(_share(at, state, groups, masters), numbered=masters_by_number(tree))


def _share(at: At, state: Any, groups: Any, masters: Any) -> _Share:
    fits = isinstance(state, Mapping) and isinstance(groups, list)
    if not fits or not all(isinstance(g, Mapping) and isinstance(g.get(schema.PARAMS), list) for g in groups):
        raise CorruptCheckpointError(
            "a part holds no state of an optimizer: its groups do not number their parameters",
            leaf=schema.OPTIMIZER,
            found=f"at pp {at.pp}, tp {at.tp}",
        )
    return _Share(state, groups, masters if isinstance(masters, list) else None)


def check_one_save(shares: Mapping[At, _Share]) -> None:
    """Check that the parts may have been written together.

    The options of the groups are the same on all ranks of a job, and so are step counts, but for parameters that a
    step left out: two parts that have no step count in common are of different steps.

    Raises:
        CorruptCheckpointError: They were not.
    """
    first, one = next(iter(shares.items()))
    steps: tuple[At, set[Any]] | None = None
    for at, share in shares.items():
        for n, (group, other) in enumerate(zip(one.groups, share.groups, strict=False)):
            for key in (group.keys() & other.keys()) - {schema.PARAMS, _NAMES}:
                if not _alike(group[key], other[key]):
                    raise two_saves(
                        f"{key} of group {n} is {group[key]!r} at {_called(first)}, and {other[key]!r} at {_called(at)}"
                    )
        mine = set(_steps(share.state))
        if mine and steps is None:
            steps = (at, mine)
        elif mine and steps is not None and not mine & steps[1]:
            raise two_saves(f"the step counts of the optimizer at {_called(steps[0])} and at {_called(at)} differ")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) or isinstance(other, StoredTensor):
        return True  # the options of a capturable optimizer are tensors; the reader of groups compares them
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _called(at: At) -> str:
    return f"pp {at.pp}, tp {at.tp}" + (f", rdp {at.dp}" if at.dp else "")


def _steps(state: Mapping[Any, Any]) -> Iterator[Any]:
    """The step counts of parameters, or what tells them apart: of a tensor of one number its CRC-32 does."""
    for members in state.values():
        step = members.get(STEP) if isinstance(members, Mapping) else None
        if isinstance(step, StoredTensor) and step.at is not None and step.at.crc is not None:
            yield (step.dtype.name, step.shape, step.at.crc)
        elif type(step) in (int, float):
            yield step


def _is_flat(shares: Mapping[At, _Share], model: Merged) -> bool:
    """Whether states are pieces of flat buffers: none has more dims than one, although parameters have."""
    if all(_NAMES in group for share in shares.values() for group in share.groups):
        return False
    shapes = [shape for share in shares.values() for members in share.state.values() if (shape := largest(members))]
    wide = any(len(held.shape) > 1 for copies in model.stage.copies.values() for held in copies.values())
    return bool(shapes) and wide and all(len(shape) == 1 for shape in shapes)


def largest(members: Any) -> tuple[int, ...] | None:
    """The shape of a parameter: that of the state with the most dims, as a step count is a single number."""
    if not isinstance(members, Mapping):
        return None
    shapes = [value.shape for value in members.values() if isinstance(value, StoredTensor) and value.shape]
    return max(shapes, key=len, default=None)


def _united(scan: Scan, shares: Mapping[At, _Share]) -> dict[At, _Share] | None:
    """Shares of ranks that differ in rdp only, as one; None if several have one parameter, with different states."""
    made: dict[At, _Share] = {}
    states: dict[At, dict[Any, Any]] = {}
    for at, share in sorted(shares.items()):
        key = At(pp=at.pp, tp=at.tp)
        state = states.setdefault(key, {})
        made.setdefault(key, replace(share, state=state))
        for number, members in share.state.items():
            if state.get(number) and members and not _same(scan, state[number], members):
                return None
            state[number] = state.get(number) or members
    return made


def _same(scan: Scan, one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and scan.same(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(scan, one[key], other[key]) for key in one)
    return bool(one == other)


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(group[schema.PARAMS]) for group in groups]


# Which parameter a number means.


def _names(united: Mapping[At, _Share], model: Merged, wanted: Hints) -> dict[int, str] | None:
    """The name of each number on tp rank 0; None if nobody can tell."""
    groups = united[At()].groups
    stored = [number for numbers in _numbers(groups) for number in numbers]
    told = all(len(group.get(_NAMES) or ()) == len(group[schema.PARAMS]) for group in groups)
    theirs = None if wanted.groups is None else sum(map(len, wanted.groups))
    if not told and theirs != len(stored):
        # The program does not have all parameters of the job, as a rank of a pipeline has not, or says nothing.
        found = _guessed(united, model)
        if found is not None and set(found) == set(stored):
            return found
        if theirs is None:
            return None
    shapes = {number: largest(_state(united, number)) for number in stored}
    named = names_of_stage(
        groups,
        ordinary=len(groups),
        wanted=wanted,
        model=model.stage.copies or None,
        shapes=shapes,
        is_expert=lambda _: False,
    )
    return None if named is None or not all(isinstance(name, str) for name in named.values()) else named


def _state(united: Mapping[At, _Share], number: int) -> Any:
    """The state of a number on tp rank 0."""
    return next((share.state[number] for at, share in united.items() if not at.tp and share.state.get(number)), None)


def _guessed(united: Mapping[At, _Share], model: Merged) -> dict[int, str] | None:
    """Names by order and shapes, stage by stage: each has states of its own parameters, whose order is that of its
    model; None unless there is only one way.
    """
    found: dict[int, str] = {}
    for at, share in united.items():
        if at.tp:
            continue
        numbers = [[n for n in group if n in share.state] for group in _numbers(share.groups)]
        shapes = {n: largest(share.state[n]) for group in numbers for n in group}
        held = _parameters(model, at.pp)
        for names in (held, {name: shape for name, shape in held.items() if not name.endswith(_BUFFERS)}):
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
    of_stages: Mapping[At, _Share],
    names: Mapping[int, str] | None,
    model: Merged,
    masters: Mapping[At, Mapping[int, Any]] | None,
) -> dict[str, Any]:
    """The optimizer of one tp rank, of all stages, with the numbers of tp rank 0."""
    first = next(iter(of_stages.values()))
    tp = next(iter(of_stages)).tp
    numbers = {n: n for group in _numbers(first.groups) for n in group}
    groups: list[Mapping[str, Any]] = list(first.groups)
    if names is not None:
        numbers, groups = _as_on_first(first.groups, names, model, tp)
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
) -> tuple[dict[int, int], list[Mapping[str, Any]]]:
    """For a tp rank: the number on tp rank 0 of each of its own, and its groups.

    A parameter that SMP keeps on tp rank 0 alone has no number elsewhere, and those behind it have smaller ones.

    Raises:
        CorruptCheckpointError: It has other parameters than its model.
    """
    by_name = {name: number for number, name in names.items()}
    absent = {name for name, copies in model.stage.copies.items() if (0, 0, tp) not in copies}
    present = [name for _, name in sorted(names.items()) if name not in absent]
    mine = sorted(n for group in _numbers(groups) for n in group)
    ordered = [name for _, name in sorted(names.items())] if len(mine) == len(names) else present
    if len(ordered) != len(mine):
        raise CorruptCheckpointError(
            "a tp rank numbers other parameters than tp rank 0, and its model does not say why",
            leaf=schema.group(),
            expected=f"{len(present)} parameters, or {len(names)}",
            found=f"{len(mine)} at tp {tp}",
        )
    called = dict(zip(mine, ordered, strict=True))
    made: list[Mapping[str, Any]] = [
        {
            **group,
            schema.PARAMS: [by_name[called[n]] for n in group[schema.PARAMS]],
            _NAMES: [called[n] for n in group[schema.PARAMS]],
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


def _masters(united: Mapping[At, _Share]) -> dict[At, dict[int, StoredTensor]] | None:
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
        for held, numbers in zip(share.masters, _numbers(share.groups), strict=True):
            mine = [n for n in numbers if n in share.state]
            if not isinstance(held, list) or len(held) != len(mine):
                return None
            for number, weight in zip(mine, held, strict=True):
                shape = largest(share.state[number])
                if not isinstance(weight, StoredTensor) or (shape is not None and shape != weight.shape):
                    return None
                made.setdefault(at, {})[number] = weight
    return made


def _lost_masters(united: Mapping[At, _Share]) -> UnknownArray:
    held = next((w for share in united.values() for group in share.masters or [] if group for w in group), None)
    return UnknownArray(
        problem="the master weights are lists in the order of the parameters that a rank had, and its states do not "
        "say which these were",
        hint="The model's own weights, in half precision, are whole.",
        dtype=held.dtype if isinstance(held, StoredTensor) else None,
        shape=held.shape if isinstance(held, StoredTensor) else None,
    )
