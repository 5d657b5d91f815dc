"""What one rank has in memory, and how a file of torch.save is laid out that holds some of its tensors.

Every rank decides alone what it writes. Ranks that hold the same tensors may have a file in common, which the first of
them writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.by_rank.grid import RankAt, RankName
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, dumps
from xla_ckpt.plan.file_plan import Entry, FilePlan, RegionSource
from xla_ckpt.plan.stored_shardings import sharding_of_spec
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.sharding.sharding import position
from xla_ckpt.tree import schema

PARTS = (schema.MODEL, schema.OPTIMIZER, schema.SCHEDULER, schema.USER_CONTENT)
"""Members of a state that these layouts have a place for."""

ANY_STATE = (
    "The layout native holds any state, and loads on any topology: layout='native' of xla_ckpt.save_checkpoint, or "
    "to='native' (--to native) of a conversion."
)
"""What to do about a state that has no place in these layouts."""

SHARING = ("edp", "cp")
"""Mesh axes along which ranks hold the same, unless ZeRO-1 deals it out, and so have a file in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One rank's part of an array, as it has it in memory."""

    leaf: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the tensor itself, padding included."""

    pieces: tuple[Piece, ...]
    """Which elements of the global array it consists of."""

    alike: tuple[str, ...]
    """Mesh axes along which ranks hold the same."""

    expert: bool = False
    """Whether it belongs to an expert, which only some ranks have."""

    elsewhere: bool = False
    """Whether the manifest finds the array in other files."""

    full: tuple[int, ...] | None = None
    """Shape of the global array, where it is known."""

    spec: tuple[object, ...] | None = None
    """How the global array is split (see `xla_ckpt.sharding.sharding.Sharding.spec`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return Box.whole(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank, with a `LeafAt` for each array."""

    parts: Mapping[str, Any]
    tensors: Mapping[str, RankTensor]
    """The tensor of each array, by leaf path. Several paths of one tied array have the same tensor."""

    zero1: bool = False
    """Whether the rows of the optimizer's states are dealt out over dp."""

    by_name: bool = False
    """Whether the optimizer's state is kept by parameter name; else it is stored as it is."""

    shapes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Local shape of each parameter of the optimizer, by name."""

    experts: frozenset[str] | None = None
    """Names of the parameters that a ZeRO-1 optimizer of experts has; None where one has all of them."""

    def members(self, part: str) -> Mapping[Any, Any]:
        """A part of it, for a file that has a place for its members.

        Raises:
            UnsupportedStateError: It is no dict.
        """
        tree = self.parts[part]
        if not isinstance(tree, Mapping):
            problem = f"the layout has a place for {part} as a dict of its parameters or states"
            raise UnsupportedStateError(problem, leaf=part, found=type(tree).__name__)
        return tree


@dataclass(frozen=True, slots=True)
class Laying:
    """Lays out files of what one rank has."""

    mesh: Mesh
    rank: int
    state: RankState
    first: bool = False
    """Whether the first of the ranks that share a file writes all of its tensors: they may not be equal."""

    @property
    def at(self) -> dict[str, int]:
        """The coordinates of the rank."""
        return self.mesh.coordinates(self.rank)

    def place(self, names: Sequence[RankName], *, dealt: bool = False) -> tuple[str, tuple[str, ...]]:
        """What the file of this rank is called, and the mesh axes along which ranks have it in common.

        Args:
            names: Those that such files have. The first one counts that tells the ranks of the job apart.
            dealt: Whether each dp rank has rows of its own, which ZeRO-1 has dealt out.

        Raises:
            UnsupportedStateError: None of them does.
        """
        name, axes = name_in_job(names, self.mesh, dealt=dealt)
        return name.of(RankAt.of(self.at, axes)), ("cp",) if dealt else SHARING

    def shared(self, names: Sequence[RankName], tree: Any, part: str, *, dealt: bool = False) -> list[FilePlan]:
        """The file of this rank, if it is the first of the ranks that have it in common (see `place`)."""
        path, sharing = self.place(names, dealt=dealt)
        return [] if position(sharing, self.mesh, self.rank) else [self.whole(path, tree, part, sharing)]

    def common(self, path: str, tree: Any, part: str) -> list[FilePlan]:
        """A file of what all ranks have alike, if this is the first of them."""
        return [] if self.rank else [self.whole(path, tree, part, tuple(self.mesh.sizes))]

    def whole(self, path: str, tree: Any, part: str, sharing: Sequence[str]) -> FilePlan:
        """A file that holds its tensors itself.

        Args:
            path: Its name in the tag directory.
            tree: What is pickled in it, with a `LeafAt` for each tensor.
            part: Leaf path of what it is, for errors.
            sharing: Mesh axes along which ranks have it in common.

        Raises:
            UnsupportedStateError: Something in the tree cannot be pickled.
        """
        tensors: list[tuple[str, RankTensor]] = []

        def in_file(leaf: str) -> InFile:
            tensor = self.state.tensors[leaf]
            tensors.append((leaf, tensor))
            return InFile(len(tensors) - 1, tensor.dtype, tensor.shape)

        pickled = dumps(tree, part, in_file)
        lengths, sources, entries = self.regions(tensors, sharing)
        codec = TorchFile(stem=stem(path), pickled=pickled, storages=lengths)
        return FilePlan(path=path, codec=codec, sources=sources, entries=entries)

    def regions(
        self, tensors: Sequence[tuple[str, RankTensor]], sharing: Sequence[str]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[RegionSource, ...], tuple[Entry, ...]]:
        """(bytes of the regions of each storage, sources of all regions, entries of the manifest)."""
        lengths: list[tuple[int, ...]] = []
        sources: list[RegionSource] = []
        entries: list[Entry] = []
        for path, tensor in tensors:
            first = len(sources)
            cuts, frames = _regions(tensor)
            # The manifest finds an array once: under its first name, and on the first of the ranks that hold the same.
            is_first_name = path == tensor.leaf
            is_first_rank = all(self.at[axis] == 0 for axis in tensor.alike if axis not in sharing)
            is_copy = tensor.elsewhere or not (is_first_name and is_first_rank)
            lengths.append(tuple(b - a for a, b in pairwise(cuts)))
            sources += [RegionSource(leaf=tensor.leaf, shard=0, offset=a, nbytes=b - a) for a, b in pairwise(cuts)]
            region = {offset: first + i for i, offset in enumerate(cuts)}
            entries += [
                Entry(
                    leaf=tensor.leaf,
                    box=p.box,
                    region=region[at],
                    frame=frame,
                    copy=is_copy or (p.copy is not None and p.copy.index > 0),
                )
                for p, frame, at in frames
            ]
        return tuple(lengths), tuple(sources), tuple(entries)


def _regions(tensor: RankTensor) -> tuple[list[int], list[tuple[Piece, Box | None, int]]]:
    """Where a tensor's bytes are cut into regions; and for each piece (piece, its frame, offset of its region).

    A piece that is one run of bytes is a region of its own, so that a reader verifies no more than it reads. If some
    piece is scattered, the whole tensor is one region, and each piece has the frame that says where it lies in it.
    """
    whole, itemsize = Box.whole(tensor.shape), tensor.dtype.itemsize
    pieces = [p for p in tensor.pieces if p.box.size]
    places = [runs(p.local, whole, itemsize) for p in pieces]
    if all(where.contiguous for where in places):
        cuts = {0, tensor.nbytes} | {w.offset for w in places} | {w.offset + w.nbytes for w in places}
        return sorted(cuts), [(p, None, w.offset) for p, w in zip(pieces, places, strict=True)]
    return [0, tensor.nbytes], [(p, p.frame(tensor.shape), 0) for p in pieces]


def with_experts(tensors: Mapping[str, RankTensor], mesh: Mesh) -> dict[str, RankTensor]:
    """The same tensors. Those of experts are marked: parameters that are split over ep, and all states of these."""
    if mesh.ep == 1:
        return dict(tensors)
    parameters = {path: schema.parameter_of(path) or path for path in tensors}
    experts = {parameters[path] for path, tensor in tensors.items() if "ep" in sharding_of_spec(tensor.spec).axes}
    return {path: replace(tensor, expert=parameters[path] in experts) for path, tensor in tensors.items()}


def stem(path: str) -> str:
    """What torch.save calls the folder in a zip: the file's own name without its ending.

    >>> stem("model/rank_00.pt")
    'rank_00'
    """
    return path.rpartition("/")[2].removesuffix(".pt")


def name_in_job(names: Sequence[RankName], mesh: Mesh, *, dealt: bool) -> tuple[RankName, Set[str]]:
    """The first of the names that tells the ranks of a job apart, and the mesh axes along which it has to.

    Args:
        dealt: Whether each dp rank has rows of its own, which ZeRO-1 has dealt out.

    Raises:
        UnsupportedStateError: None of them does.
    """
    axes = {axis for axis in ("pp", "ep", "tp") if mesh.sizes[axis] > 1}
    apart = (axes | {"dp"}) - {"ep"} if dealt else axes  # dp counts the ranks along ep, too
    name = next((name for name in names if apart <= name.axes), None)
    if name is None:
        raise UnsupportedStateError(
            f"there is no place for what ranks along {', '.join(sorted(apart - names[-1].axes))} have of their own",
            expected=f"ranks that {names[-1].template} tells apart",
            found=str(mesh),
            hint=ANY_STATE,
        )
    return name, apart


def check_common(skeleton: Mapping[str, Any], layout: str) -> None:
    """Refuse state of an optimizer that every rank has its own of: ranks that differ along dp share a file.

    Raises:
        UnsupportedStateError: There is such state.
    """
    optimizer = skeleton.get(schema.OPTIMIZER)
    if isinstance(optimizer, Mapping) and schema.OWN in optimizer:
        raise UnsupportedStateError(
            f"the layout {layout} has no place for state that every rank has its own of",
            leaf=schema.own_states(),
            hint=ANY_STATE,
        )
