"""Infer how an array was sharded over the ranks, from rules, model attributes, the checkpoint, or shapes.

A split that is only inferred must be the only one that makes the wanted shape. Otherwise the array is unknown: a guess
would put its parts together in a wrong order without an error.
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
"""Keys and values, of which several ranks may hold the same. Of any other array a shape that does not fit is one."""

_SEPARATE_QKV_NAMES = re.compile(r"(weight|bias)_[qkv]$")
"""Queries, keys and values that are arrays of their own in a layer, whose name only looks fused."""

_QKV_NAMES = re.compile(r"qkv|query_key_value|w_pack|c_attn", re.IGNORECASE)
"""Of the fused ones those of three arrays: queries, keys and values. The others are of two."""

_QKV_RULE = "('tp', [Q, K, V])", "tp:Q+K+V", ", with the rows that the whole array has of queries, keys and values"
_PAIR_RULE = "('tp', 2)", "tp*2", ", if each rank has a part of each of 2 fused arrays"
"""How the split of a fused dim is said in Python and at the command line, and what is said of it."""

_DOCS_HINT = "docs/parallelism.md has those for fused arrays and for experts."

SHARDING_HINT = (
    "Say with model= (--like) what was saved, or give a rule such as shardings=[(r'up_proj', ('tp', None))] "
    f"(--sharding up_proj tp,_); {_DOCS_HINT}"
)

REPLICATED_RULE = f"shardings=[(r'{NAME_PLACEHOLDER}', None)] (--sharding '{NAME_PLACEHOLDER}' _)"
"""In the hint of an `UnreadableArray`: the rule that says that each rank has all of it."""


def is_declared(local: tuple[int, ...], hint: ArrayHint) -> bool:
    """Whether a rule, attributes or the tag say how an array was split. A shape alone says only how it may have been.

    Attributes also stay on weights that every rank has whole. So they say nothing about a tensor that already has the
    wanted shape.
    """
    return hint.sharding is not None and (hint.has_rule or hint.is_declared_in_tag or hint.shape != local)


def resolve_sharding(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, hint: ArrayHint
) -> Sharding | UnreadableArray:
    """How an array was split of which each rank of `mesh` has a tensor of the shape `local`.

    Of sections that several ranks held alike (keys and values) the shapes say how many ranks did. Which of them did is
    found out by `list_replica_orders`.
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
    """The first rule of those that make the shape of the model, as a hint; where there are none, one of that form.

    For queries, keys and values in one array it has no numbers: three parts of one size would fit other sizes, too, and
    mix their rows without an error.
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
    """How a tensor dim is split, as a person types it."""
    if split is None:
        return "_"
    axes = "+".join(split.axes)
    if split.has_custom_sections:
        return f"{axes}:{'+'.join(str(section.spec) for section in split.sections)}"
    return axes + ("" if split.is_plain else f"*{len(split.sections)}")


def _find_contradiction(
    name: str, sharding: Sharding, local: tuple[int, ...], mesh: Mesh, expert: bool | None, hint: ArrayHint
) -> UnreadableArray | None:
    """Why a rule cannot be true of an array: it makes another shape than the model has. None if it can.

    Without this a conversion would write half of an array, or twice as much. Attributes of the model itself are not
    doubted here: where they make another shape, a load says so.
    """
    if not hint.has_rule or hint.is_declared_in_tag or hint.shape is None:
        return None
    try:
        shape = sharding.map_local_shape(local, mesh, 0).shape
    except ValueError:
        return None  # it is refused, with the numbers, where the parts are put together
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
    """The same for what the files say of experts: parameters of a job without expert parallelism do not say it."""
    if expert is False:  # ranks that hold different experts hold the same of it
        return exclude_axes(sharding, ("ep", "dp"))
    dims = sharding.pad_dims(len(local))
    if mesh.ep == 1 or not dims or dims[0] is not None or "ep" in sharding.axes:
        return sharding
    if expert or (wanted is not None and wanted[:1] == (local[0] * mesh.ep,)):
        return replace(sharding, dims=(DimSharding(("ep",)), *dims[1:]))
    return sharding


def _is_consistent(split: DimSharding, n: int, ranks: int, total: int) -> bool:
    """Whether each rank has `n` of `total` elements with the copies that the program has."""
    try:
        return compute_global_size(n, ranks, split.sections) == total
    except ValueError:
        return False


def _fit_copies(name: str, sharding: Sharding, local: tuple[int, ...], mesh: Mesh, hint: ArrayHint) -> Sharding:
    """The same for the number of copies that the job had which wrote the tensors; the program may want another one."""
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
    """The same with so many copies of keys and values that each rank has `n` of `total` elements.

    Queries are held once, and keys and values behind them in equal numbers of copies. Where no number fits, the split
    stays as it is, and what does not fit is told.
    """
    queries, keys = split.sections[:1], split.sections[1:]
    if not keys:
        queries, keys = (), queries  # a single section is one of keys or values, and nothing else has to be counted
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
    """The ways in which ranks may have held copies of sections: repeated as a whole, or on neighbouring ranks.

    Where all ranks of an axis hold the same, both are one.
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
    # The order of the job that loads is the likelier one: it is looked at first.
    return sorted(candidates, key=lambda candidate: candidate != sharding)


def _infer_sharding(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...]
) -> Sharding | UnreadableArray:
    """How an array was split, from the shape that each rank has and the shape that is wanted.

    It counts as known only if a single split over ep and tp makes one shape of the other. A guess would put the parts
    together in a wrong order, without an error.
    """
    if len(wanted) != len(local):
        return Sharding()  # no split makes these shapes fit, and the load says so
    fitting = _find_fitting_shardings(local, mesh, expert, wanted)
    # The shape of a fused projection does not show whether a rank has one block of it, or one of each of its parts.
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
    """The splits over ep and tp that make the wanted shape of what each rank has."""
    if len(wanted) != len(local):
        return []
    # Experts are always stacked along the first dim, and no layer splits one dim over both.
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
    """The split of keys or values of which several tp ranks hold each row, if it makes the wanted shape."""
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
    """The sharding with the global size of each split dim, where the program says that local tensors are padded."""
    if not hint.shape_excludes_padding or hint.shape is None or len(hint.shape) != len(local):
        return sharding
    dims = sharding.pad_dims(len(local))
    return replace(sharding, shape=tuple(n if s is not None else None for n, s in zip(hint.shape, dims, strict=True)))
