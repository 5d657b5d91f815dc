"""Sharing files with an earlier tag: compare what is saved with its digests, and have its files in the new tag, too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.save_messages import EarlierTag
from xla_ckpt.engine.segments import ShardBytes
from xla_ckpt.engine.stale import remembered
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.unchanged import unchanged_since
from xla_ckpt.engine.verify import verify_files
from xla_ckpt.errors import CheckpointError
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.digest import block_count, block_size, digest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import Sources
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.plan.sharing import SharedPlan, Twins, divided, new_names, twins_of, whole_files, without_twins
from xla_ckpt.sharding.corners import Flags, Ints
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.root import Root

logger = get_logger(__name__)

AT_ONCE = 64
"""Regions that a thread compares before it asks for more."""


def earlier_tag(order: Order, newest: TagEntry | None) -> EarlierTag | None:
    """The tag whose files a save may share, if it asks for that and there is one."""
    wanted = order.options.share
    if not wanted:
        return None
    entry = newest if wanted is True else order.root.entry(wanted)
    if entry is None or entry.damage is not None:
        level = logging.DEBUG if wanted is True else logging.WARNING  # a first save has nothing to share with
        missing = "there is no earlier tag" if wanted is True else f"there is no tag {wanted}"
        logger.log(level, "tag %s shares nothing: %s that can be read", order.tag, missing)
        return None
    return EarlierTag(entry.directory, entry.tag, entry.sequence)


def share_files(
    plan: SavePlan,
    frozen: Frozen,
    earlier: EarlierTag | None,
    root: Root,
    directory: Directory,
    crew: Crew,
    *,
    verify: bool,
) -> SharedPlan:
    """Have all files of an earlier tag that still hold in the directory of a new one. Without one, nothing is shared.

    That it is damaged or gone is logged, and no error: then all is written.

    Args:
        plan: What this process would write if it shared nothing.
        frozen: What it saves.
        earlier: The earlier tag; None if there is none.
        root: Where both are.
        directory: The new tag.
        crew: The threads that compare. Its progress is called for each region, with no bytes.
        verify: Whether the bytes of a file are compared with their digests before it is shared. Parity that is made of
            damaged bytes would keep the damage.

    Returns:
        What is left to write, and what is shared.
    """
    twins = without_twins(plan)
    shared: dict[int, FileRecord] = {}
    if earlier is not None:
        try:
            known = remembered(root, earlier.tag, earlier.sequence)
            with TagReader(root.store.open(earlier.directory), root.path, earlier.tag, known) as reader:
                with collector_paused():
                    twins = twins_of(plan, frozen.leaves, reader.manifest)
                unchanged = unchanged_since(root, earlier.tag, earlier.sequence, frozen.fixed)
                _compare(plan, twins, frozen.snapshot.to_write(), unchanged, reader, crew)
                shared = _linked(plan, twins, reader, directory, crew, verify=verify)
        except (CheckpointError, OSError) as error:
            crew.progress(0)  # if the save was given up, this is where it ends
            logger.warning("nothing is shared with tag %s: %s", earlier.tag, error)
    with collector_paused():
        return divided(plan, twins, shared, frozen.fixed)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Regions of a planned file, and their twins in a file of the earlier tag."""

    rows: Ints
    """The regions of the planned file."""

    sources: Sources
    known: Sequence[int]
    """The digests of all blocks of the earlier tag's file."""

    first: Ints
    """The place of the first digest of each twin."""

    same: Flags
    """Which regions of the planned file have the bytes of their twins: filled in."""


def _compare(
    plan: SavePlan,
    twins: Sequence[Twins],
    shards: ShardBytes,
    unchanged: Collection[str],
    earlier: TagReader,
    crew: Crew,
) -> None:
    """Find out which regions have the bytes of their twins. What is not in host memory yet counts as changed.

    `unchanged` are leaf paths of what need not be looked at.
    """
    pairs = []
    for file, its in zip(plan.files, twins, strict=True):
        for number in np.unique(its.file[its.file >= 0]).tolist():
            if (table := earlier.digest_table(number)) is not None:
                rows = np.flatnonzero(its.file == number)
                sources = Sources.of(file.sources).rows(rows)
                first = table.find(its.offset[rows], sources.nbytes)
                pairs.append(_Pair(rows, sources, table.digests.tolist(), first, its.same))

    def compare(task: tuple[_Pair, slice], _: memoryview) -> None:
        pair, part = task
        sources = pair.sources
        columns = (pair.rows, sources.shard, sources.offset, sources.nbytes, pair.first)
        numbers = zip(sources.leaf[part], *(column[part].tolist() for column in columns), strict=True)
        for leaf, row, shard, offset, nbytes, first in numbers:
            crew.progress(0)
            source = shards[leaf, shard]
            if leaf in unchanged:
                pair.same[row] = True
            elif not isinstance(source, Deferred):
                pair.same[row] = _is_same(source[offset : offset + nbytes], pair.known, first)

    tasks = [(pair, slice(at, at + AT_ONCE)) for pair in pairs for at in range(0, len(pair.rows), AT_ONCE)]
    work_off(tasks, compare, workers=threads(crew.workers, 1), buffer_bytes=0, name="xla_ckpt-share")


def _is_same(data: memoryview, known: Sequence[int], first: int) -> bool:
    """Whether some bytes have the digests from `first` on. What was trained differs nearly everywhere: one tells it."""
    block = block_size(len(data))
    if digest(data[:block]) != known[first]:
        return False
    blocks = range(block_count(len(data)) - 1, 0, -1)  # what is filled up bit by bit differs at its end
    return all(digest(data[b * block : (b + 1) * block]) == known[first + b] for b in blocks)


def _linked(
    plan: SavePlan, twins: Sequence[Twins], earlier: TagReader, directory: Directory, crew: Crew, *, verify: bool
) -> dict[int, FileRecord]:
    """The files of the earlier tag that are in the new one now, by their index in the earlier one."""
    tables = {
        number: earlier.digest_table(number) for its in twins for number in np.unique(its.file).tolist() if number >= 0
    }
    counts = {number: 0 if table is None else len(table.offset) for number, table in tables.items()}
    shared = {}
    for file, name in new_names(plan, twins, whole_files(twins, counts)).items():
        record = earlier.manifest.files[file]
        try:
            earlier.source(file)  # which compares its size
            if verify:
                _check(earlier, file, crew)
            directory.link(earlier.directory, record.path, name)
        except (OSError, CheckpointError) as refused:
            # Damage, another device, a file system without hard links, a file that is too large for one request, or has
            # gone.
            logger.warning("%s of tag %s is written again, and not shared: %s", record.path, earlier.tag, refused)
        else:
            shared[file] = replace(record, path=name)
    return shared


def _check(earlier: TagReader, file: int, crew: Crew) -> None:
    """Refuse a file whose bytes do not have their digests.

    Raises:
        CheckpointError: They do not, or it cannot be read.
    """
    readers = Crew(workers=crew.workers, progress=lambda _: crew.progress(0))
    problems, _ = verify_files(earlier, [file], readers)
    if problems:
        raise problems[0]
