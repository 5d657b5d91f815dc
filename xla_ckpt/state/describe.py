"""A state, described: everything about it but its bytes.

Each array becomes a leaf once: where it is, and who is the same as whom. Everything else becomes the skeleton.
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

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.display import make_printable
from xla_ckpt.dtypes import DType
from xla_ckpt.engine import pickles
from xla_ckpt.fingerprint import text_fingerprint
from xla_ckpt.lightweight import Columns, lightweight
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.leaf import Holding, Leaves, holding_of
from xla_ckpt.plan.replicas import Replicas
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.ranges import Runs, runs
from xla_ckpt.sharding.rules import Rules, idle, parse_rules
from xla_ckpt.snapshot.shards import HostShard, LocalShards, Look, MemoryShard, windows
from xla_ckpt.state.frozen_base import tree_of_base
from xla_ckpt.state.members import State
from xla_ckpt.state.mistakes import check_may_be_pickled
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.values import APART, CODEC, resolver
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import Json
from xla_ckpt.tree.flatten import Flat, flatten
from xla_ckpt.tree.skeleton import only, part_at, renumbered
from xla_ckpt.tree.unflatten import Unflattener

PACKAGE = __name__.partition(".")[0]
"""The package whose frames a warning does not show."""

logger = get_logger(__name__)


SAMPLED_RUNS = 64
"""Of a piece that is scattered over its tensor about so many runs of bytes are compared with other ranks' copies."""

SAMPLED_BYTES = 256
"""So much of each run."""


@lightweight()
class HeldArray:
    """An array that this rank holds, and which part of the global array it is."""

    value: Any
    local: LocalArray
    adapter: ArrayAdapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank has in memory, padding included."""
        return self.adapter.shape(self.value)

    def apart(self, data: MemoryShard, itemsize: int) -> list[HostShard]:
        """The pieces of this array, from its whole tensor. Of scattered ones, and of a device's, only a sample."""
        places = [runs(piece.local, Box.whole(self.shape), itemsize) for piece in self.local.pieces]
        return [_cut_out(data, at) for at in places]


@dataclass(frozen=True, slots=True, eq=False)
class HeldArrays(Columns[HeldArray]):
    """The arrays of all leaves of a rank: a row for each, in the order of the leaves."""

    paths: Sequence[str]
    values: Sequence[Any]
    locals: Sequence[LocalArray]
    adapters: Sequence[ArrayAdapter]

    def __len__(self) -> int:
        return len(self.paths)

    def row(self, number: int) -> HeldArray:
        return HeldArray(self.values[number], self.locals[number], self.adapters[number])


def _cut_out(data: MemoryShard, at: Runs) -> HostShard:
    """A piece of a tensor, to be compared with other ranks' copies of it."""
    if at.contiguous and isinstance(data, HostShard):
        return replace(data, data=data.data[at.offset : at.offset + at.nbytes])
    if at.contiguous:
        look = windows(at.nbytes)
        look = replace(look, offset=at.offset + look.offset)
    else:
        step = max(1, at.counts[0] // SAMPLED_RUNS)
        look = Look(
            offset=at.offset,
            count=-(-at.counts[0] // step),
            stride=step * at.strides[0],
            nbytes=min(at.nbytes, SAMPLED_BYTES),
        )
    sample = look.of(data.data) if isinstance(data, HostShard) else data.look(look)
    return HostShard(data=memoryview(sample), keep=None, immutable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A state on this rank: everything about it but its bytes."""

    state: State
    placement: Placement
    leaves: Leaves
    arrays: HeldArrays
    """The array of each leaf."""

    aliases: Mapping[str, str]
    """Leaf path of a tied array -> leaf path under which it is described."""

    skeleton: Json
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    objects: list[bytes]
    """Pickled objects, by their index in `skeleton`."""

    module_metadata: Mapping[str, Mapping[str, Json]]
    """Leaf path of each module's state dict in `skeleton` -> module -> its metadata."""

    structure: Json
    """The whole structure of the state as this rank has it."""

    structure_metadata: Mapping[str, Mapping[str, Json]]
    """The same as `module_metadata`, of `structure`."""

    structure_objects: list[bytes]
    """Pickled objects, by their index in `structure`; only where a layout was asked for that pickles structures."""

    parts: Mapping[str, str]
    """Part of the state -> fingerprint of its plain values, which all ranks have in common."""

    replicas: Replicas
    """Whether replicas have to be equal, or the first one of each array is stored whole, whatever the others are."""

    def tree(self, part: str, array: Any) -> Any:
        """A part of the state as a tree, with what `array` makes of (leaf path, kind) in place of each array."""

        def unpickled(index: int, leaf: str) -> Any:
            return pickles.load(self.structure_objects[index], leaf, trust=True)  # this process has just pickled it

        return Unflattener(
            array=array,
            codec=CODEC,
            object=unpickled,
            resolve=resolver(trust=True),
            module_metadata=self.structure_metadata,
        ).build(self.structure[part], part)


def describe(
    state: State,
    placement: Placement,
    rules: Rules | None,
    *,
    structure: bool = False,
    takes_apart: bool = False,
    replicas: Replicas = "equal",
) -> Description:
    """Describe a state.

    Args:
        state: The state, as this rank has it.
        placement: Where this rank is.
        rules: How arrays are split that do not say so themselves.
        structure: Give all its objects, for layouts that pickle the structure of a state.
        takes_apart: Take objects of plain classes apart, for layouts that have a place for their attributes.
        replicas: What is done with replicas that differ.

    Raises:
        UnsupportedStateError: Something in it cannot be stored.
        UsageError: A sharding rule makes no sense or does not fit.
    """
    shardings = StateShardings(placement, parse_rules(rules), state.parameters, state.alone).of_model(state.model)
    adapters: list[ArrayAdapter] = []

    def kind(value: Any) -> str | None:
        """Asked once for each array, in the order of the tree."""
        adapter = shardings.adapters.of(value)
        if adapter is None:
            return None
        adapters.append(adapter)
        return adapter.kind

    tree = state.tree if state.base is None else {**state.tree, schema.BASE: tree_of_base(state.base, shardings)}
    flat = flatten(tree, kind, APART if takes_apart else CODEC)
    if placement.mesh.pp == 1 and placement.rank == 0:  # on other stages a rule may be for leaves that are not here
        for message in idle(shardings.rules, flat.arrays):
            logger.warning("%s", message)
    # Which arrays differ is known only when all is written. So with "first" one rank writes all of each array.
    together = frozenset(flat.arrays) if replicas == "first" else state.buffers
    leaves, arrays, aliases = describe_arrays(flat.arrays, adapters, shardings, together)
    own = flat if placement.speaks else _own_part(flat, state.alone)
    objects = [_pickle(leaf, value) for leaf, value in own.objects]
    all_objects = objects
    if own is not flat:
        all_objects = [_pickle(leaf, value) for leaf, value in flat.objects] if structure else []
    return Description(
        state=state,
        placement=placement,
        leaves=leaves,
        arrays=arrays,
        aliases=aliases,
        skeleton=own.skeleton,
        module_metadata=own.module_metadata,
        objects=objects,
        structure=flat.skeleton,
        structure_metadata=flat.module_metadata,
        structure_objects=all_objects,
        parts={p: _part_fingerprint(flat.skeleton, p) for p in state.parts} if placement.world > 1 else {},
        replicas=replicas,
    )


def describe_arrays(
    arrays: Mapping[str, Any],
    adapters: Sequence[ArrayAdapter],
    shardings: StateShardings,
    together: frozenset[str] = frozenset(),
) -> tuple[Leaves, HeldArrays, dict[str, str]]:
    """The leaves of some arrays, the array of each, and the leaf paths of tied ones with those of the first.

    Args:
        arrays: By leaf path.
        adapters: The adapter of each.
        shardings: Where they lie.
        together: Leaves whose copies need not be equal (buffers): one rank writes all of such an array.

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
    forms: list[tuple[DType, Holding]] = []
    described = zip(arrays.items(), adapters, shardings.forms(arrays, adapters), strict=True)
    for (path, value), adapter, (dtype, local) in described:
        identity = adapter.identity(value)
        if identity is not None and (same := first.setdefault(identity, path)) != path:
            aliases[path] = same
            continue
        weak_type = value.weak_type if adapter.kind == "jax" else None
        number = numbers.setdefault((id(dtype), id(local), path in together, weak_type), len(forms))
        if number == len(forms):
            forms.append((dtype, holding_of(local, together=path in together, weak_type=weak_type)))
        paths.append(path)
        values.append(value)
        places.append(local)
        kept.append(adapter)
        form.append(number)
    leaves = Leaves(paths, forms, np.array(form, np.int64))
    return leaves, HeldArrays(paths, values, places, kept), aliases


def local_shards(arrays: HeldArrays, taken_whole: frozenset[str]) -> LocalShards:
    """All local shards, in one batch for each kind of array; those `taken_whole` with their padding."""
    places = arrays.locals
    if taken_whole:
        columns = zip(arrays.paths, arrays.values, arrays.locals, arrays.adapters, strict=True)
        places = [_taken_whole(*column) if column[0] in taken_whole else column[2] for column in columns]
    batches = []
    for adapter in dict.fromkeys(arrays.adapters):
        own = [each is adapter for each in arrays.adapters]
        values = list(zip(compress(arrays.values, own), compress(places, own), strict=True))
        batches.append((list(compress(arrays.paths, own)), adapter.shards(values)))
    return LocalShards(batches)


def _taken_whole(path: str, value: Any, local: LocalArray, adapter: ArrayAdapter) -> LocalArray:
    """The whole of a tensor, padding included, in the place of the pieces that are stored of it."""
    # An array that knows its own place has no padding.
    return local if adapter.place(value, path) is not None else whole(adapter.shape(value))


def shards_apart(
    description: Description, taken_whole: frozenset[str], shards: LocalShards
) -> dict[str, list[HostShard]]:
    """The pieces of arrays that are `taken_whole`, where other ranks hold some of them and not the rest."""
    return {
        leaf.path: array.apart(shards.of(leaf.path)[0], leaf.dtype.itemsize)
        for leaf, array in zip(description.leaves, description.arrays, strict=True)
        if leaf.path in taken_whole and any(piece.copy is not None for piece in array.local.pieces)
    }


def _part_fingerprint(skeleton: Json, part: str) -> str:
    """That of a part of a skeleton, less what each rank has its own of."""
    stored = part_at(skeleton, part)
    own = part == schema.OPTIMIZER and isinstance(stored, dict) and schema.OWN in stored
    common = {k: v for k, v in stored.items() if k != schema.OWN} if own else stored
    return text_fingerprint(json.dumps(common))


def _own_part(flat: Flat, alone: tuple[str, ...]) -> Flat:
    """What only this rank has of a flattened state: the others speak for the rest."""
    own = [(n, leaf, value) for n, (leaf, value) in enumerate(flat.objects) if leaf.startswith(alone)]
    numbers = {n: i for i, (n, _, _) in enumerate(own)}
    holders = [holder for path in alone if (holder := schema.holder_of(path)) is not None]
    skeleton = renumbered(only(flat.skeleton, holders), numbers.__getitem__) if holders else None
    metadata = {leaf: of for leaf, of in flat.module_metadata.items() if leaf.startswith(alone)}
    return Flat({}, [(leaf, value) for _, leaf, value in own], skeleton, metadata)


def _pickle(leaf: str, value: Any) -> bytes:
    check_may_be_pickled(value, leaf)
    warnings.warn(
        f"{make_printable(leaf)}: a {type(value).__module__}.{type(value).__qualname__} is no plain value and will be "
        "pickled; loading it needs trust_pickle=True",
        stacklevel=_frames_of_ours(),
    )
    return pickles.dump(value, leaf)


_FRAMES_BETWEEN = (f"{PACKAGE}.", "torch._dynamo.")
"""Modules between a program and a warning: this library, and Dynamo, which it has run its calls as they are."""


def _frames_of_ours() -> int:
    """How far up the stack the program's own code is, for a warning that is to show the program's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_FRAMES_BETWEEN):
        frame, level = frame.f_back, level + 1
    return level
