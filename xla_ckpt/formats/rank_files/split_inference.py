"""Infer how an array was sharded over the ranks, from rules, model attributes, the checkpoint, or shapes.

An inferred sharding must be the only one that produces the requested shape. Otherwise the array is unreadable, because
a guess could assemble its parts in a wrong order without an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from xla_ckpt.core.manifest.manifest import NAME_PLACEHOLDER, UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint
from xla_ckpt.core.plan.stored_sharding import exclude_axes
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import DimSharding, Sharding, compute_global_size, count_parts

_FUSED_NAMES = re.compile(r"qkv|gate_up|up_gate|query_key_value|dense_h_to_4h|w_pack|c_attn|\bkv_proj", re.IGNORECASE)
_KV_NAMES = re.compile(r"(weight|bias)_[kv]$|(^|\.)[kv]_proj\.|(^|\.)(key|value)s?(_proj)?\.")
"""Pattern of keys and values, which may be replicated on several ranks. For any other array, a shape that does not fit
is an error."""

_SEPARATE_QKV_NAMES = re.compile(r"(weight|bias)_[qkv]$")
"""Pattern of queries, keys and values that are separate arrays, although the name of their layer looks fused."""

_QKV_NAMES = re.compile(r"qkv|query_key_value|w_pack|c_attn", re.IGNORECASE)
"""Pattern of arrays that fuse queries, keys and values. Other fused arrays consist of two arrays."""

_QKV_RULE = "('tp', [Q, K, V])", "tp:Q+K+V", ", with the rows that the whole array has of queries, keys and values"
_PAIR_RULE = "('tp', 2)", "tp*2", ", if each rank has a part of each of 2 fused arrays"
"""Rules for a fused dim in Python and at the command line, and a remark on them."""

_DOCS_HINT = "docs/parallelism.md has those for fused arrays and for experts."

SHARDING_HINT = (
    "Say with model= (--like) what was saved, or give a rule such as shardings=[(r'up_proj', ('tp', None))] "
    f"(--sharding up_proj tp,_); {_DOCS_HINT}"
)

REPLICATED_RULE = f"shardings=[(r'{NAME_PLACEHOLDER}', None)] (--sharding '{NAME_PLACEHOLDER}' _)"
"""Rule for a replicated array, for the hint of an `UnreadableArray`."""


def is_declared(local: tuple[int, ...], hint: ArrayHint) -> bool:
    """Return True if a rule, attributes or the checkpoint declare the sharding. A shape alone only limits the
    possibilities.

    Attributes also remain on weights that every rank has in full. Therefore they are ignored for a tensor that already
    has the requested shape.
    """
    return hint.sharding is not None and (hint.has_rule or hint.is_declared_in_tag or hint.shape != local)


def resolve_sharding(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, hint: ArrayHint
) -> Sharding | UnreadableArray:
    """Resolve the sharding of an array of which each rank of `mesh` has a tensor of the shape `local`.

    For sections that several ranks replicate (keys and values), the shapes determine the number of replicas.
    `list_replica_orders` lists the possible orders of the replicas.

    Returns:
        The sharding; an `UnreadableArray` if it is unknown or contradicts the model.
    """
    if hint.problem is not None:
        return hint.problem
    if hint.sharding is not None and is_declared(local, hint):
        sharding = hint.sharding if hint.has_rule else _add_expert_split(hint.sharding, local, mesh, expert, hint.shape)
        if not hint.has_rule and not hint.is_declared_in_tag:
            sharding = _fit_copies(name, sharding, local, mesh, hint)
        sharding = _set_unpadded_size(sharding, local, hint)
        return _find_contradiction(name, sharding, local, mesh, expert, hint) or sharding
    if mesh.tp == mesh.ep == 1 or not local or hint.shape == local:
        return Sharding()
    if hint.shape is None:
        return _make_ambiguous_array(
            "nothing says what the whole is", f"{SHARDING_HINT} If each rank has all of it, give {REPLICATED_RULE}."
        )
    return _infer_sharding(name, local, mesh, expert, hint.shape)


def _suggest_rule(name: str, ndim: int, fitting: Sequence[Sharding]) -> str:
    """Return a hint with the first sharding that produces the shape of the model, or an example rule if none fits.

    For fused queries, keys and values the rule has no numbers: three parts of equal size would also fit other sizes,
    and mix their rows without an error.
    """
    plain = DimSharding(("tp",))
    sharding = next((split for split in fitting if split.axes), Sharding((plain,)))
    dims, where = sharding.pad_dims(ndim), ""
    specs, words = [*map(repr, Sharding(dims).spec)], [*map(_format_split, dims)]
    if plain in dims and _is_fused(name):
        dim = dims.index(plain)
        specs[dim], words[dim], where = _QKV_RULE if _QKV_NAMES.search(name) else _PAIR_RULE
    spec = f"({', '.join(specs)}{',' * (ndim == 1)})"
    rule = f"shardings=[(r'{NAME_PLACEHOLDER}', {spec})] (--sharding '{NAME_PLACEHOLDER}' '{','.join(words)}')"
    return f"Give a rule such as {rule}{where}; {_DOCS_HINT}"


def _format_split(split: DimSharding | None) -> str:
    """Format the sharding of a tensor dim in command-line syntax."""
    if split is None:
        return "_"
    axes = "+".join(split.axes)
    if split.has_custom_sections:
        return f"{axes}:{'+'.join(str(section.spec) for section in split.sections)}"
    return axes + ("" if split.is_plain else f"*{len(split.sections)}")


def _find_contradiction(
    name: str, sharding: Sharding, local: tuple[int, ...], mesh: Mesh, expert: bool | None, hint: ArrayHint
) -> UnreadableArray | None:
    """Return the reason why a rule contradicts the shape of the model; None if it does not.

    Without this check a conversion would write half of an array, or twice as much. Attributes of the model itself are
    not checked here: if they produce another shape, the load raises an error.
    """
    if not hint.has_rule or hint.is_declared_in_tag or hint.shape is None:
        return None
    try:
        shape = sharding.map_local_shape(local, mesh, 0).shape
    except ValueError:
        return None  # raises an error with the numbers when the parts are assembled
    if shape == hint.shape:
        return None
    fitting = _find_fitting_shardings(local, mesh, expert, hint.shape) or _find_replicated_shardings(
        name, local, mesh, hint.shape
    )
    return UnreadableArray(
        problem=f"the rule {hint.rule_text} makes {list(shape)} of what the ranks have, "
        f"the model has {list(hint.shape)}",
        hint=_suggest_rule(name, len(local), fitting)
        if any(split.axes for split in fitting)
        else "Correct the rule, or give the model that was saved, with the shape of the whole array.",
    )


def _add_expert_split(
    sharding: Sharding, local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...] | None
) -> Sharding:
    """Add the expert-parallel sharding, which the parameters of a job without expert parallelism do not declare."""
    if expert is False:  # it is replicated on ranks that hold different experts
        return exclude_axes(sharding, ("ep", "dp"))
    dims = sharding.pad_dims(len(local))
    if mesh.ep == 1 or not dims or dims[0] is not None or "ep" in sharding.axes:
        return sharding
    if expert or (wanted is not None and wanted[:1] == (local[0] * mesh.ep,)):
        return replace(sharding, dims=(DimSharding(("ep",)), *dims[1:]))
    return sharding


def _is_consistent(split: DimSharding, n: int, ranks: int, total: int) -> bool:
    """Return True if each rank has `n` of `total` elements with the number of replicas that the program uses."""
    try:
        return compute_global_size(n, ranks, split.sections) == total
    except ValueError:
        return False


def _fit_copies(name: str, sharding: Sharding, local: tuple[int, ...], mesh: Mesh, hint: ArrayHint) -> Sharding:
    """Set the number of replicas that the writing job used; the program may use another one."""
    if hint.shape is None or len(hint.shape) != len(local) or hint.shape_excludes_padding:
        return sharding
    dims = list(sharding.pad_dims(len(local)))
    for dim, split in enumerate(dims):
        if split is None or (split.is_plain and not _KV_NAMES.search(name)):
            continue
        ranks = count_parts(split.axes, mesh.sizes)
        if not _is_consistent(split, local[dim], ranks, hint.shape[dim]):
            dims[dim] = _infer_copies(split, local[dim], ranks, hint.shape[dim])
    return replace(sharding, dims=tuple(dims))


def _infer_copies(split: DimSharding, n: int, ranks: int, total: int) -> DimSharding:
    """Set the number of KV replicas so that each rank has `n` of `total` elements.

    Queries are not replicated; the keys and values that follow them have equal numbers of replicas. If no number fits,
    the split is unchanged, and the mismatch raises an error later.
    """
    queries, keys = split.sections[:1], split.sections[1:]
    if not keys:
        queries, keys = (), queries  # a single section contains keys or values, without queries
    rows = sum(section.size or 0 for section in queries)
    if total <= rows or (queries and rows == 0):
        return split
    copies, remainder = divmod(n * ranks - rows, total - rows)
    if remainder or copies < 1 or ranks % copies:
        return split
    held_once = (replace(section, copies=1, adjacent=False) for section in queries)
    copied = (replace(section, copies=copies, adjacent=section.adjacent and copies > 1) for section in keys)
    return DimSharding(split.axes, (*held_once, *copied))


def list_replica_orders(sharding: Sharding, mesh: Mesh) -> list[Sharding]:
    """Return the possible orders of replicated sections: repeated as a whole, or on neighbouring ranks.

    If all ranks of an axis are replicas, both orders are the same.
    """
    candidates = []
    for adjacent in (False, True):
        dims: list[DimSharding | None] = []
        for split in sharding.dims:
            if split is None or not split.has_copies:
                dims.append(split)
                continue
            ranks = count_parts(split.axes, mesh.sizes)
            sections = (replace(s, adjacent=adjacent and 1 < s.copies < ranks) for s in split.sections)
            dims.append(DimSharding(split.axes, tuple(sections)))
        candidate = replace(sharding, dims=tuple(dims))
        if candidate not in candidates:
            candidates.append(candidate)
    # The order of the loading job is the most likely one, so it comes first.
    return sorted(candidates, key=lambda candidate: candidate != sharding)


def _infer_sharding(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...]
) -> Sharding | UnreadableArray:
    """Infer the sharding of an array from its local shape and the requested shape.

    The result is accepted only if exactly one sharding over ep and tp fits both shapes. A guess could assemble the
    parts in a wrong order without an error.
    """
    if len(wanted) != len(local):
        return Sharding()  # no sharding fits these shapes, and the load raises an error
    fitting = _find_fitting_shardings(local, mesh, expert, wanted)
    # The shape of a fused projection does not show whether a rank has one block of it, or one block of each part.
    if len(fitting) == 1 and not ("tp" in fitting[0].axes and _is_fused(name)):
        return fitting[0]
    hint = _suggest_rule(name, len(local), fitting or _find_replicated_shardings(name, local, mesh, wanted))
    if not fitting:
        return UnreadableArray(
            problem=f"no split over {mesh.tp} tp (and {mesh.ep} ep) ranks makes the wanted shape of what each has",
            hint=f"If the model, or the config.json, is that of this checkpoint, say how the array was split. {hint}",
            expected=str(list(wanted)),
        )
    if len(fitting) > 1:
        return _make_ambiguous_array(
            f"{list(local)} of each rank makes the wanted shape in {len(fitting)} ways", hint, wanted
        )
    why = "by its name it is fused, and nothing says in how many strided blocks each rank has it"
    return _make_ambiguous_array(why, hint, wanted)


def _is_fused(name: str) -> bool:
    return bool(_FUSED_NAMES.search(name)) and not _SEPARATE_QKV_NAMES.search(name)


def _find_fitting_shardings(
    local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...]
) -> list[Sharding]:
    """Return the shardings over ep and tp that produce the requested shape from the local shape."""
    if len(wanted) != len(local):
        return []
    # Experts are always stacked along the first dim, and no layer shards one dim over both axes.
    of_ep: list[int | None] = [0] if expert else [None] if expert is False or mesh.ep == 1 else [None, 0]
    of_tp: list[int | None] = [None] if mesh.tp == 1 else [None, *range(len(local))]
    candidates = [
        Sharding(
            tuple(
                DimSharding(("ep",)) if d == ep else DimSharding(("tp",)) if d == tp else None
                for d in range(len(local))
            )
        )
        for ep in of_ep
        for tp in of_tp
        if ep is None or ep != tp
    ]
    return [sharding for sharding in candidates if sharding.map_local_shape(local, mesh, 0).shape == wanted]


def _find_replicated_shardings(
    name: str, local: tuple[int, ...], mesh: Mesh, wanted: tuple[int, ...]
) -> list[Sharding]:
    """Return the sharding of keys or values that several tp ranks replicate, if it produces the requested shape."""
    if not _KV_NAMES.search(name) or len(wanted) != len(local):
        return []
    dims = [_infer_copies(DimSharding(("tp",)), n, mesh.tp, total) for n, total in zip(local, wanted, strict=True)]
    candidates = [Sharding((*[None] * dim, split)) for dim, split in enumerate(dims) if split.has_copies]
    return [sharding for sharding in candidates if sharding.map_local_shape(local, mesh, 0).shape == wanted]


def _make_ambiguous_array(why: str, hint: str, wanted: tuple[int, ...] | None = None) -> UnreadableArray:
    return UnreadableArray(
        problem=f"it is ambiguous how this array was split over the ranks: {why}",
        hint=hint,
        expected=None if wanted is None else str(list(wanted)),
    )


def _set_unpadded_size(sharding: Sharding, local: tuple[int, ...], hint: ArrayHint) -> Sharding:
    """Set the global size of each sharded dim, if the program declares that local tensors are padded."""
    if not hint.shape_excludes_padding or hint.shape is None or len(hint.shape) != len(local):
        return sharding
    dims = sharding.pad_dims(len(local))
    return replace(sharding, shape=tuple(n if s is not None else None for n, s in zip(hint.shape, dims, strict=True)))
