"""What a save and a conversion write: files that the package's own `CheckpointManager.load(..., into=...)` takes.

Each rank has a file of torch.save for each item, with all of its plain values, and with the parts of arrays that this
rank writes, as plain tensors. ``metadata.pkl`` says which parts these are, so that the package's resharder puts them
together for any job. A job of one rank has whole tensors in one file, which the package loads without a resharder, too.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from xla_ckpt.engine.seal import Index
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.distcp import STEM
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.new_ranks import leaves_of_ranks
from xla_ckpt.layouts.torch_checkpointing.metadata import VERSION_WRITTEN
from xla_ckpt.layouts.torch_checkpointing.tags import ITEMS_METADATA, file_of, rank_of
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, LeafAt, dumps
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.plan.leaf import Leaf, Leaves
from xla_ckpt.plan.save_plan import OwnBox, SavePlan, own_boxes
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys, replaced_leaves

if TYPE_CHECKING:
    from xla_ckpt.state.describe import Description

_ELSEWHERE = (
    "Save in the native layout, and convert it without a mesh: xla-ckpt convert SRC DST --to torch_checkpointing"
)

_DICT = "Save a dict, of which each value becomes an item: {'state': ...}."

MAX_CHUNKS_OF_DIM = 1 << 16
"""Chunks of a dim, at most: so many numbers are tried of a part that may be no chunk."""

ItemTrees = Mapping[str, Any]
"""Item -> its value, with a `LeafAt` for each array."""


def trees_of(members: Mapping[str, Any], rank: int, world: int) -> ItemTrees:
    """The items of a state: its members, and those of `extras`. A state of each rank is that of this one.

    Raises:
        UnsupportedStateError: Two would be called the same, or one cannot be the name of a file.
    """
    items = {name: value for name, value in members.items() if name != schema.EXTRAS}
    extras = members.get(schema.EXTRAS, {})
    for name, value in extras.items():
        item = str(name)
        if item in items:
            raise UnsupportedStateError(
                "two members would be one item of torch_checkpointing", leaf=item, hint="Rename the key in extras."
            )
        is_own = isinstance(value, Mapping) and schema.saved_by(dict(value)) == world
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
class TorchItems:
    """The files of one rank.

    Args:
        aliases: Leaf path of a tied array -> that under which it is described.
    """

    trees: ItemTrees
    aliases: Mapping[str, str]
    writer: int

    def files(self, leaves: Mapping[str, Leaf], own: Mapping[str, OwnBox]) -> Iterator[FilePlan]:
        """The file of each item.

        Args:
            leaves: All arrays that the rank knows of, by leaf path.
        """
        for item, tree in self.trees.items():
            yield self._file(item, tree, leaves, own)

    def _file(self, item: str, tree: Any, leaves: Mapping[str, Leaf], own: Mapping[str, OwnBox]) -> FilePlan:
        storages: list[tuple[int, ...]] = []
        written: list[OwnBox] = []
        numbers: dict[str, int] = {}

        def first_of(path: str) -> str:
            return self.aliases.get(path, path)

        def is_here(path: str) -> bool:
            first = first_of(path)
            return first in own or (self.writer == 0 and not Box.whole(leaves[first].shape).size)

        def tensor(path: str) -> InFile:
            first = first_of(path)
            leaf, part = leaves[first], own.get(first)
            if first not in numbers:
                numbers[first] = len(storages)
                storages.append(() if part is None else (part.source.nbytes,))
                if part is not None:
                    written.append(part)
            return InFile(numbers[first], leaf.dtype, leaf.shape if part is None else part.box.shape)

        pickled = dumps(_without(tree, is_here), item, tensor)
        return FilePlan(
            path=file_of(item, self.writer),
            codec=TorchFile(stem=STEM, pickled=pickled, storages=tuple(storages)),
            sources=tuple(part.source for part in written),
            entries=tuple(Entry(leaf=part.leaf.path, box=part.box, region=i) for i, part in enumerate(written)),
        )


def _without(tree: Any, is_here: Any) -> Any:
    """The same tree without the arrays of other ranks; in lists None stands for them."""
    if isinstance(tree, dict):
        return {
            key: _without(value, is_here)
            for key, value in tree.items()
            if not isinstance(value, LeafAt) or is_here(value.path)
        }
    if type(tree) in (list, tuple):
        return type(tree)(_without(value, is_here) for value in tree)
    return None if isinstance(tree, LeafAt) and not is_here(tree.path) else tree


def _own_of(leaves: Sequence[Leaf], lanes: int) -> list[dict[str, OwnBox]]:
    """What this rank writes, for each of its devices. A shard is written by one of those that have it.

    Raises:
        UnsupportedStateError: The package cannot describe a part.
    """
    rows = Leaves.of(leaves)
    forms = [
        (dtype, replace(holding, shards=tuple(replace(shard, together=True) for shard in holding.shards)))
        for dtype, holding in rows.forms
    ]
    of_lane: list[dict[str, OwnBox]] = [{} for _ in range(lanes)]
    for part in own_boxes(replace(rows, forms=forms)):
        path = part.leaf.path
        if of_lane[part.lane].setdefault(path, part) is not part:
            raise UnsupportedStateError(
                "torch_checkpointing has one part of an array on each rank, and here are several",
                leaf=path,
                hint=_ELSEWHERE,
            )
        place_among_chunks(part.box, part.leaf.shape, path)
    return of_lane


def place_among_chunks(box: Box, shape: Sequence[int], leaf: str) -> tuple[tuple[int, int], ...]:
    """(number of chunks, index of this one) of each dim of which a box is a chunk, as torch.chunk makes them.

    Raises:
        UnsupportedStateError: It is none.

    >>> place_among_chunks(Box((4, 0), (5, 3)), (5, 3), "w")
    ((3, 2), (1, 0))
    """
    chunks = []
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        if (start, stop) == (0, size):
            chunks.append((1, 0))
            continue
        # The last chunk may be shorter than the others: how many stand before it is tried.
        before = (
            [start // (stop - start)] if stop < size else range(1, min(start // (stop - start), MAX_CHUNKS_OF_DIM) + 1)
        )
        fitting = next((i for i in before if _is_chunk(start, stop, size, i)), None)
        if fitting is None:
            raise UnsupportedStateError(
                "torch_checkpointing describes equal chunks only", leaf=leaf, found=str(box), hint=_ELSEWHERE
            )
        length = start // fitting if fitting else stop
        chunks.append((-(-size // length), fitting))
    return tuple(chunks)


def _is_chunk(start: int, stop: int, size: int, before: int) -> bool:
    """Whether these are the elements that torch.chunk makes chunk number `before` of."""
    if before and start % before:
        return False
    length = start // before if before else stop
    count = -(-size // length)
    return -(-size // count) == length and start == before * length and stop == min(size, start + length)


@dataclass(frozen=True)
class ItemsWriting(Writing):
    """What one rank writes in this layout."""

    description: Description

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import local_lanes

        about, lanes = self.description, local_lanes()
        placement = about.placement
        if placement.mesh.pp > 1:
            raise UnsupportedStateError(
                "torch_checkpointing's files are not written by pipeline stages", hint=_ELSEWHERE
            )
        leaves = {leaf.path: leaf for leaf in about.leaves}
        trees = trees_of(_members(about), placement.rank, placement.world)
        files: list[FilePlan] = []
        for lane, own in enumerate(_own_of(about.leaves, lanes)):
            writer = placement.rank * lanes + lane
            files += TorchItems(trees, about.aliases, writer).files(leaves, own)
        return SavePlan(tuple(files))

    @property
    def index(self) -> Index:
        return partial(_index, trees=trees_of(_members(self.description), 0, self.description.placement.world))


def _members(about: Description) -> dict[str, Any]:
    """The members of a state.

    Raises:
        UnsupportedStateError: It has none.
    """
    if not isinstance(about.structure, dict):
        raise UnsupportedStateError("torch_checkpointing saves dicts of items only", hint=_DICT)
    return {part: about.tree(part, lambda path, _: LeafAt(path)) for part in map(str, about.structure)}


def rewritten_items(stored: StoredState, to: Topology) -> Rewriting:
    """The files of a conversion.

    Raises:
        IncompatibleCheckpointError: An array cannot be split over the mesh.
        UnsupportedStateError: The package has no place for something.
    """
    manifest = stored.manifest
    tree = stored.tree(stored.part, lambda path, _: LeafAt(path))
    if not isinstance(tree, dict):
        raise UnsupportedStateError("torch_checkpointing saves dicts of items only", leaf=stored.part, hint=_DICT)
    if stored.part != paths.ROOT:
        tree = {paths.split(stored.part)[-1]: tree}
    ranks, specs = leaves_of_ranks(manifest, manifest.arrays, to)
    leaves = {leaf.path: leaf for of_rank in ranks for leaf in of_rank}
    files = []
    for rank, of_rank in enumerate(ranks):
        (own,) = _own_of(of_rank, lanes=1)
        items = TorchItems(trees_of(tree, rank, to.mesh.size), manifest.aliases, rank)
        files.append(tuple(items.files(leaves, own)))
    return Rewriting(files, specs, index=partial(_index, trees=trees_of(tree, 0, to.mesh.size)))


def _index(reader: TagReader, *, trees: ItemTrees) -> dict[str, bytes]:
    """``metadata.pkl``, from the manifest of all ranks."""
    manifest = reader.manifest
    writers = [rank_of(file.path) for file in manifest.files]
    world = 1 + max((writer for writer in writers if writer is not None), default=0)
    items: dict[str, Any] = {}
    for item, tree in trees.items():
        groups: dict[str, list[Any]] = {}

        def described(keys: Keys, leaf: Any, groups: dict[str, list[Any]] = groups) -> Any:
            if isinstance(leaf, LeafAt):
                record = manifest.array(leaf.path)
                assert record is not None, leaf.path  # what was merged has been compared with the skeleton
                if not all(type(key) in (str, int) for key in keys):
                    raise UnsupportedStateError("an array below a key that is neither text nor number", leaf=leaf.path)
                parts = [(shard.box, writers[shard.file] or 0) for shard in record]
                groups[json.dumps(list(keys), separators=(",", ":"))] = _groups(leaf.path, record, parts)
            return leaf

        replaced_leaves(tree, described)
        if groups:
            items[item] = {"nested_path_to_metadata": groups, "rank_to_layout_info": dict.fromkeys(range(world))}
    content = {"metadata": items, "world_size": world, "version": VERSION_WRITTEN}
    return {ITEMS_METADATA: pickle.dumps(content, protocol=4)}


def _groups(leaf: str, record: ArrayRecord, parts: Sequence[tuple[Box, int]]) -> list[Any]:
    """How the parts of an array lie, (box, rank) of each: said once of all of them if they are equal chunks."""
    boxes, ranks = zip(*(parts or [(Box.whole(record.shape), 0)]), strict=True)
    chunks = [place_among_chunks(box, record.shape, leaf) for box in boxes]
    counts = [tuple(k for k, _ in of_box) for of_box in chunks]
    at = [tuple(i for _, i in of_box) for of_box in chunks]
    grid = max(counts)
    if all(count == grid for count in counts) and len(boxes) == prod(grid):
        order = sorted(range(len(boxes)), key=at.__getitem__)
        return [_group(record, grid, [ranks[i] for i in order], [ranks[i] for i in order])]
    groups = []
    for count, place, rank in zip(counts, at, ranks, strict=True):
        # The other places of this mesh are nobody's: the resharder asks about the ranks of the group alone.
        number = sum(i * prod(count[d + 1 :]) for d, i in enumerate(place))
        mesh = [max(ranks) + 1 + i for i in range(prod(count))]
        mesh[number] = rank
        groups.append(_group(record, count, mesh, [rank]))
    return groups


def _group(record: ArrayRecord, counts: Sequence[int], mesh: Sequence[int], ranks: Sequence[int]) -> Any:
    """One of the package's `GlobalObjectMetadata`, as its `to_dict` makes it."""
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
