"""Targets that share memory of the program: a load may fill it only if what is stored for all of them agrees."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.target import Target, by_kind
from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.strided import Strided
from xla_ckpt.snapshot.memory import Bytes
from xla_ckpt.tree.path import listed


@dataclass(frozen=True, slots=True)
class _Place:
    """A box of a target, and the memory of the program that it goes into."""

    leaf: str
    box: Box
    memory: Strided


def check_overlaps(reader: TagReader, targets: Mapping[str, Target]) -> None:
    """Find out whether targets that share memory get the same values, before anything is overwritten.

    What is stored for them is read for that, into other memory. Names of one stored array need no look.

    Raises:
        IncompatibleCheckpointError: They do not: the load would leave those of the target that is filled last.
        CorruptCheckpointError: What is read for that is damaged.
    """
    for places in _together(targets):
        aliases = reader.manifest.aliases
        distinct = {(aliases.get(p.leaf, p.leaf), p.box, p.memory): p for p in places}
        if len(distinct) > 1:
            _check_values(reader, targets, list(distinct.values()))


def _together(targets: Mapping[str, Target]) -> Iterator[list[_Place]]:
    """Places whose spans of memory meet."""
    spans: dict[Hashable, list[tuple[int, int, str]]] = {}
    of_each = by_kind(targets.values(), lambda kind, some: kind.spans(some))
    for leaf, of_target in zip(targets, of_each, strict=True):
        for space, low, high in of_target:
            spans.setdefault(space, []).append((low, high, leaf))
    # Nearly every target has memory of its own: only of the others is looked at each box.
    for meeting in spans.values():
        if len(meeting) > 1:
            near = _near(meeting)
            yield from _meeting({leaf: target for leaf, target in targets.items() if leaf in near} if near else {})


def _near(spans: Sequence[tuple[int, int, str]]) -> set[str]:
    """The leaf paths whose span meets another one."""
    low, high = np.array([span[:2] for span in spans], np.int64).T
    order = np.lexsort((high, low))
    reach = np.maximum.accumulate(high[order])
    meets = low[order][1:] < reach[:-1]
    both = np.r_[meets, False] | np.r_[False, meets]
    return {spans[i][2] for i in order[both].tolist()}


def _meeting(targets: Mapping[str, Target]) -> Iterator[list[_Place]]:
    """Places of some targets whose spans of memory meet."""
    spaces: dict[object, list[tuple[int, int, _Place]]] = {}
    for leaf, target in targets.items():
        for box, memory in zip(target.boxes, target.over(), strict=False):
            if box.size:
                spaces.setdefault(memory.space, []).append((*memory.span, _Place(leaf, box, memory)))
    for places in spaces.values():
        places.sort(key=lambda p: p[:2])
        met: list[_Place] = []
        end = 0
        for low, high, place in places:
            if met and low >= end:
                if len(met) > 1:
                    yield met
                met = []
            met.append(place)
            end = max(end, high)
        if len(met) > 1:
            yield met


def _check_values(reader: TagReader, targets: Mapping[str, Target], places: list[_Place]) -> None:
    """Write what is stored into memory that lies as the program's does: each place must keep what was written."""
    leaves = list(dict.fromkeys(place.leaf for place in places))
    stored = {targets[leaf].dtype for leaf in leaves}
    if len(stored) > 1:
        raise _refusal(leaves, "types: " + ", ".join(sorted(dtype.name for dtype in stored)))
    arrays = [np.empty(place.box.size * targets[place.leaf].dtype.itemsize, np.uint8) for place in places]
    wants = [Want(place.leaf, place.box, i) for i, place in enumerate(places)]
    read_into(reader, plan_restore(reader.manifest, wants), [values.data for values in arrays])
    low = min(place.memory.span[0] for place in places)
    high = max(place.memory.span[1] for place in places)
    itemsize = next(iter(stored)).itemsize
    rehearsed = np.zeros((high - low) * itemsize // places[0].memory.itemsize, np.uint8)
    views = [_view(rehearsed, place.memory, low, itemsize) for place in places]
    for view, values in zip(views, arrays, strict=True):
        view[...] = values.reshape(view.shape)
    for view, values in zip(views, arrays, strict=True):
        if not np.array_equal(view, values.reshape(view.shape)):
            raise _refusal(leaves, "values")


def _view(memory: Bytes, place: Strided, low: int, itemsize: int) -> Bytes:
    """The bytes of a place, in memory whose first byte stands for `low`, for elements of another size (of a cast)."""
    first = (place.start - low) * itemsize // place.itemsize
    steps = (*(step * itemsize // place.itemsize for step in place.strides), 1)
    return np.lib.stride_tricks.as_strided(memory[first:], (*place.shape, itemsize), steps)


def _refusal(leaves: list[str], what: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"arrays of the target share memory, and the checkpoint holds different {what} for them; nothing was changed",
        expected="equal values, or arrays with memory of their own",
        found=listed(leaves),
        hint="Give each its own memory (clone() it, or do not tie the weights); or load from a tag that was saved with "
        "them tied.",
    )
