"""Plan the rank files of a save: what one rank has in memory, and how its torch.save files are laid out.

Each rank decides alone what it writes. Ranks that hold the same tensors may share a file, which the first of them
writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.plan.leaf import ArrayLeaf
from xla_ckpt.core.plan.manifest_views import find_rank_axes
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, RegionSource, SavePlan
from xla_ckpt.core.plan.stored_sharding import parse_stored_spec
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import Piece
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.core.sharding.mesh import MESH_AXES, Mesh
from xla_ckpt.core.sharding.sharding import compute_part_index
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.native import NativeWritePlanner
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankFileName
from xla_ckpt.formats.rank_files.layout import RankLayout
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree
from xla_ckpt.saving.finalize import WritePlanner
from xla_ckpt.state.describe import LocalArrayRef, StateDescription

STATE_PARTS = (schema.MODEL, schema.OPTIMIZER, schema.SCHEDULER, schema.USER_CONTENT)
"""Members of a state that these layouts have a place for."""

NATIVE_LAYOUT_HINT = (
    "The layout native holds any state, and loads on any topology: layout='native' of xla_ckpt.save_checkpoint, or "
    "to='native' (--to native) of a conversion."
)
"""What to do about a state that has no place in these layouts."""

SHARED_AXES = ("edp", "cp")
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

    replicated_axes: tuple[str, ...]
    """Mesh axes along which ranks hold the same."""

    is_expert: bool = False
    """Whether it belongs to an expert, which only some ranks have."""

    stored_elsewhere: bool = False
    """Whether the manifest finds the array in other files."""

    global_shape: tuple[int, ...] | None = None
    """Shape of the global array, where it is known."""

    spec: tuple[object, ...] | None = None
    """How the global array is split (see `xla_ckpt.core.sharding.sharding.Sharding.spec`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank, with a `LeafPlaceholder` for each array."""

    parts: Mapping[str, Any]
    tensors: Mapping[str, RankTensor]
    """The tensor of each array, by leaf path. Several paths of one tied array have the same tensor."""

    zero1: bool = False
    """Whether the rows of the optimizer's states are dealt out over dp."""

    keyed_by_name: bool = False
    """Whether the optimizer's state is kept by parameter name; else it is stored as it is."""

    local_shapes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Local shape of each parameter of the optimizer, by name."""

    expert_names: frozenset[str] | None = None
    """Names of the parameters that a ZeRO-1 optimizer of experts has; None where one has all of them."""

    def get_members(self, part: str) -> Mapping[Any, Any]:
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
class RankFilePlanner:
    """Lays out files of what one rank has."""

    mesh: Mesh
    rank: int
    state: RankState
    first_rank_writes: bool = False
    """Whether the first of the ranks that share a file writes all of its tensors: they may not be equal."""

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of the rank."""
        return self.mesh.coordinates(self.rank)

    def name_file(self, names: Sequence[RankFileName], *, per_dp: bool = False) -> tuple[str, tuple[str, ...]]:
        """What the file of this rank is called, and the mesh axes along which ranks have it in common.

        Args:
            names: Those that such files have. The first one counts that tells the ranks of the job apart.
            per_dp: Whether each dp rank has rows of its own, which ZeRO-1 has dealt out.

        Raises:
            UnsupportedStateError: None of them does.
        """
        name, axes = choose_file_name(names, self.mesh, per_dp=per_dp)
        return name.format_name(RankCoords.from_mesh(self.coordinates, axes)), ("cp",) if per_dp else SHARED_AXES

    def plan_shared_file(
        self, names: Sequence[RankFileName], tree: Any, part: str, *, per_dp: bool = False
    ) -> list[FilePlan]:
        """The file of this rank, if it is the first of the ranks that have it in common (see `name_file`)."""
        path, sharing = self.name_file(names, per_dp=per_dp)
        return [] if compute_part_index(sharing, self.mesh, self.rank) else [self.plan_file(path, tree, part, sharing)]

    def plan_common_file(self, path: str, tree: Any, part: str) -> list[FilePlan]:
        """A file of what all ranks have alike, if this is the first of them."""
        return [] if self.rank else [self.plan_file(path, tree, part, tuple(self.mesh.sizes))]

    def plan_file(self, path: str, tree: Any, part: str, shared_axes: Sequence[str]) -> FilePlan:
        """A file that holds its tensors itself.

        Args:
            path: Its name in the tag directory.
            tree: What is pickled in it, with a `LeafPlaceholder` for each tensor.
            part: Leaf path of what it is, for errors.
            shared_axes: Mesh axes along which ranks have it in common.

        Raises:
            UnsupportedStateError: Something in the tree cannot be pickled.
        """
        tensors: list[tuple[str, RankTensor]] = []

        def in_file(leaf: str) -> FileTensor:
            tensor = self.state.tensors[leaf]
            tensors.append((leaf, tensor))
            return FileTensor(len(tensors) - 1, tensor.dtype, tensor.shape)

        pickled = dump_tree(tree, part, in_file)
        lengths, sources, entries = self.plan_regions(tensors, shared_axes)
        codec = TorchFile(archive_name=get_stem(path), pickled=pickled, storages=lengths)
        return FilePlan(path=path, layout=codec, sources=sources, entries=entries)

    def plan_regions(
        self, tensors: Sequence[tuple[str, RankTensor]], shared_axes: Sequence[str]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[RegionSource, ...], tuple[FileEntry, ...]]:
        """(bytes of the regions of each storage, sources of all regions, entries of the manifest)."""
        lengths: list[tuple[int, ...]] = []
        sources: list[RegionSource] = []
        entries: list[FileEntry] = []
        for path, tensor in tensors:
            first = len(sources)
            cuts, frames = _cut_regions(tensor)
            # The manifest finds an array once: under its first name, and on the first of the ranks that hold the same.
            is_first_name = path == tensor.leaf
            is_first_rank = all(
                self.coordinates[axis] == 0 for axis in tensor.replicated_axes if axis not in shared_axes
            )
            is_copy = tensor.stored_elsewhere or not (is_first_name and is_first_rank)
            lengths.append(tuple(b - a for a, b in pairwise(cuts)))
            sources += [
                RegionSource(leaf=tensor.leaf, shard_index=0, offset=a, nbytes=b - a) for a, b in pairwise(cuts)
            ]
            region = {offset: first + i for i, offset in enumerate(cuts)}
            entries += [
                FileEntry(
                    leaf=tensor.leaf,
                    box=p.global_box,
                    region=region[at],
                    parent_box=frame,
                    is_copy=is_copy or (p.copy is not None and p.copy.index > 0),
                )
                for p, frame, at in frames
            ]
        return tuple(lengths), tuple(sources), tuple(entries)


def _cut_regions(tensor: RankTensor) -> tuple[list[int], list[tuple[Piece, Box | None, int]]]:
    """Where a tensor's bytes are cut into regions; and for each piece (piece, its frame, offset of its region).

    A piece that is one run of bytes is a region of its own, so that a reader verifies no more than it reads. If some
    piece is scattered, the whole tensor is one region, and each piece has the frame that says where it lies in it.
    """
    whole, itemsize = Box.from_shape(tensor.shape), tensor.dtype.itemsize
    pieces = [p for p in tensor.pieces if p.global_box.size]
    places = [compute_runs(p.local_box, whole, itemsize) for p in pieces]
    if all(where.is_contiguous for where in places):
        cuts = {0, tensor.nbytes} | {w.offset for w in places} | {w.offset + w.run_bytes for w in places}
        return sorted(cuts), [(p, None, w.offset) for p, w in zip(pieces, places, strict=True)]
    return [0, tensor.nbytes], [(p, p.compute_parent_box(tensor.shape), 0) for p in pieces]


def mark_experts(tensors: Mapping[str, RankTensor], mesh: Mesh) -> dict[str, RankTensor]:
    """The same tensors. Those of experts are marked: parameters that are split over ep, and all states of these."""
    if mesh.ep == 1:
        return dict(tensors)
    parameters = {path: schema.get_parameter_path(path) or path for path in tensors}
    experts = {parameters[path] for path, tensor in tensors.items() if "ep" in parse_stored_spec(tensor.spec).axes}
    return {path: replace(tensor, is_expert=parameters[path] in experts) for path, tensor in tensors.items()}


def get_stem(path: str) -> str:
    """What torch.save calls the folder in a zip: the file's own name without its ending.

    >>> get_stem("model/rank_00.pt")
    'rank_00'
    """
    return path.rpartition("/")[2].removesuffix(".pt")


def choose_file_name(names: Sequence[RankFileName], mesh: Mesh, *, per_dp: bool) -> tuple[RankFileName, Set[str]]:
    """The first of the names that tells the ranks of a job apart, and the mesh axes along which it has to.

    Args:
        per_dp: Whether each dp rank has rows of its own, which ZeRO-1 has dealt out.

    Raises:
        UnsupportedStateError: None of them does.
    """
    axes = {axis for axis in ("pp", "ep", "tp") if mesh.sizes[axis] > 1}
    apart = (axes | {"dp"}) - {"ep"} if per_dp else axes  # dp counts the ranks along ep, too
    name = next((name for name in names if apart <= name.axes), None)
    if name is None:
        raise UnsupportedStateError(
            f"there is no place for what ranks along {', '.join(sorted(apart - names[-1].axes))} have of their own",
            expected=f"ranks that {names[-1].template} tells apart",
            found=str(mesh),
            hint=NATIVE_LAYOUT_HINT,
        )
    return name, apart


def check_no_rank_local_state(skeleton: Mapping[str, Any], layout: str) -> None:
    """Refuse state of an optimizer that every rank has its own of: ranks that differ along dp share a file.

    Raises:
        UnsupportedStateError: There is such state.
    """
    optimizer = skeleton.get(schema.OPTIMIZER)
    if isinstance(optimizer, Mapping) and schema.PER_RANK_STATE in optimizer:
        raise UnsupportedStateError(
            f"the layout {layout} has no place for state that every rank has its own of",
            leaf=schema.get_per_rank_state_path(),
            hint=NATIVE_LAYOUT_HINT,
        )


@dataclass(frozen=True, kw_only=True)
class RankWritePlanner(WritePlanner):
    """What one rank writes: files of a layout for what it has a place for, native ones for the rest."""

    layout: RankLayout
    description: StateDescription
    rank_state: RankState
    """This rank's state, without its trees."""

    native_planner: NativeWritePlanner

    @property
    def unsplit_leaves(self) -> frozenset[str]:
        return frozenset(self.rank_state.tensors)

    @property
    def marks(self) -> Mapping[str, bytes]:
        return self.layout.marks

    @cached_property
    def plan(self) -> SavePlan:
        return SavePlan((*self.native_planner.plan.files, *self.layout.plan_files(self.file_planner)))

    @cached_property
    def file_planner(self) -> RankFilePlanner:
        """This rank's state, to be laid out."""
        about = self.description
        members = about.structure or {}
        trees = {
            part: about.build_tree(part, lambda path, _: LeafPlaceholder(path))
            for part in STATE_PARTS
            if part in members
        }
        state, placement = replace(self.rank_state, parts=trees), about.placement
        return RankFilePlanner(placement.mesh, placement.rank, state, about.replicas == "first")

    @classmethod
    def from_description(cls, layout: RankLayout, description: StateDescription, **more: Any) -> Self:
        """How a rank writes its state in a layout. `more` are further fields of a derived class.

        Raises:
            UnsupportedStateError: The layout has no place for something in it.
        """
        mesh, state, name = description.placement.mesh, description.state, layout.name
        members = description.structure if isinstance(description.structure, dict) else {}
        has_nothing = description.structure == {}  # of user content alone only rank 0 has anything
        if not has_nothing and not any(part in members for part in STATE_PARTS):
            raise UnsupportedStateError(
                f"the layout {name} holds {', '.join(STATE_PARTS)}, and nothing of it is here",
                hint=NATIVE_LAYOUT_HINT,
            )
        check_no_rank_local_state(members, name)
        arrays_of_parts = {
            leaf.path: _make_rank_tensor(leaf, array, description, name)
            for leaf, array in zip(description.leaves, description.arrays, strict=True)
            if schema.get_member(leaf.path) in STATE_PARTS
        }
        tensors = mark_experts(arrays_of_parts, mesh)
        of_ranks = {
            path: replace(tensor, is_expert=True, stored_elsewhere=True)
            for path, tensor in tensors.items()
            if _is_rank_specific(tensor, mesh)
        }
        tensors |= of_ranks
        arrays = tensors | {alias: tensors[path] for alias, path in description.aliases.items() if path in tensors}
        shapes: dict[Any, tuple[int, ...]] = {p.name: tuple(p.value.shape) for p in state.parameters.values()}
        native_leaves = tuple(leaf for leaf in description.leaves if leaf.path not in tensors or leaf.path in of_ranks)
        rank_state = RankState(
            parts={},
            tensors=arrays,
            zero1=state.zero1_axes is not None,
            keyed_by_name=state.is_keyed_by_name,
            local_shapes=shapes,
            expert_names=state.expert_parameters,
        )
        _check_zero1_axes(state.zero1_axes, mesh, name)
        choose_file_name(layout.file_names, mesh, per_dp=rank_state.zero1)
        native = NativeWritePlanner(description, native_leaves)
        return cls(layout=layout, description=description, rank_state=rank_state, native_planner=native, **more)


def _check_zero1_axes(axes: Sequence[str] | None, mesh: Mesh, layout: str) -> None:
    """Refuse a ZeRO-1 optimizer whose rows are dealt out over axes that files do not number: it would be lost."""
    over = [axis for axis in axes or () if mesh.sizes[axis] > 1]
    if axes is None or ((over or mesh.dp == 1) and {"dp", "edp"} >= set(over)):
        return
    dealt = f"are dealt out over {' and '.join(over)}" if over else "are not dealt out over dp"
    raise UnsupportedStateError(
        f"the layout {layout} cannot hold this optimizer: files are named by dp, and these ZeRO-1 shards {dealt}",
        leaf=schema.OPTIMIZER,
        found=str(mesh),
        hint=NATIVE_LAYOUT_HINT,
    )


def _is_rank_specific(tensor: RankTensor, mesh: Mesh) -> bool:
    """Whether it says something of each rank. Ranks that share a file have others, so all are stored beside it, too."""
    if schema.get_member(tensor.leaf) != schema.MODEL or tensor.global_shape is None:
        return False
    return bool(find_rank_axes(tensor.dtype, tensor.global_shape, tensor.spec, mesh))


def _make_rank_tensor(leaf: ArrayLeaf, array: LocalArrayRef, description: StateDescription, layout: str) -> RankTensor:
    path, local, placement = leaf.path, array.local, description.placement
    # A file is shared by ranks that hold the same, so it has to be known along which axes they do.
    alike: tuple[str, ...] | None = None
    if isinstance(local.group, tuple) and local.group[0] == "mesh":
        alike = local.group[1]
    complete = [p.global_box for p in local.pieces] == [Box.from_shape(local.shape)] or not Box.from_shape(
        local.shape
    ).size
    held_by_one = placement.world_size == 1 or path.startswith(description.state.rank_local_prefixes)
    if alike is None and complete and held_by_one:
        alike = MESH_AXES
    if alike is None:
        raise UnsupportedStateError(
            f"the layout {layout} holds what each rank has as one tensor, and this array is spread by its own rules "
            "(DTensor, SPMD, jax)",
            leaf=path,
            hint="Save it by xla_ckpt.save_checkpoint in the layout native, and convert it: "
            f"xla-ckpt convert SRC DST --to {layout} --mesh ...",
        )
    return RankTensor(
        leaf=path,
        dtype=leaf.dtype,
        shape=array.shape,
        pieces=local.pieces,
        replicated_axes=alike,
        global_shape=local.shape,
        spec=local.spec,
    )
