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

from xla_ckpt import pickled_objects
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
"""Package whose frames are skipped in warnings."""

logger = get_logger(__name__)


SAMPLED_RUNS = 64
"""Approximate number of sampled byte runs of a strided piece, for comparison with the copies on other ranks."""

SAMPLED_BYTES = 256
"""Maximum number of bytes sampled from each run."""


@slots_dataclass()
class LocalArrayRef:
    """An array on this rank, and its region of the global array."""

    value: Any
    local: LocalArray
    adapter: ArrayAdapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in this rank's memory, padding included."""
        return self.adapter.get_shape(self.value)

    def extract_pieces(self, data: LocalShard, itemsize: int) -> list[HostShard]:
        """Extract the pieces of this array from its whole tensor. Strided pieces and device arrays are only sampled."""
        places = [compute_runs(piece.local_box, Box.from_shape(self.shape), itemsize) for piece in self.local.pieces]
        return [_sample_piece(data, at) for at in places]


@dataclass(frozen=True, slots=True, eq=False)
class LocalArrayRefs(ColumnarSequence[LocalArrayRef]):
    """The arrays of all leaves of a rank: one row per array, in leaf order."""

    paths: Sequence[str]
    values: Sequence[Any]
    local_arrays: Sequence[LocalArray]
    adapters: Sequence[ArrayAdapter]

    def __len__(self) -> int:
        return len(self.paths)

    def get_row(self, index: int) -> LocalArrayRef:
        return LocalArrayRef(self.values[index], self.local_arrays[index], self.adapters[index])


def _sample_piece(data: LocalShard, region: ByteRuns) -> HostShard:
    """Read a sample of a piece of a tensor, for comparison with the copies on other ranks."""
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
    """The description of a state on this rank: everything except its bytes."""

    state: CapturedState
    placement: RankInfo
    leaves: LeafTable
    arrays: LocalArrayRefs
    """The array of each leaf."""

    aliases: Mapping[str, str]
    """Leaf path of a tied array -> leaf path of its description."""

    skeleton: Json
    """The structure of the state if this rank reports for its stage, otherwise its rank-local part or None."""

    pickled_objects: list[bytes]
    """Pickled objects, indexed by `skeleton`."""

    module_metadata: Mapping[str, Mapping[str, Json]]
    """Leaf path of each module's state dict in `skeleton` -> module -> its metadata."""

    structure: Json
    """The whole structure of the state on this rank."""

    structure_metadata: Mapping[str, Mapping[str, Json]]
    """Like `module_metadata`, for `structure`."""

    pickled_structure_objects: list[bytes]
    """Pickled objects, indexed by `structure`; only for layouts that pickle structures."""

    part_fingerprints: Mapping[str, str]
    """Part of the state -> fingerprint of its plain values, which must be equal on all ranks."""

    replicas: ReplicaPolicy
    """Policy for replicas: they must be equal, or the first copy of each array is stored."""

    def build_tree(self, part: str, create_array: Any) -> Any:
        """Build the tree of a part of the state, with `create_array(leaf path, kind)` called for each array."""

        def unpickled(index: int, leaf: str) -> Any:
            return pickled_objects.load(
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
        state: The state on this rank.
        placement: Placement of this rank.
        rules: Sharding rules for arrays without a sharding.
        with_structure: Include the whole structure, for layouts that pickle it.
        split_objects: Split objects of plain classes into attributes, for layouts that store these.
        replicas: Policy for replicas that differ.

    Raises:
        UnsupportedStateError: If a value cannot be stored.
        UsageError: If a sharding rule is invalid or does not fit an array.
    """
    shardings = StateShardings(placement, parse_rules(rules), state.parameters, state.rank_local_prefixes).with_model(
        state.model
    )
    adapters: list[ArrayAdapter] = []

    def kind(value: Any) -> str | None:
        """Return the kind of an array. Called once for each array, in tree order."""
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
    if placement.mesh.pp == 1 and placement.rank == 0:  # a rule may be for leaves of another stage
        for message in find_unused_rules(shardings.rules, flat.arrays):
            logger.warning("%s", message)
    # Differences are only known after all arrays are written. With "first", one rank therefore writes whole arrays.
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
    """Describe arrays as leaves.

    Args:
        arrays: Arrays by leaf path.
        adapters: The adapter of each array.
        shardings: Shardings of the state.
        written_whole: Leaves whose copies may differ (buffers): one rank writes the whole array.

    Returns:
        The leaves, the array of each leaf, and the leaf paths of tied arrays -> leaf path of the first.

    Raises:
        UnsupportedStateError: If an array cannot be stored.
        UsageError: If a sharding rule does not fit.
    """
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    paths: list[str] = []
    values: list[Any] = []
    places: list[LocalArray] = []
    kept: list[ArrayAdapter] = []
    form: list[int] = []
    numbers: dict[tuple[int, int, bool, bool | None], int] = {}
    """Row numbers keyed by object identity, because hashing the values would take as long as everything else."""
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
    """Collect all local shards, batched by kind of array; `padded_leaves` include their padding."""
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
    """Return the local array with its padding, instead of the pieces that are stored."""
    # An array with its own sharding has no padding.
    return local if adapter.locate(value, path) is not None else create_unsharded(adapter.get_shape(value))


def extract_replicated_pieces(
    description: StateDescription, padded_leaves: frozenset[str], shards: LocalShards
) -> dict[str, list[HostShard]]:
    """Extract the pieces of `padded_leaves`, because other ranks hold some of them but not all."""
    return {
        leaf.path: array.extract_pieces(shards.get_shards(leaf.path)[0], leaf.dtype.itemsize)
        for leaf, array in zip(description.leaves, description.arrays, strict=True)
        if leaf.path in padded_leaves and any(piece.copy is not None for piece in array.local.pieces)
    }


def _fingerprint_part(skeleton: Json, part: str) -> str:
    """Compute the fingerprint of a part of a skeleton, without its rank-local state."""
    stored = get_part(skeleton, part)
    own = part == schema.OPTIMIZER and isinstance(stored, dict) and schema.PER_RANK_STATE in stored
    common = {k: v for k, v in stored.items() if k != schema.PER_RANK_STATE} if own else stored
    return compute_text_fingerprint(json.dumps(common))


def _select_rank_local(flat: FlatTree, rank_local_prefixes: tuple[str, ...]) -> FlatTree:
    """Select the rank-local part of a flattened state. Other ranks report the rest."""
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
    return pickled_objects.dump(value, leaf)


_SKIPPED_MODULES = (f"{PACKAGE}.", "torch._dynamo.")
"""Module prefixes of frames that warnings skip: this library, and Dynamo, through which its calls may run."""


def _count_library_frames() -> int:
    """Count the stack frames above the program's own code, so that a warning shows the program's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_SKIPPED_MODULES):
        frame, level = frame.f_back, level + 1
    return level
