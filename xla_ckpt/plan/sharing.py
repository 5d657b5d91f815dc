"""What a save shares with an earlier tag, and what it writes besides. Pure.

A file of the earlier tag comes into the new one as it is if all of its regions still hold. If one of them does not, it
is left out: who reads the files of a directory without the manifest would find old bytes under the name of new ones.
What stays as it is must not share a file with what changes, then: it is written into a file apart, which the next save
shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.manifest.records import FileRecord, Manifest
from xla_ckpt.manifest.shards import ShardColumns
from xla_ckpt.plan.file_plan import Entries, FilePlan, LeafShards, Sources
from xla_ckpt.plan.leaf import Leaves
from xla_ckpt.plan.save_plan import SavePlan, Written
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Corners, Flags, Ints

APART_BYTES = 1 << 20
"""What stays as it is gets a file apart from this size on (bytes). Less is written again in the time that takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """Where the earlier tag has the same boxes of the same arrays as a planned file: a row for each region of that."""

    file: Ints
    """Index of the earlier tag's file; -1 where it has no such region, or it is not to be shared."""

    offset: Ints
    """Of its first byte in that file."""

    same: Flags
    """Whether its bytes are those of the twin: none is, as long as nobody has compared them."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """What one process writes of a tag, and what it shares."""

    plan: SavePlan
    """What it writes."""

    shared: Written = Written((), LeafShards.of(()))  # noqa: RUF009  # it is never changed
    """The files of the earlier tag that it shares, under their names in the new tag."""

    nbytes: int = 0
    """Bytes of arrays that are in those."""


def twins_of(plan: SavePlan, leaves: Leaves, earlier: Manifest) -> list[Twins]:
    """Where the earlier tag has the regions of each file of a plan. Whether their bytes are equal is not asked yet."""
    arrays = earlier.arrays
    form_of = dict(zip(leaves.paths, leaves.form.tolist(), strict=True))

    def cell(earlier_form: int, box: Box, form: int) -> int:
        """Which cell of the arrays of a form of the earlier tag is this box of a leaf; -1 if none is."""
        theirs = arrays.forms[earlier_form]
        cells = (i for i, its in theirs.touching(box) if its == box)
        return next(cells, -1) if theirs.dtype == leaves.forms[form][0] else -1

    of_files = without_twins(plan)
    for file, twins in zip(plan.files, of_files, strict=True):
        entries = _entries(file)
        row = np.array([arrays.row.get(leaf, -1) for leaf in entries.leaf], np.int64)
        form = np.array([form_of[leaf] for leaf in entries.leaf], np.int64)
        has = np.flatnonzero(row >= 0)
        # Few boxes are different ones, and each is looked for once.
        alike = np.array([arrays.form[row[has]], entries.box[has], form[has]])
        kinds, which = np.unique(alike, axis=1, return_inverse=True)
        cells = [cell(earlier_form, entries.boxes[box], form) for earlier_form, box, form in kinds.T.tolist()]
        of_array = np.array(cells, np.int64)[which.reshape(-1)]
        place = arrays.first[row[has]] + of_array
        # Who reads the files of a directory without the manifest would miss what lies elsewhere, or is no such file.
        near = np.array([_is_like(record.path, file.path) for record in earlier.files], np.bool_)
        good = np.flatnonzero((of_array >= 0) & ~np.isin(place, list(arrays.frames)))
        good = good[near[arrays.file[place[good]]]]
        twins.file[has[good]], twins.offset[has[good]] = arrays.file[place[good]], arrays.offset[place[good]]
    return of_files


def without_twins(plan: SavePlan) -> list[Twins]:
    """The same where there is no earlier tag: no region has a twin."""
    counts = [len(file.sources) for file in plan.files]
    return [Twins(np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)) for n in counts]


def whole_files(twins: Sequence[Twins], regions: Mapping[int, int]) -> list[int]:
    """The files of the earlier tag of which all regions still hold.

    Args:
        twins: For each file of a plan.
        regions: How many regions that are not empty each file of the earlier tag has, of those with twins.
    """
    counts = Counter(file for its in twins for file in its.file[its.same].tolist())
    return sorted(file for file, count in counts.items() if count == regions[file])


def new_names(plan: SavePlan, twins: Sequence[Twins], files: Sequence[int]) -> dict[int, str]:
    """What files of the earlier tag are called in the new one: like files of this process, so the names are free."""
    beside: dict[int, str] = {}
    for file, its in zip(plan.files, twins, strict=True):
        for number in np.intersect1d(its.file, files).tolist():
            beside.setdefault(number, file.path)
    return {file: _named(beside[file], f"shared-{n}") for n, file in enumerate(files, 1)}


def divided(
    plan: SavePlan,
    twins: Sequence[Twins],
    shared: Mapping[int, FileRecord],
    fixed: Collection[str] = (),
) -> SharedPlan:
    """What is written if some files of the earlier tag are shared.

    Args:
        plan: What would be written without an earlier tag.
        twins: Of each of its files.
        shared: Index of each shared file of the earlier tag -> its record, with its name in the new tag.
        fixed: Leaf paths of what the program says that it does not change.
    """
    files: list[FilePlan] = []
    shards: list[LeafShards] = []
    nbytes, number = 0, {file: n for n, file in enumerate(shared)}
    for file, its in zip(plan.files, twins, strict=True):
        sources, entries = Sources.of(file.sources), _entries(file)
        is_shared = its.same & np.isin(its.file, list(shared))
        stays = ~is_shared & (its.same | np.array([leaf in fixed for leaf in sources.leaf], np.bool_))
        if int(sources.nbytes[stays].sum()) < APART_BYTES:
            stays[:] = False
        apart = ((file.path, ~is_shared & ~stays), (_named(file.path, "apart"), stays))
        for path, which in apart:
            if which.all():
                files.append(file)
            elif which.any() and (part := file.only(np.flatnonzero(which))) is not None:
                files.append(replace(part, path=path))
        rows = np.flatnonzero(is_shared)
        if len(rows):
            nbytes += int(sources.nbytes[rows].sum())
            columns = ShardColumns(
                box=Corners.of(entries.boxes).rows(entries.box[rows]),
                file=np.array([number[f] for f in its.file[rows].tolist()], np.int64),
                offset=its.offset[rows],
            )
            shards.append(LeafShards([entries.leaf[row] for row in rows.tolist()], columns))
    return SharedPlan(SavePlan(tuple(files)), Written(tuple(shared.values()), LeafShards.joined(shards)), nbytes)


def _entries(file: FilePlan) -> Entries:
    assert isinstance(file.entries, Entries), "each region of a file of the native layout is a shard"
    return file.entries


def _is_like(path: str, other: str) -> bool:
    """Whether two files lie in one directory, and have the same ending."""
    return path.rpartition("/")[0] == other.rpartition("/")[0] and path.rpartition(".")[2] == other.rpartition(".")[2]


def _named(path: str, what: str) -> str:
    """The name of a file beside another one.

    >>> _named("model/00001-of-00002.safetensors", "apart")
    'model/00001-of-00002-apart.safetensors'
    """
    before, dot, ending = path.rpartition(".")
    return f"{before}-{what}{dot}{ending}"
