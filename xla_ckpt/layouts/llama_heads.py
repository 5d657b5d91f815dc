"""In which order the heads of a stored Llama-like model are, and how many ranks had the same keys and values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.llama_config import OTHER_CONFIG, LlamaConfig
from xla_ckpt.layouts.llama_names import Form, Projection, hf_names, query_dim
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.stored_shardings import sharding_of
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Section
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCopies:
    """What the caller says about keys and values that several ranks hold."""

    count: int | None = None
    """How many ranks hold each head: neuronx-distributed's `kv_size_multiplier`; None if the caller does not say."""

    adjacent: bool | None = None
    """Whether neighbouring ranks hold the same, as on trn2; None if the caller does not say."""


def stored_form(leaves: Mapping[str, str], manifest: Manifest, config: LlamaConfig, copies: KeyCopies) -> Form:
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
            raise no_copies(copies.count)
        return Form(projection=projection)
    stored = _stored_copies(leaves, manifest, config)
    count = copies.count if stored is None else stored[0]
    adjacent = copies.adjacent if stored is None or stored[1] is None else stored[1]
    if stored is not None and (copies.count not in (None, count) or copies.adjacent not in (None, adjacent)):
        raise UsageError(
            "the checkpoint says otherwise how often keys and values are held",
            expected=_called(count, adjacent),
            found=_called(copies.count, copies.adjacent),
            hint="Leave kv_size_multiplier and hardware of LlamaJob(...) (--kv-size-multiplier, --hardware) out.",
        )
    ranks = Mesh.parse(manifest.mesh or "").tp
    if stored is not None and ranks > 1 and (config.heads % ranks or config.kv_heads * (count or 1) % ranks):
        raise IncompatibleCheckpointError(
            "the heads of config.json do not divide over the ranks that saved this",
            leaf=leaves[forms[projection]],
            expected=f"heads, and key-value heads with {count} copies, that divide over tp={ranks}",
            found=f"{config.heads} heads and {config.kv_heads} key-value heads",
            hint=OTHER_CONFIG,
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
            expected=f"a tp in mesh= (--mesh) that divides {config.heads} heads",
            found=f"tp={ranks}",
        )
    if config.kv_heads * copies % ranks:
        raise UsageError(
            "the key-value heads do not divide over the tensor-parallel ranks",
            expected=f"{config.kv_heads} heads, each held by {ranks // config.kv_heads or 1} of {ranks} ranks",
            found=f"a kv_size_multiplier of {copies}",
            hint=f"Give LlamaJob(kv_size_multiplier={ranks // config.kv_heads}) (--kv-size-multiplier)."
            if ranks % config.kv_heads == 0 and form.projection in (Projection.LINEAR, Projection.FUSED)
            else "Choose another tp in mesh= (--mesh).",
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


def no_copies(count: int | None) -> UsageError:
    """The error for copies that a form of the projections has no place for."""
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
