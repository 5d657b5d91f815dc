"""Merge the records of all ranks into the contents of a manifest, and compare replicas.

Each rank reports its files and shards. The first rank of each pipeline stage also reports the structure of the state. A
rank with rank-local state (`extras/<name>/ranks/<rank>`) reports that part. Samples of array bytes and fingerprints of
plain values detect replicas that differ although no sharding was declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest.arrays import (
    ArrayRecord,
    ArrayTable,
    ShardTable,
    create_array_record,
    create_metadata,
    freeze_spec,
)
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.plan.rank_consistency import MAX_LISTED_RANKS, ArrayInfo, format_ranks
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.sharding.box import Box, IntArray, create_grid
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import has_sections
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import renumber_objects
from xla_ckpt.display import join_lines
from xla_ckpt.errors import DivergentReplicasError, FormatError, SaveError

_UNDECLARED_HINT = (
    "If each rank trains the whole model: they were never made equal (the same seed, or DistributedDataParallel). If "
    "the array is split over ranks, as tensor parallelism does: give its parameter neuronx-distributed's attributes "
    "(tensor_model_parallel, partition_dim), or pass mesh= and shardings= with a rule that fits its leaf path."
)
DIVERGED_HINT = (
    "If replicas have drifted apart that nothing keeps equal: options=SaveOptions(replicas='first') saves the first of "
    "them, and the tag says of which arrays. Parts of an array must not be saved so: only the first part would be kept."
)
"""Part of a hint that explains how to save replicas that have diverged."""

_PER_RANK_MEMBER_HINT = "Wrap a member of extras that every rank has its own of in xla_ckpt.PerRank."
_PER_RANK_STATE_HINT = (
    "If an optimizer's state lies otherwise than its parameter, or every rank has its own of it, say so: "
    "xla_ckpt.register_optimizer."
)

RankDifference = tuple[int, list[int]]
"""A rank, and other ranks with different content."""

ReplicaPolicy = Literal["equal", "first"]
"""Policy for replicas: ``equal`` requires equal bytes, ``first`` stores the bytes of the first replica."""


class LeafNumbering:
    """Common numbering of the leaf paths of all records."""

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self.numbers: dict[str, int] = {}
        """Leaf path -> number."""
        self._columns: dict[int, IntArray] = {}
        """Numbers by the id of a record's names, which the ranks of a stage share."""
        for record in records:
            if id(record.names) not in self._columns:
                numbers = [self.numbers.setdefault(name, len(self.numbers)) for name in record.names]
                self._columns[id(record.names)] = np.array(numbers, np.int64)

    def map_column(self, record: RankRecord, leaf: IntArray) -> IntArray:
        """Map a column of a record's own leaf numbers to the common numbers."""
        return self._columns[id(record.names)][leaf]


def compare_replicas(
    records: Sequence[RankRecord], mesh: Mesh, replicas: ReplicaPolicy, numbers: LeafNumbering
) -> tuple[list[str], tuple[str, ...]]:
    """Compare the replicated content of all ranks.

    Returns:
        Warnings, and the leaf paths of arrays whose replicas differ, if `replicas` allows that. Buffers are not
            included.

    Raises:
        DivergentReplicasError: Content that must be equal differs between ranks.
    """
    warnings: list[str] = []
    bad: dict[str, RankDifference] = {}
    loose: dict[str, RankDifference] = {}
    for leaf, first, other, is_loose in _find_differing_samples(records, numbers):
        _, differing = (loose if is_loose else bad).setdefault(leaf, (first, []))
        if other not in differing[-1:]:
            differing.append(other)
    plain: dict[str, RankDifference] = {}
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    for record in records:
        stage = mesh.coordinates(record.rank)["pp"] if mesh.pp > 1 else 0
        for part, text in record.parts.items():
            rank, known = seen.setdefault((part, stage if part in schema.STAGE_MEMBERS else 0), (record.rank, text))
            if known != text:
                plain.setdefault(part, (rank, []))[1].append(record.rank)
    if bad and replicas == "equal":
        leaf, (rank, ranks) = next(iter(bad.items()))
        raise DivergentReplicasError(
            f"{len(bad)} replicated {'arrays differ' if len(bad) > 1 else 'array differs'} between ranks, and no copy "
            "can stand for the others",
            leaf=leaf,
            expected=f"the bytes of rank {rank}",
            found=f"others on {format_ranks(ranks)}",
            hint=_build_hint(leaf, mesh, next((r.arrays[leaf][2] for r in records if leaf in r.arrays), None)),
            details=join_lines(_list_differences(bad)),
        )
    if plain:
        part, (rank, ranks) = next(iter(plain.items()))
        raise DivergentReplicasError(
            "plain values differ between ranks",
            leaf=part,
            expected=f"those of rank {rank}",
            found=f"others on {format_ranks(ranks)}",
            hint=_PER_RANK_STATE_HINT if part == schema.OPTIMIZER else _PER_RANK_MEMBER_HINT,
        )
    for leaf, (rank, ranks) in loose.items():
        warnings.append(
            f"the buffer {leaf} of rank {rank} differs from that of {format_ranks(ranks)}; rank {rank}'s is kept"
        )
    if bad:
        warnings.append(join_lines([describe_divergence(len(bad)), *_list_differences(bad)]))
    return warnings, tuple(bad)


def _find_differing_samples(
    records: Sequence[RankRecord], numbers: LeafNumbering
) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (leaf path, first rank, other rank, True for a buffer) of samples at equal positions with different
    content.

    The first rank is the first with a sample of the position. Samples are yielded in the order of the records.
    """
    leaf = np.concatenate([numbers.map_column(record, record.samples.leaf) for record in records])
    if not len(leaf):
        return
    place, content, loose = (
        np.concatenate([getattr(record.samples, name) for record in records])
        for name in ("layout_fingerprint", "content_fingerprint", "warn_only")
    )
    order = np.lexsort((place, leaf))  # stable: among equal positions, the first rank's sample comes first
    begins = np.r_[True, (np.diff(leaf[order]) != 0) | (place[order][1:] != place[order][:-1])]
    first = np.empty_like(order)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    ranks = np.repeat([record.rank for record in records], [len(record.samples) for record in records])
    names = list(numbers.numbers)
    for row in np.flatnonzero(content != content[first]).tolist():
        yield names[leaf[row]], int(ranks[first[row]]), int(ranks[row]), bool(loose[row])


def describe_divergence(count: int) -> str:
    """Return a sentence about the number of arrays whose replicas differ.

    >>> describe_divergence(1)
    "the replicas of 1 array differ, and the bytes of the first are stored (replicas='first'):"
    """
    arrays = f"{count} array{'s' if count > 1 else ''}"
    return f"the replicas of {arrays} differ, and the bytes of the first are stored (replicas='first'):"


_COPIES_HINT = (
    "The array is declared in sections that several ranks hold: they may hold another number of copies "
    "(kv_size_multiplier), or those of other ranks ('x4' against 'x4 adjacent')."
)


def _build_hint(leaf: str, mesh: Mesh, spec: Any = None) -> str:
    """Return a hint with the likely cause of a difference."""
    if any(map(has_sections, spec or ())):
        return f"{_COPIES_HINT} The mesh of this save was {mesh}. {DIVERGED_HINT}"
    if schema.get_member(leaf) == schema.EXTRAS:
        return _PER_RANK_MEMBER_HINT
    state = f" {_PER_RANK_STATE_HINT}" if schema.get_owner(leaf) is not None else ""
    return f"{_UNDECLARED_HINT}{state} The mesh of this save was {mesh}. {DIVERGED_HINT}"


def _list_differences(bad: Mapping[str, RankDifference]) -> list[str]:
    lines = [
        f"  {leaf}: rank {rank} against {format_ranks(others)}"
        for leaf, (rank, others) in [*bad.items()][:MAX_LISTED_RANKS]
    ]
    return lines + ([f"  ... and {len(bad) - MAX_LISTED_RANKS} more"] if len(bad) > MAX_LISTED_RANKS else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateRegion:
    """A region that two ranks wrote because neither knew of the other. Equal copies are valid, and one is kept."""

    leaf: str
    box: Box
    nbytes: int
    ranks: tuple[int, int]
    files: tuple[int, int]
    offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRecords:
    """Contents of the manifest."""

    skeleton: Any
    arrays: ArrayTable
    files: tuple[FileRecord, ...]
    aliases: dict[str, str]
    objects: tuple[int, ...]
    duplicates: tuple[DuplicateRegion, ...]
    warnings: tuple[str, ...]
    module_metadata: Mapping[str, Mapping[str, Any]]

    def build_manifest(self, header: ManifestHeader, mesh: Mesh) -> Manifest:
        """Build the manifest of the checkpoint that the ranks of `mesh` saved."""
        return Manifest(
            header=header,
            skeleton=self.skeleton,
            arrays=self.arrays,
            files=self.files,
            aliases=self.aliases,
            object_files=self.objects,
            mesh=str(mesh) if mesh.size > 1 else None,
            world_size=mesh.size,
            module_metadata=self.module_metadata,
        )


def merge_records(records: Sequence[RankRecord], mesh: Mesh, replicas: ReplicaPolicy = "equal") -> MergedRecords:
    """Merge the records of all ranks. Arrays whose replicas differ, if allowed, are marked as divergent.

    Raises:
        DivergentReplicasError: Replicated content differs between ranks.
        SaveError: The ranks together did not write every element exactly once, or disagree about the structure.
    """
    numbers = LeafNumbering(records)
    warnings, divergent = compare_replicas(records, mesh, replicas, numbers)
    files: list[FileRecord] = []
    first_files: list[int] = []
    facts: dict[str, ArrayInfo] = {}
    aliases: dict[str, str] = {}
    objects: list[int] = []
    skeleton: Any = None
    module_metadata: dict[str, dict[str, Any]] = {}
    for record in records:
        base, first_object = len(files), len(objects)
        first_files.append(base)
        files.extend(record.files)
        objects += [base + n for n in record.objects]
        for leaf, fact in record.arrays.items():
            if facts.setdefault(leaf, fact)[:2] != fact[:2]:
                raise SaveError(
                    "ranks disagree about an array",
                    leaf=leaf,
                    rank=record.rank,
                    expected=f"{facts[leaf][0]} {list(facts[leaf][1])}",
                    found=f"{fact[0]} {list(fact[1])}",
                )
        aliases.update(record.aliases)
        for path, of_modules in record.module_metadata.items():
            # A stage has the metadata of its own modules and of their parents, which other stages have, too.
            module_metadata.setdefault(path, {}).update(of_modules)
        if record.skeleton is not None:
            own_skeleton = renumber_objects(record.skeleton, first_object.__add__) if first_object else record.skeleton
            skeleton = own_skeleton if skeleton is None else _merge_skeletons(skeleton, own_skeleton, "", record.rank)
    arrays, duplicates = _merge_arrays(records, facts, numbers, first_files)
    return MergedRecords(
        skeleton=skeleton,
        arrays=arrays.mark_divergent(divergent),
        files=tuple(files),
        aliases={alias: target for alias, target in aliases.items() if alias not in arrays},
        objects=tuple(objects),
        duplicates=tuple(duplicates),
        warnings=tuple(warnings),
        module_metadata=module_metadata,
    )


def _merge_arrays(
    records: Sequence[RankRecord], infos: Mapping[str, ArrayInfo], numbers: LeafNumbering, first_files: Sequence[int]
) -> tuple[ArrayTable, list[DuplicateRegion]]:
    """Return all arrays from the shards of all ranks, and the regions that two ranks wrote (included once)."""
    shards = ShardTable.concatenate([record.shards for record in records], first_files)
    leaf = np.concatenate([numbers.map_column(record, record.leaf) for record in records])
    ranks = np.repeat([record.rank for record in records], [len(record.leaf) for record in records])
    order = np.argsort(leaf, kind="stable")
    ends = np.searchsorted(leaf[order], np.arange(len(numbers.numbers) + 1))
    kinds: dict[tuple[Any, ...], int] = {}
    kind = [
        kinds.setdefault((dtype, shape, freeze_spec(spec), weak_type), len(kinds))
        for dtype, shape, spec, weak_type in infos.values()
    ]
    number = np.array([numbers.numbers.get(name, len(numbers.numbers)) for name in infos], np.int64)
    row = _find_whole_shards(shards, order, ends, number, [fact[1] for fact in infos.values()])
    whole = np.flatnonzero(row >= 0)  # most arrays of a job with few ranks
    names, which = list(infos), row[whole]
    used, form = np.unique(np.array(kind, np.int64)[whole], return_inverse=True)
    all_kinds = [*kinds]
    of_one_shard = ArrayTable(
        names=[names[i] for i in whole.tolist()],
        metadata=tuple(
            create_metadata(
                dtype=dtypes.get_dtype(dtype),
                shape=shape,
                grids=(create_grid(Box.from_shape(shape)),),
                spec=spec,
                weak_type=weak_type,
            )
            for dtype, shape, spec, weak_type in map(all_kinds.__getitem__, used.tolist())
        ),
        metadata_index=form.reshape(-1),
        file=shards.file[which],
        offset=shards.offset[which],
    )
    others: dict[str, ArrayRecord] = {}
    duplicates: list[DuplicateRegion] = []
    bounds = [*ends.tolist(), len(order)]
    for i in np.flatnonzero(row < 0).tolist():
        fact, n = infos[names[i]], int(number[i])
        its = order[bounds[n] : bounds[n + 1]]
        others[names[i]], twice = _merge_array(names[i], fact, shards.select(its, len(fact[1])), ranks[its])
        duplicates += twice
    return ArrayTable.concatenate([of_one_shard, ArrayTable.from_records(others)]).order_by(names), duplicates


def _find_whole_shards(
    shards: ShardTable, order: IntArray, ends: IntArray, number: IntArray, shapes: Sequence[tuple[int, ...]]
) -> IntArray:
    """Return the row of each array's only shard if it is the whole array and not empty, otherwise -1.

    Args:
        shards: All shards.
        order: Rows of the shards, sorted by array.
        ends: Start of each array's rows in `order`, followed by the end of the last.
        number: Number of each requested array.
        shapes: Global shapes of the requested arrays.
    """
    counts = np.append(np.diff(ends), 0)[number]
    row = np.full(len(number), -1, np.int64)
    asked = np.flatnonzero(counts == 1)
    if shards.has_parent is not None or not len(asked):
        return row
    rows = order[ends[number[asked]]]
    # Boxes with fewer dims have zeros in the last columns, so the shapes are padded with zeros, too.
    sizes = np.zeros((len(asked), shards.box.dims), np.int64)
    for i, at in enumerate(asked.tolist()):
        sizes[i, : len(shapes[at])] = shapes[at]
    dims = np.array([len(shapes[at]) for at in asked.tolist()], np.int64)
    empty = ((sizes == 0) & (np.arange(shards.box.dims) < dims[:, None])).any(axis=1)
    fits = (shards.box.start[rows] == 0).all(axis=1) & (shards.box.stop[rows] == sizes).all(axis=1) & ~empty
    row[asked[fits]] = rows[fits]
    return row


def _merge_array(
    leaf: str, info: ArrayInfo, shards: ShardTable, ranks: IntArray
) -> tuple[ArrayRecord, list[DuplicateRegion]]:
    """Return the record of an array from its shards and the ranks that wrote them, and the regions that two ranks
    wrote.

    Raises:
        SaveError: The shards do not contain every element exactly once.
    """
    name, shape, spec, weak_type = info
    dtype = dtypes.get_dtype(name)
    try:
        return create_array_record(dtype, shape, shards, spec, weak_type), []
    except FormatError as error:
        first = shards.box.find_first_duplicates()
        once = np.flatnonzero(first == np.arange(len(first)))
        if len(once) == len(first):
            raise _create_coverage_error(leaf, shape, shards, ranks, error) from error
    duplicates = [
        DuplicateRegion(
            leaf=leaf,
            box=shards.box.get_box(b),
            nbytes=shards.box.get_box(b).size * dtype.itemsize,
            ranks=(int(ranks[a]), int(ranks[b])),
            files=(int(shards.file[a]), int(shards.file[b])),
            offsets=(int(shards.offset[a]), int(shards.offset[b])),
        )
        for b, a in enumerate(first.tolist())
        if a != b
    ]
    try:
        return create_array_record(dtype, shape, shards.select(once), spec, weak_type), duplicates
    except FormatError as error:
        raise _create_coverage_error(leaf, shape, shards.select(once), ranks[once], error) from error


def _create_coverage_error(
    leaf: str, shape: tuple[int, ...], shards: ShardTable, ranks: IntArray, error: FormatError
) -> SaveError:
    wrote = [f"  rank {rank} wrote {shards.box.get_box(row)}" for row, rank in enumerate(ranks[:MAX_LISTED_RANKS])]
    more = [f"  ... and {len(ranks) - MAX_LISTED_RANKS} more"] if len(ranks) > MAX_LISTED_RANKS else []
    return SaveError(
        f"the ranks together did not write this array of shape {list(shape)} exactly once: {error.problem}",
        leaf=leaf,
        expected=error.expected,
        found=error.found,
        hint="Ranks have models of different shapes, or disagree about who holds what: check the model, mesh and "
        "shardings of all ranks.",
        details=join_lines([*wrote, *more]),
    )


def _is_plain_dict(skeleton: Any) -> bool:
    return isinstance(skeleton, dict) and not (len(skeleton) == 1 and next(iter(skeleton)).startswith("$"))


def _merge_skeletons(a: Any, b: Any, path: str, rank: int) -> Any:
    """Merge two skeletons recursively.

    Raises:
        SaveError: The skeletons have different values at the same path.
    """
    if a == b:
        return a
    if _is_plain_dict(a) and _is_plain_dict(b):
        both = {k: _merge_skeletons(v, b[k], f"{path}/{k}", rank) if k in b else v for k, v in a.items()}
        return both | {k: v for k, v in b.items() if k not in a}
    if isinstance(a, list) and isinstance(b, list):
        name = path.rsplit("/", 1)[-1]
        # The only list that pipeline stages share: the parameter groups, each with the stage's own parameters.
        if name == schema.PARAM_GROUPS and len(a) == len(b):
            return [_merge_skeletons(x, y, path, rank) for x, y in zip(a, b, strict=True)]
        if name == schema.PARAMS:
            known = set(a)
            return a + [v for v in b if v not in known]
    raise SaveError(
        "pipeline stages disagree about a value that they should share",
        leaf=path.lstrip("/"),
        rank=rank,
        expected=str(a)[:80],
        found=str(b)[:80],
        hint="Optimizers of all stages need the same groups, in the same order, with the same hyper-parameters.",
    )
