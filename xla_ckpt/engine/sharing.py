"""Sharing files with an earlier tag: compare what is saved with its digests, and have its files in the new tag, too."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.save_messages import Base
from xla_ckpt.engine.segments import ShardBytes
from xla_ckpt.engine.stale import remembered
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError
from xla_ckpt.manifest.digest import DigestColumn, block_count, block_size, digest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import Sources
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.plan.sharing import Sharing, Twins, divided, names_of, twins_of, whole_files, without_twins
from xla_ckpt.sharding.corners import Flags
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.tags.root import Root

logger = logging.getLogger(__name__)


def share(
    plan: SavePlan, frozen: Frozen, memory: ShardBytes, base: Base | None, root: Root, directory: Directory, crew: Crew
) -> Sharing:
    """Have all files of the base that still hold in the directory of a new tag. Without a base, nothing is shared.

    That the base is damaged or gone is logged, and no error: then all is written.

    Args:
        plan: What this process would write if it shared nothing.
        frozen: What it saves.
        memory: The bytes of that.
        base: The earlier tag.
        root: Where both are.
        directory: The new tag.
        crew: The threads that compare. Its progress is called for each region, with no bytes.

    Returns:
        What is left to write, and what is shared.
    """
    twins = without_twins(plan)
    holds = [np.zeros(len(its.file), np.bool_) for its in twins]
    shared: dict[int, FileRecord] = {}
    if base is not None:
        try:
            known = remembered(root, base.tag, base.sequence)
            with TagReader(root.store.open(base.directory), root.path, base.tag, known) as reader:
                with collector_paused():
                    twins = twins_of(plan, frozen.leaves, reader.manifest)
                regions = _regions(plan, twins, memory, reader)
                _compare(regions, holds, crew)
                shared = _linked(plan, twins, holds, reader, directory)
        except (CheckpointError, OSError) as error:
            crew.progress(0)  # if the save was given up, this is where it ends
            logger.warning("nothing is shared with tag %s: %s", base.tag, error)
    with collector_paused():
        return divided(plan, twins, holds, shared, frozen.fixed)


@dataclass(frozen=True, slots=True)
class _Region:
    """A region of a plan that the base has, too, perhaps with other bytes."""

    file: int
    """Index of the planned file."""

    row: int
    """Index of the region in it."""

    data: memoryview
    known: DigestColumn
    """The digests of its blocks in the base."""


def _regions(plan: SavePlan, twins: Sequence[Twins], memory: ShardBytes, base: TagReader) -> list[_Region]:
    """All regions with a twin, but for those that are not in host memory yet."""
    regions = []
    for n, (file, its) in enumerate(zip(plan.files, twins, strict=True)):
        sources = Sources.of(file.sources)
        for number in np.unique(its.file[its.file >= 0]).tolist():
            table = base.digest_table(number)
            if table is None:
                continue
            rows = np.flatnonzero(its.file == number)
            columns = (rows, sources.shard[rows], sources.offset[rows], sources.nbytes[rows])
            first = table.find(its.offset[rows], sources.nbytes[rows])
            for row, shard, offset, nbytes, at in zip(*(c.tolist() for c in (*columns, first)), strict=True):
                source = memory[sources.leaf[row], shard]
                if not isinstance(source, Deferred):
                    known = table.digests[at : at + block_count(nbytes)]
                    regions.append(_Region(n, row, source[offset : offset + nbytes], known))
    return regions


def _compare(regions: Sequence[_Region], holds: Sequence[Flags], crew: Crew) -> None:
    """Find out which regions have the bytes of their twins."""

    def compare(region: _Region, _: memoryview) -> None:
        crew.progress(0)
        holds[region.file][region.row] = _is_same(region.data, region.known)

    work_off(regions, compare, workers=threads(crew.workers, 1), buffer_bytes=0, name="xla_ckpt-share")


def _is_same(data: memoryview, known: DigestColumn) -> bool:
    """Whether some bytes have these digests. What was trained differs nearly everywhere: one block tells it."""
    block = block_size(len(data))
    blocks = itertools.chain((0,), range(len(known) - 1, 0, -1))  # what is filled up bit by bit differs at its end
    return all(digest(data[b * block : (b + 1) * block]) == int(known[b]) for b in blocks)


def _linked(
    plan: SavePlan, twins: Sequence[Twins], holds: Sequence[Flags], base: TagReader, directory: Directory
) -> dict[int, FileRecord]:
    """The files of the base that are in the new tag now, by their index in the base."""
    tables = {
        number: base.digest_table(number) for its in twins for number in np.unique(its.file).tolist() if number >= 0
    }
    counts = {number: 0 if table is None else len(table.offset) for number, table in tables.items()}
    shared = {}
    for file, name in names_of(plan, twins, whole_files(twins, holds, counts)).items():
        record = base.manifest.files[file]
        try:
            base.source(file)  # which compares its size
            directory.link(base.directory, record.path, name)
        except (OSError, CheckpointError) as refused:
            # Another device, a file system without hard links, a file that is too large for one request, or has gone.
            logger.warning("%s of tag %s is written again, and not shared: %s", record.path, base.tag, refused)
        else:
            shared[file] = replace(record, path=name)
    return shared
