"""Describe a captured state: its structure, array leaves, shardings and aliases, without its bytes.

Each array becomes one leaf with its place in the global array; tied arrays become aliases of the first name.
Everything else becomes the skeleton.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np

from xla_ckpt import pickled_objects as pickles
from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.fingerprint import compute_text_fingerprint
from xla_ckpt.core.lightweight import ColumnarSequence, slots_dataclass
from xla_ckpt.core.plan.leaf import LeafTable, LocalLayout, create_local_layout
from xla_ckpt.core.plan.merge import ReplicaPolicy
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.sharding.memory_layout import ByteRuns, compute_runs
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.sharding.sharding import ShardingRules, find_unused_rules, parse_rules
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import FlatTree, Unflattener, flatten
from xla_ckpt.core.tree.skeleton import get_part, renumber_objects, select_parts
from xla_ckpt.core.tree.values import Json
from xla_ckpt.display import make_printable
from xla_ckpt.logs import get_logger
from xla_ckpt.snapshot.shards import HostShard, LocalShard, LocalShards, SampleWindows, choose_sample_windows
from xla_ckpt.state.argument_checks import check_can_pickle
from xla_ckpt.state.base_model import build_base_tree
from xla_ckpt.state.objects import CapturedState
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.values import CODEC, OBJECT_SPLITTING_CODEC, create_class_resolver

PACKAGE = __name__.partition(".")[0]
"""The package whose frames a warning does not show."""

logger = get_logger(__name__)


SAMPLED_RUNS = 64
"""Of a piece that is scattered over its tensor about so many runs of bytes are compared with other ranks' copies."""

SAMPLED_BYTES = 256
"""So much of each run."""


@slots_dataclass()
class LocalArrayRef:
    """An array that this rank holds, and which part of the global array it is."""

    value: Any
    local: LocalArray
    adapter: ArrayAdapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank has in memory, padding included."""
        return self.adapter.get_shape(self.value)

    def extract_pieces(self, data: LocalShard, itemsize: int) -> list[HostShard]:
        """The pieces of this array, from its whole tensor. Of scattered ones, and of a device's, only a sample."""
        places = [compute_runs(piece.local_box, Box.from_shape(self.shape), itemsize) for piece in self.local.pieces]
        return [_sample_piece(data, at) for at in places]


@dataclass(frozen=True, slots=True, eq=False)
class LocalArrayRefs(ColumnarSequence[LocalArrayRef]):
    """The arrays of all leaves of a rank: a row for each, in the order of the leaves."""

    paths: Sequence[str]
    values: Sequence[Any]
    local_arrays: Sequence[LocalArray]
    adapters: Sequence[ArrayAdapter]

    def __len__(self) -> int:
        return len(self.paths)

    def get_row(self, index: int) -> LocalArrayRef:
        return LocalArrayRef(self.values[index], self.local_arrays[index], self.adapters[index])


def _sample_piece(data: LocalShard, region: ByteRuns) -> HostShard:
    """A piece of a tensor, to be compared with other ranks' copies of it."""
    if region.is_contiguous and isinstance(data, HostShard):
        return replace(data, data=data.data[region.offset : region.offset + region.run_bytes])
    if region.is_contiguous:
        look = choose_sample_windows(region.run_bytes)
        look = replace(look, offset=region.offset + look.offset)
    else:
        step = max(1, region.counts[0] // SAMPLED_RUNS)
        look = SampleWindows(
            offset=region.offset,
            count=-(-region.counts[0] // step),
            stride=step * region.strides[0],
            nbytes=min(region.run_bytes, SAMPLED_BYTES),
        )
    sample = look.read(data.data) if isinstance(data, HostShard) else data.read_sample(look)
    return HostShard(data=memoryview(sample), owner=None, immutable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescription:
    """A state on this rank: everything about it but its bytes."""

    state: CapturedState
    placement: RankInfo
    leaves: LeafTable
    arrays: LocalArrayRefs
    """The array of each leaf."""

    aliases: Mapping[str, str]
    """Leaf path of a tied array -> leaf path under which it is described."""

    skeleton: Json
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    pickled_objects: list[bytes]
    """Pickled objects, by their index in `skeleton`."""

    module_metadata: Mapping[str, Mapping[str, Json]]
    """Leaf path of each module's state dict in `skeleton` -> module -> its metadata."""

    structure: Json
    """The whole structure of the state as this rank has it."""

    structure_metadata: Mapping[str, Mapping[str, Json]]
    """The same as `module_metadata`, of `structure`."""

    pickled_structure_objects: list[bytes]
    """Pickled objects, by their index in `structure`; only where a layout was asked for that pickles structures."""

    part_fingerprints: Mapping[str, str]
    """Part of the state -> fingerprint of its plain values, which all ranks have in common."""

    replicas: ReplicaPolicy
    """Whether replicas have to be equal, or the first one of each array is stored whole, whatever the others are."""

    def build_tree(self, part: str, create_array: Any) -> Any:
        """A part of the state as a tree, with what `create_array` makes of (leaf path, kind) in place of each array."""

        def unpickled(index: int, leaf: str) -> Any:
            return pickles.load(
                self.pickled_structure_objects[index], leaf, trust=True
            )  # this process has just pickled it

        return Unflattener(
            get_array=create_array,
            codec=CODEC,
            get_object=unpickled,
            resolve_class=create_class_resolver(trust=True),
            module_metadata=self.structure_metadata,
        ).build(self.structure[part], part)


def describe_state(
    state: CapturedState,
    placement: RankInfo,
    rules: ShardingRules | None,
    *,
    with_structure: bool = False,
    split_objects: bool = False,
    replicas: ReplicaPolicy = "equal",
) -> StateDescription:
    """Describe a state.

    Args:
        state: The state, as this rank has it.
        placement: Where this rank is.
        rules: How arrays are split that do not say so themselves.
        with_structure: Give all its objects, for layouts that pickle the structure of a state.
        split_objects: Take objects of plain classes apart, for layouts that have a place for their attributes.
        replicas: What is done with replicas that differ.

    Raises:
        UnsupportedStateError: Something in it cannot be stored.
        UsageError: A sharding rule makes no sense or does not fit.
    """
    shardings = StateShardings(placement, parse_rules(rules), state.parameters, state.rank_local_prefixes).with_model(
        state.model
    )
    adapters: list[ArrayAdapter] = []

    def kind(value: Any) -> str | None:
        """Asked once for each array, in the order of the tree."""
        adapter = shardings.adapters.find(value)
        if adapter is None:
            return None
        adapters.append(adapter)
        return adapter.kind

    tree = (
        state.tree
        if state.base_parameters is None
        else {**state.tree, schema.BASE: build_base_tree(state.base_parameters, shardings)}
    )
    flat = flatten(tree, kind, OBJECT_SPLITTING_CODEC if split_objects else CODEC)
    if placement.mesh.pp == 1 and placement.rank == 0:  # on other stages a rule may be for leaves that are not here
        for message in find_unused_rules(shardings.rules, flat.arrays):
            logger.warning("%s", message)
    # Which arrays differ is known only when all is written. So with "first" one rank writes all of each array.
    together = frozenset(flat.arrays) if replicas == "first" else state.buffers
    leaves, arrays, aliases = describe_arrays(flat.arrays, adapters, shardings, together)
    own = flat if placement.is_stage_leader else _select_rank_local(flat, state.rank_local_prefixes)
    objects = [_dump_object(leaf, value) for leaf, value in own.objects]
    all_objects = objects
    if own is not flat:
        all_objects = [_dump_object(leaf, value) for leaf, value in flat.objects] if with_structure else []
    return StateDescription(
        state=state,
        placement=placement,
        leaves=leaves,
        arrays=arrays,
        aliases=aliases,
        skeleton=own.skeleton,
        module_metadata=own.module_metadata,
        pickled_objects=objects,
        structure=flat.skeleton,
        structure_metadata=flat.module_metadata,
        pickled_structure_objects=all_objects,
        part_fingerprints={p: _fingerprint_part(flat.skeleton, p) for p in state.shared_parts}
        if placement.world_size > 1
        else {},
        replicas=replicas,
    )


def describe_arrays(
    arrays: Mapping[str, Any],
    adapters: Sequence[ArrayAdapter],
    shardings: StateShardings,
    written_whole: frozenset[str] = frozenset(),
) -> tuple[LeafTable, LocalArrayRefs, dict[str, str]]:
    """The leaves of some arrays, the array of each, and the leaf paths of tied ones with those of the first.

    Args:
        arrays: By leaf path.
        adapters: The adapter of each.
        shardings: Where they lie.
        written_whole: Leaves whose copies need not be equal (buffers): one rank writes all of such an array.

    Raises:
        UnsupportedStateError: One of them cannot be stored.
        UsageError: A sharding rule does not fit.
    """
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    paths: list[str] = []
    values: list[Any] = []
    places: list[LocalArray] = []
    kept: list[ArrayAdapter] = []
    form: list[int] = []
    numbers: dict[tuple[int, int, bool, bool | None], int] = {}
    """By the identity of what is kept here: a hash of it would take as long as all the rest."""
    forms: list[tuple[DType, LocalLayout]] = []
    described = zip(arrays.items(), adapters, shardings.iterate_forms(arrays, adapters), strict=True)
    for (path, value), adapter, (dtype, local) in described:
        identity = adapter.get_identity(value)
        if identity is not None and (same := first.setdefault(identity, path)) != path:
            aliases[path] = same
            continue
        weak_type = value.weak_type if adapter.kind == "jax" else None
        number = numbers.setdefault((id(dtype), id(local), path in written_whole, weak_type), len(forms))
        if number == len(forms):
            forms.append((dtype, create_local_layout(local, write_whole=path in written_whole, weak_type=weak_type)))
        paths.append(path)
        values.append(value)
        places.append(local)
        kept.append(adapter)
        form.append(number)
    leaves = LeafTable(paths, forms, np.array(form, np.int64))
    return leaves, LocalArrayRefs(paths, values, places, kept), aliases


def collect_local_shards(arrays: LocalArrayRefs, padded_leaves: frozenset[str]) -> LocalShards:
    """All local shards, in one batch for each kind of array; those `padded_leaves` with their padding."""
    places = arrays.local_arrays
    if padded_leaves:
        columns = zip(arrays.paths, arrays.values, arrays.local_arrays, arrays.adapters, strict=True)
        places = [_include_padding(*column) if column[0] in padded_leaves else column[2] for column in columns]
    batches = []
    for adapter in dict.fromkeys(arrays.adapters):
        own = [each is adapter for each in arrays.adapters]
        values = list(zip(compress(arrays.values, own), compress(places, own), strict=True))
        batches.append((list(compress(arrays.paths, own)), adapter.get_shards(values)))
    return LocalShards(batches)


def _include_padding(path: str, value: Any, local: LocalArray, adapter: ArrayAdapter) -> LocalArray:
    """The whole of a tensor, padding included, in the place of the pieces that are stored of it."""
    # An array that knows its own place has no padding.
    return local if adapter.locate(value, path) is not None else create_unsharded(adapter.get_shape(value))


def extract_replicated_pieces(
    description: StateDescription, padded_leaves: frozenset[str], shards: LocalShards
) -> dict[str, list[HostShard]]:
    """The pieces of arrays that are `padded_leaves`, where other ranks hold some of them and not the rest."""
    return {
        leaf.path: array.extract_pieces(shards.get_shards(leaf.path)[0], leaf.dtype.itemsize)
        for leaf, array in zip(description.leaves, description.arrays, strict=True)
        if leaf.path in padded_leaves and any(piece.copy is not None for piece in array.local.pieces)
    }


def _fingerprint_part(skeleton: Json, part: str) -> str:
    """That of a part of a skeleton, less what each rank has its own of."""
    stored = get_part(skeleton, part)
    own = part == schema.OPTIMIZER and isinstance(stored, dict) and schema.PER_RANK_STATE in stored
    common = {k: v for k, v in stored.items() if k != schema.PER_RANK_STATE} if own else stored
    return compute_text_fingerprint(json.dumps(common))


def _select_rank_local(flat: FlatTree, rank_local_prefixes: tuple[str, ...]) -> FlatTree:
    """What only this rank has of a flattened state: the others speak for the rest."""
    own = [(n, leaf, value) for n, (leaf, value) in enumerate(flat.objects) if leaf.startswith(rank_local_prefixes)]
    numbers = {n: i for i, (n, _, _) in enumerate(own)}
    holders = [holder for path in rank_local_prefixes if (holder := schema.get_rank_parent(path)) is not None]
    skeleton = renumber_objects(select_parts(flat.skeleton, holders), numbers.__getitem__) if holders else None
    metadata = {leaf: of for leaf, of in flat.module_metadata.items() if leaf.startswith(rank_local_prefixes)}
    return FlatTree({}, [(leaf, value) for _, leaf, value in own], skeleton, metadata)


def _dump_object(leaf: str, value: Any) -> bytes:
    check_can_pickle(value, leaf)
    warnings.warn(
        f"{make_printable(leaf)}: a {type(value).__module__}.{type(value).__qualname__} is no plain value and will be "
        "pickled; loading it needs trust_pickle=True",
        stacklevel=_count_library_frames(),
    )
    return pickles.dump(value, leaf)


_SKIPPED_MODULES = (f"{PACKAGE}.", "torch._dynamo.")
"""Modules between a program and a warning: this library, and Dynamo, which it has run its calls as they are."""


def _count_library_frames() -> int:
    """How far up the stack the program's own code is, for a warning that is to show the program's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_SKIPPED_MODULES):
        frame, level = frame.f_back, level + 1
    return level
