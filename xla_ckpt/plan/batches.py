"""Which bytes are read in one go: the reads of a plan as whole digest blocks, and these as batches. Pure.

Large contiguous parts go straight into their destination. Everything else (scattered parts, many small neighbours, the
two ends of a part that begins or ends inside a block) comes through a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from xla_ckpt.manifest.digest import block_sizes
from xla_ckpt.plan.costs import DISK, Costs
from xla_ckpt.plan.restore_plan import RestorePlan
from xla_ckpt.sharding.corners import Flags, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """Whole digest blocks of stored shards, and the reads that need them: a row for each, in file order.

    Only whole blocks can be verified. An extent may hold more bytes than its read wants, at both ends.
    """

    read: Ints
    """Row in the plan."""

    first: Ints
    """First digest block."""

    last: Ints
    """One past the last digest block."""

    start: Ints
    """File offset of the first byte."""

    stop: Ints
    """File offset of one past the last byte."""

    straight: Flags
    """Whether the bytes go straight into their destination."""

    def __len__(self) -> int:
        return len(self.read)

    @classmethod
    def of(cls, plan: RestorePlan, read: Ints, first: Ints, last: Ints, straight: Flags) -> Extents:
        """The extents of these blocks of these reads."""
        offset, shard = plan.offset[read], plan.shard[read]
        size = block_sizes(shard)
        start, stop = offset + first * size, offset + np.minimum(last * size, shard)
        return cls(read=read, first=first, last=last, start=start, stop=stop, straight=straight)

    def rows(self, which: Ints | slice) -> Extents:
        """Some of them."""
        return Extents(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Neighbouring extents of one file, which are read in one go."""

    plan: RestorePlan
    extents: Extents
    file: int
    start: int
    """File offset of the first byte."""

    stop: int
    """File offset of one past the last byte."""

    @property
    def straight(self) -> bool:
        """Whether it is one extent whose bytes are read straight into their destination."""
        return bool(self.extents.straight[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all extents: more than are read where they overlap."""
        return int((self.extents.stop - self.extents.start).sum())

    @property
    def wanted(self) -> tuple[Ints, Ints]:
        """What its read wants of each extent: offsets in the shard, of the first byte and of one past the last."""
        plan, extents = self.plan, self.extents
        first, offset = plan.first[extents.read], plan.offset[extents.read]
        # A long part comes in several extents: each has the bytes that the part and the extent have in common.
        low = np.maximum(first, extents.start - offset)
        return low, np.minimum(first + plan.span[extents.read], extents.stop - offset)

    @property
    def is_wanted_whole(self) -> bool:
        """Whether all bytes of the blocks are wanted; only for plans that want none of them twice."""
        (low, high), read, extents = self.wanted, self.extents.read, self.extents
        wanted = np.where(self.plan.scatter[read] < 0, high - low, self.plan.moved[read])
        behind = np.concatenate([extents.start[:1], np.maximum.accumulate(extents.stop)[:-1]])  # of those before
        return bool(wanted.sum() == np.maximum(extents.stop - np.maximum(extents.start, behind), 0).sum())

    def leaf(self, extent: int = 0) -> str:
        """The leaf path of the array that one of the extents belongs to."""
        return self.plan.leaves[int(self.plan.leaf[self.extents.read[extent]])]


def batches_of(plan: RestorePlan, *, straight: bool, costs: Costs = DISK) -> list[ReadBatch]:
    """Everything that is read, in file order. `straight`: whether any of it may go straight into its destination."""
    extents = _extents(plan, straight, costs)
    alone, through = np.flatnonzero(extents.straight), np.flatnonzero(~extents.straight)
    some = extents.rows(through)
    groups = [alone[i : i + 1] for i in range(len(alone))]
    groups += [through[i:j] for i, j in _neighbours(plan.file[some.read], some.start, some.stop, costs)]
    groups.sort(key=lambda group: int(group[0]))
    return [_batch(plan, extents.rows(group)) for group in groups]


def _batch(plan: RestorePlan, extents: Extents) -> ReadBatch:
    # Extents may overlap, so the last one need not reach furthest.
    return ReadBatch(plan, extents, int(plan.file[extents.read[0]]), int(extents.start[0]), int(extents.stop.max()))


def _neighbours(file: Ints, start: Ints, stop: Ints, costs: Costs) -> Iterator[tuple[int, int]]:
    """(first, one past the last) of extents that are close together, and together small enough for a buffer."""
    if not len(file):
        return
    furthest = _furthest(file, stop)
    # Reads of one shard may overlap. One that begins before the others do is not in what they read.
    apart = (file[1:] != file[:-1]) | (start[1:] > furthest[:-1] + costs.max_gap) | (start[1:] < start[:-1])
    bounds = np.concatenate([[0], np.flatnonzero(apart) + 1, [len(file)]])
    small = furthest[bounds[1:] - 1] - start[bounds[:-1]] <= costs.batch_bytes
    for (first, last), fits in zip(pairwise(bounds.tolist()), small.tolist(), strict=True):
        at = first
        while at < last:
            end = at + int(np.searchsorted(furthest[at:last], start[at] + costs.batch_bytes, side="right"))
            end = last if fits else max(end, at + 1)
            yield at, end
            at = end


def _furthest(file: Ints, stop: Ints) -> Ints:
    """For each extent, the furthest end of it and those before it in its file."""
    if ((stop[1:] >= stop[:-1]) | (file[1:] != file[:-1])).all():
        return stop
    bounds = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
    return np.concatenate([np.maximum.accumulate(stop[first:last]) for first, last in pairwise(bounds)])


def _extents(plan: RestorePlan, straight: bool, costs: Costs) -> Extents:
    """The extents of all reads. The rows of a scattered part are copied between strided views of the whole, so all its
    blocks come together; the plan has bounded what they span. A large contiguous one is cut.
    """
    size, first, last = plan.blocks
    one_run = plan.scatter < 0
    goes_straight = one_run & (plan.moved >= costs.straight_bytes) if straight else np.zeros(len(plan), np.bool_)
    cut = goes_straight | (one_run & ((last - first) * size > costs.batch_bytes))
    rows: list[tuple[int, int, int, bool]] = []
    for read in np.flatnonzero(cut).tolist():
        if goes_straight[read]:
            rows += _straight(plan, read, int(size[read]), costs)
        else:
            groups = _bounded(int(size[read]), int(first[read]), int(last[read]), costs)
            rows += [(read, a, b, False) for a, b in groups]
    whole, pieces = np.flatnonzero(~cut), np.array(rows, np.int64).reshape(-1, 4)
    extents = Extents.of(
        plan,
        np.concatenate([whole, pieces[:, 0]]),
        np.concatenate([first[whole], pieces[:, 1]]),
        np.concatenate([last[whole], pieces[:, 2]]),
        np.concatenate([np.zeros(len(whole), np.bool_), pieces[:, 3] != 0]),
    )
    return extents.rows(np.lexsort((extents.first, extents.read))) if rows else extents


def _straight(plan: RestorePlan, read: int, size: int, costs: Costs) -> Sequence[tuple[int, int, int, bool]]:
    """The extents of a large contiguous read: the blocks that are wanted whole go straight into their destination.

    The first and the last block may also hold bytes that are not wanted. Read straight, those would overwrite the
    destination's neighbours, so these blocks go through the buffer.
    """
    begin = int(plan.first[read])
    end = begin + int(plan.span[read])
    begins_inside = begin % size != 0
    ends_inside = end % size != 0 and end != plan.shard[read]  # the last block of a shard may be short, and is whole
    head, tail = -(-begin // size), end // size if ends_inside else -(-end // size)
    rows = [(read, begin // size, head, False)] if begins_inside else []
    rows += [(read, a, b, True) for a, b in _bounded(size, head, tail, costs)]
    # A read that lies inside of one block has a tail before its head: that block has been dealt with.
    return [*rows, (read, tail, tail + 1, False)] if ends_inside and head <= tail else rows


def _bounded(size: int, first: int, last: int, costs: Costs) -> Iterator[tuple[int, int]]:
    """Some blocks in groups that fit in a worker's buffer."""
    step = max(costs.batch_bytes // size, 1)
    for block in range(first, last, step):
        yield block, min(block + step, last)
