"""Array leaves of one rank, and the assignment of shards to the replicas that write them.

Plans contain the positions of elements, not the arrays. Each rank computes the owners without communication, from facts
that all replicas share. Large shards are split by rows. Small shards are distributed whole, balanced by bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import ColumnarSequence, slots_dataclass
from xla_ckpt.core.sharding.box import Box, IntArray
from xla_ckpt.core.sharding.local_array import LocalArray, Piece

MIN_SPLIT_BYTES = 64 * 1024
"""Minimum size (bytes) of a shard that its replicas split. Splitting smaller ones would cost more than it balances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A region of a global array on this process, and its replicas."""

    box: Box
    """Region of the global array."""

    replica: int = 0
    """Index of this replica, from 0. Unique among the holders."""

    replicas: int = 1
    """Number of replicas in the job, the same on all holders."""

    group: Hashable = None
    """Identifier of the set of holders. Shards with equal groups are held by the same processes."""

    local_device: int = 0
    """Index of the local device that holds the shard. Each local device has its own payload files."""

    write_whole: bool = False
    """True if the first replica writes the whole shard. The replicas may differ, and a file must not mix them."""

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}")


def split_rows(box: Box, replica: int, replicas: int) -> Box | None:
    """Return the part of `box` that a replica writes if it is split by rows, or None if that replica writes nothing.

    The split is along the first tensor dim with more than one row, so that every part is one run of bytes.

    >>> str(split_rows(Box((0, 0), (7, 2)), 1, 3))
    '[2:4, 0:2]'
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return box if replica == 0 else None
    first, rows = box.start[dim], box.shape[dim]
    low, high = replica * rows // replicas, (replica + 1) * rows // replicas
    return box.slice_dim(dim, first + low, first + high) if low < high else None


def assign_owners(
    kinds: Sequence[tuple[LocalShard, int]], kind: IntArray, *, split: bool = True
) -> tuple[list[Box | None], IntArray]:
    """Compute which shards this holder writes, and which part of each.

    The small shards of one group of holders are distributed by the running sum of their bytes. All holders of the group
    iterate over the same list in the same order, so they agree. Empty shards have no writer.

    Args:
        kinds: Distinct shards, each with its itemsize (bytes).
        kind: Index into `kinds` for each shard, in the same order on all holders.
        split: True to split large shards among the replicas. Otherwise they are distributed whole.

    Returns:
        For each kind the part that a writer writes, or None if it writes nothing; and the rows of the shards that this
        holder writes.
    """
    dealt_out = [_is_unsplit(shard, itemsize, split=split) for shard, itemsize in kinds]
    parts = [_compute_part(shard, unsplit=dealt) for (shard, _), dealt in zip(kinds, dealt_out, strict=True)]
    # Shards with the same group and number of replicas are held by the same processes.
    holders: dict[Hashable, int] = {}
    dealt_to = [
        holders.setdefault((shard.group, shard.replicas), len(holders)) if dealt else -1
        for (shard, _), dealt in zip(kinds, dealt_out, strict=True)
    ]
    writes = np.array([part is not None for part in parts], np.bool_)[kind]
    group = np.array(dealt_to, np.int64)[kind]
    rows = np.argsort(group, kind="stable")[np.count_nonzero(group < 0) :]
    group, of_rows = group[rows], kind[rows]
    facts = [(shard.replica, shard.replicas, shard.box.size * itemsize) for shard, itemsize in kinds]
    replica, replicas, nbytes = np.array(facts, np.int64).reshape(-1, 3).T
    nbytes = nbytes[of_rows]
    total = np.zeros(len(holders), np.int64)
    np.add.at(total, group, nbytes)
    before = np.cumsum(nbytes) - nbytes - (np.cumsum(total) - total)[group]
    # The running sum is split into as many equal parts as there are replicas. The part in which a shard begins
    # determines its writer.
    writes[rows] = before * replicas[of_rows] // total[group] == replica[of_rows]
    return parts, np.flatnonzero(writes)


def _is_unsplit(shard: LocalShard, itemsize: int, *, split: bool) -> bool:
    """Return True if one holder writes a shard whole because it is too small to split, or must not be split."""
    whole = not split or shard.box.size * itemsize < MIN_SPLIT_BYTES or shard.box.size == 1
    return whole and shard.replicas > 1 and not shard.write_whole and shard.box.size > 0


def _compute_part(shard: LocalShard, *, unsplit: bool) -> Box | None:
    """Return the part of a shard that this holder writes (of an unsplit shard: if it is assigned to this holder)."""
    if shard.box.size == 0:
        return None
    if shard.replicas == 1 or shard.write_whole:
        return shard.box if shard.replica == 0 else None
    return shard.box if unsplit else split_rows(shard.box, shard.replica, shard.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayout:
    """Shards of a global array on this process, without its name. Arrays with equal shards share one instance."""

    shape: tuple[int, ...]
    """Global shape (elements)."""

    shards: tuple[LocalShard, ...]
    """Shards on this process. May be empty."""

    spec: tuple[object, ...] | None = None
    """Sharding of the array, for display and for `explain` (see `xla_ckpt.core.sharding.sharding.Sharding.spec`)."""

    weak_type: bool | None = None
    """True if it is a weakly typed JAX array. None for arrays of other frameworks."""

    def __post_init__(self) -> None:
        whole = Box.from_shape(self.shape)
        for shard in self.shards:
            if not whole.contains(shard.box):
                raise ValueError(f"shard {shard.box} lies outside of the array {whole}")


@slots_dataclass()
class ArrayLeaf:
    """An array leaf on this process."""

    path: str
    """Leaf path in the state tree."""

    dtype: DType
    layout: LocalLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape (elements)."""
        return self.layout.shape

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """Shards on this process. May be empty."""
        return self.layout.shards

    @property
    def spec(self) -> tuple[object, ...] | None:
        """Sharding of the array."""
        return self.layout.spec

    @property
    def nbytes(self) -> int:
        """Number of bytes of the global array."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class LeafTable(ColumnarSequence[ArrayLeaf]):
    """Array leaves of a process: a row per leaf. Leaves with equal dtype and layout share one entry of `kinds`."""

    paths: Sequence[str]
    kinds: Sequence[tuple[DType, LocalLayout]]
    kind: IntArray
    """Index into `kinds`, per leaf."""

    @classmethod
    def from_leaves(cls, leaves: Sequence[ArrayLeaf]) -> LeafTable:
        """Create the columns from a sequence of leaves."""
        if isinstance(leaves, LeafTable):
            return leaves
        forms: dict[tuple[DType, int], tuple[int, LocalLayout]] = {}
        form = [forms.setdefault((leaf.dtype, id(leaf.layout)), (len(forms), leaf.layout))[0] for leaf in leaves]
        return cls(
            paths=[leaf.path for leaf in leaves],
            kinds=[(dtype, holding) for (dtype, _), (_, holding) in forms.items()],
            kind=np.array(form, np.int64),
        )

    def __len__(self) -> int:
        return len(self.paths)

    def get_row(self, index: int) -> ArrayLeaf:
        return ArrayLeaf(self.paths[index], *self.kinds[self.kind[index]])


def create_leaf(path: str, dtype: DType, local: LocalArray) -> ArrayLeaf:
    """Create the leaf of a local array."""
    return ArrayLeaf(path, dtype, create_local_layout(local))


def create_local_layout(local: LocalArray, *, write_whole: bool = False, weak_type: bool | None = None) -> LocalLayout:
    """Create the layout of a local array.

    Args:
        local: The local array.
        write_whole: True if one holder writes each shard whole.
        weak_type: True for a weakly typed JAX array, None for arrays of other frameworks.
    """
    shards = tuple(_create_shard(piece, local, write_whole) for piece in local.pieces)
    return LocalLayout(shape=local.shape, shards=shards, spec=local.spec, weak_type=weak_type)


def _create_shard(piece: Piece, local: LocalArray, write_whole: bool) -> LocalShard:
    replica, replicas, group = local.replica, local.replicas, local.group
    if piece.copy is not None:  # each replica of the array contains all copies of this piece
        replica, replicas = replica * piece.copy.count + piece.copy.index, replicas * piece.copy.count
        group = group, piece.copy.group
    return LocalShard(
        box=piece.global_box,
        replica=replica,
        replicas=replicas,
        group=group,
        local_device=piece.local_device,
        write_whole=write_whole,
    )
