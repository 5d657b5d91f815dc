"""Whether ranks have in common what they should: arrays by samples of bytes, plain values by fingerprints. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from xla_ckpt.display import join_lines
from xla_ckpt.errors import DivergentReplicasError
from xla_ckpt.plan.agreement import MAX_NAMED_RANKS, named_ranks
from xla_ckpt.plan.record import Record
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import has_sections
from xla_ckpt.tree import schema

_UNDECLARED = (
    "If each rank trains the whole model: they were never made equal (the same seed, or DistributedDataParallel). If "
    "the array is split over ranks, as tensor parallelism does: give its parameter neuronx-distributed's attributes "
    "(tensor_model_parallel, partition_dim), or pass mesh= and shardings= with a rule that fits its leaf path."
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

Differing = tuple[int, list[int]]
"""A rank, and others that have something else."""

Replicas = Literal["equal", "first"]
"""What a save asks of replicas: that they are equal, or nothing, and then it stores the first one's bytes."""


class LeafNumbers:
    """Numbers for the leaf paths of all records."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.of: dict[str, int] = {}
        """Leaf path -> its number."""
        self._columns: dict[int, Ints] = {}
        """By the identity of a record's names: the ranks of a stage have them in common."""
        for record in records:
            if id(record.names) not in self._columns:
                numbers = [self.of.setdefault(name, len(self.of)) for name in record.names]
                self._columns[id(record.names)] = np.array(numbers, np.int64)

    def column(self, record: Record, leaf: Ints) -> Ints:
        """These numbers, for a column of a record's own ones."""
        return self._columns[id(record.names)][leaf]


def compare_replicas(
    records: Sequence[Record], mesh: Mesh, replicas: Replicas, numbers: LeafNumbers
) -> tuple[list[str], tuple[str, ...]]:
    """Compare what ranks have in common.

    Returns:
        Warnings, and the leaf paths of arrays whose replicas differ and may differ. Buffers are not among them.

    Raises:
        DivergentReplicasError: Ranks differ in what has to be equal.
    """
    warnings: list[str] = []
    bad: dict[str, Differing] = {}
    loose: dict[str, Differing] = {}
    for leaf, first, other, is_loose in _different_samples(records, numbers):
        _, differing = (loose if is_loose else bad).setdefault(leaf, (first, []))
        if other not in differing[-1:]:
            differing.append(other)
    plain: dict[str, Differing] = {}
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    for record in records:
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
            details=join_lines(_listed(bad)),
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
        warnings.append(join_lines([first_stored(len(bad)), *_listed(bad)]))
    return warnings, tuple(bad)


def _different_samples(records: Sequence[Record], numbers: LeafNumbers) -> Iterator[tuple[str, int, int, bool]]:
    """(leaf path, rank, other rank, whether it is a buffer) of samples of one place with different contents.

    The first rank is the first that has a sample of the place. They come in the order of the records.
    """
    leaf = np.concatenate([numbers.column(record, record.samples.leaf) for record in records])
    if not len(leaf):
        return
    place, content, loose = (
        np.concatenate([getattr(record.samples, name) for record in records]) for name in ("place", "content", "loose")
    )
    order = np.lexsort((place, leaf))  # stable: of equal places, the first rank's comes first
    begins = np.r_[True, (np.diff(leaf[order]) != 0) | (place[order][1:] != place[order][:-1])]
    first = np.empty_like(order)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    ranks = np.repeat([record.rank for record in records], [len(record.samples) for record in records])
    names = list(numbers.of)
    for row in np.flatnonzero(content != content[first]).tolist():
        yield names[leaf[row]], int(ranks[first[row]]), int(ranks[row]), bool(loose[row])


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


def _listed(bad: Mapping[str, Differing]) -> list[str]:
    lines = [
        f"  {leaf}: rank {rank} against {named_ranks(others)}"
        for leaf, (rank, others) in [*bad.items()][:MAX_NAMED_RANKS]
    ]
    return lines + ([f"  ... and {len(bad) - MAX_NAMED_RANKS} more"] if len(bad) > MAX_NAMED_RANKS else [])
