"""One array of a tag, looked at without reading all of it: where its parts lie, and numbers about its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from xla_ckpt.api.opened import Knowledge, opened
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.statistics import Statistics, statistics_of
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import IncompatibleCheckpointError, storage_errors
from xla_ckpt.keywords import nearest
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.plan.stored_shardings import local_array_of, stored_sharding
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.ranges import pieces
from xla_ckpt.storage.base import Store
from xla_ckpt.tree import path as paths

VALUE_BYTES = 64 << 20
"""Bytes of an array that are read for the numbers about its values, at most."""

PIECES = 16
"""Of a larger array as many pieces are read, at equal distances."""

PARTS_TOLD = 256
"""Parts of an array whose places are told."""

MAX_RANKS_TOLD = 1024
"""Ranks of a mesh that are looked at to say which of them held a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPart:
    """A part of an array, as it is stored."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str
    """Relative to the tag."""

    ranks: tuple[int, ...]
    """The ranks of the first pipeline stage that had it when it was saved, as far as the tag says that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySample:
    """What `Checkpoints.sample` says of an array."""

    path: str
    tag: str
    leaf: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    mesh: str | None
    """Of the job that saved it."""

    split: tuple[object, ...] | None
    """How its dims were split over the mesh, as rules say it; None if nothing says so."""

    shards: int
    """In how many parts it is stored."""

    parts: tuple[ArrayPart, ...]
    """Those parts, the first 256 of them."""

    values: Statistics | None
    """Numbers about the values that were read; None where two of them are packed in a byte."""

    @property
    def whole(self) -> bool:
        """Whether all of its values were read."""
        return self.values is not None and self.values.elements == Box.whole(self.shape).size

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "whole": self.whole}


def sample_of(store: Store, tag: str, leaf: str, about: Knowledge, max_bytes: int) -> ArraySample:
    """Where an array lies, and numbers about its values, or about those in some pieces of it if it is large.

    Raises:
        IncompatibleCheckpointError: There is no such array, or nothing says how it was split.
        CheckpointError: The tag is damaged.
    """
    with opened(store, tag, about, part=leaf) as reader, storage_errors("reading an array", path=store.path, tag=tag):
        record = reader.manifest.array(leaf)
        if record is None:
            problem = f"there is no such array{nearest(leaf, list(reader.manifest.arrays))}"
            hint = f"Leaf paths of its arrays begin with: {paths.tops(reader.manifest.arrays)}."
            raise IncompatibleCheckpointError(problem, path=store.path, tag=tag, leaf=leaf, hint=hint)
        return ArraySample(
            path=store.path,
            tag=tag,
            leaf=leaf,
            dtype=record.dtype.name,
            shape=record.shape,
            nbytes=record.nbytes,
            mesh=reader.manifest.mesh,
            split=record.spec,
            shards=record.form.cells,
            parts=_parts(reader.manifest, leaf, record),
            values=_values(reader, leaf, record, max_bytes),
        )


def _values(reader: TagReader, leaf: str, record: ArrayRecord, max_bytes: int) -> Statistics | None:
    whole, itemsize = Box.whole(record.shape), record.dtype.itemsize
    boxes = list(pieces(whole, whole, itemsize, max(max_bytes // PIECES, 1)))
    if record.nbytes > max_bytes:
        boxes = [boxes[i * len(boxes) // PIECES] for i in range(PIECES)]
    slots = [memoryview(bytearray(box.size * itemsize)) for box in boxes]
    wants = [Want(leaf, box, number) for number, box in enumerate(boxes)]
    read_into(reader, plan_restore(reader.manifest, wants), slots, Crew())
    return statistics_of(slots, record.dtype)


def _parts(manifest: Manifest, leaf: str, record: ArrayRecord) -> tuple[ArrayPart, ...]:
    boxes_by_rank = _boxes_by_rank(manifest.mesh, leaf, record)
    return tuple(
        ArrayPart(
            start=shard.box.start,
            stop=shard.box.stop,
            file=manifest.files[shard.file].path,
            ranks=tuple(
                rank for rank, boxes in boxes_by_rank.items() if any(shard.box.intersect(box) for box in boxes)
            ),
        )
        for shard in islice(record, PARTS_TOLD)
    )


def _boxes_by_rank(text: str | None, leaf: str, record: ArrayRecord) -> Mapping[int, tuple[Box, ...]]:
    """Rank of the first pipeline stage -> what it had of an array; nothing where the tag does not say that."""
    try:
        mesh = Mesh.parse(text or "")
        if text is None or record.spec is None or mesh.size // mesh.pp > MAX_RANKS_TOLD:
            return {}
        sharding = stored_sharding(record)
        return {
            rank: local_array_of(leaf, sharding, record.shape, mesh, rank).boxes for rank in range(mesh.size // mesh.pp)
        }
    except ValueError:
        return {}  # the spec is for people, and another library's may say what no mesh of ours can have
