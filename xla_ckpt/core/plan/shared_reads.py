"""Cooperative reads: assigns reads to ranks if several ranks request the same bytes or the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from xla_ckpt.core.plan.restore_plan import ReadRequest, RestorePlan
from xla_ckpt.core.sharding.box import Box

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OverlappingReads:
    """Different boxes of one leaf with the same rows, such as the columns of a row-parallel weight.

    Separately, each rank would read whole checksum blocks, which also contain the columns of the others. Instead every
    member reads some of the rows for all members.
    """

    leaf: str
    boxes: tuple[tuple[Box, Ranks], ...]
    """Each box, and the ranks that request it."""

    @property
    def members(self) -> Ranks:
        """All ranks that request one of the boxes."""
        return tuple(sorted({rank for _, ranks in self.boxes for rank in ranks}))

    @property
    def bounds(self) -> Box:
        """Smallest box that contains all boxes."""
        return reduce(_compute_bounding_box, (box for box, _ in self.boxes))

    def assign_rows(self, rank: int) -> Box | None:
        """Return the rows that a member reads, or None if there are fewer rows than members and it gets none."""
        whole, members = self.bounds, self.members
        i, n = members.index(rank), len(members)
        first, rows = whole.start[0], whole.shape[0]
        low, high = first + i * rows // n, first + (i + 1) * rows // n
        return whole.slice_dim(0, low, high) if low < high else None


def _compute_bounding_box(a: Box, b: Box) -> Box:
    return Box(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """Reads that a job's ranks have in common. Equal on all ranks."""

    identical: tuple[tuple[str, Box, Ranks], ...]
    """Boxes that several ranks request."""

    overlapping: tuple[OverlappingReads, ...]

    def to_json(self) -> list[object]:
        """Return the groups as plain JSON, to send to the other ranks."""
        return [
            [[leaf, b.start, b.stop, ranks] for leaf, b, ranks in self.identical],
            [[m.leaf, [[b.start, b.stop, ranks] for b, ranks in m.boxes]] for m in self.overlapping],
        ]

    @classmethod
    def from_json(cls, json: Any) -> ReadGroups:
        """Create the groups from the result of `to_json`."""

        def box(start: Any, stop: Any) -> Box:
            return Box(tuple(start), tuple(stop))

        same, mixed = json
        return cls(
            tuple((leaf, box(a, b), tuple(ranks)) for leaf, a, b, ranks in same),
            tuple(
                OverlappingReads(leaf, tuple((box(a, b), tuple(ranks)) for a, b, ranks in boxes))
                for leaf, boxes in mixed
            ),
        )


def group_reads(requests_by_rank: Sequence[Sequence[tuple[str, Box]]]) -> ReadGroups:
    """Group the reads that ranks have in common.

    Args:
        requests_by_rank: (leaf, box) pairs that each rank requests.
    """
    rows: dict[tuple[str, tuple[int, ...]], dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes_wanted in enumerate(requests_by_rank):
        for leaf, box in boxes_wanted:
            rows[leaf, (*box.start[:1], *box.stop[:1])][box].append(rank)
    same, mixed = [], []
    for (leaf, _), boxes in sorted(rows.items()):
        if len(boxes) > 1:
            mixed.append(OverlappingReads(leaf, tuple((box, tuple(ranks)) for box, ranks in sorted(boxes.items()))))
        else:
            ((box, ranks),) = boxes.items()
            if len(ranks) > 1:
                same.append((leaf, box, tuple(ranks)))
    return ReadGroups(tuple(same), tuple(m for m in mixed if len(m.members) > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """One rank's share of cooperative reads."""

    rank: int
    groups: ReadGroups
    slots: Mapping[tuple[str, Box], int]
    """Slot of each box that this rank requests."""

    readers: Mapping[int, tuple[int, Ranks]]
    """Slot -> (the rank that reads it for all, the ranks that request it), for boxes that several ranks request."""

    def select_own_reads(self, plan: RestorePlan) -> RestorePlan:
        """Return the part of the plan that this rank reads directly into its slots."""
        mixed = [(m.leaf, box) for m in self.groups.overlapping for box, _ in m.boxes]
        others = {self.slots[wanted] for wanted in mixed if wanted in self.slots}
        others |= {slot for slot, (reader, _) in self.readers.items() if reader != self.rank}
        return plan.select(~plan.match_slots(others))

    def plan_overlapping_reads(self, first_slot: int) -> list[tuple[OverlappingReads, ReadRequest]]:
        """Return this rank's reads of overlapping boxes, into separate memory with slots numbered from `first_slot`."""
        wants: list[tuple[OverlappingReads, ReadRequest]] = []
        for mixed in self.groups.overlapping:
            if self.rank in mixed.members and (box := mixed.assign_rows(self.rank)) is not None:
                wants.append((mixed, ReadRequest(mixed.leaf, box, first_slot + len(wants))))
        return wants


def assign_readers(rank: int, groups: ReadGroups, requests: Sequence[ReadRequest]) -> ReadShare:
    """Assign the reads of identical boxes: the largest first, each to the member with the fewest elements so far."""
    slots = {(w.leaf, w.box): w.slot for w in requests}
    load: dict[Ranks, dict[int, int]] = {}
    readers: dict[int, tuple[int, Ranks]] = {}
    for leaf, box, ranks in sorted(groups.identical, key=lambda s: (-s[1].size, s[0], s[1])):
        of = load.setdefault(ranks, dict.fromkeys(ranks, 0))
        reader = min(ranks, key=lambda r: (of[r], r))
        of[reader] += box.size
        if (slot := slots.get((leaf, box))) is not None:
            readers[slot] = reader, ranks
    return ReadShare(rank=rank, groups=groups, slots=slots, readers=readers)
