"""Reuse unchanged files of an earlier checkpoint: compare digests, and hard-link the files into the new one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.core.checksum import compute_block_size, compute_digest, count_blocks
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.file_sharing import (
    BaseMatches,
    SharedPlan,
    create_no_matches,
    find_fully_matching_files,
    match_base_regions,
    name_shared_files,
    split_shared,
)
from xla_ckpt.core.plan.save_plan import RegionSourceTable, SavePlan
from xla_ckpt.core.sharding.box import BoolArray, IntArray
from xla_ckpt.errors import CheckpointError
from xla_ckpt.features.reuse.buffer_cache import find_unchanged_leaves
from xla_ckpt.features.stale import get_cached_manifest
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import verify_files
from xla_ckpt.logs import get_logger
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.context import PreparedSave, SaveContext
from xla_ckpt.saving.rank_protocol import BaseTag
from xla_ckpt.saving.write import ShardBytes
from xla_ckpt.snapshot.snapshot import LazyShard
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.threads import get_worker_count, run_tasks
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.root import Root

logger = get_logger(__name__)

REGIONS_PER_TASK = 64
"""Number of regions per task of a thread."""


def find_base_tag(context: SaveContext, newest: TagEntry | None) -> BaseTag | None:
    """Return the tag whose files a save may reuse, or None if reuse is not requested or there is none."""
    wanted = context.options.share
    if not wanted:
        return None
    entry = newest if wanted is True else context.root.get_entry(wanted)
    if entry is None or entry.damage is not None:
        level = logging.DEBUG if wanted is True else logging.WARNING  # a first save has nothing to reuse
        missing = "there is no earlier tag" if wanted is True else f"there is no tag {wanted}"
        logger.log(level, "tag %s shares nothing: %s that can be read", context.tag, missing)
        return None
    return BaseTag(entry.directory, entry.tag, entry.sequence)


def reuse_files(
    plan: SavePlan,
    prepared: PreparedSave,
    base: BaseTag | None,
    root: Root,
    directory: Directory,
    io: IoContext,
    *,
    verify: bool,
) -> SharedPlan:
    """Link all unchanged files of an earlier tag into the directory of a new one.

    If the earlier tag is corrupt or missing, a warning is logged and all files are written.

    Args:
        plan: Save plan of this process without reuse.
        prepared: State to save.
        base: The earlier tag; None if there is none.
        root: Root of both tags.
        directory: Directory of the new tag.
        io: Threads that compare. The progress callback is called with 0 bytes for each region.
        verify: If True, compare the bytes of a file with their digests before it is reused, because parity computed
            from damaged bytes would preserve the damage.

    Returns:
        The remaining files to write, and the reused files.
    """
    twins = create_no_matches(plan)
    shared: dict[int, FileRecord] = {}
    if base is not None:
        try:
            known = get_cached_manifest(root, base.tag, base.sequence)
            with TagReader(root.store.open(base.directory), root.path, base.tag, known) as reader:
                with pause_gc():
                    twins = match_base_regions(plan, prepared.leaves, reader.manifest)
                unchanged = find_unchanged_leaves(root, base.tag, base.sequence, prepared.untrained_parameters)
                _compare_regions(plan, twins, prepared.snapshot.materialize(), unchanged, reader, io)
                shared = _link_files(plan, twins, reader, directory, io, verify=verify)
        except (CheckpointError, OSError) as error:
            io.progress(0)  # raises if the save was cancelled
            logger.warning("nothing is shared with tag %s: %s", base.tag, error)
    with pause_gc():
        return split_shared(plan, twins, shared, prepared.untrained_parameters)


@dataclass(frozen=True, slots=True)
class _RegionPairs:
    """Regions of a planned file, and the matching regions in a file of the earlier tag."""

    rows: IntArray
    """Indices of the regions in the planned file."""

    sources: RegionSourceTable
    known: Sequence[int]
    """Digests of all blocks of the earlier file."""

    first: IntArray
    """Index of the first digest of each matching region."""

    same: BoolArray
    """For each region of the planned file, True if its bytes are equal. Filled in by the comparison."""


def _compare_regions(
    plan: SavePlan,
    twins: Sequence[BaseMatches],
    shards: ShardBytes,
    unchanged: Collection[str],
    base: TagReader,
    io: IoContext,
) -> None:
    """Find the regions whose bytes equal their matches. Regions that are not in host memory yet count as changed.

    `unchanged` contains leaf paths that need no comparison.
    """
    pairs = []
    for file, its in zip(plan.files, twins, strict=True):
        for number in np.unique(its.file[its.file >= 0]).tolist():
            if (table := base.get_digest_table(number)) is not None:
                rows = np.flatnonzero(its.file == number)
                sources = RegionSourceTable.from_sources(file.sources).select(rows)
                first = table.find_first_digests(its.offset[rows], sources.nbytes)
                pairs.append(_RegionPairs(rows, sources, table.digests.tolist(), first, its.is_equal))

    def compare(task: tuple[_RegionPairs, slice], _: memoryview) -> None:
        pair, part = task
        sources = pair.sources
        columns = (pair.rows, sources.shard_index, sources.offset, sources.nbytes, pair.first)
        numbers = zip(sources.leaf[part], *(column[part].tolist() for column in columns), strict=True)
        for leaf, row, shard, offset, nbytes, first in numbers:
            io.progress(0)
            source = shards[leaf, shard]
            if leaf in unchanged:
                pair.same[row] = True
            elif not isinstance(source, LazyShard):
                pair.same[row] = _has_known_digests(source[offset : offset + nbytes], pair.known, first)

    tasks = [
        (pair, slice(at, at + REGIONS_PER_TASK)) for pair in pairs for at in range(0, len(pair.rows), REGIONS_PER_TASK)
    ]
    run_tasks(tasks, compare, workers=get_worker_count(io.workers, 1), buffer_bytes=0, name="xla_ckpt-share")


def _has_known_digests(data: memoryview, known: Sequence[int], first: int) -> bool:
    """Return True if the bytes have the digests from `first` on.

    The first block is checked first, because it nearly always differs after training.
    """
    block = compute_block_size(len(data))
    if compute_digest(data[:block]) != known[first]:
        return False
    blocks = range(count_blocks(len(data)) - 1, 0, -1)  # gradually filled buffers differ at the end
    return all(compute_digest(data[b * block : (b + 1) * block]) == known[first + b] for b in blocks)


def _link_files(
    plan: SavePlan, twins: Sequence[BaseMatches], base: TagReader, directory: Directory, io: IoContext, *, verify: bool
) -> dict[int, FileRecord]:
    """Link files of the earlier tag into the new one, and return their records by index in the earlier tag."""
    tables = {
        number: base.get_digest_table(number) for its in twins for number in np.unique(its.file).tolist() if number >= 0
    }
    counts = {number: 0 if table is None else len(table.offset) for number, table in tables.items()}
    shared = {}
    for file, name in name_shared_files(plan, twins, find_fully_matching_files(twins, counts)).items():
        record = base.manifest.files[file]
        try:
            base.open_file(file)  # checks its size
            if verify:
                _check_file(base, file, io)
            directory.link(base.directory, record.path, name)
        except (OSError, CheckpointError) as refused:
            # Corrupt or missing, on another device, without hard links, or too large for one request.
            logger.warning("%s of tag %s is written again, and not shared: %s", record.path, base.tag, refused)
        else:
            shared[file] = replace(record, path=name)
    return shared


def _check_file(base: TagReader, file: int, io: IoContext) -> None:
    """Raise an error if a file does not match its digests.

    Raises:
        CheckpointError: The file does not match, or cannot be read.
    """
    readers = IoContext(workers=io.workers, progress=lambda _: io.progress(0))
    problems, _ = verify_files(base, [file], readers)
    if problems:
        raise problems[0]
