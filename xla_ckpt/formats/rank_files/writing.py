"""Plan the rank files of a save: the state of one rank, and the structure of its torch.save files.

Each rank plans its files without communication. Ranks with equal tensors may share a file, which the first of them
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
"""Members of a state that these layouts support."""

NATIVE_LAYOUT_HINT = (
    "The layout native holds any state, and loads on any topology: layout='native' of xla_ckpt.save_checkpoint, or "
    "to='native' (--to native) of a conversion."
)
"""Hint for state that these layouts do not support."""

SHARED_AXES = ("edp", "cp")
"""Mesh axes along which ranks are replicas and share a file, unless ZeRO-1 shards the state over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One rank's part of an array, as stored in its memory."""

    leaf: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the tensor itself, including padding."""

    pieces: tuple[Piece, ...]
    """Elements of the global array that it consists of."""

    replicated_axes: tuple[str, ...]
    """Mesh axes along which it is replicated."""

    is_expert: bool = False
    """True if it belongs to an expert, which only some ranks have."""

    stored_elsewhere: bool = False
    """True if the manifest refers to other files for the array."""

    global_shape: tuple[int, ...] | None = None
    """Shape of the global array, if known."""

    spec: tuple[object, ...] | None = None
    """Sharding of the global array (see `xla_ckpt.core.sharding.sharding.Sharding.spec`)."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank, with a `LeafPlaceholder` for each array."""

    parts: Mapping[str, Any]
    tensors: Mapping[str, RankTensor]
    """Tensor of each array, by leaf path. Several paths of a tied array have the same tensor."""

    zero1: bool = False
    """True if the rows of the optimizer's states are sharded over dp."""

    keyed_by_name: bool = False
    """True if the optimizer's state is keyed by parameter name; otherwise it is stored unchanged."""

    local_shapes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Local shape of each parameter of the optimizer, by name."""

    expert_names: frozenset[str] | None = None
    """Names of the parameters of a separate ZeRO-1 optimizer for experts; None if one optimizer has all parameters."""

    def get_members(self, part: str) -> Mapping[Any, Any]:
        """Return the members of a part.

        Raises:
            UnsupportedStateError: The part is not a dict.
        """
        tree = self.parts[part]
        if not isinstance(tree, Mapping):
            problem = f"the layout has a place for {part} as a dict of its parameters or states"
            raise UnsupportedStateError(problem, leaf=part, found=type(tree).__name__)
        return tree


@dataclass(frozen=True, slots=True)
class RankFilePlanner:
    """Planner of the files that one rank writes."""

    mesh: Mesh
    rank: int
    state: RankState
    first_rank_writes: bool = False
    """True if the first of the ranks that share a file writes all of its tensors, because they may differ."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of the rank."""
        return self.mesh.coordinates(self.rank)

    def name_file(self, names: Sequence[RankFileName], *, per_dp: bool = False) -> tuple[str, tuple[str, ...]]:
        """Return the name of this rank's file, and the mesh axes along which ranks share it.

        Args:
            names: Possible patterns. The first one that distinguishes the ranks of the job is used.
            per_dp: True if each dp rank has its own rows, sharded by ZeRO-1.

        Raises:
            UnsupportedStateError: No pattern distinguishes the ranks.
        """
        name, axes = choose_file_name(names, self.mesh, per_dp=per_dp)
        return name.format_name(RankCoords.from_mesh(self.coordinates, axes)), ("cp",) if per_dp else SHARED_AXES

    def plan_shared_file(
        self, names: Sequence[RankFileName], tree: Any, part: str, *, per_dp: bool = False
    ) -> list[FilePlan]:
        """Plan the file of this rank, if it is the first of the ranks that share the file (see `name_file`).

        Raises:
            UnsupportedStateError: No pattern distinguishes the ranks, or the tree cannot be pickled.
        """
        path, sharing = self.name_file(names, per_dp=per_dp)
        return [] if compute_part_index(sharing, self.mesh, self.rank) else [self.plan_file(path, tree, part, sharing)]

    def plan_common_file(self, path: str, tree: Any, part: str) -> list[FilePlan]:
        """Plan a file of state that is the same on all ranks, if this is the first rank."""
        return [] if self.rank else [self.plan_file(path, tree, part, tuple(self.mesh.sizes))]

    def plan_file(self, path: str, tree: Any, part: str, shared_axes: Sequence[str]) -> FilePlan:
        """Plan a file that contains its tensors.

        Args:
            path: Its name in the checkpoint directory.
            tree: The object to pickle, with a `LeafPlaceholder` for each tensor.
            part: Leaf path of the object, for errors.
            shared_axes: Mesh axes along which ranks share the file.

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
        """Return (bytes of the regions of each storage, sources of all regions, entries of the manifest)."""
        lengths: list[tuple[int, ...]] = []
        sources: list[RegionSource] = []
        entries: list[FileEntry] = []
        for path, tensor in tensors:
            first = len(sources)
            cuts, frames = _cut_regions(tensor)
            # The manifest refers to an array once: under its first name, and on the first of its replica ranks.
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
    """Cut a tensor's bytes into regions.

    A piece that is contiguous in memory is a separate region, so that a reader verifies no more than it reads. If a
    piece is scattered, the whole tensor is one region, and each piece has a parent box that locates it in the region.

    Returns:
        Offsets of the cuts, and for each piece (piece, its parent box, offset of its region).
    """
    whole, itemsize = Box.from_shape(tensor.shape), tensor.dtype.itemsize
    pieces = [p for p in tensor.pieces if p.global_box.size]
    places = [compute_runs(p.local_box, whole, itemsize) for p in pieces]
    if all(where.is_contiguous for where in places):
        cuts = {0, tensor.nbytes} | {w.offset for w in places} | {w.offset + w.run_bytes for w in places}
        return sorted(cuts), [(p, None, w.offset) for p, w in zip(pieces, places, strict=True)]
    return [0, tensor.nbytes], [(p, p.compute_parent_box(tensor.shape), 0) for p in pieces]


def mark_experts(tensors: Mapping[str, RankTensor], mesh: Mesh) -> dict[str, RankTensor]:
    """Mark the tensors of experts: parameters that are sharded over ep, and all of their states."""
    if mesh.ep == 1:
        return dict(tensors)
    parameters = {path: schema.get_parameter_path(path) or path for path in tensors}
    experts = {parameters[path] for path, tensor in tensors.items() if "ep" in parse_stored_spec(tensor.spec).axes}
    return {path: replace(tensor, is_expert=parameters[path] in experts) for path, tensor in tensors.items()}


def get_stem(path: str) -> str:
    """Return the name of the folder in a torch.save zip: the file name without extension.

    >>> get_stem("model/rank_00.pt")
    'rank_00'
    """
    return path.rpartition("/")[2].removesuffix(".pt")


def choose_file_name(names: Sequence[RankFileName], mesh: Mesh, *, per_dp: bool) -> tuple[RankFileName, Set[str]]:
    """Choose the first file name pattern that distinguishes the ranks of a job.

    Args:
        per_dp: True if each dp rank has its own rows, sharded by ZeRO-1.

    Returns:
        The pattern, and the mesh axes along which it must distinguish ranks.

    Raises:
        UnsupportedStateError: No pattern distinguishes the ranks.
    """
    axes = {axis for axis in ("pp", "ep", "tp") if mesh.sizes[axis] > 1}
    apart = (axes | {"dp"}) - {"ep"} if per_dp else axes  # dp also counts the ranks along ep
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
    """Check that the optimizer has no state that differs on every rank: ranks that differ along dp share a file.

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
    """Planner of one rank's writes: files of the layout for the state that it supports, native files for the rest."""

    layout: RankLayout
    description: StateDescription
    rank_state: RankState
    """State of this rank, without its trees."""

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
        """Planner of the layout's files for this rank's state."""
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
        """Return the planner of a rank's state in a layout. `more` are additional fields of a derived class.

        Raises:
            UnsupportedStateError: The layout does not support a part of the state.
        """
        mesh, state, name = description.placement.mesh, description.state, layout.name
        members = description.structure if isinstance(description.structure, dict) else {}
        has_nothing = description.structure == {}  # if the state is only user content, only rank 0 has any
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
    """Check that ZeRO-1 rows are sharded only over axes in the file names. Other rows would be lost.

    Raises:
        UnsupportedStateError: The rows are sharded over other axes, or not over dp.
    """
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
    """Return True if a value differs by rank. Native files store all such values, because ranks share rank files."""
    if schema.get_member(tensor.leaf) != schema.MODEL or tensor.global_shape is None:
        return False
    return bool(find_rank_axes(tensor.dtype, tensor.global_shape, tensor.spec, mesh))


def _make_rank_tensor(leaf: ArrayLeaf, array: LocalArrayRef, description: StateDescription, layout: str) -> RankTensor:
    path, local, placement = leaf.path, array.local, description.placement
    # Ranks with equal tensors share a file, so their mesh axes must be known.
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
