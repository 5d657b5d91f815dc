"""What tests ask of boxes."""

from __future__ import annotations

from collections.abc import Iterable

from xla_ckpt.core.sharding.box import Box, find_overlap


def is_partition(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether the boxes hold every element of `whole` exactly once, and nothing else.

    >>> is_partition([Box((0,), (2,)), Box((2,), (3,))], Box((0,), (3,)))
    True
    """
    nonempty = [b for b in boxes if b.size]
    inside = all(whole.contains(b) for b in nonempty)
    return inside and sum(b.size for b in nonempty) == whole.size and find_overlap(nonempty) is None
