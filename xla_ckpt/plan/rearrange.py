"""Other arrays of the same stored bytes: renamed, cut out of one another, put together, with their parts in another
order. Pure.

A shard is a box of an array and the place of its bytes. So an array that consists of parts of stored ones is a record
with other boxes, and no byte moves: whoever reads a manifest reads these arrays, too, and verifies them alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box, Frame


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Elements of a new array, and where they are in one that is stored."""

    box: Box
    """Region of the new array."""

    leaf: str
    """Leaf path of the stored array."""

    source: Box
    """Region of the stored array; of the same shape."""

    def __post_init__(self) -> None:
        if self.box.shape != self.source.shape:
            raise ValueError(f"{self.source} of {self.leaf} cannot be {self.box} of another array")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearranged:
    """A new array."""

    shape: tuple[int, ...]
    parts: tuple[Excerpt, ...]
    """Disjoint; together they are the whole array."""

    spec: tuple[object, ...] | None = None
    """How a job splits it (see `xla_ckpt.sharding.sharding.Sharding.spec`), or None."""


def rearranged(leaf: str, new: Rearranged, manifest: Manifest) -> ArrayRecord:
    """The record of a new array.

    Args:
        leaf: Its leaf path, for errors.
        new: What it consists of.
        manifest: What is stored.

    Raises:
        IncompatibleCheckpointError: A part is not stored, or nothing says how its array was split, or the parts have
            different element types.
        FormatError: The parts are not every element exactly once.
    """
    sources = {part.leaf: manifest.required(part.leaf) for part in new.parts}
    types = {record.dtype.name: name for name, record in sources.items()}
    if len(types) != 1:
        raise IncompatibleCheckpointError(
            "it would be made of arrays of different element types",
            leaf=leaf,
            found=", ".join(f"{name} in {dtype_name}" for name, dtype_name in types.items()) or "no arrays at all",
        )
    shards = [shard for part in new.parts for shard in _shards(part, sources[part.leaf])]
    first, *others = sources.values()
    united = array_record(first.dtype, new.shape, shards, new.spec)
    meant = first.stands_for if all(record.stands_for == first.stands_for for record in others) else None
    return united.changed(stands_for=meant, own=any(record.own for record in sources.values()))


def _shards(part: Excerpt, record: ArrayRecord) -> Iterator[Shard]:
    """What is stored of a part, with the boxes that it has in the new array."""
    offset = tuple(new - old for new, old in zip(part.box.start, part.source.start, strict=True))
    for shard in record.touching(part.source):
        region = shard.box.intersect(part.source)
        if region is None:
            continue
        whole = shard.frame or shard.box
        box = region.moved(offset)
        # The digests of a region cover all of it. So a part of it keeps the place of the whole.
        frame = None if region == whole else Frame(whole.start, whole.stop).moved(offset)
        yield Shard(box, shard.file, shard.offset, frame)
