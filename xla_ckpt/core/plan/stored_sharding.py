"""Shardings of stored arrays on another mesh, and mismatches in the order of their rows.

An array is sharded by a matching rule, otherwise as it was saved. A rank's own sharding determines its rows: a program
with other sections than the job that saved the array would load other rows, although the shapes are equal.
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
"""Mesh axes that may split the rows of ZeRO-1 optimizer states."""


def find_optimizer_parameters(manifest: Manifest) -> frozenset[str] | None:
    """Return the path components of a stored optimizer's parameters, or None if it does not name them.

    Other members of the state belong to no parameter (``optimizer/state/k``).
    """
    return schema.find_grouped_parameters((get_children(manifest.skeleton) or {}).get(schema.OPTIMIZER))


def resolve_sharding(leaf: str, manifest: Manifest, rules: ParsedRules) -> Sharding:
    """Return the sharding of an array: from a matching rule, otherwise as it was saved.

    The rule of a parameter also applies to its optimizer states, along the dims that they share. It does not apply to
    states with other dims.

    Args:
        leaf: Leaf path of a stored array.
        manifest: Manifest of the checkpoint.
        rules: Sharding rules of the caller.

    Raises:
        ValueError: The array is not stored, or a rule does not fit.
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
    """Return the rule's sharding for an array, or for the parameter that owns the state; None if no rule matches."""
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
    """Return the sharding at the time of the save, over the axes of a `Mesh`."""
    return parse_stored_spec(record.spec)


def find_foreign_axes(spec: Sequence[Any] | None) -> set[str]:
    """Return the axis names in a spec that a `Mesh` does not have, such as the axes of a DTensor's or JAX mesh.

    >>> find_foreign_axes(["tp", ["dp", "x"], None])
    {'x'}
    """
    names = [name for entry in spec or () for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return {name for name in names if isinstance(name, str) and name not in SPLIT_AXES}


def parse_stored_spec(spec: Sequence[Any] | None) -> Sharding:
    """Parse a stored spec, ignoring axes that a `Mesh` does not have."""
    dims: list[DimSharding | None] = []
    for entry in spec or ():
        names: tuple[Any, ...] = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        axes = tuple(n for n in names if n in SPLIT_AXES)
        parts = [n for n in names if not isinstance(n, str)]
        dims += Sharding.parse([[*axes, *parts[:1]]]).dims if axes else [None]
    return Sharding(tuple(dims))


def compute_local_array(leaf: str, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, rank: int) -> LocalArray:
    """Compute a rank's part of an array.

    Rows of ZeRO-1 states are split after tensor parallelism, as the optimizer does.

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
    """Derive the sharding of an optimizer state from its parameter.

    Args:
        sharding: Sharding of the parameter.
        rule: Mapping between the dims of the parameter and the state.
        parameter_shape: Local shape of the parameter.
        shape: Local shape of the state.

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
    """Return the ZeRO-1 mesh axes that split the rows of a state."""
    first = sharding.dims[0] if sharding.dims else None
    return () if first is None else tuple(a for a in first.axes if a in ZERO1_AXES)


def exclude_axes(sharding: Sharding, axes: Sequence[str]) -> Sharding:
    """Return the sharding without these axes."""
    dims: list[DimSharding | None] = []
    for split in sharding.dims:
        kept = () if split is None else tuple(a for a in split.axes if a not in axes)
        dims.append(DimSharding(kept, split.sections) if split is not None and kept else None)
    return Sharding(tuple(dims), sharding.shape)


def pad_evenly(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Sharding, tuple[int, ...]]:
    """Return a sharding into equal local tensors, padded at the end, and the local shape.

    Raises:
        ValueError: The sections do not divide. They cannot be padded.
    """
    dims = sharding.pad_dims(len(shape))
    local = tuple(_compute_padded_size(n, split, mesh) for split, n in zip(dims, shape, strict=True))
    return Sharding(sharding.dims, shape), local


def _compute_padded_size(n: int, split: DimSharding | None, mesh: Mesh) -> int:
    ranks = 1 if split is None else count_parts(split.axes, mesh.sizes)
    return -(-n // ranks) if split is None or split.is_plain else compute_local_size(n, ranks, split.sections)


def describe_section_mismatch(stored: Sharding, wanted: Sharding, shape: Sequence[int]) -> str | None:
    """Describe the difference between the sections of two shardings, or return None if they are equal.

    Only stored sections with sizes or copies are compared: these are queries, keys and values. A stride may come from a
    DTensor, and does not determine the order of the rows.
    """
    for n, one, other in zip(shape, stored.pad_dims(len(shape)), wanted.pad_dims(len(shape)), strict=True):
        if one is None or other is None or not set(one.axes) & set(other.axes) or not one.has_custom_sections:
            continue
        sizes = [_compute_sizes(split.sections, n) for split in (one, other)]
        if sizes[0] != sizes[1]:
            return f"its rows are {_format_sizes(sizes[0])}, and here they would be {_format_sizes(sizes[1])}"
    return None


def describe_head_order_mismatch(stored: Sharding, wanted: Sharding) -> str | None:
    """Describe the difference in the order of heads between a saved array and its target, or return None if it is
    equal.

    If the keys and values are repeated as a whole, the order of the query heads depends on the number of copies. If
    neighbouring ranks hold the same copy, the order is the same as without copies.
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
    """Return True if an array consists of queries, keys and values: sections with sizes or with copies."""
    return any(split is not None and split.has_custom_sections for split in sharding.dims)


def find_copy_mismatch(sharding: Sharding, mesh: Mesh) -> tuple[int, int] | None:
    """Return the stored number of copies of a section and the number on this mesh, or None if they are equal.

    Copies on neighbouring ranks are ignored, because they do not change the order of the heads.

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
    """Return the sizes of the sections of a dim with `n` elements."""
    return [n // len(sections) if s.size is None else s.size for s in sections]


def _format_sizes(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))
