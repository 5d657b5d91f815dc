"""Shardings: which tensor dims are split over which mesh axes, and what that gives each rank.

Everything follows from the mesh, the rank's number and the shape of the local tensor: no rank asks another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Copy, LocalArray, Piece, chunk_bounds
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Block, Section, blocks_of, global_size, local_size, parse_section

REPLICATING = ("edp", "ep", "cp", "tp")
"""Mesh axes along which an unsplit array is the same everywhere. ``pp`` is none: its stages hold different arrays."""

SPLIT_AXES = ("pp", "dp", "edp", "ep", "cp", "tp")
"""Mesh axes that a tensor dim may be split over; ``dp`` is ``edp`` times ``ep``."""

STAGE = ("dp", "cp", "tp")
"""The mesh axes along which the ranks of one pipeline stage lie."""


@dataclass(frozen=True, slots=True)
class Split:
    """How one tensor dim is split."""

    axes: tuple[str, ...]
    """Mesh axes, outermost first."""

    sections: tuple[Section, ...] = (Section(),)
    """The dim consists of these, one behind the other, and each is divided over the axes on its own. A rank's local
    tensor holds its part of the first, then of the second, ... Sections without a size are equally large: so many of
    them are Megatron's and neuronx-distributed's `partition_stride`, for projections that are fused into one tensor."""

    def __post_init__(self) -> None:
        unknown = [a for a in self.axes if a not in SPLIT_AXES]
        if unknown or not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"{self.axes} are no mesh axes to split over; there are {', '.join(SPLIT_AXES)}")
        if not self.sections:
            raise ValueError("a tensor dim of no sections")
        if len({s.size is None for s in self.sections}) > 1:
            raise ValueError("of the sections of a tensor dim either all have a size, or none")

    @classmethod
    def strided(cls, axes: tuple[str, ...], stride: int) -> Split:
        """A split into `stride` sections of one size.

        Raises:
            ValueError: `stride` is below 1.
        """
        if stride < 1:
            raise ValueError(f"a partition stride of {stride}")
        return cls(axes, (Section(),) * stride)

    @property
    def plain(self) -> bool:
        """Whether each rank holds a single chunk of the dim that nobody else holds."""
        return self.sections == (Section(),)

    @property
    def named(self) -> bool:
        """Whether its sections have sizes or copies: more than a stride says."""
        return any(s != Section() for s in self.sections)

    @property
    def copies(self) -> bool:
        """Whether some section is held by several ranks."""
        return any(s.copies > 1 for s in self.sections)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an array is split. Tensor dims behind the last one that is named are not split.

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
    def copies(self) -> bool:
        """Whether a part of the array is held by several ranks of an axis that splits it."""
        return any(split is not None and split.copies for split in self.dims)

    @property
    def spec(self) -> tuple[object, ...]:
        """As JSON can hold it: per tensor dim None, or the axes, with the stride or the sections behind them."""
        return tuple(map(_spec_of, self.dims))

    @classmethod
    def parse(cls, spec: Any) -> Sharding:
        """The sharding that a spec in JAX's manner names: ``("tp", None)``, ``(("dp", "tp"), None)``, or None.

        An integer after the axes is the stride: ``(("tp", 3), None)``. A list after them has the sections: their sizes
        in elements of the global array, with ``x4`` behind the size of one that four ranks hold alike, and ``x4
        adjacent`` if neighbouring ranks do: ``(("tp", [4096, "1024x4", "1024x4"]), None)``. A single section needs no
        size: ``(("tp", ["x4"]), None)``. Stored arrays also say into how many parts a section was cut, ``"1024x4/8"``.

        Raises:
            ValueError: `spec` has another form.
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

    def place(self, local: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Where a rank's local tensor of this shape lies.

        Raises:
            ValueError: The shape cannot come from this sharding.
        """
        if len(self.dims) > len(local):
            raise ValueError(f"{len(self.dims)} dims are sharded, the tensor has {len(local)}")
        sizes = mesh.sizes
        shape: list[int] = []
        blocks: list[list[Block]] = []
        axes: list[tuple[str, ...]] = []
        for dim, (split, n) in enumerate(zip(self.over(len(local)), local, strict=True)):
            named, sections = ((), (Section(),)) if split is None else (split.axes, split.sections)
            ranks = number_of_parts(named, sizes)
            declared = None if self.shape is None else self.shape[dim]
            total = global_size(n, ranks, sections) if declared is None else declared
            shape.append(total)
            blocks.append(blocks_of(n, ranks, position(named, mesh, rank), sections, total))
            axes.append(named)
        replica, replicas, group = copies(self.axes, sizes, mesh.coordinates(rank))
        return LocalArray(
            shape=tuple(shape),
            pieces=_pieces(blocks, axes),
            replica=replica,
            replicas=replicas,
            group=group,
            spec=self._stored(mesh).spec,
        )

    def part(self, shape: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Where a rank's part of a global array of this shape lies. Dims that do not divide are cut into chunks.

        Raises:
            ValueError: More dims are sharded than the array has, or one in sections does not divide.
        """
        if len(self.dims) > len(shape):
            raise ValueError(f"{len(self.dims)} dims are sharded, the array has {len(shape)}")
        dims = self.over(len(shape))
        ranks = [1 if split is None else number_of_parts(split.axes, mesh.sizes) for split in dims]
        uneven = any(
            split is not None and split.plain and n % count for split, n, count in zip(dims, shape, ranks, strict=True)
        )
        if not uneven:
            local = [
                n if split is None else local_size(n, count, split.sections)
                for split, n, count in zip(dims, shape, ranks, strict=True)
            ]
            return replace(self, shape=None).place(local, mesh, rank)
        bounds = []
        for split, n, count in zip(dims, shape, ranks, strict=True):
            if split is None:
                bounds.append((0, n))
            elif not split.plain:
                raise ValueError("one dim is cut into sections, and another one does not divide")
            else:
                bounds.append(chunk_bounds(0, n, count, position(split.axes, mesh, rank)))
        box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
        replica, replicas, group = copies(self.axes, mesh.sizes, mesh.coordinates(rank))
        return LocalArray(
            shape=tuple(shape),
            pieces=(Piece(Box.whole(box.shape), box),),  # kept where it is empty, because it says the local shape
            replica=replica,
            replicas=replicas,
            group=group,
            spec=self._stored(mesh).spec,
        )

    def zero1(self, local: Sequence[int], mesh: Mesh, rank: int, axes: tuple[str, ...]) -> LocalArray:
        """Where a rank's ZeRO-1 shard of such a tensor lies: its rows, zero-padded, are dealt out along `axes`.

        Raises:
            ValueError: The tensor cannot come from this sharding, or is split over these axes already.
        """
        full = self.place(local, mesh, rank)
        first = self.dims[0] if self.dims else None
        split = Split(axes) if first is None else Split((*first.axes, *axes), first.sections)
        here = Sharding((split, *self.dims[1:]))
        # Zero padding goes behind the last row, so the last ranks hold fewer rows of the tensor than others, or none.
        low, high = chunk_bounds(0, local[0], number_of_parts(axes, mesh.sizes), position(axes, mesh, rank))
        replica, replicas, group = copies(here.axes, mesh.sizes, mesh.coordinates(rank))
        return replace(
            full,
            pieces=full.rows(low, high),
            replica=replica,
            replicas=replicas,
            group=group,
            # What the sections have of copies is a matter of the ranks that split the parameter, without dp.
            spec=Sharding((Split(split.axes, self._stored_sections(first, mesh)), *self._stored(mesh).dims[1:])).spec,
        )

    def _stored(self, mesh: Mesh) -> Sharding:
        """The same as a stored array says it to other ranks than those of `mesh`."""
        dims = tuple(s if s is None else Split(s.axes, self._stored_sections(s, mesh)) for s in self.dims)
        return replace(self, dims=dims)

    @staticmethod
    def _stored_sections(split: Split | None, mesh: Mesh) -> tuple[Section, ...]:
        if split is None:
            return (Section(),)
        ranks = number_of_parts(split.axes, mesh.sizes)
        return tuple(section.stored(ranks) for section in split.sections)


UNSPLIT = Sharding()
"""The sharding of an array that is the same on all ranks."""


def _split(entry: Any) -> Split | None:
    match entry:
        case None:
            return None
        case str(axis):
            return Split((axis,))
        case [*axes, int(stride)] if all(isinstance(a, str) for a in axes):
            return Split.strided(tuple(axes), stride)
        case [*axes, [*sections]] if all(isinstance(a, str) for a in axes):
            return Split(tuple(axes), tuple(map(parse_section, sections)))
        case [*axes] if all(isinstance(a, str) for a in axes):
            return Split(tuple(axes))
    raise ValueError(f"a tensor dim is split over a mesh axis, several, or None, not {entry!r}")


def _spec_of(split: Split | None) -> object:
    """One entry of `Sharding.spec`: what `_split` reads."""
    if split is None:
        return None
    if split.named:
        return (*split.axes, tuple(s.spec for s in split.sections))
    if len(split.sections) > 1:
        return (*split.axes, len(split.sections))
    return split.axes[0] if len(split.axes) == 1 else split.axes


def _pieces(blocks: Sequence[Sequence[Block]], axes: Sequence[tuple[str, ...]]) -> tuple[Piece, ...]:
    """The pieces of a local tensor that holds these blocks of each dim: one for each combination of blocks.

    `axes` are the mesh axes that split each dim.
    """
    pieces = []
    for choice in product(*blocks):
        local = Box(tuple(b.start for b in choice), tuple(b.stop for b in choice))
        start = tuple(b.first for b in choice)
        stop = tuple(b.first + b.stop - b.start for b in choice)
        box = Box(start, stop)
        if box.size:
            pieces.append(Piece(local, box, copy=_copy(choice, axes)))
    return tuple(pieces)


def _copy(choice: Sequence[Block], axes: Sequence[tuple[str, ...]]) -> Copy | None:
    """Which copy a piece is, of the sections that it lies in; None if nobody else holds these sections."""
    index, count, group = 0, 1, []
    for block, named in zip(choice, axes, strict=True):
        if block.copies > 1:
            index, count = index * block.copies + block.copy, count * block.copies
            group.append((named, block.copies, block.adjacent))
    return Copy(index, count, tuple(group)) if count > 1 else None


def number_of_parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of parts of something that is split over these axes."""
    return prod(sizes[a] for a in axes)


def position(axes: Sequence[str], mesh: Mesh, rank: int) -> int:
    """Which part a rank has when something is split over these axes."""
    at, sizes, index = mesh.coordinates(rank), mesh.sizes, 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def copies(axes: Sequence[str], sizes: dict[str, int], at: dict[str, int]) -> tuple[int, int, object]:
    """(replica, replicas, name of the group of holders) on a rank, of an array that these axes split."""
    split = _single_axes(axes)
    others = [a for a in REPLICATING if a not in split]
    replica = 0
    for axis in others:
        replica = replica * sizes[axis] + at[axis]
    return replica, number_of_parts(others, sizes), ("mesh", tuple(others))


def axes_of(group: Sequence[int], mesh: Mesh, rank: int) -> tuple[str, ...] | None:
    """The mesh axes along which exactly the ranks of a group lie, in its order; None if there are no such axes.

    >>> axes_of([1, 3], Mesh(dp=2, tp=2), 1)
    ('dp',)
    """
    here = mesh.coordinates(rank)
    for axes in (("dp",), ("dp", "cp"), ("edp",), ("edp", "cp"), ("cp",), ("tp",), ("dp", "cp", "tp"), ("dp", "tp")):
        along = _single_axes(axes)
        others = [a for a in ("pp", "edp", "ep", "cp", "tp") if a not in along]
        alike = all(mesh.coordinates(r)[a] == here[a] for r in group for a in others)
        if alike and [position(axes, mesh, r) for r in group] == list(range(number_of_parts(axes, mesh.sizes))):
            return axes
    return None


def _single_axes(axes: Iterable[str]) -> frozenset[str]:
    """The axes with ``edp`` and ``ep`` in place of ``dp``, which is the two of them."""
    return frozenset(single for axis in axes for single in (("edp", "ep") if axis == "dp" else (axis,)))
