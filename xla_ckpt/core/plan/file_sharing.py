"""File sharing with a base checkpoint: decides which files a save reuses as hard links, and which it writes.

A file of the base is reused if all of its regions are unchanged. Otherwise it is not, because readers that ignore the
manifest would find old bytes under the names of new ones. Therefore unchanged regions are written to a separate file,
which the next save can reuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.core.manifest.arrays import ShardTable
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest
from xla_ckpt.core.plan.leaf import LeafTable
from xla_ckpt.core.plan.save_plan import (
    FileEntryTable,
    FilePlan,
    LeafShardTable,
    RegionSourceTable,
    SavePlan,
    WriteResult,
)
from xla_ckpt.core.sharding.box import BoolArray, Box, BoxArray, IntArray

MIN_SEPARATE_BYTES = 1 << 20
"""Minimum size (bytes) of unchanged regions that get a separate file. Rewriting fewer bytes costs less."""


@dataclass(frozen=True, slots=True, eq=False)
class BaseMatches:
    """Matching regions of the base checkpoint (same array, same box) for one planned file: a row per planned region."""

    file: IntArray
    """Index of the base file, or -1 if it has no such region or must not be shared."""

    offset: IntArray
    """Byte offset of the region in that file."""

    is_equal: BoolArray
    """True if the bytes are equal. False until they have been compared."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Files of a save that one process writes, and base files that it reuses."""

    plan: SavePlan
    """Plan for the written files."""

    shared_files: WriteResult = WriteResult((), LeafShardTable.from_shards(()))  # noqa: RUF009  # it is never changed
    """Reused files of the base checkpoint, under their names in the new checkpoint."""

    nbytes: int = 0
    """Number of array bytes in the reused files."""


def match_base_regions(plan: SavePlan, leaves: LeafTable, base: Manifest) -> list[BaseMatches]:
    """Find the regions of each planned file in the base checkpoint. Their bytes are not compared here."""
    arrays = base.arrays
    form_of = dict(zip(leaves.paths, leaves.kind.tolist(), strict=True))

    def cell(earlier_form: int, box: Box, form: int) -> int:
        """Return the index of the base cell that equals this box, or -1 if no cell does."""
        theirs = arrays.metadata[earlier_form]
        cells = (i for i, its in theirs.find_overlapping(box) if its == box)
        return next(cells, -1) if theirs.dtype == leaves.kinds[form][0] else -1

    of_files = create_no_matches(plan)
    for file, twins in zip(plan.files, of_files, strict=True):
        entries = _get_entries(file)
        row = np.array([arrays.row_by_leaf.get(leaf, -1) for leaf in entries.leaf], np.int64)
        form = np.array([form_of[leaf] for leaf in entries.leaf], np.int64)
        has = np.flatnonzero(row >= 0)
        # There are few distinct boxes, and each is looked up once.
        alike = np.array([arrays.metadata_index[row[has]], entries.box_index[has], form[has]])
        kinds, which = np.unique(alike, axis=1, return_inverse=True)
        cells = [cell(earlier_form, entries.distinct_boxes[box], form) for earlier_form, box, form in kinds.T.tolist()]
        of_array = np.array(cells, np.int64)[which.reshape(-1)]
        place = arrays.first_shard[row[has]] + of_array
        # Tools that read the directory without the manifest would not find regions in another directory or file type.
        near = np.array([_is_similar_name(record.path, file.path) for record in base.files], np.bool_)
        good = np.flatnonzero((of_array >= 0) & ~np.isin(place, list(arrays.parent_boxes)))
        good = good[near[arrays.file[place[good]]]]
        twins.file[has[good]], twins.offset[has[good]] = arrays.file[place[good]], arrays.offset[place[good]]
    return of_files


def create_no_matches(plan: SavePlan) -> list[BaseMatches]:
    """Return matches for a save without a base checkpoint."""
    counts = [len(file.sources) for file in plan.files]
    return [BaseMatches(np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)) for n in counts]


def find_fully_matching_files(matches: Sequence[BaseMatches], region_counts: Mapping[int, int]) -> list[int]:
    """Return the base files whose regions are all unchanged.

    Args:
        matches: Matches of each file of a plan.
        region_counts: Number of non-empty regions of each base file that has matches.
    """
    counts = Counter(file for its in matches for file in its.file[its.is_equal].tolist())
    return sorted(file for file, count in counts.items() if count == region_counts[file])


def name_shared_files(plan: SavePlan, matches: Sequence[BaseMatches], files: Sequence[int]) -> dict[int, str]:
    """Return unique names of reused files in the new checkpoint, derived from this process's own file names."""
    beside: dict[int, str] = {}
    for file, its in zip(plan.files, matches, strict=True):
        for number in np.intersect1d(its.file, files).tolist():
            beside.setdefault(number, file.path)
    return {file: _insert_suffix(beside[file], f"shared-{n}") for n, file in enumerate(files, 1)}


def split_shared(
    plan: SavePlan,
    matches: Sequence[BaseMatches],
    shared: Mapping[int, FileRecord],
    unchanged: Collection[str] = (),
) -> SharedPlan:
    """Split a plan into written and reused files.

    Args:
        plan: Plan of a save without a base checkpoint.
        matches: Matches of each of its files.
        shared: Index of each reused base file -> its record, with its name in the new checkpoint.
        unchanged: Leaf paths that the program declares as unchanged.
    """
    files: list[FilePlan] = []
    shards: list[LeafShardTable] = []
    nbytes, number = 0, {file: n for n, file in enumerate(shared)}
    for file, its in zip(plan.files, matches, strict=True):
        sources, entries = RegionSourceTable.from_sources(file.sources), _get_entries(file)
        is_shared = its.is_equal & np.isin(its.file, list(shared))
        stays = ~is_shared & (its.is_equal | np.array([leaf in unchanged for leaf in sources.leaf], np.bool_))
        if int(sources.nbytes[stays].sum()) < MIN_SEPARATE_BYTES:
            stays[:] = False
        apart = ((file.path, ~is_shared & ~stays), (_insert_suffix(file.path, "apart"), stays))
        for path, which in apart:
            if which.all():
                files.append(file)
            elif which.any() and (part := file.select_regions(np.flatnonzero(which))) is not None:
                files.append(replace(part, path=path))
        rows = np.flatnonzero(is_shared)
        if len(rows):
            nbytes += int(sources.nbytes[rows].sum())
            columns = ShardTable(
                box=BoxArray.from_boxes(entries.distinct_boxes).select(entries.box_index[rows]),
                file=np.array([number[f] for f in its.file[rows].tolist()], np.int64),
                offset=its.offset[rows],
            )
            shards.append(LeafShardTable([entries.leaf[row] for row in rows.tolist()], columns))
    return SharedPlan(
        SavePlan(tuple(files)), WriteResult(tuple(shared.values()), LeafShardTable.concatenate(shards)), nbytes
    )


def _get_entries(file: FilePlan) -> FileEntryTable:
    assert isinstance(file.entries, FileEntryTable), "each region of a file of the native layout is a shard"
    return file.entries


def _is_similar_name(path: str, other: str) -> bool:
    """Return True if two files are in the same directory and have the same extension."""
    return path.rpartition("/")[0] == other.rpartition("/")[0] and path.rpartition(".")[2] == other.rpartition(".")[2]


def _insert_suffix(path: str, suffix: str) -> str:
    """Insert a suffix before the extension of a file name.

    >>> _insert_suffix("model/00001-of-00002.safetensors", "apart")
    'model/00001-of-00002-apart.safetensors'
    """
    before, dot, ending = path.rpartition(".")
    return f"{before}-{suffix}{dot}{ending}"
