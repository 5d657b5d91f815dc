"""Plan saves and conversions that the torch_checkpointing `CheckpointManager.load(..., into=...)` reads.

Each rank has a torch.save file for each item, with all of its plain values, and with the parts of arrays that this rank
writes, as plain tensors. ``metadata.pkl`` describes these parts, so that the resharder of the package can load them for
any job. A job of one rank has full tensors in one file, which the package also loads without a resharder.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.files.dcp_file import ARCHIVE_NAME
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.plan.leaf import ArrayLeaf, LeafTable
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, OwnedRegion, SavePlan, assign_regions
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import KeyPath, map_leaves
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.base import ConversionPlan, StoredState, TargetTopology
from xla_ckpt.formats.native import assign_leaves_to_ranks
from xla_ckpt.formats.torch_checkpointing.layout import ITEMS_METADATA_FILE, get_file_name, parse_rank
from xla_ckpt.formats.torch_checkpointing.reading import METADATA_VERSION
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.saving.finalize import IndexBuilder, WritePlanner

if TYPE_CHECKING:
    from xla_ckpt.state.describe import StateDescription


_CONVERT_HINT = (
    "Save in the native layout, and convert it without a mesh: xla-ckpt convert SRC DST --to torch_checkpointing"
)

_DICT_HINT = "Save a dict, of which each value becomes an item: {'state': ...}."

MAX_CHUNKS_PER_DIM = 1 << 16
"""Maximum number of chunks along a dim that are tried for a part that may not be a chunk."""

ItemTrees = Mapping[str, Any]
"""Item -> its value, with a `LeafPlaceholder` for each array."""


def split_into_items(members: Mapping[str, Any], rank: int, world: int) -> ItemTrees:
    """Split a state into items: its members, and the members of `extras`. Rank-local state is that of `rank`.

    Raises:
        UnsupportedStateError: Two items have the same name, or a name is not a valid file name.
    """
    items = {name: value for name, value in members.items() if name != schema.EXTRAS}
    extras = members.get(schema.EXTRAS, {})
    for name, value in extras.items():
        item = str(name)
        if item in items:
            raise UnsupportedStateError(
                "two members would be one item of torch_checkpointing", leaf=item, hint="Rename the key in extras."
            )
        is_own = isinstance(value, Mapping) and schema.get_saved_rank_count(dict(value)) == world
        items[item] = value[schema.RANKS][str(rank)] if is_own and str(rank) in value[schema.RANKS] else value
    for item in items:
        if not item or not all(letter.isalnum() or letter in "-_." for letter in item) or item.startswith("."):
            raise UnsupportedStateError(
                "an item of torch_checkpointing has to be called as a file can be",
                leaf=item,
                expected="letters, digits, and - _ . inside of the name",
                hint="Rename the key.",
            )
    return items


@dataclass(frozen=True, slots=True)
class ItemFilePlanner:
    """Planner of the files of one rank.

    Args:
        aliases: Leaf path of a tied array -> leaf path under which it is described.
    """

    trees: ItemTrees
    aliases: Mapping[str, str]
    writer: int

    def plan_files(self, leaves: Mapping[str, ArrayLeaf], own: Mapping[str, OwnedRegion]) -> Iterator[FilePlan]:
        """Yield the file of each item.

        Args:
            leaves: All arrays that the rank knows, by leaf path.
            own: Regions that the rank writes, by leaf path.
        """
        for item, tree in self.trees.items():
            yield self._plan_file(item, tree, leaves, own)

    def _plan_file(
        self, item: str, tree: Any, leaves: Mapping[str, ArrayLeaf], own: Mapping[str, OwnedRegion]
    ) -> FilePlan:
        storages: list[tuple[int, ...]] = []
        written: list[OwnedRegion] = []
        numbers: dict[str, int] = {}

        def first_of(path: str) -> str:
            return self.aliases.get(path, path)

        def is_here(path: str) -> bool:
            first = first_of(path)
            return first in own or (self.writer == 0 and not Box.from_shape(leaves[first].shape).size)

        def tensor(path: str) -> FileTensor:
            first = first_of(path)
            leaf, part = leaves[first], own.get(first)
            if first not in numbers:
                numbers[first] = len(storages)
                storages.append(() if part is None else (part.source.nbytes,))
                if part is not None:
                    written.append(part)
            return FileTensor(numbers[first], leaf.dtype, leaf.shape if part is None else part.box.shape)

        pickled = dump_tree(_remove_remote_arrays(tree, is_here), item, tensor)
        return FilePlan(
            path=get_file_name(item, self.writer),
            layout=TorchFile(archive_name=ARCHIVE_NAME, pickled=pickled, storages=tuple(storages)),
            sources=tuple(part.source for part in written),
            entries=tuple(FileEntry(leaf=part.leaf.path, box=part.box, region=i) for i, part in enumerate(written)),
        )


def _remove_remote_arrays(tree: Any, is_here: Any) -> Any:
    """Return the tree without arrays of other ranks. In lists they are replaced by None."""
    if isinstance(tree, dict):
        return {
            key: _remove_remote_arrays(value, is_here)
            for key, value in tree.items()
            if not isinstance(value, LeafPlaceholder) or is_here(value.path)
        }
    if type(tree) in (list, tuple):
        return type(tree)(_remove_remote_arrays(value, is_here) for value in tree)
    return None if isinstance(tree, LeafPlaceholder) and not is_here(tree.path) else tree


def _assign_regions(leaves: Sequence[ArrayLeaf], lanes: int) -> list[dict[str, OwnedRegion]]:
    """Return the regions that each device of this rank writes. A shard is written by one of its replicas.

    Raises:
        UnsupportedStateError: The package cannot describe a region.
    """
    rows = LeafTable.from_leaves(leaves)
    forms = [
        (dtype, replace(holding, shards=tuple(replace(shard, write_whole=True) for shard in holding.shards)))
        for dtype, holding in rows.kinds
    ]
    of_lane: list[dict[str, OwnedRegion]] = [{} for _ in range(lanes)]
    for part in assign_regions(replace(rows, kinds=forms)):
        path = part.leaf.path
        if of_lane[part.local_device].setdefault(path, part) is not part:
            raise UnsupportedStateError(
                "torch_checkpointing has one part of an array on each rank, and here are several",
                leaf=path,
                hint=_CONVERT_HINT,
            )
        find_chunk_position(part.box, part.leaf.shape, path)
    return of_lane


def find_chunk_position(box: Box, shape: Sequence[int], leaf: str) -> tuple[tuple[int, int], ...]:
    """Return (number of chunks, index of this chunk) for each dim, for a box that is a chunk as in torch.chunk.

    Raises:
        UnsupportedStateError: The box is not such a chunk.

    >>> find_chunk_position(Box((4, 0), (5, 3)), (5, 3), "w")
    ((3, 2), (1, 0))
    """
    chunks = []
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        if (start, stop) == (0, size):
            chunks.append((1, 0))
            continue
        # The last chunk may be shorter than the others, so possible numbers of preceding chunks are tried.
        before = (
            [start // (stop - start)] if stop < size else range(1, min(start // (stop - start), MAX_CHUNKS_PER_DIM) + 1)
        )
        fitting = next((i for i in before if _is_chunk(start, stop, size, i)), None)
        if fitting is None:
            raise UnsupportedStateError(
                "torch_checkpointing describes equal chunks only", leaf=leaf, found=str(box), hint=_CONVERT_HINT
            )
        length = start // fitting if fitting else stop
        chunks.append((-(-size // length), fitting))
    return tuple(chunks)


def _is_chunk(start: int, stop: int, size: int, before: int) -> bool:
    """Return True if these elements are the chunk number `before` of torch.chunk."""
    if before and start % before:
        return False
    length = start // before if before else stop
    count = -(-size // length)
    return -(-size // count) == length and start == before * length and stop == min(size, start + length)


@dataclass(frozen=True)
class ItemsWritePlanner(WritePlanner):
    """Write plan of one rank in this layout."""

    description: StateDescription

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import count_local_devices

        about, lanes = self.description, count_local_devices()
        placement = about.placement
        if placement.mesh.pp > 1:
            raise UnsupportedStateError(
                "torch_checkpointing's files are not written by pipeline stages", hint=_CONVERT_HINT
            )
        leaves = {leaf.path: leaf for leaf in about.leaves}
        trees = split_into_items(_build_members(about), placement.rank, placement.world_size)
        files: list[FilePlan] = []
        for lane, own in enumerate(_assign_regions(about.leaves, lanes)):
            writer = placement.rank * lanes + lane
            files += ItemFilePlanner(trees, about.aliases, writer).plan_files(leaves, own)
        return SavePlan(tuple(files))

    @property
    def index(self) -> IndexBuilder:
        return partial(
            _build_metadata_file,
            trees=split_into_items(_build_members(self.description), 0, self.description.placement.world_size),
        )


def _build_members(about: StateDescription) -> dict[str, Any]:
    """Return the members of a state.

    Raises:
        UnsupportedStateError: The state is not a dict.
    """
    if not isinstance(about.structure, dict):
        raise UnsupportedStateError("torch_checkpointing saves dicts of items only", hint=_DICT_HINT)
    return {part: about.build_tree(part, lambda path, _: LeafPlaceholder(path)) for part in map(str, about.structure)}


def plan_item_conversion(stored: StoredState, to: TargetTopology) -> ConversionPlan:
    """Plan the files of a conversion.

    Raises:
        IncompatibleCheckpointError: An array cannot be sharded over the mesh.
        UnsupportedStateError: The package cannot store a value.
    """
    manifest = stored.manifest
    tree = stored.tree(stored.part, lambda path, _: LeafPlaceholder(path))
    if not isinstance(tree, dict):
        raise UnsupportedStateError("torch_checkpointing saves dicts of items only", leaf=stored.part, hint=_DICT_HINT)
    if stored.part != paths.ROOT:
        tree = {paths.split(stored.part)[-1]: tree}
    ranks, specs = assign_leaves_to_ranks(manifest, manifest.arrays, to)
    leaves = {leaf.path: leaf for of_rank in ranks for leaf in of_rank}
    files = []
    for rank, of_rank in enumerate(ranks):
        (own,) = _assign_regions(of_rank, lanes=1)
        items = ItemFilePlanner(split_into_items(tree, rank, to.mesh.size), manifest.aliases, rank)
        files.append(tuple(items.plan_files(leaves, own)))
    return ConversionPlan(
        files, specs, index=partial(_build_metadata_file, trees=split_into_items(tree, 0, to.mesh.size))
    )


def _build_metadata_file(reader: TagReader, *, trees: ItemTrees) -> dict[str, bytes]:
    """Build ``metadata.pkl`` from the manifest of all ranks."""
    manifest = reader.manifest
    writers = [parse_rank(file.path) for file in manifest.files]
    world = 1 + max((writer for writer in writers if writer is not None), default=0)
    items: dict[str, Any] = {}
    for item, tree in trees.items():
        groups: dict[str, list[Any]] = {}

        def described(keys: KeyPath, leaf: Any, groups: dict[str, list[Any]] = groups) -> Any:
            if isinstance(leaf, LeafPlaceholder):
                record = manifest.find_array(leaf.path)
                assert record is not None, leaf.path  # merged records have been checked against the skeleton
                if not all(type(key) in (str, int) for key in keys):
                    raise UnsupportedStateError("an array below a key that is neither text nor number", leaf=leaf.path)
                parts = [(shard.box, writers[shard.file] or 0) for shard in record]
                groups[json.dumps(list(keys), separators=(",", ":"))] = _build_groups(leaf.path, record, parts)
            return leaf

        map_leaves(tree, described)
        if groups:
            items[item] = {"nested_path_to_metadata": groups, "rank_to_layout_info": dict.fromkeys(range(world))}
    content = {"metadata": items, "world_size": world, "version": METADATA_VERSION}
    return {ITEMS_METADATA_FILE: pickle.dumps(content, protocol=4)}


def _build_groups(leaf: str, record: ArrayRecord, parts: Sequence[tuple[Box, int]]) -> list[Any]:
    """Describe the parts of an array, (box, rank) of each: in one group, or one per part if chunks are unequal."""
    boxes, ranks = zip(*(parts or [(Box.from_shape(record.shape), 0)]), strict=True)
    chunks = [find_chunk_position(box, record.shape, leaf) for box in boxes]
    counts = [tuple(k for k, _ in of_box) for of_box in chunks]
    at = [tuple(i for _, i in of_box) for of_box in chunks]
    grid = max(counts)
    if all(count == grid for count in counts) and len(boxes) == prod(grid):
        order = sorted(range(len(boxes)), key=at.__getitem__)
        return [_build_group(record, grid, [ranks[i] for i in order], [ranks[i] for i in order])]
    groups = []
    for count, place, rank in zip(counts, at, ranks, strict=True):
        # Other positions of this mesh get unused rank numbers: the resharder only uses the ranks of the group.
        number = sum(i * prod(count[d + 1 :]) for d, i in enumerate(place))
        mesh = [max(ranks) + 1 + i for i in range(prod(count))]
        mesh[number] = rank
        groups.append(_build_group(record, count, mesh, [rank]))
    return groups


def _build_group(record: ArrayRecord, counts: Sequence[int], mesh: Sequence[int], ranks: Sequence[int]) -> Any:
    """Return a `GlobalObjectMetadata` of the package, in the form of its `to_dict`."""
    dims = [d for d, count in enumerate(counts) if count > 1]
    strides = [prod(b for b in record.shape[d + 1 :]) for d in range(len(record.shape))]
    data = {
        "global_shape": list(record.shape),
        "dtype": f"torch.{record.dtype.name}",
        "stride": strides,
        "mesh_spec": {
            "device_type": "cpu",
            "mesh_shape": tuple(counts[d] for d in dims) or (1,),
            "mesh_data": tuple(mesh),
            "mesh_dim_names": None,
        },
        "placements": [{"type": "Shard", "dim": d} for d in dims] or [{"type": "Replicate"}],
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": tuple(ranks)}
