"""Shardings of stored arrays on another mesh, and mismatches in the order of their rows.

An array is split as a rule says, and otherwise as it was when it was saved. The rows of a rank follow from the sections
of its own sharding: a program with other sections than the job that saved the array would load other rows, and no shape
would show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import (
    SPLIT_AXES,
    DimSharding,
    ParsedRules,
    Section,
    Sharding,
    compute_local_size,
    count_parts,
    find_sharding,
)
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import BY_SHAPE, StateRule
from xla_ckpt.core.tree.skeleton import get_children

ZERO1_AXES = ("dp", "edp", "cp")
"""Mesh axes over which a ZeRO-1 optimizer may deal out rows."""


def find_optimizer_parameters(manifest: Manifest) -> frozenset[str] | None:
    """The path components of the parameters that a stored optimizer has; None where it does not name them.

    Other members of its state belong to no parameter (``optimizer/state/k``).
    """
    return schema.find_grouped_parameters((get_children(manifest.skeleton) or {}).get(schema.OPTIMIZER))


def resolve_sharding(leaf: str, manifest: Manifest, rules: ParsedRules) -> Sharding:
    """How an array is split: as a rule says, else as it was when it was saved.

    What a rule says of a parameter holds for its optimizer's states, in the dims that they have. Of a state of other
    dims it says nothing.

    Args:
        leaf: Leaf path of a stored array.
        manifest: What is stored.
        rules: The caller's rules.

    Raises:
        ValueError: A rule does not fit.
    """
    record = manifest.find_array(leaf)
    if record is None:
        raise ValueError("no such array is stored")
    owner = schema.get_parameter_path(leaf)
    if (ruled := find_leaf_rule(leaf, rules)) is not None:
        return _apply_rule(
            ruled, record, None if owner is None else manifest.find_array(owner), state=owner is not None
        )
    return get_stored_sharding(record)


def find_leaf_rule(leaf: str, rules: ParsedRules) -> Sharding | None:
    """What a rule says of an array, or of the parameter whose state it is; None if none does."""
    name = schema.get_parameter_path(leaf) or leaf
    return find_sharding(rules, name, schema.strip_member(name))


def _apply_rule(sharding: Sharding, record: ArrayRecord, parameter: ArrayRecord | None, *, state: bool) -> Sharding:
    shape = record.shape if parameter is None else parameter.shape
    if state and parameter is None and not shape:
        return Sharding()
    if len(sharding.dims) > len(shape):
        raise ValueError(f"a rule splits {len(sharding.dims)} dims, the array has {len(shape)}")
    if state and all(d is None for d in BY_SHAPE.map_dims(shape, record.shape)):
        return get_stored_sharding(record)
    return derive_state_sharding(sharding, BY_SHAPE, shape, record.shape)


def get_stored_sharding(record: ArrayRecord) -> Sharding:
    """How an array was split when it was saved, over the axes that a mesh has."""
    return parse_stored_spec(record.spec)


def find_foreign_axes(spec: Sequence[Any] | None) -> set[str]:
    """Names in a spec of axes that no mesh has: those of a DTensor's or a jax array's own mesh.

    >>> find_foreign_axes(["tp", ["dp", "x"], None])
    {'x'}
    """
    names = [name for entry in spec or () for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return {name for name in names if isinstance(name, str) and name not in SPLIT_AXES}


def parse_stored_spec(spec: Sequence[Any] | None) -> Sharding:
    """The sharding that a spec describes, over the axes that a mesh has."""
    dims: list[DimSharding | None] = []
    for entry in spec or ():
        names: tuple[Any, ...] = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        axes = tuple(n for n in names if n in SPLIT_AXES)
        parts = [n for n in names if not isinstance(n, str)]
        dims += Sharding.parse([[*axes, *parts[:1]]]).dims if axes else [None]
    return Sharding(tuple(dims))


def compute_local_array(leaf: str, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, rank: int) -> LocalArray:
    """Where a rank's part of an array lies.

    Rows that a ZeRO-1 optimizer deals out are cut after tensor parallelism has cut them, as it does.

    Raises:
        ValueError: The sharding does not fit.
    """
    dealt = get_zero1_axes(sharding) if schema.get_member(leaf) == schema.OPTIMIZER else ()
    if not dealt:
        return sharding.map_global_shape(shape, mesh, rank)
    base, local = pad_evenly(exclude_axes(sharding, dealt), shape, mesh)
    return base.map_zero1_shape(local, mesh, rank, dealt)


def derive_state_sharding(
    sharding: Sharding, rule: StateRule, parameter_shape: Sequence[int], shape: Sequence[int]
) -> Sharding:
    """How state of the local shape `shape` is split, of a parameter of the local shape `parameter_shape` that is split
    like this.

    Raises:
        ValueError: The state cannot have this shape.

    >>> derive_state_sharding(Sharding.parse(("tp", None)), BY_SHAPE, (4, 6), (4, 1)).spec
    ('tp', None)
    >>> derive_state_sharding(Sharding.parse(("tp",)), BY_SHAPE, (4,), ()).spec
    ()
    """
    dims = rule.map_dims(parameter_shape, shape)
    if all(d is None for d in dims):
        return Sharding()
    over = sharding.pad_dims(len(parameter_shape))
    true = None if sharding.shape is None else tuple(None if d is None else sharding.shape[d] for d in dims)
    return Sharding(tuple(None if d is None else over[d] for d in dims), true)


def get_zero1_axes(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes over which the rows of a state are dealt out."""
    first = sharding.dims[0] if sharding.dims else None
    return () if first is None else tuple(a for a in first.axes if a in ZERO1_AXES)


def exclude_axes(sharding: Sharding, axes: Sequence[str]) -> Sharding:
    """The same, unsplit over these axes."""
    dims: list[DimSharding | None] = []
    for split in sharding.dims:
        kept = () if split is None else tuple(a for a in split.axes if a not in axes)
        dims.append(DimSharding(kept, split.sections) if split is not None and kept else None)
    return Sharding(tuple(dims), sharding.shape)


def pad_evenly(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding of an array into equal local tensors, whose ends may be padding, and their shape.

    Raises:
        ValueError: Sections do not divide: they cannot be padded.
    """
    dims = sharding.pad_dims(len(shape))
    local = tuple(_compute_padded_size(n, split, mesh) for split, n in zip(dims, shape, strict=True))
    return Sharding(sharding.dims, shape), local


def _compute_padded_size(n: int, split: DimSharding | None, mesh: Mesh) -> int:
    ranks = 1 if split is None else count_parts(split.axes, mesh.sizes)
    return -(-n // ranks) if split is None or split.is_plain else compute_local_size(n, ranks, split.sections)


def describe_section_mismatch(stored: Sharding, wanted: Sharding, shape: Sequence[int]) -> str | None:
    """How two splits of an array contradict each other; None if they do not.

    Only a stored split whose sections have sizes or copies is compared: those are queries, keys and values. A stride
    may be that of a DTensor, and says nothing about the order of the rows.
    """
    for n, one, other in zip(shape, stored.pad_dims(len(shape)), wanted.pad_dims(len(shape)), strict=True):
        if one is None or other is None or not set(one.axes) & set(other.axes) or not one.has_custom_sections:
            continue
        sizes = [_compute_sizes(split.sections, n) for split in (one, other)]
        if sizes[0] != sizes[1]:
            return f"its rows are {_format_sizes(sizes[0])}, and here they would be {_format_sizes(sizes[1])}"
    return None


def describe_head_order_mismatch(stored: Sharding, wanted: Sharding) -> str | None:
    """How the order of the heads differs between the job that saved an array and the one that wants it; or None.

    Where keys and values are repeated as a whole, the heads of the queries are in an order that depends on the number
    of copies. Where neighbouring ranks hold the same, they are in the order that they have without copies.
    """
    texts, orders = [], []
    for sharding in (stored, wanted):
        sections = [s for split in sharding.dims if split is not None for s in split.sections]
        most = max(sections, key=lambda s: s.copies, default=Section())
        orders.append(1 if most.adjacent else most.copies)
        texts.append(f"{most.copies}{' on neighbouring ranks' if most.adjacent else ''}")
    if orders[0] == orders[1]:
        return None
    return f"was saved by a job with kv_size_multiplier={texts[0]}, and this one has {texts[1]}"


def has_fused_sections(sharding: Sharding) -> bool:
    """Whether an array consists of queries, keys and values: sections with sizes, or with copies."""
    return any(split is not None and split.has_custom_sections for split in sharding.dims)


def find_copy_mismatch(sharding: Sharding, mesh: Mesh) -> tuple[int, int] | None:
    """How many copies of a section were held, and how many the ranks of a mesh would hold; None if they are as many.

    Copies on neighbouring ranks do not count: they do not change the order of the heads.

    Raises:
        ValueError: The ranks cannot hold equally many copies.
    """
    for split in sharding.dims:
        for section in () if split is None else split.sections:
            copies = section.count_copies(count_parts(split.axes, mesh.sizes)) if split is not None else 1
            if copies != section.copies and not section.adjacent:
                return section.copies, copies
    return None


def _compute_sizes(sections: Sequence[Section], n: int) -> list[int]:
    """The sizes of the sections of a dim of `n` elements."""
    return [n // len(sections) if s.size is None else s.size for s in sections]


def _format_sizes(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))
