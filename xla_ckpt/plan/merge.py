"""What all ranks wrote, put together: records in, the contents of a manifest out. Pure.

Each rank reports its files and shards. The first rank of each pipeline stage also reports the structure of the state,
in which it stands for its stage; a rank with a state of its own (`extras/<name>/ranks/<rank>`) reports that part. Every
rank reports digests of what it should have in common with others, and so undeclared differences are found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.display import join_lines
from xla_ckpt.errors import FormatError, SaveError
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays, array_record
from xla_ckpt.manifest.forms import form_of, frozen
from xla_ckpt.manifest.records import FileRecord, Head, Manifest
from xla_ckpt.manifest.shards import ShardColumns
from xla_ckpt.plan.agreement import MAX_NAMED_RANKS
from xla_ckpt.plan.record import Record
from xla_ckpt.plan.replicas import LeafNumbers, Replicas, compare_replicas
from xla_ckpt.plan.same_arrays import ArrayFact
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.grid import single
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import renumbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A region that two ranks wrote, which did not know of each other. Equal copies are fine, and one is kept."""

    leaf: str
    box: Box
    nbytes: int
    ranks: tuple[int, int]
    files: tuple[int, int]
    offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The contents of the manifest."""

    skeleton: Any
    arrays: Arrays
    files: tuple[FileRecord, ...]
    aliases: dict[str, str]
    objects: tuple[int, ...]
    duplicates: tuple[Duplicate, ...]
    warnings: tuple[str, ...]
    module_metadata: Mapping[str, Mapping[str, Any]]

    def manifest(self, head: Head, mesh: Mesh) -> Manifest:
        """The manifest of the tag that the ranks of `mesh` saved."""
        return Manifest(
            head=head,
            skeleton=self.skeleton,
            arrays=self.arrays,
            files=self.files,
            aliases=self.aliases,
            objects=self.objects,
            mesh=str(mesh) if mesh.size > 1 else None,
            world=mesh.size,
            module_metadata=self.module_metadata,
        )


def merge(records: Sequence[Record], mesh: Mesh, replicas: Replicas = "equal") -> Merged:
    """Put the records of all ranks together. Arrays whose replicas may and do differ are marked in the result.

    Raises:
        DivergentReplicasError: Ranks that should hold the same hold different values.
        SaveError: The ranks together did not write every element exactly once, or disagree about the structure.
    """
    numbers = LeafNumbers(records)
    warnings, divergent = compare_replicas(records, mesh, replicas, numbers)
    files: list[FileRecord] = []
    first_files: list[int] = []
    facts: dict[str, ArrayFact] = {}
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
            # A stage has metadata of its own modules, and of those around them, which other stages have, too.
            module_metadata.setdefault(path, {}).update(of_modules)
        if record.skeleton is not None:
            own_skeleton = renumbered(record.skeleton, first_object.__add__) if first_object else record.skeleton
            skeleton = own_skeleton if skeleton is None else _united(skeleton, own_skeleton, "", record.rank)
    arrays, duplicates = _arrays(records, facts, numbers, first_files)
    return Merged(
        skeleton=skeleton,
        arrays=arrays.with_divergent(divergent),
        files=tuple(files),
        aliases={alias: target for alias, target in aliases.items() if alias not in arrays},
        objects=tuple(objects),
        duplicates=tuple(duplicates),
        warnings=tuple(warnings),
        module_metadata=module_metadata,
    )


def _arrays(
    records: Sequence[Record], facts: Mapping[str, ArrayFact], numbers: LeafNumbers, first_files: Sequence[int]
) -> tuple[Arrays, list[Duplicate]]:
    """All arrays, from the shards of all ranks; and what two ranks wrote, which is not in them twice."""
    shards = ShardColumns.joined([record.shards for record in records], first_files)
    leaf = np.concatenate([numbers.column(record, record.leaf) for record in records])
    ranks = np.repeat([record.rank for record in records], [len(record.leaf) for record in records])
    order = np.argsort(leaf, kind="stable")
    ends = np.searchsorted(leaf[order], np.arange(len(numbers.of) + 1))
    kinds: dict[tuple[Any, ...], int] = {}
    kind = [
        kinds.setdefault((dtype, shape, frozen(spec), weak_type), len(kinds))
        for dtype, shape, spec, weak_type in facts.values()
    ]
    number = np.array([numbers.of.get(name, len(numbers.of)) for name in facts], np.int64)
    row = _only_rows(shards, order, ends, number, [fact[1] for fact in facts.values()])
    whole = np.flatnonzero(row >= 0)  # as most arrays of a job of few ranks
    names, which = list(facts), row[whole]
    used, form = np.unique(np.array(kind, np.int64)[whole], return_inverse=True)
    all_kinds = [*kinds]
    of_one_shard = Arrays(
        names=[names[i] for i in whole.tolist()],
        forms=tuple(
            form_of(
                dtype=dtypes.dtype(dtype),
                shape=shape,
                grids=(single(Box.whole(shape)),),
                spec=spec,
                weak_type=weak_type,
            )
            for dtype, shape, spec, weak_type in map(all_kinds.__getitem__, used.tolist())
        ),
        form=form.reshape(-1),
        file=shards.file[which],
        offset=shards.offset[which],
    )
    others: dict[str, ArrayRecord] = {}
    duplicates: list[Duplicate] = []
    bounds = [*ends.tolist(), len(order)]
    for i in np.flatnonzero(row < 0).tolist():
        fact, n = facts[names[i]], int(number[i])
        its = order[bounds[n] : bounds[n + 1]]
        others[names[i]], twice = _array(names[i], fact, shards.rows(its, len(fact[1])), ranks[its])
        duplicates += twice
    return Arrays.joined([of_one_shard, Arrays.of(others)]).in_order(names), duplicates


def _only_rows(shards: ShardColumns, order: Ints, ends: Ints, number: Ints, shapes: Sequence[tuple[int, ...]]) -> Ints:
    """The row of the shard of each array that has one, which is all of it and not empty; -1 for any other array.

    Args:
        shards: All of them.
        order: Their rows, sorted by array.
        ends: Where those of each array begin in `order`, and where the last ones end.
        number: Of each array that is asked about.
        shapes: Their global shapes.
    """
    counts = np.append(np.diff(ends), 0)[number]
    row = np.full(len(number), -1, np.int64)
    asked = np.flatnonzero(counts == 1)
    if shards.framed is not None or not len(asked):
        return row
    rows = order[ends[number[asked]]]
    # Boxes of fewer dims have zeros in the last columns, and so have the shapes.
    sizes = np.zeros((len(asked), shards.box.dims), np.int64)
    for i, at in enumerate(asked.tolist()):
        sizes[i, : len(shapes[at])] = shapes[at]
    dims = np.array([len(shapes[at]) for at in asked.tolist()], np.int64)
    empty = ((sizes == 0) & (np.arange(shards.box.dims) < dims[:, None])).any(axis=1)
    fits = (shards.box.start[rows] == 0).all(axis=1) & (shards.box.stop[rows] == sizes).all(axis=1) & ~empty
    row[asked[fits]] = rows[fits]
    return row


def _array(leaf: str, fact: ArrayFact, shards: ShardColumns, ranks: Ints) -> tuple[ArrayRecord, list[Duplicate]]:
    """The record of an array, from its shards, each with the rank that wrote it; and what two ranks wrote."""
    name, shape, spec, weak_type = fact
    dtype = dtypes.dtype(name)
    try:
        return array_record(dtype, shape, shards, spec, weak_type), []
    except FormatError as error:
        first = shards.box.first_of_equals()
        once = np.flatnonzero(first == np.arange(len(first)))
        if len(once) == len(first):
            raise _not_once(leaf, shape, shards, ranks, error) from error
    duplicates = [
        Duplicate(
            leaf=leaf,
            box=shards.box.box(b),
            nbytes=shards.box.box(b).size * dtype.itemsize,
            ranks=(int(ranks[a]), int(ranks[b])),
            files=(int(shards.file[a]), int(shards.file[b])),
            offsets=(int(shards.offset[a]), int(shards.offset[b])),
        )
        for b, a in enumerate(first.tolist())
        if a != b
    ]
    try:
        return array_record(dtype, shape, shards.rows(once), spec, weak_type), duplicates
    except FormatError as error:
        raise _not_once(leaf, shape, shards.rows(once), ranks[once], error) from error


def _not_once(leaf: str, shape: tuple[int, ...], shards: ShardColumns, ranks: Ints, error: FormatError) -> SaveError:
    wrote = [f"  rank {rank} wrote {shards.box.box(row)}" for row, rank in enumerate(ranks[:MAX_NAMED_RANKS])]
    more = [f"  ... and {len(ranks) - MAX_NAMED_RANKS} more"] if len(ranks) > MAX_NAMED_RANKS else []
    return SaveError(
        f"the ranks together did not write this array of shape {list(shape)} exactly once: {error.problem}",
        leaf=leaf,
        expected=error.expected,
        found=error.found,
        hint="Ranks have models of different shapes, or disagree about who holds what: check the model, mesh and "
        "shardings of all ranks.",
        details=join_lines([*wrote, *more]),
    )


def _is_plain(skeleton: Any) -> bool:
    return isinstance(skeleton, dict) and not (len(skeleton) == 1 and next(iter(skeleton)).startswith("$"))


def _united(a: Any, b: Any, path: str, rank: int) -> Any:
    """One skeleton that has the members of both."""
    if a == b:
        return a
    if _is_plain(a) and _is_plain(b):
        both = {k: _united(v, b[k], f"{path}/{k}", rank) if k in b else v for k, v in a.items()}
        return both | {k: v for k, v in b.items() if k not in a}
    if isinstance(a, list) and isinstance(b, list):
        name = path.rsplit("/", 1)[-1]
        # The one list that pipeline stages share: group by group, each with its own parameters.
        if name == schema.GROUPS and len(a) == len(b):
            return [_united(x, y, path, rank) for x, y in zip(a, b, strict=True)]
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
