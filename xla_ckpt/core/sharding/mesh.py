"""Mesh: the ranks of a job along named parallel axes (pp, dp, ep, cp, tp), and the coordinates of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import check_fields

MESH_AXES = ("pp", "dp", "cp", "tp")
"""Axes that make up the world, outermost first, in neuronx-distributed's rank order."""


@check_fields
@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged by parallelism, in neuronx-distributed's order: pp outermost, then dp, cp, and tp innermost.

    Expert parallelism divides data parallelism (as in neuronx-distributed): `ep` neighbouring ranks along dp hold
    different experts, and ``dp // ep`` such groups are replicas.

    Args:
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas (experts included: ``dp == edp * ep``).
        ep: Number of expert-parallel ranks inside `dp`.
        cp: Number of context-parallel ranks.
        tp: Number of tensor-parallel ranks.

    Raises:
        ValueError: A size is below 1, or `ep` does not divide `dp`.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.coordinates(5)
    (8, {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1, 'ep': 0, 'edp': 1})
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "ep", "cp", "tp"):
            size = getattr(self, axis)
            if type(size) is not int or size < 1:
                raise ValueError(f"mesh axis {axis} has {size!r} ranks; it needs at least 1")
        if self.dp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp={self.dp}: expert parallelism is a part of dp")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along every axis, including ``ep`` and ``edp`` (``dp // ep``)."""
        return {**{a: getattr(self, a) for a in MESH_AXES}, "ep": self.ep, "edp": self.dp // self.ep}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` along every axis, including ``ep`` and ``edp``.

        Raises:
            ValueError: `rank` is outside of the mesh.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside of a mesh of {self.size}")
        at: dict[str, int] = {}
        for axis in reversed(MESH_AXES):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return {**{a: at[a] for a in MESH_AXES}, "ep": at["dp"] % self.ep, "edp": at["dp"] // self.ep}

    def rank(self, at: Mapping[str, int]) -> int:
        """Return the rank at these coordinates. Axes that are not given default to 0.

        Raises:
            ValueError: A coordinate is outside of the mesh.

        >>> Mesh(dp=2, tp=4).rank({"dp": 1, "tp": 1})
        5
        """
        rank = 0
        for axis in MESH_AXES:
            i = at.get(axis, 0)
            if not 0 <= i < getattr(self, axis):
                raise ValueError(f"{axis}={i} is outside of a mesh with {getattr(self, axis)} ranks along it")
            rank = rank * int(getattr(self, axis)) + i
        return rank

    def first_of_stage(self, rank: int) -> int:
        """Return the first rank of a rank's pipeline stage, which reports for the whole stage.

        >>> Mesh(pp=2, dp=2).first_of_stage(3)
        2
        """
        return rank - rank % (self.size // self.pp) if self.pp > 1 else 0

    def __str__(self) -> str:
        """Format as ``pp=1,dp=2,ep=1,cp=1,tp=4``, the form that `parse` reads."""
        return ",".join(f"{a}={getattr(self, a)}" for a in ("pp", "dp", "ep", "cp", "tp"))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh from a string such as ``pp=1,dp=2,tp=4``. Axes that are not given have one rank.

        Raises:
            ValueError: The string has another form.

        >>> Mesh.parse("dp=2,tp=4").size
        8
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, equals, size = part.partition("=")
            if not equals or axis not in ("pp", "dp", "ep", "cp", "tp") or not size.isdigit() or axis in sizes:
                raise ValueError(f"{part!r} is no mesh axis; a mesh is written like pp=1,dp=2,ep=1,cp=1,tp=4")
            sizes[axis] = int(size)
        return cls(**sizes)


def parse_mesh(mesh: object) -> Mesh | None:
    """Return the mesh of a caller's argument: ``Mesh(dp=2, tp=4)``, ``"dp=2,tp=4"`` or None.

    Raises:
        UsageError: The argument is invalid.
    """
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        if isinstance(mesh, str):
            return Mesh.parse(mesh)
        problem = f"{mesh!r} is neither a Mesh nor text"
    except ValueError as error:
        problem = str(error)
    raise UsageError(
        f"a mesh makes no sense: {problem}", expected='mesh="dp=2,tp=4" (--mesh dp=2,tp=4)', found=repr(mesh)
    )


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Position of this process in the job."""

    rank: int = 0
    world_size: int = 1
    mesh: Mesh = field(default_factory=Mesh)
    """Arrangement of the ranks. Pure data parallelism by default."""

    @property
    def is_stage_leader(self) -> bool:
        """True if this process reports for its pipeline stage."""
        return self.rank == self.mesh.first_of_stage(self.rank)
