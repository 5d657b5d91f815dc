"""Who writes what: the replicas of a shard split its bytes between them.

Every function here is computed by each rank alone, from facts that all replicas share, so that no rank has to be
asked: large shards are split by rows, small ones are dealt out whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints

SPLIT_BYTES = 64 * 1024
"""Shards below this are written whole by one replica: splitting them would cost more than it balances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A region of a global array that this process holds, and who else holds it."""

    box: Box
    """Region of the global array."""

    replica: int = 0
    """Which of the equal copies this is, from 0; the same number on no other holder."""

    replicas: int = 1
    """How many copies there are in the job. All holders know the same number."""

    group: Hashable = None
    """Names the set of holders: all shards with an equal group are held by the same processes."""

    lane: int = 0
    """Which local device holds it; each lane has payload files of its own."""

    together: bool = False
    """Whether one holder writes it whole. The copies need not be equal then, and no file may mix them."""

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}")


def row_range(box: Box, replica: int, replicas: int) -> Box | None:
    """The part of `box` that one of its replicas writes when it is split by rows; None if that replica writes nothing.

    The split runs along the first tensor dim with more than one row, so that every part is one run of bytes.

    >>> str(row_range(Box((0, 0), (7, 2)), 1, 3))
    '[2:4, 0:2]'
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return box if replica == 0 else None
    first, rows = box.start[dim], box.shape[dim]
    low, high = replica * rows // replicas, (replica + 1) * rows // replicas
    return box.along(dim, first + low, first + high) if low < high else None


def owned(kinds: Sequence[tuple[LocalShard, int]], kind: Ints, *, cut: bool = True) -> tuple[list[Box | None], Ints]:
    """Which of many shards of one holder it writes, and what of each.

    The small shards of one group of holders are dealt out along the running sum of their bytes: each holder of the
    group walks the same list in the same order, and so they agree. Empty shards have no bytes and no writer.

    Args:
        kinds: What the shards are, each with the bytes of one element: of those that are alike, one.
        kind: The index of each shard's kind, in the order in which all holders have them.
        cut: Whether the copies of a large shard split it; else it is dealt out whole, however large it is.

    Returns:
        For each kind the part that a writer writes of such a shard, None if it writes nothing; and the rows of the
        shards of which this holder is a writer.
    """
    dealt_out = [_is_dealt_out(shard, itemsize, cut=cut) for shard, itemsize in kinds]
    parts = [_part(shard, dealt_out=dealt) for (shard, _), dealt in zip(kinds, dealt_out, strict=True)]
    # The same processes hold shards of one group that have as many replicas.
    holders: dict[Hashable, int] = {}
    dealt_to = [
        holders.setdefault((shard.group, shard.replicas), len(holders)) if dealt else -1
        for (shard, _), dealt in zip(kinds, dealt_out, strict=True)
    ]
    writes = np.array([part is not None for part in parts], np.bool_)[kind]
    group = np.array(dealt_to, np.int64)[kind]
    rows = np.argsort(group, kind="stable")[np.count_nonzero(group < 0) :]
    group, of_rows = group[rows], kind[rows]
    facts = [(shard.replica, shard.replicas, shard.box.size * itemsize) for shard, itemsize in kinds]
    replica, replicas, nbytes = np.array(facts, np.int64).reshape(-1, 3).T
    nbytes = nbytes[of_rows]
    total = np.zeros(len(holders), np.int64)
    np.add.at(total, group, nbytes)
    before = np.cumsum(nbytes) - nbytes - (np.cumsum(total) - total)[group]
    # The running sum is cut into as many equal parts as there are replicas. The part in which a shard begins says who
    # writes it.
    writes[rows] = before * replicas[of_rows] // total[group] == replica[of_rows]
    return parts, np.flatnonzero(writes)


def _is_dealt_out(shard: LocalShard, itemsize: int, *, cut: bool) -> bool:
    """Whether its holders write a shard whole, by turns: it is too small to split, of one element, or not to be cut."""
    whole = not cut or shard.box.size * itemsize < SPLIT_BYTES or shard.box.size == 1
    return whole and shard.replicas > 1 and not shard.together and shard.box.size > 0


def _part(shard: LocalShard, *, dealt_out: bool) -> Box | None:
    """What this holder writes of a shard; of one that is dealt out, if it is its turn."""
    if shard.box.size == 0:
        return None
    if shard.replicas == 1 or shard.together:
        return shard.box if shard.replica == 0 else None
    return shard.box if dealt_out else row_range(shard.box, shard.replica, shard.replicas)
