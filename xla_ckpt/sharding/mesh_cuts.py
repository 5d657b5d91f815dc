"""How a DTensor was cut, as its mesh and its placements say: which boxes of the global array a rank has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from xla_ckpt.sharding.box import MAX_DIMS
from xla_ckpt.sharding.cuts import Cut, held, mesh_order, pieces_of, spec_of, uneven
from xla_ckpt.sharding.local_array import Piece

MAX_INTERLEAVED = 1 << 12
"""Chunks that interleaved strided shards may make: a hostile file may name any number, and each of them takes time."""


class MeshCut(NamedTuple):
    """What one mesh dim does."""

    dim: int | None
    """The tensor dim that it cuts; None if it holds copies."""

    factor: int = 1
    """See `Cut`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCutting:
    """What a local tensor is of a global one."""

    shape: tuple[int, ...]
    """Of the global one."""

    local: tuple[int, ...] | None = None
    """Shape that the local tensor has to have; None if this rank has nothing of it, whatever its local tensor is."""

    pieces: tuple[Piece, ...] = ()

    spec: tuple[object, ...] | None = None
    """See `ArrayForm.spec`."""

    uneven: tuple[tuple[int, Cut], ...] = ()
    """See `xla_ckpt.sharding.cuts.uneven`: versions of torch do not agree about these."""

    problem: str = ""
    """Why it cannot be told how it was cut; then there are no pieces."""


def cutting_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshCut],
    names: Sequence[str] | None,
) -> MeshCutting:
    """How a DTensor was cut.

    Args:
        shape: Global shape.
        mesh: Size of each mesh dim.
        coordinate: Place of the rank along each.
        placements: What each of them does.
        names: What they are called.

    Raises:
        ValueError: These contradict each other.

    >>> cutting = cutting_of((6, 4), (2, 2), (1, 0), [MeshCut(0), MeshCut(None)], ("dp", "tp"))
    >>> str(cutting.pieces[0].box), cutting.local, cutting.spec
    ('[3:6, 0:4]', (3, 4), (('dp',), None))
    """
    names = [f"mesh{d}" for d in range(len(mesh))] if names is None else names
    if not len(mesh) == len(coordinate) == len(placements) == len(names) or max(len(mesh), len(shape)) > MAX_DIMS:
        raise ValueError("mesh and placements do not have the same number of dims")
    cuts: list[list[tuple[str, Cut]]] = [[] for _ in shape]
    for parts, index, placement, name in zip(mesh, coordinate, placements, names, strict=True):
        if not 0 <= index < parts:
            raise ValueError("a rank stands outside of its mesh")
        if placement.dim is not None:
            if not -len(shape) <= placement.dim < len(shape) or placement.factor < 1:
                raise ValueError("a placement cuts what the tensor does not have")
            cuts[placement.dim % len(shape)].append((name, Cut(parts, index, placement.factor)))
    by_dim = [(size, [cut for _, cut in named]) for size, named in zip(shape, cuts, strict=True)]
    if prod(cut.factor for _, of_dim in by_dim if mesh_order(of_dim) is None for cut in of_dim) > MAX_INTERLEAVED:
        raise ValueError("strided shards make too many chunks")
    pieces, local = pieces_of([held(size, of_dim) for size, of_dim in by_dim])
    return MeshCutting(
        shape=tuple(shape),
        local=local,
        pieces=pieces,
        spec=tuple(spec_of(named) for named in cuts),
        uneven=tuple(blocks for size, of_dim in by_dim for blocks in uneven(size, of_dim)),
    )
