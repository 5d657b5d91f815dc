"""Array leaves of one rank, and which replica writes which part of a shard.

Plans see where elements are, not what holds them. Each rank computes the owners alone, from facts that all replicas
share: large shards are split by rows, small ones are distributed whole, balanced by bytes.
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
"""Shards below this are written whole by one replica: splitting them would cost more than it balances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A region of a global array that this process holds, and who else holds it."""

    box: Box
    """Region of the global array."""

    replica: int = 0
    """Which of the equal copies this is, from 0; the same number on no other holder."""

    replicas: int = 1
    """How many copies there are in the job. All holders know the same number."""

    group: Hashable = None
    """Names the set of holders: all shards with an equal group are held by the same processes."""

    local_device: int = 0
    """Which local device holds it; each lane has payload files of its own."""

    write_whole: bool = False
    """Whether one holder writes it whole. The copies need not be equal then, and no file may mix them."""

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}")


def split_rows(box: Box, replica: int, replicas: int) -> Box | None:
    """The part of `box` that one of its replicas writes when it is split by rows; None if that replica writes nothing.

    The split runs along the first tensor dim with more than one row, so that every part is one run of bytes.

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
    """Which of many shards of one holder it writes, and what of each.

    The small shards of one group of holders are dealt out along the running sum of their bytes: each holder of the
    group walks the same list in the same order, and so they agree. Empty shards have no bytes and no writer.

    Args:
        kinds: What the shards are, each with the bytes of one element: of those that are alike, one.
        kind: The index of each shard's kind, in the order in which all holders have them.
        split: Whether the copies of a large shard split it; else it is dealt out whole, however large it is.

    Returns:
        For each kind the part that a writer writes of such a shard, None if it writes nothing; and the rows of the
        shards of which this holder is a writer.
    """
    dealt_out = [_is_unsplit(shard, itemsize, split=split) for shard, itemsize in kinds]
    parts = [_compute_part(shard, unsplit=dealt) for (shard, _), dealt in zip(kinds, dealt_out, strict=True)]
    # The same processes hold shards of one group that have as many replicas.
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
    # The running sum is cut into as many equal parts as there are replicas. The part in which a shard begins says who
    # writes it.
    writes[rows] = before * replicas[of_rows] // total[group] == replica[of_rows]
    return parts, np.flatnonzero(writes)


def _is_unsplit(shard: LocalShard, itemsize: int, *, split: bool) -> bool:
    """Whether its holders write a shard whole, by turns: it is too small to split, of one element, or not to be cut."""
    whole = not split or shard.box.size * itemsize < MIN_SPLIT_BYTES or shard.box.size == 1
    return whole and shard.replicas > 1 and not shard.write_whole and shard.box.size > 0


def _compute_part(shard: LocalShard, *, unsplit: bool) -> Box | None:
    """What this holder writes of a shard; of one that is dealt out, if it is its turn."""
    if shard.box.size == 0:
        return None
    if shard.replicas == 1 or shard.write_whole:
        return shard.box if shard.replica == 0 else None
    return shard.box if unsplit else split_rows(shard.box, shard.replica, shard.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayout:
    """What this process holds of a global array, whatever the array is called: arrays that lie alike share one."""

    shape: tuple[int, ...]
    """Global shape (elements)."""

    shards: tuple[LocalShard, ...]
    """May be none."""

    spec: tuple[object, ...] | None = None
    """How the array is split, for people and for `explain` (see `xla_ckpt.core.sharding.sharding.Sharding.spec`)."""

    weak_type: bool | None = None
    """Whether it is an array of jax's with a weak type; None for arrays that are none of jax's."""

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
        """What this process holds of it; may be nothing."""
        return self.layout.shards

    @property
    def spec(self) -> tuple[object, ...] | None:
        """How it is split."""
        return self.layout.spec

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class LeafTable(ColumnarSequence[ArrayLeaf]):
    """The array leaves of a process: a row for each. What those that lie alike have in common is said once."""

    paths: Sequence[str]
    kinds: Sequence[tuple[DType, LocalLayout]]
    kind: IntArray
    """The index of each leaf's form."""

    @classmethod
    def from_leaves(cls, leaves: Sequence[ArrayLeaf]) -> LeafTable:
        """The columns of some leaves."""
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
    """The leaf of a local tensor that lies like this."""
    return ArrayLeaf(path, dtype, create_local_layout(local))


def create_local_layout(local: LocalArray, *, write_whole: bool = False, weak_type: bool | None = None) -> LocalLayout:
    """What a process holds whose tensor lies like this. `write_whole`: one holder writes each shard whole."""
    shards = tuple(_create_shard(piece, local, write_whole) for piece in local.pieces)
    return LocalLayout(shape=local.shape, shards=shards, spec=local.spec, weak_type=weak_type)


def _create_shard(piece: Piece, local: LocalArray, write_whole: bool) -> LocalShard:
    replica, replicas, group = local.replica, local.replicas, local.group
    if piece.copy is not None:  # each copy of the array has the copies of this piece in it
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
