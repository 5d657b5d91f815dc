"""Arrays that every rank holds whole."""

from __future__ import annotations

from xla_ckpt.adapters.base import Placement
from xla_ckpt.plan.leaf import Leaf, LocalShard


def replicated(leaf: Leaf, placement: Placement) -> Leaf:
    """The leaf of an array that every rank of the job holds whole."""
    if placement.world == 1:
        return leaf
    shards = tuple(LocalShard(s.box, placement.rank, placement.world, "world") for s in leaf.shards)
    return Leaf(leaf.path, leaf.dtype, leaf.shape, shards)
