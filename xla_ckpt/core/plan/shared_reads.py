"""Cooperative reads: which rank reads what, if several ranks want the same bytes or the same rows."""

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
    """Different boxes of one leaf with the same rows: the columns of a row-parallel weight, say.

    Each alone would read whole digest blocks, which hold the others' columns, too. Together every member reads some of
    the rows, for all of them.
    """

    leaf: str
    boxes: tuple[tuple[Box, Ranks], ...]
    """Each box, and the ranks that want it."""

    @property
    def members(self) -> Ranks:
        """All ranks that want one of the boxes."""
        return tuple(sorted({rank for _, ranks in self.boxes for rank in ranks}))

    @property
    def bounds(self) -> Box:
        """The smallest box around all of them."""
        return reduce(_compute_bounding_box, (box for box, _ in self.boxes))

    def assign_rows(self, rank: int) -> Box | None:
        """What a member reads; None if there are fewer rows than members, and it has none."""
        whole, members = self.bounds, self.members
        i, n = members.index(rank), len(members)
        first, rows = whole.start[0], whole.shape[0]
        low, high = first + i * rows // n, first + (i + 1) * rows // n
        return whole.slice_dim(0, low, high) if low < high else None


def _compute_bounding_box(a: Box, b: Box) -> Box:
    return Box(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """What a job's ranks want in common. All ranks have the same."""

    identical: tuple[tuple[str, Box, Ranks], ...]
    """Boxes that several ranks want."""

    overlapping: tuple[OverlappingReads, ...]

    def to_json(self) -> list[object]:
        """As plain JSON, for the way to the other ranks."""
        return [
            [[leaf, b.start, b.stop, ranks] for leaf, b, ranks in self.identical],
            [[m.leaf, [[b.start, b.stop, ranks] for b, ranks in m.boxes]] for m in self.overlapping],
        ]

    @classmethod
    def from_json(cls, json: Any) -> ReadGroups:
        """What `to_json` described."""

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
    """What the ranks have in common, from the (leaf, box) that each of them wants."""
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
    """One rank's part of reading together."""

    rank: int
    groups: ReadGroups
    slots: Mapping[tuple[str, Box], int]
    """The slot of each box that this rank wants."""

    readers: Mapping[int, tuple[int, Ranks]]
    """Slot -> (the rank that reads it for all, the ranks that want it), of boxes that several ranks want."""

    def select_own_reads(self, plan: RestorePlan) -> RestorePlan:
        """The part of the plan that this rank reads straight into its slots."""
        mixed = [(m.leaf, box) for m in self.groups.overlapping for box, _ in m.boxes]
        others = {self.slots[wanted] for wanted in mixed if wanted in self.slots}
        others |= {slot for slot, (reader, _) in self.readers.items() if reader != self.rank}
        return plan.select(~plan.match_slots(others))

    def plan_overlapping_reads(self, first_slot: int) -> list[tuple[OverlappingReads, ReadRequest]]:
        """What this rank reads for mixed boxes, into memory of its own, numbered from `first_slot`."""
        wants: list[tuple[OverlappingReads, ReadRequest]] = []
        for mixed in self.groups.overlapping:
            if self.rank in mixed.members and (box := mixed.assign_rows(self.rank)) is not None:
                wants.append((mixed, ReadRequest(mixed.leaf, box, first_slot + len(wants))))
        return wants


def assign_readers(rank: int, groups: ReadGroups, requests: Sequence[ReadRequest]) -> ReadShare:
    """Deal the reading of equal boxes out: the largest first, each to the member that has least to read so far."""
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
