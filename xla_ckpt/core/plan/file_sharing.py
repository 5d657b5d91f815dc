"""File sharing with a base checkpoint: which files a save reuses as hard links, and what it writes.

A file of the base is reused if all of its regions still match. If one does not, the file is left out, because readers
of a directory without the manifest would find old bytes under the name of new ones. So regions that stay the same are
written into a separate file, which the next save reuses.
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
"""What stays as it is gets a file apart from this size on (bytes). Less is written again in the time that takes."""


@dataclass(frozen=True, slots=True, eq=False)
class BaseMatches:
    """Where the earlier tag has the same boxes of the same arrays as a planned file: a row for each region of that."""

    file: IntArray
    """Index of the earlier tag's file; -1 where it has no such region, or it is not to be shared."""

    offset: IntArray
    """Of its first byte in that file."""

    is_equal: BoolArray
    """Whether its bytes are those of the twin: none is, as long as nobody has compared them."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """What one process writes of a tag, and what it shares."""

    plan: SavePlan
    """What it writes."""

    shared_files: WriteResult = WriteResult((), LeafShardTable.from_shards(()))  # noqa: RUF009  # it is never changed
    """The files of the earlier tag that it shares, under their names in the new tag."""

    nbytes: int = 0
    """Bytes of arrays that are in those."""


def match_base_regions(plan: SavePlan, leaves: LeafTable, base: Manifest) -> list[BaseMatches]:
    """Where the earlier tag has the regions of each file of a plan. Whether their bytes are equal is not asked yet."""
    arrays = base.arrays
    form_of = dict(zip(leaves.paths, leaves.kind.tolist(), strict=True))

    def cell(earlier_form: int, box: Box, form: int) -> int:
        """Which cell of the arrays of a form of the earlier tag is this box of a leaf; -1 if none is."""
        theirs = arrays.metadata[earlier_form]
        cells = (i for i, its in theirs.find_overlapping(box) if its == box)
        return next(cells, -1) if theirs.dtype == leaves.kinds[form][0] else -1

    of_files = create_no_matches(plan)
    for file, twins in zip(plan.files, of_files, strict=True):
        entries = _get_entries(file)
        row = np.array([arrays.row_by_leaf.get(leaf, -1) for leaf in entries.leaf], np.int64)
        form = np.array([form_of[leaf] for leaf in entries.leaf], np.int64)
        has = np.flatnonzero(row >= 0)
        # Few boxes are different ones, and each is looked for once.
        alike = np.array([arrays.metadata_index[row[has]], entries.box_index[has], form[has]])
        kinds, which = np.unique(alike, axis=1, return_inverse=True)
        cells = [cell(earlier_form, entries.boxes[box], form) for earlier_form, box, form in kinds.T.tolist()]
        of_array = np.array(cells, np.int64)[which.reshape(-1)]
        place = arrays.first_shard[row[has]] + of_array
        # Who reads the files of a directory without the manifest would miss what lies elsewhere, or is no such file.
        near = np.array([_is_similar_name(record.path, file.path) for record in base.files], np.bool_)
        good = np.flatnonzero((of_array >= 0) & ~np.isin(place, list(arrays.parent_boxes)))
        good = good[near[arrays.file[place[good]]]]
        twins.file[has[good]], twins.offset[has[good]] = arrays.file[place[good]], arrays.offset[place[good]]
    return of_files


def create_no_matches(plan: SavePlan) -> list[BaseMatches]:
    """The same where there is no earlier tag: no region has a twin."""
    counts = [len(file.sources) for file in plan.files]
    return [BaseMatches(np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)) for n in counts]


def find_fully_matching_files(matches: Sequence[BaseMatches], region_counts: Mapping[int, int]) -> list[int]:
    """The files of the earlier tag of which all regions still hold.

    Args:
        matches: For each file of a plan.
        region_counts: How many regions that are not empty each file of the earlier tag has, of those with twins.
    """
    counts = Counter(file for its in matches for file in its.file[its.is_equal].tolist())
    return sorted(file for file, count in counts.items() if count == region_counts[file])


def name_shared_files(plan: SavePlan, matches: Sequence[BaseMatches], files: Sequence[int]) -> dict[int, str]:
    """What files of the earlier tag are called in the new one: like files of this process, so the names are free."""
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
    """What is written if some files of the earlier tag are shared.

    Args:
        plan: What would be written without an earlier tag.
        matches: Of each of its files.
        shared: Index of each shared file of the earlier tag -> its record, with its name in the new tag.
        unchanged: Leaf paths of what the program says that it does not change.
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
                box=BoxArray.from_boxes(entries.boxes).select(entries.box_index[rows]),
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
    """Whether two files lie in one directory, and have the same ending."""
    return path.rpartition("/")[0] == other.rpartition("/")[0] and path.rpartition(".")[2] == other.rpartition(".")[2]


def _insert_suffix(path: str, suffix: str) -> str:
    """The name of a file beside another one.

    >>> _insert_suffix("model/00001-of-00002.safetensors", "apart")
    'model/00001-of-00002-apart.safetensors'
    """
    before, dot, ending = path.rpartition(".")
    return f"{before}-{suffix}{dot}{ending}"
