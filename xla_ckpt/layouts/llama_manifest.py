"""A stored Llama-like model under other names: a manifest that finds its bytes as the arrays of Hugging Face's, or of
neuronx-distributed's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.llama_config import LlamaConfig
from xla_ckpt.layouts.llama_names import (
    EMBEDDING,
    HEAD,
    ArrayLink,
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
from xla_ckpt.plan.hints import ArrayHint
from xla_ckpt.plan.rearrange import Excerpt, Rearranged, rearranged
from xla_ckpt.plan.stored_shardings import sharding_of
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Section
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCopies:
    """What the caller says about keys and values that several ranks hold."""

    count: int | None = None
    """How many ranks hold each head: neuronx-distributed's `kv_size_multiplier`; None if the caller does not say."""

    adjacent: bool | None = None
    """Whether neighbouring ranks hold the same, as on trn2; None if the caller does not say."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A model under Hugging Face's names."""

    manifest: Manifest
    equal: tuple[str, str] | None = None
    """Leaf paths of the *stored* manifest: two arrays of which only the first goes along, because they have to be
    equal."""


def names_in_part(manifest: Manifest, part: str) -> dict[str, str]:
    """Leaf path of each array in a part of the state, shared ones under all their names, by its name there.

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
        raise UsageError("the checkpoint holds no arrays there", leaf=part)
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
        manifest: What is stored.
        part: Leaf path of the model in it.
        config: The sizes.
        copies: What the caller says.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration, or nothing says in which order
            the heads are.
        UsageError: What the caller says contradicts the checkpoint.
    """
    leaves = names_in_part(manifest, part)
    for name, leaf in leaves.items():
        check_shape(name, _record(leaf, manifest).shape, config, leaf)
    form = _form(leaves, manifest, config, copies)
    links_by_name: dict[str, list[ArrayLink]] = {}
    for name in leaves:
        _, called = hf_names(name)
        _check_sections(name, leaves[name], called, manifest, config)
        for hf in called:
            links_by_name[hf] = links(hf, config, replace(form, fuse_mlp=called != [name]))
    arrays = _arrays(links_by_name, leaves, manifest, config, to_hf=True)
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
        config: The sizes.
        form: How the job has the model.
        mesh: The job's ranks.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration.
        UsageError: The copies do not fit the heads, or the ranks.
    """
    check_heads(config, form, mesh)
    leaves = names_in_part(manifest, schema.MODEL)
    tied = config.tied and HEAD in leaves
    stored = {name: leaf for name, leaf in leaves.items() if not (tied and name == HEAD)}
    for name, leaf in leaves.items():
        check_shape(name, _record(leaf, manifest).shape, config, leaf)
    check_names(stored, config)
    links_by_name: dict[str, list[ArrayLink]] = {}
    for name in stored:
        for link in links(name, config, form):
            links_by_name.setdefault(link.theirs, []).append(link)
    arrays = _arrays(links_by_name, stored, manifest, config, to_hf=False)
    arrays = {name: record.changed(spec=split_of(name, config, form).spec) for name, record in arrays.items()}
    renamed = model_alone(manifest, arrays, {HEAD: EMBEDDING} if config.tied else {})
    return replace(renamed, mesh=str(mesh), world=mesh.size)


def reordered(manifest: Manifest, config: LlamaConfig, copies: KeyCopies, mesh: Mesh) -> Manifest:
    """The state of a job with its heads in the order of another `kv_size_multiplier`, optimizer states included.

    Args:
        manifest: What is stored, under the names of neuronx-distributed's examples.
        config: The sizes.
        copies: What the new job has; both are known.
        mesh: The new job's ranks.

    Raises:
        IncompatibleCheckpointError: Names or shapes are not those of the configuration, or nothing says in which order
            the heads are, or a state does not have the shape of its parameter.
        UsageError: The copies do not fit the heads, or the ranks.
    """
    leaves = names_in_part(manifest, schema.MODEL)
    old = _form(leaves, manifest, config, KeyCopies())
    count = copies.count or 1
    if count > 1 and copies.adjacent is None:
        raise unsaid_order(count)
    new = replace(old, copies=count, adjacent=count > 1 and bool(copies.adjacent))
    if new.copies > 1 and old.projection not in (Projection.LINEAR, Projection.FUSED):
        raise _no_copies(new.copies)
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


def check_heads(config: LlamaConfig, form: Form, mesh: Mesh) -> None:
    """Compare heads and copies with a job: every rank has whole heads, and keys for its queries.

    Raises:
        UsageError: They do not fit.
    """
    ranks, copies = mesh.tp, form.copies
    if ranks % copies:
        raise UsageError(
            "the copies of keys and values do not divide the tensor-parallel ranks",
            expected=f"a kv_size_multiplier that divides tp={ranks}",
            found=copies,
        )
    if config.heads % ranks:
        raise UsageError(
            "the attention heads do not divide over the tensor-parallel ranks",
            expected=config.heads,
            found=f"tp={ranks}",
        )
    if config.kv_heads * copies % ranks:
        raise UsageError(
            "the key-value heads do not divide over the tensor-parallel ranks",
            expected=f"{config.kv_heads} heads, each held by {ranks // config.kv_heads or 1} of {ranks} ranks",
            found=f"a kv_size_multiplier of {copies}",
            hint=f"Give LlamaJob(kv_size_multiplier={ranks // config.kv_heads}) (--kv-size-multiplier)."
            if ranks % config.kv_heads == 0
            else "Choose another tp.",
        )


def _record(leaf: str, manifest: Manifest) -> ArrayRecord:
    record = manifest.array(leaf)
    assert record is not None, leaf
    return record


def _form(leaves: Mapping[str, str], manifest: Manifest, config: LlamaConfig, copies: KeyCopies) -> Form:
    """In which form the projections are stored, and how often keys and values are held, which orders the heads.

    Raises:
        IncompatibleCheckpointError: Layers have different forms, or nothing says the order.
        UsageError: What the caller says contradicts the checkpoint.
    """
    forms = {projection: name for name in leaves if (projection := hf_names(name)[0]) is not None}
    if len(forms) > 1:
        raise IncompatibleCheckpointError(
            "the model has its projections in different forms",
            leaf=leaves[next(iter(forms.values()))],
            found=" and ".join(forms.values()),
        )
    projection = next(iter(forms), Projection.SEPARATE)
    if projection is Projection.STRIDED and config.group > 1:
        raise IncompatibleCheckpointError(
            "queries, keys and values of different sizes in one array of this name may be arranged in several ways",
            leaf=leaves[forms[projection]],
            expected=f"as many key-value heads as attention heads in {forms[projection]}",
            found=f"{config.heads} heads and {config.kv_heads} key-value heads",
        )
    if projection in (Projection.SEPARATE, Projection.STRIDED):
        if copies.count not in (None, 1):
            raise _no_copies(copies.count)
        return Form(projection=projection)
    stored = _stored_copies(leaves, manifest, config)
    count = copies.count if stored is None else stored[0]
    adjacent = copies.adjacent if stored is None or stored[1] is None else stored[1]
    if stored is not None and (copies.count not in (None, count) or copies.adjacent not in (None, adjacent)):
        raise UsageError(
            "the checkpoint says otherwise how often keys and values are held",
            expected=_called(count, adjacent),
            found=_called(copies.count, copies.adjacent),
        )
    ranks = Mesh.parse(manifest.mesh or "").tp
    if stored is not None and ranks > 1 and (config.heads % ranks or config.kv_heads * (count or 1) % ranks):
        raise IncompatibleCheckpointError(
            "the heads of config.json do not divide over the ranks that saved this",
            leaf=leaves[forms[projection]],
            expected=f"heads, and key-value heads with {count} copies, that divide over tp={ranks}",
            found=f"{config.heads} heads and {config.kv_heads} key-value heads",
            hint="Give the config.json of the model in this checkpoint.",
        )
    if count is None and config.group > 1:
        raise IncompatibleCheckpointError(
            "nothing says in which order the attention heads are stored",
            leaf=leaves[forms[projection]],
            expected="the kv_size_multiplier of the job that neuronx-distributed's names come from",
            hint="Give LlamaJob(kv_size_multiplier=...) (--kv-size-multiplier): 1 if no rank held a copy of another "
            "rank's keys. For a larger one trn2 is another order than trn1: LlamaJob(hardware=...) (--hardware).",
        )
    if (count or 1) > 1 and adjacent is None:
        raise unsaid_order(count)
    return Form(projection=projection, copies=count or 1, adjacent=bool(adjacent))


def unsaid_order(count: int | None) -> UsageError:
    """The error for copies of which nobody says which ranks hold the same."""
    return UsageError(
        "copies of keys and values are arranged otherwise on trn1 than on trn2",
        expected="LlamaJob(hardware=...) (--hardware): trn1 or trn2, of the job that has them",
        found=f"a kv_size_multiplier of {count}",
    )


def check_layers(leaves: Mapping[str, str], config: LlamaConfig) -> None:
    """Check that every layer of the configuration has its queries and its output projection there, and no other has.

    Raises:
        IncompatibleCheckpointError: It has not: they would stay in another order without a word.
    """
    names = [name for name in leaves if query_dim(name) is not None and name.endswith(("weight", "_q", "_qkv"))]
    for dim, what in ((0, "queries"), (1, "output projections")):
        count = sum(query_dim(name) == dim and "weight" in name.rpartition(".")[2] for name in names)
        if count != config.layers:
            raise IncompatibleCheckpointError(
                f"the {what} of the layers of config.json are not all there under the names of neuronx-distributed's "
                "Llama examples",
                leaf=schema.MODEL,
                expected=f"{config.layers}, called like model.layers.0.self_attn.qkv_proj.weight_q and o_proj.weight",
                found=count,
            )


def _called(count: int | None, adjacent: bool | None) -> str:
    """Copies as a caller names them."""
    hardware = "" if adjacent is None else ", trn2" if adjacent else ", trn1"
    return f"{'any' if count is None else count} kv_size_multiplier{hardware}"


def _no_copies(count: int | None) -> UsageError:
    return UsageError(
        "copies of keys and values are stored as qkv_proj.weight_qkv, or weight_q, weight_k and weight_v",
        expected="a kv_size_multiplier of 1",
        found=count,
    )


def _stored_copies(
    leaves: Mapping[str, str], manifest: Manifest, config: LlamaConfig
) -> tuple[int, bool | None] | None:
    """How many ranks held each head of keys, and whether neighbours did; None for what the checkpoint does not say.

    Raises:
        IncompatibleCheckpointError: Layers have different numbers.
    """
    counts: dict[tuple[int, bool | None], str] = {}
    ranks = Mesh.parse(manifest.mesh or "").tp
    # The files of a job show how many of its ranks held the same. In a tag of ours sections do, which a layer named. A
    # split without them says nothing: another kind of job may have loaded the model of one with copies.
    of_job = manifest.head.sequence == 0
    for name, leaf in leaves.items():
        projection, called = hf_names(name)
        if projection is None or not any(".k_proj." in hf or ".v_proj." in hf for hf in called):
            continue
        split = next(iter(sharding_of(leaf, manifest, ()).dims), None)
        last = split.sections[-1] if split is not None else Section(copies=ranks)
        if of_job or (split is not None and (last.size is not None or last.copies > 1)):
            # Where all ranks hold all keys, the files of a job do not show how it repeats them.
            shown = last.adjacent or last.copies == 1 or last.copies != ranks or config.kv_heads == 1
            counts.setdefault((last.copies, last.adjacent if shown else None), leaf)
    if len(counts) > 1:
        raise IncompatibleCheckpointError(
            "the layers have keys and values in different numbers of copies",
            leaf=next(iter(counts.values())),
            found=", ".join(f"{count} of {leaf}" for (count, _), leaf in counts.items()),
        )
    return next(iter(counts), None)


def _check_sections(name: str, leaf: str, parts: Sequence[str], manifest: Manifest, config: LlamaConfig) -> None:
    """Refuse a fused array of which the checkpoint says that ranks had it otherwise: its rows are in another order.

    Args:
        name: Its name.
        leaf: Its leaf path.
        parts: Hugging Face's names of what it consists of.
        manifest: What is stored.
        config: The sizes.

    Raises:
        IncompatibleCheckpointError: It does.
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


def _arrays(
    links_by_name: Mapping[str, Iterable[ArrayLink]],
    leaves: Mapping[str, str],
    manifest: Manifest,
    config: LlamaConfig,
    *,
    to_hf: bool,
) -> dict[str, ArrayRecord]:
    """The records of the new arrays that links make, by their names.

    Args:
        links_by_name: New name -> the links that it consists of.
        leaves: Leaf path of each stored array, by its name.
        manifest: What is stored.
        config: The sizes.
        to_hf: Whether the new names are Hugging Face's.
    """
    arrays = {}
    for name, parts in links_by_name.items():
        olds = [link.theirs if to_hf else link.hf for link in parts]
        missing = next((old for old in olds if old not in leaves), None)
        if missing is not None:
            raise IncompatibleCheckpointError("the checkpoint lacks a part of an array", leaf=name, expected=missing)
        shape = shape_of(name, config) or _record(leaves[olds[0]], manifest).shape
        whole = Box.whole(shape)
        pieces = []
        for link, old in zip(parts, olds, strict=True):
            new_first, old_first = (link.here, link.there) if to_hf else (link.there, link.here)
            if link.size is None:
                pieces.append(Excerpt(whole, leaves[old], whole))
                continue
            box = whole.along(link.dim, new_first, new_first + link.size)
            pieces.append(Excerpt(box, leaves[old], whole.along(link.dim, old_first, old_first + link.size)))
        arrays[name] = rearranged(schema.weight(name), Rearranged(shape=shape, parts=tuple(pieces)), manifest)
    return arrays


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
    )


def llama_hints(config: LlamaConfig) -> dict[str, ArrayHint]:
    """What a configuration says about each array that such a model may have, by its name.

    Most shapes show how an array was split. Of fused ones, and of keys and values, it is said. How many ranks held the
    same keys and values, and which ones, is found out from the files.
    """
    names = [EMBEDDING, HEAD, "model.norm.weight"]
    buffers = ["model.rotary_emb.inv_freq"]
    for i in range(config.layers):
        names += [f"model.layers.{i}.{name}" for name in _OF_LAYER]
        buffers.append(f"model.layers.{i}.self_attn.rotary_emb.inv_freq")
    # Their shape is not in the configuration, and every rank has them whole.
    hints = {name: ArrayHint(sharding=Sharding(), ruled=True) for name in buffers}
    for name in names:
        shape = shape_of(name, config)
        projection, called = hf_names(name)
        form = Form(projection=projection or Projection.SEPARATE)
        said = len(called) > 1 or projection is Projection.LINEAR
        hints[name] = ArrayHint(shape=shape, sharding=split_of(name, config, form) if said else None)
    return hints


_OF_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(
        f"{at}.{kind}"
        for at in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj")
        for kind in ("weight", "bias")
    ),
    *(f"self_attn.qkv_proj.{kind}_{what}" for kind in ("weight", "bias") for what in ("qkv", "q", "k", "v")),
    *(f"mlp.{at}_proj.{kind}" for at in ("gate", "up", "gate_up", "down") for kind in ("weight", "bias")),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
