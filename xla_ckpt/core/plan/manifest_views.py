"""Views of a manifest: one module as the model, master weights as weights, rank numbers excluded, or derived arrays.

A shard is a box of an array and the location of its bytes. Therefore an array that consists of parts of stored ones is
a record with other boxes: no bytes are moved, and readers load and verify it like any other array. Rank numbers are
untrained parameters that neuronx-distributed's `SPMDRank` stores. They describe an arrangement of ranks, not a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.plan.stored_sharding import parse_stored_spec
from xla_ckpt.core.sharding.box import Box, ParentBox
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import count_parts
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import get_children, get_part
from xla_ckpt.errors import IncompatibleCheckpointError


def extract_module(manifest: Manifest, module_path: str) -> Manifest | None:
    """Return a manifest whose model is one module of the stored model, or None if there is no such module.

    Model state is stored flat: the array ``w`` of the module ``master`` is ``model/master.w``.

    Args:
        manifest: Manifest of the checkpoint.
        module_path: Leaf path of the module, such as ``model/master``.

    Raises:
        IncompatibleCheckpointError: The sharding of one of its arrays is unknown.
    """
    top = get_children(manifest.skeleton) or {}
    model = get_children(top.get(schema.MODEL)) or {}
    prefix = module_path.removeprefix(f"{schema.MODEL}/") + "."
    names = {name: paths.unescape(name.removeprefix(prefix)) for name in model if name.startswith(prefix)}
    if not names:
        return None
    new = {paths.join(schema.MODEL, old): schema.get_weight_path(name) for old, name in names.items()}
    arrays: dict[str, ArrayRecord] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for old, leaf in new.items():
        record, stored = manifest.find_array(old), manifest.aliases.get(old, old)
        if record is not None and first.setdefault(stored, leaf) == leaf:
            arrays[leaf] = record
        elif record is not None:
            aliases[leaf] = first[stored]
    # A checkpoint that contains only adapters keeps its record of the base model.
    base = {schema.BASE: top[schema.BASE]} if schema.BASE in top else {}
    return replace(
        manifest,
        skeleton={schema.MODEL: {name: model[old] for old, name in names.items()}, **base},
        arrays=ArrayTable.from_records(arrays),
        aliases=aliases,
        unreadable={},
        module_metadata=_extract_metadata(manifest, prefix),
        unwritten=tuple(new[leaf] for leaf in manifest.unwritten if leaf in new),
    )


def _extract_metadata(manifest: Manifest, prefix: str) -> dict[str, dict[str, Any]]:
    """Return the metadata of a module and its submodules, under names relative to the module."""
    of_model = manifest.module_metadata.get(schema.MODEL, {})
    alone = {f"{name}."[len(prefix) : -1]: of for name, of in of_model.items() if f"{name}.".startswith(prefix)}
    return {schema.MODEL: alone} if alone else {}


def find_top_modules(manifest: Manifest) -> dict[str, dict[str, tuple[int, ...] | None]]:
    """Map the leaf path of each top-level module of a stored model to its array names and their shapes, if known."""
    modules: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for leaf in (*manifest.arrays, *manifest.aliases, *manifest.unreadable):
        if schema.get_member(leaf) == schema.MODEL:
            record = None if leaf in manifest.unreadable else manifest.find_array(leaf)
            module, _, name = leaf.partition(".")
            modules.setdefault(module, {})[name] = None if record is None else record.shape
    return modules


def find_model_copies(manifest: Manifest) -> list[str]:
    """Return the leaf paths of a stored model's top-level modules if all have arrays of the same names and shapes.

    This is true for a model with its master weights or their average. Layers of equal size are excluded: they have
    numbers as names, or no submodules.
    """
    modules = find_top_modules(manifest)
    names = next(iter(modules.values()), {})
    alike = len(modules) > 1 and all(other == names for other in modules.values())
    are_layers = all(path.rpartition("/")[2].isdecimal() for path in modules) or not any("." in name for name in names)
    return [] if are_layers or not alike else [*modules]


def has_master_weights(manifest: Manifest) -> bool:
    """Return True if a checkpoint contains the optimizer's master weights by parameter name."""
    try:
        get_part(manifest.skeleton, paths.join(schema.OPTIMIZER, schema.MASTER))
    except KeyError:
        return False
    return True


def use_master_weights(manifest: Manifest, hints: LoadHints) -> Manifest:
    """Return a manifest that maps weights to their master weights, if the target's dtype matches only the master
    weights.

    Only applies if the optimizer is requested: loading only a model returns the weights that it had.
    """
    if not hints.wants_optimizer:
        return manifest
    arrays, masters = manifest.arrays, {}
    for name, hint in hints.arrays.items():
        leaf = manifest.aliases.get(schema.get_weight_path(name), schema.get_weight_path(name))
        stored, master = arrays.get(leaf), arrays.get(schema.get_master_path(name))
        if stored is None or master is None or stored.shape != master.shape:
            continue
        if hint.dtype == master.dtype.name and hint.dtype != stored.dtype.name:
            masters[leaf] = master.replace_metadata(spec=stored.spec)  # master weights may also be sharded over dp
    if not masters:
        return manifest
    return replace(
        manifest, arrays=ArrayTable.from_records({leaf: masters.get(leaf, record) for leaf, record in arrays.items()})
    )


def find_rank_axes(dtype: DType, shape: Sequence[int], spec: Sequence[Any] | None, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which a model array has a row of integers per rank, or an empty tuple for other
    arrays.

    >>> from xla_ckpt.core.dtypes import get_dtype
    >>> find_rank_axes(get_dtype("int32"), (4, 2), (("dp", "cp", "tp"), None), Mesh(dp=2, tp=2))
    ('dp', 'cp', 'tp')
    >>> find_rank_axes(get_dtype("int32"), (8, 2), ("tp", None), Mesh(tp=2))
    ()
    """
    if not dtype.is_integer:
        return ()
    for split, n in zip(parse_stored_spec(spec).pad_dims(len(shape)), shape, strict=True):
        if split is not None and n == count_parts(split.axes, mesh.sizes) > 1:
            return split.axes
    return ()


def has_rank_numbers(array: ArrayRecord | UnreadableArray, mesh: Mesh) -> bool:
    """Return True if a stored model array has integers for each rank of the job that saved it (see `find_rank_axes`).

    An array of unknown sharding is assumed to have them if each rank stored one row of integers.
    """
    if isinstance(array, UnreadableArray):
        return (
            array.dtype is not None and array.dtype.is_integer and array.shape is not None and array.shape[:1] == (1,)
        )
    return bool(find_rank_axes(array.dtype, array.shape, array.spec, mesh))


def has_same_rank_numbers(axes: Sequence[str], mesh: Mesh, other_mesh: Mesh) -> bool:
    """Return True if two jobs arrange the ranks along these axes in the same way, so that rank numbers are equal."""
    asked = {*axes, "ep"} if "dp" in axes else {*axes}
    return all(mesh.sizes[axis] == other_mesh.sizes[axis] for axis in asked)


def exclude_rank_numbers(manifest: Manifest) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest without rank numbers of the job that saved it, and the leaf paths of the excluded arrays."""
    mesh = Mesh.parse(manifest.mesh or "")
    stored: dict[str, ArrayRecord | UnreadableArray] = {**manifest.arrays, **manifest.unreadable}
    gone = {p for p, array in stored.items() if schema.get_member(p) == schema.MODEL and has_rank_numbers(array, mesh)}
    model = manifest.skeleton.get(schema.MODEL) if isinstance(manifest.skeleton, dict) else None
    if not gone or not isinstance(model, dict):
        return manifest, ()
    left = {name: array for name, array in model.items() if paths.join(schema.MODEL, paths.escape(name)) not in gone}
    kept = replace(
        manifest,
        skeleton={**manifest.skeleton, schema.MODEL: left},
        arrays=ArrayTable.from_records({path: record for path, record in manifest.arrays.items() if path not in gone}),
        unreadable={path: array for path, array in manifest.unreadable.items() if path not in gone},
    )
    return kept, tuple(sorted(gone))


@dataclass(frozen=True, slots=True)
class SourceRegion:
    """A region of a derived array and its source in a stored array."""

    box: Box
    """Region of the derived array."""

    leaf: str
    """Leaf path of the stored array."""

    source_box: Box
    """Region of the stored array, of the same shape."""

    def __post_init__(self) -> None:
        if self.box.shape != self.source_box.shape:
            raise ValueError(f"{self.source_box} of {self.leaf} cannot be {self.box} of another array")


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedArray:
    """Definition of an array that is derived from stored ones."""

    shape: tuple[int, ...]
    regions: tuple[SourceRegion, ...]
    """Disjoint regions that together cover the whole array."""

    spec: tuple[object, ...] | None = None
    """Sharding in the job (see `xla_ckpt.core.sharding.sharding.Sharding.spec`), or None."""


def derive_array(leaf: str, array: DerivedArray, manifest: Manifest) -> ArrayRecord:
    """Create the record of a derived array.

    Args:
        leaf: Leaf path of the array, for errors.
        array: Definition of the array.
        manifest: Manifest of the checkpoint.

    Raises:
        IncompatibleCheckpointError: A source array is not stored or its sharding is unknown, or the sources have
            different dtypes.
        FormatError: The regions do not contain every element exactly once.
    """
    sources = {part.leaf: manifest.get_array(part.leaf) for part in array.regions}
    types = {record.dtype.name: name for name, record in sources.items()}
    if len(types) != 1:
        raise IncompatibleCheckpointError(
            "it would be made of arrays of different element types",
            leaf=leaf,
            found=", ".join(f"{name} in {dtype_name}" for name, dtype_name in types.items()) or "no arrays at all",
        )
    shards = [shard for part in array.regions for shard in _derive_shards(part, sources[part.leaf])]
    first, *others = sources.values()
    united = create_array_record(first.dtype, array.shape, shards, array.spec)
    meant = first.original_dtype if all(record.original_dtype == first.original_dtype for record in others) else None
    return united.replace_metadata(
        original_dtype=meant, is_rank_local=any(record.is_rank_local for record in sources.values())
    )


def _derive_shards(source: SourceRegion, record: ArrayRecord) -> Iterator[Shard]:
    """Yield the stored shards of a source region, with their boxes in the derived array."""
    offset = tuple(new - old for new, old in zip(source.box.start, source.source_box.start, strict=True))
    for shard in record.find_overlapping(source.source_box):
        region = shard.box.intersect(source.source_box)
        if region is None:
            continue
        whole = shard.parent_box or shard.box
        box = region.translate(offset)
        # The checksums of a region cover all of it, so a part of it keeps the location of the whole region.
        frame = None if region == whole else ParentBox(whole.start, whole.stop).translate(offset)
        yield Shard(box, shard.file, shard.offset, frame)
