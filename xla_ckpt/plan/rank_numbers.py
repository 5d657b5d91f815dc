"""Numbers that a model has for each rank of its job: which rank it is, and which experts are its own. Pure.

neuronx-distributed's `SPMDRank` keeps them as parameters that are not trained. They are true of one arrangement of the
ranks, and no part of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.records import Manifest, UnknownArray
from xla_ckpt.plan.stored_shardings import sharding_of_spec
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import number_of_parts
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema


def axes_of_numbers(dtype: DType, shape: Sequence[int], spec: Sequence[Any] | None, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which an array of a model has a row of integers for each rank; none if it is another array.

    >>> from xla_ckpt.dtypes import dtype
    >>> axes_of_numbers(dtype("int32"), (4, 2), (("dp", "cp", "tp"), None), Mesh(dp=2, tp=2))
    ('dp', 'cp', 'tp')
    >>> axes_of_numbers(dtype("int32"), (8, 2), ("tp", None), Mesh(tp=2))
    ()
    """
    if not dtype.integer:
        return ()
    for split, n in zip(sharding_of_spec(spec).over(len(shape)), shape, strict=True):
        if split is not None and n == number_of_parts(split.axes, mesh.sizes) > 1:
            return split.axes
    return ()


def has_numbers(array: ArrayRecord | UnknownArray, mesh: Mesh) -> bool:
    """Whether a stored array of a model has integers for each rank of the job that saved it (see `axes_of_numbers`).

    Of an array of which nobody knows how it was split each rank has a row.
    """
    if isinstance(array, UnknownArray):
        return array.dtype is not None and array.dtype.integer and array.shape is not None and array.shape[:1] == (1,)
    return bool(axes_of_numbers(array.dtype, array.shape, array.spec, mesh))


def same_numbers(axes: Sequence[str], one: Mesh, other: Mesh) -> bool:
    """Whether the ranks along these axes are arranged alike in two jobs, and so have the same numbers."""
    asked = {*axes, "ep"} if "dp" in axes else {*axes}
    return all(one.sizes[axis] == other.sizes[axis] for axis in asked)


def without_numbers(manifest: Manifest) -> tuple[Manifest, tuple[str, ...]]:
    """The same tag less what says something of each rank of the job that saved it, and the leaf paths of that."""
    mesh = Mesh.parse(manifest.mesh or "")
    stored: dict[str, ArrayRecord | UnknownArray] = {**manifest.arrays, **manifest.unknown}
    gone = {p for p, array in stored.items() if schema.member_of(p) == schema.MODEL and has_numbers(array, mesh)}
    model = manifest.skeleton.get(schema.MODEL) if isinstance(manifest.skeleton, dict) else None
    if not gone or not isinstance(model, dict):
        return manifest, ()
    left = {name: array for name, array in model.items() if paths.join(schema.MODEL, paths.escape(name)) not in gone}
    kept = replace(
        manifest,
        skeleton={**manifest.skeleton, schema.MODEL: left},
        arrays=Arrays.of({path: record for path, record in manifest.arrays.items() if path not in gone}),
        unknown={path: array for path, array in manifest.unknown.items() if path not in gone},
    )
    return kept, tuple(sorted(gone))
