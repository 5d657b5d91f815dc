"""Rewrite the manifest of a Llama-like model with other array names and another order of heads. Pure.

The new manifest maps the stored bytes to the arrays of Hugging Face or of neuronx-distributed. The order of the query
heads depends on the number of ranks that hold each key head: it is detected from the stored shardings, or given by the
caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from xla_ckpt.conversion.llama.config import CONFIG_HINT, LlamaConfig
from xla_ckpt.conversion.llama.names import (
    EMBEDDING_NAME,
    LM_HEAD_NAME,
    FusionScheme,
    Projection,
    SegmentMapping,
    build_mapped_arrays,
    check_names,
    check_shape,
    get_array_shape,
    get_hf_names,
    get_query_dim,
    get_query_order,
    get_sharding,
    get_stored_record,
    list_segments,
)
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.manifest_views import DerivedArray, SourceRegion, derive_array
from xla_ckpt.core.plan.stored_sharding import resolve_sharding
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import DimSharding, Section, Sharding
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReplication:
    """Replication of keys and values over ranks, as given by the caller."""

    count: int | None = None
    """Number of ranks that hold each head: `kv_size_multiplier` in neuronx-distributed; None if unknown."""

    adjacent: bool | None = None
    """True if adjacent ranks hold replicas of the same head, as on trn2; None if unknown."""


def detect_fusion_scheme(
    leaves: Mapping[str, str], manifest: Manifest, config: LlamaConfig, replication: KVReplication
) -> FusionScheme:
    """Return the form of the stored projections, and the replication of keys and values, which orders the heads.

    Raises:
        IncompatibleCheckpointError: Layers have different forms, or the order is unknown.
        UsageError: The arguments of the caller contradict the checkpoint.
    """
    forms = {projection: name for name in leaves if (projection := get_hf_names(name)[0]) is not None}
    if len(forms) > 1:
        raise IncompatibleCheckpointError(
            "the model has its projections in different forms",
            leaf=leaves[next(iter(forms.values()))],
            found=" and ".join(forms.values()),
        )
    projection = next(iter(forms), Projection.SEPARATE)
    if projection is Projection.STRIDED and config.queries_per_kv_head > 1:
        raise IncompatibleCheckpointError(
            "queries, keys and values of different sizes in one array of this name may be arranged in several ways",
            leaf=leaves[forms[projection]],
            expected=f"as many key-value heads as attention heads in {forms[projection]}",
            found=f"{config.heads} heads and {config.kv_heads} key-value heads",
        )
    if projection in (Projection.SEPARATE, Projection.STRIDED):
        if replication.count not in (None, 1):
            raise make_no_replication_error(replication.count)
        return FusionScheme(projection=projection)
    stored = _read_stored_replication(leaves, manifest, config)
    count = replication.count if stored is None else stored[0]
    adjacent = replication.adjacent if stored is None or stored[1] is None else stored[1]
    if stored is not None and (replication.count not in (None, count) or replication.adjacent not in (None, adjacent)):
        raise UsageError(
            "the checkpoint says otherwise how often keys and values are held",
            expected=_format_replication(count, adjacent),
            found=_format_replication(replication.count, replication.adjacent),
            hint="Leave kv_size_multiplier and hardware of LlamaJob(...) (--kv-size-multiplier, --hardware) out.",
        )
    ranks = Mesh.parse(manifest.mesh or "").tp
    if stored is not None and ranks > 1 and (config.heads % ranks or config.kv_heads * (count or 1) % ranks):
        raise IncompatibleCheckpointError(
            "the heads of config.json do not divide over the ranks that saved this",
            leaf=leaves[forms[projection]],
            expected=f"heads, and key-value heads with {count} copies, that divide over tp={ranks}",
            found=f"{config.heads} heads and {config.kv_heads} key-value heads",
            hint=CONFIG_HINT,
        )
    if count is None and config.queries_per_kv_head > 1:
        raise IncompatibleCheckpointError(
            "nothing says in which order the attention heads are stored",
            leaf=leaves[forms[projection]],
            expected="the kv_size_multiplier of the job that neuronx-distributed's names come from",
            hint="Give LlamaJob(kv_size_multiplier=...) (--kv-size-multiplier): 1 if no rank held a copy of another "
            "rank's keys. For a larger one trn2 is another order than trn1: LlamaJob(hardware=...) (--hardware).",
        )
    if (count or 1) > 1 and adjacent is None:
        raise make_unknown_order_error(count)
    return FusionScheme(projection=projection, copies=count or 1, adjacent=bool(adjacent))


def make_unknown_order_error(count: int | None) -> UsageError:
    """Return the error for replicas whose assignment to ranks is unknown."""
    return UsageError(
        "copies of keys and values are arranged otherwise on trn1 than on trn2",
        expected="LlamaJob(hardware=...) (--hardware): trn1 or trn2, of the job that has them",
        found=f"a kv_size_multiplier of {count}",
    )


def check_heads(config: LlamaConfig, scheme: FusionScheme, mesh: Mesh) -> None:
    """Check heads and replicas against a job: every rank needs complete heads, and the keys of its queries.

    Raises:
        UsageError: They do not match.
    """
    ranks, copies = mesh.tp, scheme.copies
    if ranks % copies:
        raise UsageError(
            "the copies of keys and values do not divide the tensor-parallel ranks",
            expected=f"a kv_size_multiplier that divides tp={ranks}",
            found=copies,
        )
    if config.heads % ranks:
        raise UsageError(
            "the attention heads do not divide over the tensor-parallel ranks",
            expected=f"a tp in mesh= (--mesh) that divides {config.heads} heads",
            found=f"tp={ranks}",
        )
    if config.kv_heads * copies % ranks:
        raise UsageError(
            "the key-value heads do not divide over the tensor-parallel ranks",
            expected=f"{config.kv_heads} heads, each held by {ranks // config.kv_heads or 1} of {ranks} ranks",
            found=f"a kv_size_multiplier of {copies}",
            hint=f"Give LlamaJob(kv_size_multiplier={ranks // config.kv_heads}) (--kv-size-multiplier)."
            if ranks % config.kv_heads == 0 and scheme.projection in (Projection.LINEAR, Projection.FUSED)
            else "Choose another tp in mesh= (--mesh).",
        )


def check_layers(leaves: Mapping[str, str], config: LlamaConfig) -> None:
    """Check that the layers of the configuration, and no others, contain queries and an output projection.

    Raises:
        IncompatibleCheckpointError: They do not: their heads would silently stay in the old order.
    """
    names = [name for name in leaves if get_query_dim(name) is not None and name.endswith(("weight", "_q", "_qkv"))]
    for dim, what in ((0, "queries"), (1, "output projections")):
        count = sum(get_query_dim(name) == dim and "weight" in name.rpartition(".")[2] for name in names)
        if count != config.layers:
            raise IncompatibleCheckpointError(
                f"the {what} of the layers of config.json are not all there under the names of neuronx-distributed's "
                "Llama examples",
                leaf=schema.MODEL,
                expected=f"{config.layers}, called like model.layers.0.self_attn.qkv_proj.weight_q and o_proj.weight",
                found=count,
            )


def _format_replication(count: int | None, adjacent: bool | None) -> str:
    """Format a replication with the names of the caller's arguments."""
    hardware = "" if adjacent is None else ", trn2" if adjacent else ", trn1"
    return f"{'any' if count is None else count} kv_size_multiplier{hardware}"


def make_no_replication_error(count: int | None) -> UsageError:
    """Return the error for replicas that the form of the projections does not support."""
    return UsageError(
        "copies of keys and values are stored as qkv_proj.weight_qkv, or weight_q, weight_k and weight_v",
        expected="a kv_size_multiplier of 1",
        found=count,
    )


def _read_stored_replication(
    leaves: Mapping[str, str], manifest: Manifest, config: LlamaConfig
) -> tuple[int, bool | None] | None:
    """Return the number of ranks that hold each key head, and True if they are adjacent; None for unknown values.

    Raises:
        IncompatibleCheckpointError: Layers have different numbers.
    """
    counts: dict[tuple[int, bool | None], str] = {}
    ranks = Mesh.parse(manifest.mesh or "").tp
    # The files of a job show how many of its ranks held replicas. In a tag of this library, sections that a layer
    # declared show it. A sharding without sections shows nothing, because another kind of job may have loaded a model
    # with replicas.
    of_job = manifest.header.sequence == 0
    for name, leaf in leaves.items():
        projection, called = get_hf_names(name)
        if projection is None or not any(".k_proj." in hf or ".v_proj." in hf for hf in called):
            continue
        split = next(iter(resolve_sharding(leaf, manifest, ()).dims), None)
        last = split.sections[-1] if split is not None else Section(copies=ranks)
        if of_job or (split is not None and (last.size is not None or last.copies > 1)):
            # If every rank holds all keys, the files of a job do not show the order of the replicas.
            shown = last.adjacent or last.copies == 1 or last.copies != ranks or config.kv_heads == 1
            counts.setdefault((last.copies, last.adjacent if shown else None), leaf)
    if len(counts) > 1:
        raise IncompatibleCheckpointError(
            "the layers have keys and values in different numbers of copies",
            leaf=next(iter(counts.values())),
            found=", ".join(f"{count} of {leaf}" for (count, _), leaf in counts.items()),
        )
    return next(iter(counts), None)


@dataclass(frozen=True, slots=True)
class RenamedModel:
    """Model under its Hugging Face names."""

    manifest: Manifest
    tied_pair: tuple[str, str] | None = None
    """Leaf paths in the *stored* manifest of two arrays that must be equal. Only the first is kept."""


def collect_leaves_by_name(manifest: Manifest, part: str) -> dict[str, str]:
    """Return the leaf path of each array in a part of the state by its name there. Tied arrays have all of their names.

    Raises:
        IncompatibleCheckpointError: The sharding of an array is unknown.
        UsageError: The part contains no arrays.
    """
    depth = len(paths.split(part))
    leaves = {}
    for leaf in (*manifest.arrays, *manifest.aliases, *manifest.unreadable):
        if paths.is_under(leaf, part) and leaf != part:
            manifest.find_array(leaf)  # raises if the sharding is unknown
            leaves[".".join(map(paths.unescape, paths.split(leaf)[depth:]))] = leaf
    if not leaves:
        hint = f"Leaf paths of its arrays begin with: {paths.format_top_parts(manifest.arrays)}."
        raise UsageError("the checkpoint holds no arrays there", leaf=part, hint=hint)
    return leaves


def check_shapes(manifest: Manifest, config: LlamaConfig) -> None:
    """Check the shapes of a stored model against a configuration.

    Raises:
        IncompatibleCheckpointError: A shape differs.
    """
    for leaf, record in manifest.arrays.items():
        if schema.get_member(leaf) == schema.MODEL:
            check_shape(paths.unescape(schema.strip_member(leaf)), record.shape, config, leaf)


def to_hugging_face(manifest: Manifest, part: str, config: LlamaConfig, replication: KVReplication) -> RenamedModel:
    """Return a model under its Hugging Face names, with the Hugging Face arrays and head order.

    Args:
        part: Leaf path of the model.

    Raises:
        IncompatibleCheckpointError: Names or shapes do not match the configuration, or the order of the heads is
            unknown.
        UsageError: The arguments of the caller contradict the checkpoint.
    """
    leaves = collect_leaves_by_name(manifest, part)
    for name, leaf in leaves.items():
        check_shape(name, get_stored_record(leaf, manifest).shape, config, leaf)
    form = detect_fusion_scheme(leaves, manifest, config, replication)
    links_by_name: dict[str, list[SegmentMapping]] = {}
    for name in leaves:
        _, called = get_hf_names(name)
        _check_sections(name, leaves[name], called, manifest, config)
        for hf in called:
            links_by_name[hf] = list_segments(hf, config, replace(form, fuse_mlp=called != [name]))
    arrays = build_mapped_arrays(chain.from_iterable(links_by_name.values()), leaves, manifest, to_hf=True)
    equal = None
    if config.tied and LM_HEAD_NAME in arrays and EMBEDDING_NAME in arrays:
        del arrays[LM_HEAD_NAME]
        if manifest.aliases.get(leaves[LM_HEAD_NAME], leaves[LM_HEAD_NAME]) != manifest.aliases.get(
            leaves[EMBEDDING_NAME], leaves[EMBEDDING_NAME]
        ):
            equal = leaves[EMBEDDING_NAME], leaves[LM_HEAD_NAME]
    check_names(arrays, config)
    return RenamedModel(make_model_manifest(manifest, arrays, {}), equal)


def to_fused(manifest: Manifest, config: LlamaConfig, scheme: FusionScheme, mesh: Mesh) -> Manifest:
    """Return a Hugging Face model under the names of the neuronx-distributed examples, as a job would save it.

    Args:
        manifest: Manifest of the stored model, with Hugging Face names.

    Raises:
        IncompatibleCheckpointError: Names or shapes do not match the configuration.
        UsageError: The replicas do not match the heads, or the ranks.
    """
    check_heads(config, scheme, mesh)
    leaves = collect_leaves_by_name(manifest, schema.MODEL)
    tied = config.tied and LM_HEAD_NAME in leaves
    stored = {name: leaf for name, leaf in leaves.items() if not (tied and name == LM_HEAD_NAME)}
    for name, leaf in leaves.items():
        check_shape(name, get_stored_record(leaf, manifest).shape, config, leaf)
    check_names(stored, config)
    parts = [link for name in stored for link in list_segments(name, config, scheme)]
    arrays = build_mapped_arrays(parts, stored, manifest, to_hf=False)
    arrays = {
        name: record.replace_metadata(spec=get_sharding(name, config, scheme).spec) for name, record in arrays.items()
    }
    renamed = make_model_manifest(manifest, arrays, {LM_HEAD_NAME: EMBEDDING_NAME} if config.tied else {})
    return replace(renamed, mesh=str(mesh), world_size=mesh.size)


def convert_head_order(manifest: Manifest, config: LlamaConfig, replication: KVReplication, mesh: Mesh) -> Manifest:
    """Return the state of a job with the head order of another `kv_size_multiplier`, including optimizer states.

    Args:
        manifest: Manifest of the stored state, with the names of the neuronx-distributed examples.
        replication: Replication in the new job; both fields are set.

    Raises:
        IncompatibleCheckpointError: Names or shapes do not match the configuration, or the order of the heads is
            unknown, or a state does not have the shape of its parameter.
        UsageError: The replicas do not match the heads, or the ranks.
    """
    leaves = collect_leaves_by_name(manifest, schema.MODEL)
    old = detect_fusion_scheme(leaves, manifest, config, KVReplication())
    count = replication.count or 1
    if count > 1 and replication.adjacent is None:
        raise make_unknown_order_error(count)
    new = replace(old, copies=count, adjacent=count > 1 and bool(replication.adjacent))
    if new.copies > 1 and old.projection not in (Projection.LINEAR, Projection.FUSED):
        raise make_no_replication_error(new.copies)
    check_heads(config, new, mesh)
    check_layers(leaves, config)
    moves = _plan_row_moves(config, old, new)
    arrays = dict(manifest.arrays)
    for leaf, record in manifest.arrays.items():
        owner = schema.get_parameter_path(leaf) or leaf
        if schema.get_member(owner) != schema.MODEL:
            continue
        name = paths.unescape(schema.strip_member(owner))
        dim = get_query_dim(name)
        projection, called = get_hf_names(name)
        if dim is None and (projection is None or len(called) != 1):
            continue
        shape = get_array_shape(name, config)
        if shape is None or record.shape in ((), (1,)):
            continue
        if record.shape != shape:
            raise IncompatibleCheckpointError(
                "a state of another shape than its parameter cannot be put into another order of heads",
                leaf=leaf,
                expected=list(shape),
                found=list(record.shape),
            )
        moved = record if dim is None else _move_queries(leaf, record, dim, moves, manifest)
        sharding = get_sharding(name, config, new)
        is_weight = owner == leaf
        arrays[leaf] = moved.replace_metadata(
            spec=sharding.spec if is_weight else _convert_spec(leaf, moved, sharding, manifest)
        )
    return replace(manifest, arrays=ArrayTable.from_records(arrays))


def _plan_row_moves(config: LlamaConfig, old: FusionScheme, new: FusionScheme) -> list[tuple[int, int, int]]:
    """Return (first row before, first row after, rows) of the queries for each head."""
    before, after = (_index_rows_by_head(config, form) for form in (old, new))
    return [(before[head], after[head], config.head_dim) for head in range(config.heads)]


def _index_rows_by_head(config: LlamaConfig, scheme: FusionScheme) -> dict[int, int]:
    """Return the first row of each query head, by its index in the Hugging Face order."""
    return {
        (hf_row + row) // config.head_dim: first + row
        for first, hf_row, size in get_query_order(config, scheme)
        for row in range(0, size, config.head_dim)
    }


def _move_queries(
    leaf: str, record: ArrayRecord, dim: int, moves: Sequence[tuple[int, int, int]], manifest: Manifest
) -> ArrayRecord:
    """Return the record of an array with reordered queries. Keys and values after them are not moved."""
    whole = Box.from_shape(record.shape)
    queries = sum(size for _, _, size in moves)
    parts = [
        SourceRegion(whole.slice_dim(dim, after, after + size), leaf, whole.slice_dim(dim, before, before + size))
        for before, after, size in moves
    ]
    if queries < record.shape[dim]:
        keys_and_values = whole.slice_dim(dim, queries, record.shape[dim])
        parts.append(SourceRegion(keys_and_values, leaf, keys_and_values))
    return derive_array(leaf, DerivedArray(shape=record.shape, regions=tuple(parts)), manifest)


def _convert_spec(leaf: str, record: ArrayRecord, sharding: Sharding, manifest: Manifest) -> tuple[object, ...]:
    """Return the spec of a state whose parameter has this sharding. The mesh axes of the state are kept."""
    ndim = len(record.shape)
    dims = (
        before if before is None or after is None else DimSharding(before.axes, after.sections)
        for before, after in zip(
            resolve_sharding(leaf, manifest, ()).pad_dims(ndim), sharding.pad_dims(ndim), strict=True
        )
    )
    return Sharding(tuple(dims)).spec


def _check_sections(name: str, leaf: str, parts: Sequence[str], manifest: Manifest, config: LlamaConfig) -> None:
    """Refuse a fused array that was saved with other sections than its parts, because its rows are in another order.

    Args:
        parts: Hugging Face names of the fused arrays.

    Raises:
        IncompatibleCheckpointError: The sections differ.
    """
    sharding = resolve_sharding(leaf, manifest, ())
    split = next(iter(sharding.dims), None)
    if len(parts) < 2 or split is None or Mesh.parse(manifest.mesh or "").tp == 1:
        return
    rows = (get_array_shape(name, config) or (0,))[0]
    expected = [(get_array_shape(part, config) or (0,))[0] for part in parts]
    sizes = [rows // len(split.sections) if s.size is None else s.size for s in split.sections]
    if sizes != expected:
        raise IncompatibleCheckpointError(
            f"the array is {' and '.join(parts)} in one, and was saved as if the ranks had other parts of it",
            leaf=leaf,
            expected=f"sections of {expected} rows",
            found=f"{sharding.spec}: {sizes} rows",
            hint="Its rows are in another order than its parts. Save it with these sections.",
        )


def make_model_manifest(manifest: Manifest, arrays: Mapping[str, ArrayRecord], aliases: Mapping[str, str]) -> Manifest:
    """Return a manifest that contains only a model with these arrays, in the files of another manifest.

    `aliases` maps further names to names of arrays.
    """
    names = [*arrays, *aliases]
    skeleton: dict[str, Any] = {schema.MODEL: {name: {"$array": "torch"} for name in names}}
    return replace(
        manifest,
        skeleton=skeleton,
        arrays=ArrayTable.from_records({schema.get_weight_path(name): record for name, record in arrays.items()}),
        aliases={schema.get_weight_path(name): schema.get_weight_path(of) for name, of in aliases.items()},
        object_files=(),
        unreadable={},
        module_metadata={},
    )
