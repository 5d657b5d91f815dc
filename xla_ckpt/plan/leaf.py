"""Array leaves as plans see them: where the elements are, not what holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.lightweight import Columns, lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.local_array import LocalArray, Piece
from xla_ckpt.sharding.owners import LocalShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What this process holds of a global array, whatever the array is called: arrays that lie alike share one."""

    shape: tuple[int, ...]
    """Global shape (elements)."""

    shards: tuple[LocalShard, ...]
    """May be none."""

    spec: tuple[object, ...] | None = None
    """How the array is split, for people and for `explain` (see `xla_ckpt.sharding.sharding.Sharding.spec`)."""

    weak_type: bool | None = None
    """Whether it is an array of jax's with a weak type; None for arrays that are none of jax's."""

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        for shard in self.shards:
            if not whole.contains(shard.box):
                raise ValueError(f"shard {shard.box} lies outside of the array {whole}")


@lightweight()
class Leaf:
    """An array leaf on this process."""

    path: str
    """Leaf path in the state tree."""

    dtype: DType
    holding: Holding

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape (elements)."""
        return self.holding.shape

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """What this process holds of it; may be nothing."""
        return self.holding.shards

    @property
    def spec(self) -> tuple[object, ...] | None:
        """How it is split."""
        return self.holding.spec

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return Box.whole(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Leaves(Columns[Leaf]):
    """The array leaves of a process: a row for each. What those that lie alike have in common is said once."""

    paths: Sequence[str]
    forms: Sequence[tuple[DType, Holding]]
    form: Ints
    """The index of each leaf's form."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Leaves:
        """The columns of some leaves."""
        if isinstance(leaves, Leaves):
            return leaves
        forms: dict[tuple[DType, int], tuple[int, Holding]] = {}
        form = [forms.setdefault((leaf.dtype, id(leaf.holding)), (len(forms), leaf.holding))[0] for leaf in leaves]
        return cls(
            paths=[leaf.path for leaf in leaves],
            forms=[(dtype, holding) for (dtype, _), (_, holding) in forms.items()],
            form=np.array(form, np.int64),
        )

    def __len__(self) -> int:
        return len(self.paths)

    def row(self, number: int) -> Leaf:
        return Leaf(self.paths[number], *self.forms[self.form[number]])


def leaf_of(path: str, dtype: DType, local: LocalArray) -> Leaf:
    """The leaf of a local tensor that lies like this."""
    return Leaf(path, dtype, holding_of(local))


def holding_of(local: LocalArray, *, together: bool = False, weak_type: bool | None = None) -> Holding:
    """What a process holds whose tensor lies like this. `together`: one holder writes each shard whole."""
    shards = tuple(_shard(piece, local, together) for piece in local.pieces)
    return Holding(shape=local.shape, shards=shards, spec=local.spec, weak_type=weak_type)


def _shard(piece: Piece, local: LocalArray, together: bool) -> LocalShard:
    replica, replicas, group = local.replica, local.replicas, local.group
    if piece.copy is not None:  # each copy of the array has the copies of this piece in it
        replica, replicas = replica * piece.copy.count + piece.copy.index, replicas * piece.copy.count
        group = group, piece.copy.group
    return LocalShard(
        box=piece.box, replica=replica, replicas=replicas, group=group, lane=piece.lane, together=together
    )
