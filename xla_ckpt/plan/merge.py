"""What all ranks wrote, put together: records in, the contents of a manifest out. Pure.

Each rank reports its files and shards. The first rank of each pipeline stage also reports the structure of the state,
in which it stands for its stage; a rank with a state of its own (`extras/<name>/ranks/<rank>`) reports that part. Every
rank reports digests of what it should have in common with others, and so undeclared differences are found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from xla_ckpt import dtypes
from xla_ckpt.errors import DivergentReplicasError, FormatError, SaveError
from xla_ckpt.manifest.records import ArrayRecord, FileRecord, Head, Manifest, Shard, array_record
from xla_ckpt.plan.agreement import MAX_NAMED_RANKS, named_ranks
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import has_sections
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import renumbered

_UNDECLARED = (
    "If each rank trains the whole model: they were never made equal (the same seed, or DistributedDataParallel). If "
    "the array is split over ranks, as tensor parallelism does: give its parameter neuronx-distributed's attributes "
    "(tensor_model_parallel, partition_dim), or pass mesh= and shardings=."
)
DRIFTED = (
    "If replicas have drifted apart that nothing keeps equal: options=SaveOptions(replicas='first') saves the first of "
    "them, and the tag says of which arrays. Parts of an array must not be saved so: only the first part would be kept."
)
"""What a hint says of the way out for replicas that are no longer equal."""

_OWN_MEMBER = "Wrap a member of extras that every rank has its own of in xla_ckpt.PerRank."
_OWN_STATE = (
    "If an optimizer's state lies otherwise than its parameter, or every rank has its own of it, say so: "
    "xla_ckpt.register_optimizer."
)

Replicas = Literal["equal", "first"]
"""What a save asks of replicas: that they are equal, or nothing, and then it stores the first one's bytes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A few bytes of a replicated leaf on one rank, as digests."""

    place: str
    """Digest of where its pieces lie: only equal places are compared."""

    content: str
    loose: bool = False
    """Whether a difference is worth a warning only (a buffer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one rank reports of its part of a save."""

    rank: int
    files: tuple[FileRecord, ...]
    shards: tuple[tuple[str, Shard], ...]
    """(leaf path, shard); shards name files by their index in `files`."""

    arrays: Mapping[str, tuple[str, tuple[int, ...], Any]]
    """Leaf path -> (dtype, global shape, spec)."""

    aliases: Mapping[str, str]
    skeleton: Any
    objects: tuple[int, ...] = ()
    """Index into `files` of each pickled object, as the skeleton numbers them."""

    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    """By leaf path; one for each set of ranks that hold the same parts of it."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> digest of its plain values."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for the way to rank 0."""
        return {
            "rank": self.rank,
            "files": [
                [f.path, f.size, f.head, f.digest, *([f.regions, f.digests] if f.regions else [])] for f in self.files
            ],
            "shards": [
                [leaf, s.file, s.offset, s.box.start, s.box.stop, *((s.frame.start, s.frame.stop) if s.frame else ())]
                for leaf, s in self.shards
            ],
            "arrays": self.arrays,
            "aliases": self.aliases,
            "skeleton": self.skeleton,
            "objects": self.objects,
            "samples": {
                leaf: [[s.place, s.content, s.loose] for s in samples] for leaf, samples in self.samples.items()
            },
            "parts": self.parts,
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Record:
        """The record that `to_json` described."""
        return cls(
            rank=json["rank"],
            files=tuple(_file(*f) for f in json["files"]),
            shards=tuple((leaf, _shard(*place)) for leaf, *place in json["shards"]),
            arrays={leaf: (dtype, tuple(shape), spec) for leaf, (dtype, shape, spec) in json["arrays"].items()},
            aliases=json["aliases"],
            skeleton=json["skeleton"],
            objects=tuple(json["objects"]),
            samples={leaf: tuple(Sample(*s) for s in samples) for leaf, samples in json["samples"].items()},
            parts=json["parts"],
        )


def _file(path: str, size: int, head: int, digest: int, regions: Any = (), digests: Any = ()) -> FileRecord:
    return FileRecord(
        path=path,
        size=size,
        head=head,
        digest=digest,
        regions=tuple((at, nbytes) for at, nbytes in regions),
        digests=tuple(digests),
    )


def _shard(file: int, offset: int, start: Any, stop: Any, *frame: Any) -> Shard:
    box = Box(tuple(start), tuple(stop))
    return Shard(box, file, offset, Box(tuple(frame[0]), tuple(frame[1])) if frame else None)


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
    arrays: dict[str, ArrayRecord]
    files: tuple[FileRecord, ...]
    aliases: dict[str, str]
    objects: tuple[int, ...]
    duplicates: tuple[Duplicate, ...]
    warnings: tuple[str, ...]

    def manifest(self, head: Head, mesh: Mesh, world: int) -> Manifest:
        """The manifest of the tag that `world` ranks saved."""
        return Manifest(
            head=head,
            skeleton=self.skeleton,
            arrays=self.arrays,
            files=self.files,
            aliases=self.aliases,
            objects=self.objects,
            mesh=str(mesh) if world > 1 else None,
            world=world,
        )


def merge(records: Sequence[Record], mesh: Mesh, replicas: Replicas = "equal") -> Merged:
    """Put the records of all ranks together. Arrays whose replicas may and do differ are marked in the result.

    Raises:
        DivergentReplicasError: Ranks that should hold the same hold different values.
        SaveError: The ranks together did not write every element exactly once, or disagree about the structure.
    """
    warnings, divergent = compare_replicas(records, mesh, replicas)
    files: list[FileRecord] = []
    shards: dict[str, dict[Box, tuple[int, Shard]]] = {}
    facts: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    aliases: dict[str, str] = {}
    objects: list[int] = []
    skeleton: Any = None
    duplicates = []
    for record in records:
        base, first_object = len(files), len(objects)
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
        for leaf, reported in record.shards:
            by_box = shards.setdefault(leaf, {})
            shard = replace(reported, file=base + reported.file) if base else reported
            if shard.box in by_box:
                rank, other = by_box[shard.box]
                duplicates.append((leaf, (rank, record.rank), other, shard))
            else:
                by_box[shard.box] = record.rank, shard
        aliases.update(record.aliases)
        if record.skeleton is not None:
            own_skeleton = renumbered(record.skeleton, first_object.__add__) if first_object else record.skeleton
            skeleton = own_skeleton if skeleton is None else _united(skeleton, own_skeleton, "", record.rank)
    arrays = {leaf: _array(leaf, fact, [*shards.get(leaf, {}).values()]) for leaf, fact in facts.items()}
    arrays |= {leaf: replace(arrays[leaf], divergent=True) for leaf in divergent if leaf in arrays}
    aliases = {alias: target for alias, target in aliases.items() if alias not in arrays}
    twice = tuple(
        Duplicate(
            leaf=leaf,
            box=a.box,
            nbytes=a.box.size * arrays[leaf].dtype.itemsize,
            ranks=ranks,
            files=(a.file, b.file),
            offsets=(a.offset, b.offset),
        )
        for leaf, ranks, a, b in duplicates
    )
    return Merged(
        skeleton=skeleton,
        arrays=arrays,
        files=tuple(files),
        aliases=aliases,
        objects=tuple(objects),
        duplicates=twice,
        warnings=tuple(warnings),
    )


def _array(leaf: str, fact: tuple[str, tuple[int, ...], Any], shards: Sequence[tuple[int, Shard]]) -> ArrayRecord:
    """The record of an array, from its shards, each with the rank that wrote it."""
    dtype, shape, spec = fact
    try:
        return array_record(dtypes.dtype(dtype), shape, [shard for _, shard in shards], spec)
    except FormatError as error:
        wrote = [f"  rank {rank} wrote {shard.box}" for rank, shard in shards]
        more = [f"  ... and {len(wrote) - MAX_NAMED_RANKS} more"] if len(wrote) > MAX_NAMED_RANKS else []
        raise SaveError(
            f"the ranks together did not write this array of shape {list(shape)} exactly once: {error.problem}",
            leaf=leaf,
            expected=error.expected,
            found=error.found,
            hint="Ranks have models of different shapes, or disagree about who holds what: check the model, mesh and "
            "shardings of all ranks.",
            details="\n".join([*wrote[:MAX_NAMED_RANKS], *more]),
        ) from error


def compare_replicas(
    records: Sequence[Record], mesh: Mesh, replicas: Replicas = "equal"
) -> tuple[list[str], tuple[str, ...]]:
    """Compare what ranks have in common.

    Returns:
        Warnings, and the leaf paths of arrays whose replicas differ and may differ. Buffers are not among them.

    Raises:
        DivergentReplicasError: Ranks differ in what has to be equal.
    """
    warnings: list[str] = []
    first: dict[tuple[str, str], tuple[int, Sample]] = {}
    bad: dict[str, tuple[int, list[int]]] = {}
    loose: dict[str, tuple[int, list[int]]] = {}
    plain: dict[str, tuple[int, list[int]]] = {}
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    for record in records:
        for leaf, sample in ((leaf, sample) for leaf, samples in record.samples.items() for sample in samples):
            rank, other = first.setdefault((leaf, sample.place), (record.rank, sample))
            if other.content != sample.content:
                _, differing = (loose if sample.loose else bad).setdefault(leaf, (rank, []))
                if record.rank not in differing[-1:]:
                    differing.append(record.rank)
        stage = mesh.coordinates(record.rank)["pp"] if mesh.pp > 1 else 0
        for part, text in record.parts.items():
            rank, known = seen.setdefault((part, stage if part in schema.STAGED else 0), (record.rank, text))
            if known != text:
                plain.setdefault(part, (rank, []))[1].append(record.rank)
    if bad and replicas == "equal":
        leaf, (rank, ranks) = next(iter(bad.items()))
        raise DivergentReplicasError(
            f"{len(bad)} replicated {'arrays differ' if len(bad) > 1 else 'array differs'} between ranks, and no copy "
            "can stand for the others",
            leaf=leaf,
            expected=f"the bytes of rank {rank}",
            found=f"others on {named_ranks(ranks)}",
            hint=_hint(leaf, mesh, next((r.arrays[leaf][2] for r in records if leaf in r.arrays), None)),
            details="\n".join(_listed(bad)),
        )
    if plain:
        part, (rank, ranks) = next(iter(plain.items()))
        raise DivergentReplicasError(
            "plain values differ between ranks",
            leaf=part,
            expected=f"those of rank {rank}",
            found=f"others on {named_ranks(ranks)}",
            hint=_OWN_STATE if part == schema.OPTIMIZER else _OWN_MEMBER,
        )
    for leaf, (rank, ranks) in loose.items():
        warnings.append(
            f"the buffer {leaf} of rank {rank} differs from that of {named_ranks(ranks)}; rank {rank}'s is kept"
        )
    if bad:
        warnings.append("\n".join([first_stored(len(bad)), *_listed(bad)]))
    return warnings, tuple(bad)


def first_stored(count: int) -> str:
    """That the replicas of so many arrays differ, and what is stored of them.

    >>> first_stored(1)
    "the replicas of 1 array differ, and the bytes of the first are stored (replicas='first'):"
    """
    arrays = f"{count} array{'s' if count > 1 else ''}"
    return f"the replicas of {arrays} differ, and the bytes of the first are stored (replicas='first'):"


_COPIES = (
    "The array is declared in sections that several ranks hold: they may hold another number of copies "
    "(kv_size_multiplier), or those of other ranks ('x4' against 'x4 adjacent')."
)


def _hint(leaf: str, mesh: Mesh, spec: Any = None) -> str:
    """What is the likely cause of a difference."""
    if any(map(has_sections, spec or ())):
        return f"{_COPIES} The mesh of this save was {mesh}. {DRIFTED}"
    if schema.member_of(leaf) == schema.EXTRAS:
        return _OWN_MEMBER
    state = f" {_OWN_STATE}" if schema.owner_of(leaf) is not None else ""
    return f"{_UNDECLARED}{state} The mesh of this save was {mesh}. {DRIFTED}"


def _listed(bad: Mapping[str, tuple[int, Sequence[int]]]) -> list[str]:
    lines = [
        f"  {leaf}: rank {rank} against {named_ranks(others)}"
        for leaf, (rank, others) in [*bad.items()][:MAX_NAMED_RANKS]
    ]
    return lines + ([f"  ... and {len(bad) - MAX_NAMED_RANKS} more"] if len(bad) > MAX_NAMED_RANKS else [])


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
