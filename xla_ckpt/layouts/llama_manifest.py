"""A stored Llama-like model under other names: a manifest that finds its bytes as the arrays of Hugging Face's, or of
neuronx-distributed's. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.array_links import ArrayLink, arrays_of_links, stored_record
from xla_ckpt.layouts.llama_config import LlamaConfig
from xla_ckpt.layouts.llama_heads import KeyCopies, check_heads, check_layers, no_copies, stored_form, unsaid_order
from xla_ckpt.layouts.llama_names import (
    EMBEDDING,
    HEAD,
    Form,
    Projection,
    check_names,
    check_shape,
    hf_names,
    links,
    query_dim,
    query_order,
    shape_of,
    split_of,
)
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.rearrange import Excerpt, Rearranged, rearranged
from xla_ckpt.plan.stored_shardings import sharding_of
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True)
class Renamed:
    """A model under Hugging Face's names."""

    manifest: Manifest
    equal: tuple[str, str] | None = None
    """Leaf paths of the *stored* manifest: two arrays of which only the first goes along, because they have to be
    equal."""


def names_in_part(manifest: Manifest, part: str) -> dict[str, str]:
    """Leaf path of each array in a part of the state, tied ones under all their names, by its name there.

    Raises:
        IncompatibleCheckpointError: Nothing says how one of them was split.
    """
    depth = len(paths.split(part))
    leaves = {}
    for leaf in (*manifest.arrays, *manifest.aliases, *manifest.unknown):
        if paths.is_under(leaf, part) and leaf != part:
            manifest.array(leaf)  # this raises
            leaves[".".join(map(paths.unescape, paths.split(leaf)[depth:]))] = leaf
    if not leaves:
        hint = f"Leaf paths of its arrays begin with: {paths.tops(manifest.arrays)}."
        raise UsageError("the checkpoint holds no arrays there", leaf=part, hint=hint)
    return leaves


def check_shapes(manifest: Manifest, config: LlamaConfig) -> None:
    """Compare the shapes of a stored model with a configuration.

    Raises:
        IncompatibleCheckpointError: One is another.
    """
    for leaf, record in manifest.arrays.items():
        if schema.member_of(leaf) == schema.MODEL:
            check_shape(paths.unescape(schema.below_member(leaf)), record.shape, config, leaf)


def to_hugging_face(manifest: Manifest, part: str, config: LlamaConfig, copies: KeyCopies) -> Renamed:
    """A model under Hugging Face's names, with its arrays and the order of its heads.

    Args:
        part: Leaf path of the model in it.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration, or nothing says in which order
            the heads are.
        UsageError: What the caller says contradicts the checkpoint.
    """
    leaves = names_in_part(manifest, part)
    for name, leaf in leaves.items():
        check_shape(name, stored_record(leaf, manifest).shape, config, leaf)
    form = stored_form(leaves, manifest, config, copies)
    links_by_name: dict[str, list[ArrayLink]] = {}
    for name in leaves:
        _, called = hf_names(name)
        _check_sections(name, leaves[name], called, manifest, config)
        for hf in called:
            links_by_name[hf] = links(hf, config, replace(form, fuse_mlp=called != [name]))
    arrays = arrays_of_links(chain.from_iterable(links_by_name.values()), leaves, manifest, to_hf=True)
    equal = None
    if config.tied and HEAD in arrays and EMBEDDING in arrays:
        del arrays[HEAD]
        if manifest.aliases.get(leaves[HEAD], leaves[HEAD]) != manifest.aliases.get(
            leaves[EMBEDDING], leaves[EMBEDDING]
        ):
            equal = leaves[EMBEDDING], leaves[HEAD]
    check_names(arrays, config)
    return Renamed(model_alone(manifest, arrays, {}), equal)


def to_fused(manifest: Manifest, config: LlamaConfig, form: Form, mesh: Mesh) -> Manifest:
    """A model of Hugging Face's under the names of neuronx-distributed's examples, as a job would have saved it.

    Args:
        manifest: What is stored, under Hugging Face's names.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration.
        UsageError: The copies do not fit the heads, or the ranks.
    """
    check_heads(config, form, mesh)
    leaves = names_in_part(manifest, schema.MODEL)
    tied = config.tied and HEAD in leaves
    stored = {name: leaf for name, leaf in leaves.items() if not (tied and name == HEAD)}
    for name, leaf in leaves.items():
        check_shape(name, stored_record(leaf, manifest).shape, config, leaf)
    check_names(stored, config)
    parts = [link for name in stored for link in links(name, config, form)]
    arrays = arrays_of_links(parts, stored, manifest, to_hf=False)
    arrays = {name: record.changed(spec=split_of(name, config, form).spec) for name, record in arrays.items()}
    renamed = model_alone(manifest, arrays, {HEAD: EMBEDDING} if config.tied else {})
    return replace(renamed, mesh=str(mesh), world=mesh.size)


def reordered(manifest: Manifest, config: LlamaConfig, copies: KeyCopies, mesh: Mesh) -> Manifest:
    """The state of a job with its heads in the order of another `kv_size_multiplier`, optimizer states included.

    Args:
        manifest: What is stored, under the names of neuronx-distributed's examples.
        copies: What the new job has; both are known.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration, or nothing says in which order
            the heads are, or a state does not have the shape of its parameter.
        UsageError: The copies do not fit the heads, or the ranks.
    """
    leaves = names_in_part(manifest, schema.MODEL)
    old = stored_form(leaves, manifest, config, KeyCopies())
    count = copies.count or 1
    if count > 1 and copies.adjacent is None:
        raise unsaid_order(count)
    new = replace(old, copies=count, adjacent=count > 1 and bool(copies.adjacent))
    if new.copies > 1 and old.projection not in (Projection.LINEAR, Projection.FUSED):
        raise no_copies(new.copies)
    check_heads(config, new, mesh)
    check_layers(leaves, config)
    moves = _moves(config, old, new)
    arrays = dict(manifest.arrays)
    for leaf, record in manifest.arrays.items():
        owner = schema.parameter_of(leaf) or leaf
        if schema.member_of(owner) != schema.MODEL:
            continue
        name = paths.unescape(schema.below_member(owner))
        dim = query_dim(name)
        projection, called = hf_names(name)
        if dim is None and (projection is None or len(called) != 1):
            continue
        shape = shape_of(name, config)
        if shape is None or record.shape in ((), (1,)):
            continue
        if record.shape != shape:
            raise IncompatibleCheckpointError(
                "a state of another shape than its parameter cannot be put into another order of heads",
                leaf=leaf,
                expected=list(shape),
                found=list(record.shape),
            )
        moved = record if dim is None else _moved(leaf, record, dim, moves, manifest)
        sharding = split_of(name, config, new)
        is_weight = owner == leaf
        arrays[leaf] = moved.changed(spec=sharding.spec if is_weight else _respelled(leaf, moved, sharding, manifest))
    return replace(manifest, arrays=Arrays.of(arrays))


def _moves(config: LlamaConfig, old: Form, new: Form) -> list[tuple[int, int, int]]:
    """(first row before, first row after, rows) of the queries, head by head."""
    before, after = (_rows_by_head(config, form) for form in (old, new))
    return [(before[head], after[head], config.head_dim) for head in range(config.heads)]


def _rows_by_head(config: LlamaConfig, form: Form) -> dict[int, int]:
    """The first row of each head of queries, by its number in Hugging Face's order."""
    return {
        (hf_row + row) // config.head_dim: first + row
        for first, hf_row, size in query_order(config, form)
        for row in range(0, size, config.head_dim)
    }


def _moved(
    leaf: str, record: ArrayRecord, dim: int, moves: Sequence[tuple[int, int, int]], manifest: Manifest
) -> ArrayRecord:
    """The record of an array whose queries lie elsewhere; what is behind them, keys and values, stays."""
    whole = Box.whole(record.shape)
    queries = sum(size for _, _, size in moves)
    parts = [
        Excerpt(whole.along(dim, after, after + size), leaf, whole.along(dim, before, before + size))
        for before, after, size in moves
    ]
    if queries < record.shape[dim]:
        keys_and_values = whole.along(dim, queries, record.shape[dim])
        parts.append(Excerpt(keys_and_values, leaf, keys_and_values))
    return rearranged(leaf, Rearranged(shape=record.shape, parts=tuple(parts)), manifest)


def _respelled(leaf: str, record: ArrayRecord, sharding: Sharding, manifest: Manifest) -> tuple[object, ...]:
    """How a state of a parameter that is split like `sharding` is split: over the axes that it was before."""
    ndim = len(record.shape)
    dims = (
        before if before is None or after is None else Split(before.axes, after.sections)
        for before, after in zip(sharding_of(leaf, manifest, ()).over(ndim), sharding.over(ndim), strict=True)
    )
    return Sharding(tuple(dims)).spec


def _check_sections(name: str, leaf: str, parts: Sequence[str], manifest: Manifest, config: LlamaConfig) -> None:
    """Refuse a fused array of which the checkpoint says that ranks had it otherwise: its rows are in another order.

    Args:
        parts: Hugging Face's names of what it consists of.
    """
    sharding = sharding_of(leaf, manifest, ())
    split = next(iter(sharding.dims), None)
    if len(parts) < 2 or split is None or Mesh.parse(manifest.mesh or "").tp == 1:
        return
    rows = (shape_of(name, config) or (0,))[0]
    expected = [(shape_of(part, config) or (0,))[0] for part in parts]
    sizes = [rows // len(split.sections) if s.size is None else s.size for s in split.sections]
    if sizes != expected:
        raise IncompatibleCheckpointError(
            f"the array is {' and '.join(parts)} in one, and was saved as if the ranks had other parts of it",
            leaf=leaf,
            expected=f"sections of {expected} rows",
            found=f"{sharding.spec}: {sizes} rows",
            hint="Its rows are in another order than its parts. Save it with these sections.",
        )


def model_alone(manifest: Manifest, arrays: Mapping[str, ArrayRecord], shared: Mapping[str, str]) -> Manifest:
    """A manifest that has a model of these arrays and nothing else, in the files of another one.

    `shared` has further names of arrays.
    """
    names = [*arrays, *shared]
    skeleton: dict[str, Any] = {schema.MODEL: {name: {"$array": "torch"} for name in names}}
    return replace(
        manifest,
        skeleton=skeleton,
        arrays=Arrays.of({schema.weight(name): record for name, record in arrays.items()}),
        aliases={schema.weight(name): schema.weight(of) for name, of in shared.items()},
        objects=(),
        unknown={},
        module_metadata={},
    )
