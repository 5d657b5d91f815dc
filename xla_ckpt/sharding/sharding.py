"""Shardings: which tensor dims are split over which mesh axes, and what that gives each rank.

Everything follows from the mesh, the rank's number and the shape of the local tensor: no rank asks another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece, chunk
from xla_ckpt.sharding.mesh import Mesh

REPLICATING = ("edp", "ep", "cp", "tp")
"""Mesh axes along which an unsplit array is the same everywhere. Not ``pp``: its stages hold different arrays."""

SPLIT_AXES = ("pp", "dp", "edp", "ep", "cp", "tp")
"""Mesh axes that a tensor dim may be split over; ``dp`` is ``edp`` times ``ep``."""


@dataclass(frozen=True, slots=True)
class Split:
    """How one tensor dim is split."""

    axes: tuple[str, ...]
    """Mesh axes, outermost first."""

    stride: int = 1
    """Blocks that each rank holds: of ``n * stride`` equal blocks rank `i` of `n` has `i`, ``i + n``, ``i + 2 * n``...
    As in Megatron's and neuronx-distributed's `partition_stride`, for projections that are fused into one tensor."""

    def __post_init__(self) -> None:
        unknown = [a for a in self.axes if a not in SPLIT_AXES]
        if unknown or not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"{self.axes} are no mesh axes to split over; there are {', '.join(SPLIT_AXES)}")
        if self.stride < 1:
            raise ValueError(f"a partition stride of {self.stride}")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an array is split. Tensor dims behind the last one named are not.

    >>> Sharding.parse((("dp", "tp"), None)).spec
    (('dp', 'tp'), None)
    """

    dims: tuple[Split | None, ...] = ()

    shape: tuple[int | None, ...] | None = None
    """The true global size of each tensor dim, where local tensors are padded; None where they are not."""

    def __post_init__(self) -> None:
        axes = self.axes
        if len(set(axes)) < len(axes) or ("dp" in axes and ("ep" in axes or "edp" in axes)):
            raise ValueError(f"a mesh axis splits two tensor dims, or is a part of another: {', '.join(axes)}")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split the array."""
        return tuple(a for split in self.dims if split is not None for a in split.axes)

    @property
    def spec(self) -> tuple[object, ...]:
        """As JSON can hold it: per tensor dim None, or the axes, with the stride last where there is one."""
        return tuple(
            None if s is None else (*s.axes, s.stride) if s.stride > 1 else s.axes[0] if len(s.axes) == 1 else s.axes
            for s in self.dims
        )

    @classmethod
    def parse(cls, spec: Any) -> Sharding:
        """The sharding that a spec in JAX's manner names: ``("tp", None)``, ``(("dp", "tp"), None)``, or None.

        An integer after the axes is the stride: ``(("tp", 3), None)``.

        Raises:
            ValueError: It is none.
        """
        if isinstance(spec, Sharding):
            return spec
        if spec is None:
            return cls()
        if not isinstance(spec, list | tuple):
            raise ValueError(f"a sharding is written like ('tp', None), not {spec!r}")  # noqa: TRY004
        return cls(tuple(_split(entry) for entry in spec))

    def over(self, ndim: int) -> tuple[Split | None, ...]:
        """The split of each dim of an array of so many dims."""
        return (*self.dims, *(None,) * (ndim - len(self.dims)))

    def of_state(self, full: Sequence[int], shape: Sequence[int]) -> Sharding:
        """How state of the local shape `shape` is split that belongs to a tensor of the local shape `full`.

        It follows the tensor in the dims that it has; a dim of one element stands for all of the tensor's. State of
        any other shape is the same everywhere.

        >>> Sharding.parse(("tp", None)).of_state((4, 6), (4, 1)).spec, Sharding.parse(("tp",)).of_state((4,), ()).spec
        (('tp', None), ())
        """
        if len(shape) != len(full) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
            return Sharding()
        kept = [n == m for n, m in zip(shape, full, strict=True)]
        true = None
        if self.shape is not None:
            true = tuple(t if k else None for t, k in zip(self.shape, kept, strict=True))
        return Sharding(tuple(s if k else None for s, k in zip(self.over(len(full)), kept, strict=True)), true)

    def place(self, local: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Where a rank's local tensor of this shape lies.

        Raises:
            ValueError: The shape cannot come from this sharding.
        """
        if len(self.dims) > len(local):
            raise ValueError(f"{len(self.dims)} dims are sharded, the tensor has {len(local)}")
        here, sizes = mesh.coordinates(rank), mesh.sizes
        dims = self.over(len(local))
        shape, blocks = [], []
        for d, (split, n) in enumerate(zip(dims, local, strict=True)):
            ranks = 1 if split is None else parts(split.axes, sizes)
            true = n * ranks if self.shape is None or self.shape[d] is None else self.shape[d]
            shape.append(_whole_number(true))
            blocks.append(
                list(
                    _blocks(
                        n,
                        ranks,
                        0 if split is None else position(split.axes, mesh, rank),
                        1 if split is None else split.stride,
                        shape[-1],
                    )
                )
            )
        pieces = tuple(
            Piece(
                Box(tuple(b[0] for b in bs), tuple(b[1] for b in bs)),
                Box(tuple(b[2] for b in bs), tuple(b[2] + b[1] - b[0] for b in bs)),
            )
            for bs in product(*blocks)
        )
        replica, replicas, group = copies(self.axes, sizes, here)
        return LocalArray(tuple(shape), tuple(p for p in pieces if p.box.size), replica, replicas, group, self.spec)

    def part(self, shape: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Where a rank's part of a global array of this shape lies; dims that do not divide are cut into chunks.

        Raises:
            ValueError: More dims are sharded than the array has, or a strided one does not divide.
        """
        if len(self.dims) > len(shape):
            raise ValueError(f"{len(self.dims)} dims are sharded, the array has {len(shape)}")
        dims = self.over(len(shape))
        local, bounds = [], []
        for split, n in zip(dims, shape, strict=True):
            ranks = 1 if split is None else parts(split.axes, mesh.sizes)
            if n % ranks and split is not None and split.stride > 1:
                raise ValueError(f"{n} elements in strided blocks do not divide by {ranks}")
            bounds.append((0, n) if split is None else chunk(0, n, ranks, position(split.axes, mesh, rank)))
            local.append(n // ranks if n % ranks == 0 else -1)
        if -1 not in local:
            return replace(self, shape=None).place(local, mesh, rank)
        box = Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))
        replica, replicas, group = copies(self.axes, mesh.sizes, mesh.coordinates(rank))
        piece = Piece(Box.whole(box.shape), box)  # kept where it is empty: it says the local shape
        return LocalArray(tuple(shape), (piece,), replica, replicas, group, self.spec)

    def zero1(self, local: Sequence[int], mesh: Mesh, rank: int, axes: tuple[str, ...]) -> LocalArray:
        """Where a rank's ZeRO-1 shard of such a tensor lies: its rows, zero-padded, are dealt out along `axes`.

        Raises:
            ValueError: The tensor cannot come from this sharding, or is split over these axes already.
        """
        full = self.place(local, mesh, rank)
        first = self.dims[0] if self.dims else None
        split = Split(axes) if first is None else Split((*first.axes, *axes), first.stride)
        here = Sharding((split, *self.dims[1:]))
        ranks = parts(axes, mesh.sizes)
        size = -(-local[0] // ranks)
        low = min(position(axes, mesh, rank) * size, local[0])
        replica, replicas, group = copies(here.axes, mesh.sizes, mesh.coordinates(rank))
        pieces = full.rows(low, min(low + size, local[0]))
        return replace(full, pieces=pieces, replica=replica, replicas=replicas, group=group, spec=here.spec)


def _split(entry: Any) -> Split | None:
    match entry:
        case None:
            return None
        case str(axis):
            return Split((axis,))
        case [*axes, int(stride)] if all(isinstance(a, str) for a in axes):
            return Split(tuple(axes), stride)
        case [*axes] if all(isinstance(a, str) for a in axes):
            return Split(tuple(axes))
    raise ValueError(f"a tensor dim is split over a mesh axis, several, or None, not {entry!r}")


def _whole_number(n: int | None) -> int:
    if n is None or n < 0:
        raise ValueError(f"a tensor dim of size {n}")
    return n


def _blocks(n: int, ranks: int, index: int, stride: int, true: int) -> Iterator[tuple[int, int, int]]:
    """(local start, local stop, global start) of each block of one tensor dim."""
    if true == n * ranks and n % stride == 0:
        size = n // stride
        for k in range(stride if ranks > 1 else 1):
            width = size if ranks > 1 else n
            yield k * size, k * size + width, (k * ranks + index) * size if ranks > 1 else 0
    elif n % stride:
        raise ValueError(f"a dim of {n} elements on each rank does not consist of {stride} strided blocks")
    elif stride > 1 or true > n * ranks:
        raise ValueError(f"a dim of {true} elements cannot be {ranks} times {n} of which the last ones are padding")
    else:
        low = min(index * n, true)
        yield 0, min(low + n, true) - low, low


def parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts something falls that is split over these axes."""
    return prod(sizes[a] for a in axes)


def position(axes: Sequence[str], mesh: Mesh, rank: int) -> int:
    """Which part falls to a rank when something is split over these axes."""
    at, sizes, index = mesh.coordinates(rank), mesh.sizes, 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def copies(axes: Sequence[str], sizes: dict[str, int], at: dict[str, int]) -> tuple[int, int, object]:
    """(replica, replicas, name of the group of holders) on a rank, of an array that these axes split."""
    split = {b for a in axes for b in (("edp", "ep") if a == "dp" else (a,))}
    others = [a for a in REPLICATING if a not in split]
    replica = 0
    for axis in others:
        replica = replica * sizes[axis] + at[axis]
    return replica, parts(others, sizes), ("mesh", tuple(others))


def axes_of(group: Sequence[int], mesh: Mesh, rank: int) -> tuple[str, ...] | None:
    """The mesh axes that a group of ranks lies along, in its order; None if it lies along none.

    >>> axes_of([1, 3], Mesh(dp=2, tp=2), 1)
    ('dp',)
    """
    here = mesh.coordinates(rank)
    for axes in (("dp",), ("dp", "cp"), ("edp",), ("edp", "cp"), ("cp",), ("tp",), ("dp", "cp", "tp"), ("dp", "tp")):
        free = {b for a in axes for b in (("edp", "ep") if a == "dp" else (a,))}
        fixed = [a for a in ("pp", "edp", "ep", "cp", "tp") if a not in free]
        beside = all(mesh.coordinates(r)[a] == here[a] for r in group for a in fixed)
        if beside and [position(axes, mesh, r) for r in group] == list(range(parts(axes, mesh.sizes))):
            return axes
    return None
