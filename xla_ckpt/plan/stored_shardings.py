"""Where the arrays of a stored state would lie on a mesh other than the one that saved it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Parsed, decided
from xla_ckpt.sharding.sections import local_size
from xla_ckpt.sharding.sharding import SPLIT_AXES, Sharding, Split, number_of_parts
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import BY_SHAPE, StateRule
from xla_ckpt.tree.skeleton import children

DEALT = ("dp", "edp", "cp")
"""Mesh axes over which a ZeRO-1 optimizer may deal out rows."""


def parameters_in(manifest: Manifest) -> frozenset[str] | None:
    """The path components of the parameters that a stored optimizer has; None where it does not name them.

    Other members of its state belong to no parameter (``optimizer/state/k``).
    """
    return schema.named_owners((children(manifest.skeleton) or {}).get(schema.OPTIMIZER))


def sharding_of(leaf: str, manifest: Manifest, rules: Parsed) -> Sharding:
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
    record = manifest.array(leaf)
    if record is None:
        raise ValueError("no such array is stored")
    owner = schema.parameter_of(leaf)
    if (ruled := rule_for(leaf, rules)) is not None:
        return _ruled(ruled, record, None if owner is None else manifest.array(owner), state=owner is not None)
    return stored_sharding(record)


def rule_for(leaf: str, rules: Parsed) -> Sharding | None:
    """What a rule says of an array, or of the parameter whose state it is; None if none does."""
    name = schema.parameter_of(leaf) or leaf
    return decided(rules, name, schema.below_member(name))


def _ruled(ruled: Sharding, record: ArrayRecord, parameter: ArrayRecord | None, *, state: bool) -> Sharding:
    shape = record.shape if parameter is None else parameter.shape
    if state and parameter is None and not shape:
        return Sharding()
    if len(ruled.dims) > len(shape):
        raise ValueError(f"a rule splits {len(ruled.dims)} dims, the array has {len(shape)}")
    if state and all(d is None for d in BY_SHAPE.dims_over(shape, record.shape)):
        return stored_sharding(record)
    return state_sharding(ruled, BY_SHAPE, shape, record.shape)


def stored_sharding(record: ArrayRecord) -> Sharding:
    """How an array was split when it was saved, over the axes that a mesh has."""
    return sharding_of_spec(record.spec)


def foreign_axes(spec: Sequence[Any] | None) -> set[str]:
    """Names in a spec of axes that no mesh has: those of a DTensor's or a jax array's own mesh.

    >>> foreign_axes(["tp", ["dp", "x"], None])
    {'x'}
    """
    names = [name for entry in spec or () for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return {name for name in names if isinstance(name, str) and name not in SPLIT_AXES}


def sharding_of_spec(spec: Sequence[Any] | None) -> Sharding:
    """The sharding that a spec describes, over the axes that a mesh has."""
    dims: list[Split | None] = []
    for entry in spec or ():
        names: tuple[Any, ...] = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        axes = tuple(n for n in names if n in SPLIT_AXES)
        parts = [n for n in names if not isinstance(n, str)]
        dims += Sharding.parse([[*axes, *parts[:1]]]).dims if axes else [None]
    return Sharding(tuple(dims))


def local_array_of(leaf: str, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, rank: int) -> LocalArray:
    """Where a rank's part of an array lies.

    Rows that a ZeRO-1 optimizer deals out are cut after tensor parallelism has cut them, as it does.

    Raises:
        ValueError: The sharding does not fit.
    """
    dealt = rows_of(sharding) if schema.member_of(leaf) == schema.OPTIMIZER else ()
    if not dealt:
        return sharding.part(shape, mesh, rank)
    base, local = even(without_axes(sharding, dealt), shape, mesh)
    return base.zero1(local, mesh, rank, dealt)


def state_sharding(split: Sharding, rule: StateRule, full: Sequence[int], shape: Sequence[int]) -> Sharding:
    """How state of the local shape `shape` is split, of a parameter of the local shape `full` that is split like this.

    Raises:
        ValueError: The state cannot have this shape.

    >>> state_sharding(Sharding.parse(("tp", None)), BY_SHAPE, (4, 6), (4, 1)).spec
    ('tp', None)
    >>> state_sharding(Sharding.parse(("tp",)), BY_SHAPE, (4,), ()).spec
    ()
    """
    dims = rule.dims_over(full, shape)
    if all(d is None for d in dims):
        return Sharding()
    over = split.over(len(full))
    true = None if split.shape is None else tuple(None if d is None else split.shape[d] for d in dims)
    return Sharding(tuple(None if d is None else over[d] for d in dims), true)


def rows_of(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes over which the rows of a state are dealt out."""
    first = sharding.dims[0] if sharding.dims else None
    return () if first is None else tuple(a for a in first.axes if a in DEALT)


def without_axes(sharding: Sharding, axes: Sequence[str]) -> Sharding:
    """The same, unsplit over these axes."""
    dims: list[Split | None] = []
    for split in sharding.dims:
        kept = () if split is None else tuple(a for a in split.axes if a not in axes)
        dims.append(Split(kept, split.sections) if split is not None and kept else None)
    return Sharding(tuple(dims), sharding.shape)


def even(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding of an array into equal local tensors, whose ends may be padding, and their shape.

    Raises:
        ValueError: Sections do not divide: they cannot be padded.
    """
    dims = sharding.over(len(shape))
    local = tuple(_even(n, split, mesh) for split, n in zip(dims, shape, strict=True))
    return Sharding(sharding.dims, shape), local


def _even(n: int, split: Split | None, mesh: Mesh) -> int:
    ranks = 1 if split is None else number_of_parts(split.axes, mesh.sizes)
    return -(-n // ranks) if split is None or split.plain else local_size(n, ranks, split.sections)
