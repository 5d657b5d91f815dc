"""Tensors or values of one name on several ranks. If nobody says that they are copies, they are compared first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.layouts.by_rank.arrays import Copies, RankArray
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, listed_names
from xla_ckpt.layouts.by_rank.splits import HINT, WHOLE_RULE
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import Hints

_RANKS = ("ep", "tp")
"""Mesh axes over which an array of one name may be split without anything on disk that says so."""


def chosen_copy(
    files: RankFiles, array: RankArray, split: Sequence[str], hints: Hints, *, alone: bool
) -> tuple[Copies, bool] | UnknownArray:
    """The copies that an array is read from, and whether they are only those of the rank that loads.

    Copies that differ are parts of an array, or they have drifted apart. In a job over the same tp and ep ranks each
    rank can have its own, whichever of the two it is, as the program that wrote them loads them. For any other job the
    array is unknown.

    Args:
        split: Mesh axes along which it is split. Along all others the copies have to be equal.
        hints: What the targets of the load say.
        alone: Whether each rank wants a tensor of its own, of the shape that one rank has stored.

    Raises:
        CorruptCheckpointError: A file is missing, or holds another tensor.
    """
    copies, mesh = array.copies, array.mesh
    at = _places(array)
    pairs = _different(files, copies, at, split)
    if not pairs:
        return copies, False
    if alone and (hints.mesh.tp, hints.mesh.ep) == (mesh.tp, mesh.ep):
        coordinates = hints.mesh.coordinates(hints.rank)
        # Along an axis that splits the array the parts of all ranks are needed; dp is ep and edp.
        own = [axis for axis in _RANKS if axis not in split and not (axis == "ep" and "dp" in split)]
        return {key: tensor for key, tensor in copies.items() if all(at[key][a] == coordinates[a] for a in own)}, True
    named = [axis for axis in ("dp", *_RANKS) if mesh.sizes[axis] > 1 and (axis != "dp" or array.dealt)]
    called = {key: f"({', '.join(f'{axis} {at[key][axis]}' for axis in named)})" for key in copies}
    shape = list(copies[pairs[0][1]].shape)
    return UnknownArray(
        problem="the ranks hold different tensors of this name, and nothing says how the array was split over them",
        expected="equal ones on all ranks, or a sharding",
        found=f"{shape} on each rank; {listed_names([f'{called[b]} differs from {called[a]}' for a, b in pairs])}",
        hint=f"{HINT} A job of tp={mesh.tp}, ep={mesh.ep} whose ranks have tensors of this shape loads each rank's "
        f"own. Copies that have drifted apart need {WHOLE_RULE}: it takes the first rank's.",
    )


def differ(files: RankFiles, array: RankArray, split: Sequence[str]) -> bool:
    """Whether copies of one part are not equal; the arguments are those of `chosen_copy`.

    Raises:
        CorruptCheckpointError: A file is missing, or holds another tensor.
    """
    return bool(_different(files, array.copies, _places(array), split))


def _places(array: RankArray) -> dict[_Key, dict[str, int]]:
    """The mesh coordinates of the rank that stored each copy."""
    return {key: array.mesh.coordinates(array.rank_of(key, dealt=array.dealt)) for key in array.copies}


_Key = tuple[int, int, int]
"""(dp, ep, tp): where a copy stands."""


def _different(
    files: RankFiles, copies: Copies, at: Mapping[_Key, Mapping[str, int]], split: Sequence[str]
) -> list[tuple[_Key, _Key]]:
    """Pairs of copies of one part whose bytes are not the same: the first copy of the part, and the other one.

    Copies of different shapes or types are not compared: they are refused when the record of the array is made.
    """
    first: dict[tuple[int, ...], _Key] = {}
    pairs = []
    for key in sorted(copies):
        part = tuple(at[key][axis] for axis in split)
        one = first.setdefault(part, key)
        if one == key or (copies[one].shape, copies[one].dtype) != (copies[key].shape, copies[key].dtype):
            continue
        if not files.same(copies[one], copies[key]):
            pairs.append((one, key))
    return pairs


_ABSENT = object()
"""Stands for a member that a rank does not have."""


def in_common(files: RankFiles, by_rank: Mapping[RankAt, Any], key: Any) -> Any:
    """What all ranks have under a key, with an `UnknownArray` for each part of it that is not the same on all of them.

    It is for what is no tensor of a parameter's, and so has no place in a larger array: plain values, and containers
    with tensors in them. Without the comparison every rank would get those of the first.

    Raises:
        CorruptCheckpointError: A file is missing, or holds another tensor.
    """
    return _in_common(files, {at: members.get(key, _ABSENT) for at, members in by_rank.items()})


def _in_common(files: RankFiles, values: Mapping[RankAt, Any]) -> Any:
    one = min(values)
    first = values[one]
    others = [at for at in values if not _alike(files, first, values[at])]
    if others:
        return _differing(one, sorted(others), list(values))
    if isinstance(first, Mapping):
        return {k: _in_common(files, {at: value[k] for at, value in values.items()}) for k in first}
    if type(first) in (list, tuple):
        return type(first)(_in_common(files, {at: v[i] for at, v in values.items()}) for i in range(len(first)))
    return first


def _alike(files: RankFiles, one: Any, other: Any) -> bool:
    """Whether two values are the same; of two containers, whether they have the same members."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, StoredTensor):
        return files.same(one, other)
    if isinstance(one, Mapping):
        return bool(one.keys() == other.keys())
    if type(one) in (list, tuple):
        return len(one) == len(other)
    return bool(one == other) or (one != one and other != other)  # NaN is not equal to itself


def _differing(one: RankAt, others: Sequence[RankAt], ranks: Sequence[RankAt]) -> UnknownArray:
    axes = [axis for axis in ("dp", *_RANKS) if len({getattr(at, axis) for at in ranks}) > 1]

    def called(at: RankAt) -> str:
        return f"({', '.join(f'{axis} {getattr(at, axis)}' for axis in axes)})"

    return UnknownArray(
        problem="the ranks hold different values in this place, and nothing says which of them is meant",
        expected="the same on all ranks",
        found=listed_names([f"{called(other)} differs from {called(one)}" for other in others]),
        hint="Load what does not need it: the model without the optimizer, or parts of the tag by xla_ckpt.restore.",
    )
