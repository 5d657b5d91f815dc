"""Map array names, shapes and regions of Llama-like models between Hugging Face and neuronx-distributed. Pure.

neuronx-distributed fuses projections: ``gate_up_proj`` is gate and up, ``qkv_proj`` is queries, keys and values. If
several ranks hold the same keys and values (``kv_size_multiplier``), the query heads and the columns of ``o_proj`` are
reordered: the queries of a key head are distributed in turn to the ranks that hold it. A `SegmentMapping` maps a range
of elements of one array to the same elements of another.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from xla_ckpt.conversion.llama.config import CONFIG_HINT, LlamaConfig
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import ArrayHint
from xla_ckpt.core.plan.manifest_views import DerivedArray, SourceRegion, derive_array
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.sharding import ParsedRules, Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMapping:
    """Range of elements along one dim that a Hugging Face array and a job array have in common."""

    job_name: str
    """Name in the job."""

    hf_name: str
    """Name in Hugging Face."""

    dim: int = 0
    """Tensor dim along which the arrays are split; all other dims are complete in both."""

    job_offset: int = 0
    """Index of the first element along that dim in the array of the job."""

    hf_offset: int = 0
    """Index of the first element along that dim in the Hugging Face array."""

    size: int | None = None
    """Number of elements along that dim; None for all."""


def group_query_rows(heads: int, kv_heads: int, copies: int, head_size: int) -> list[tuple[int, int, int]]:
    """Return (first row in the job, first row in the Hugging Face order, rows) of queries that are contiguous in both.

    Ranks hold all keys and values, once per replica. The queries of each key head are divided evenly among its
    replicas.

    >>> group_query_rows(8, 2, 2, 1)
    [(0, 0, 2), (2, 4, 2), (4, 2, 2), (6, 6, 2)]
    """
    if copies == 1 or kv_heads == 1:
        return [(0, 0, heads * head_size)]
    rows = heads // kv_heads // copies * head_size
    firsts = [(head * copies + copy) * rows for copy in range(copies) for head in range(kv_heads)]
    return [(i * rows, first, rows) for i, first in enumerate(firsts)]


def build_mapped_arrays(
    segments: Iterable[SegmentMapping], leaves: Mapping[str, str], manifest: Manifest, *, to_hf: bool
) -> dict[str, ArrayRecord]:
    """Return the records of new arrays that consist of these segments, by name.

    Args:
        segments: All segments of each new array.
        leaves: Leaf path of each stored array, by name.
        to_hf: True to convert from the names of the job to the Hugging Face names; False for the reverse.

    Raises:
        IncompatibleCheckpointError: A part of an array is not stored, or its sharding is unknown.
    """
    parts: dict[str, list[SegmentMapping]] = {}
    for link in segments:
        parts.setdefault(link.hf_name if to_hf else link.job_name, []).append(link)
    return {
        name: derive_array(
            schema.get_weight_path(name), _compose_array(name, of_name, leaves, manifest, to_hf=to_hf), manifest
        )
        for name, of_name in parts.items()
    }


def _compose_array(
    name: str, segments: list[SegmentMapping], leaves: Mapping[str, str], manifest: Manifest, *, to_hf: bool
) -> DerivedArray:
    """Return the regions of a new array. Its size along the other dims is taken from the stored arrays."""
    olds = [link.job_name if to_hf else link.hf_name for link in segments]
    missing = next((old for old in olds if old not in leaves), None)
    if missing is not None:
        raise IncompatibleCheckpointError("the checkpoint lacks a part of an array", leaf=name, expected=missing)
    wholes = [Box.from_shape(get_stored_record(leaves[old], manifest).shape) for old in olds]
    firsts = [(link.hf_offset, link.job_offset) if to_hf else (link.job_offset, link.hf_offset) for link in segments]
    whole = wholes[0]
    if segments[0].size is not None:
        stop = max(new + (link.size or 0) for link, (new, _) in zip(segments, firsts, strict=True))
        whole = whole.slice_dim(segments[0].dim, 0, stop)
    pieces = []
    for link, old, stored, (new, at) in zip(segments, olds, wholes, firsts, strict=True):
        box, source = whole, stored
        if link.size is not None:
            box, source = (
                whole.slice_dim(link.dim, new, new + link.size),
                stored.slice_dim(link.dim, at, at + link.size),
            )
        pieces.append(SourceRegion(box, leaves[old], source))
    return DerivedArray(shape=whole.shape, regions=tuple(pieces))


def get_stored_record(leaf: str, manifest: Manifest) -> ArrayRecord:
    """Return the record of a stored array. Each of its leaf paths is accepted."""
    record = manifest.find_array(leaf)
    assert record is not None, leaf
    return record


EMBEDDING_NAME = "model.embed_tokens.weight"
LM_HEAD_NAME = "lm_head.weight"

_QKV = re.compile(r"(?P<at>.*self_attn\.)(?P<what>[qkv])_proj\.(?P<kind>weight|bias)")
_FUSED_QKV = re.compile(r"(?P<at>.*self_attn\.)qkv_proj\.(?P<kind>weight|bias)(?:_(?P<what>qkv|q|k|v))?")
_GATE_UP = re.compile(r"(?P<at>.*mlp\.)(?P<what>gate|up)_proj\.(?P<kind>weight|bias)")
_FUSED_GATE_UP = re.compile(r"(?P<at>.*mlp\.)gate_up_proj\.(?P<kind>weight|bias)")
_OUTPUT = re.compile(r".*self_attn\.o_proj\.weight")
_BUFFER = re.compile(r"(?:.*\.)?rotary_emb\.\w+")


_QUERIES = re.compile(r".*self_attn\.qkv_proj\.(?:weight|bias)_(?:q|qkv)")


def get_query_dim(name: str) -> int | None:
    """Return the tensor dim of the query heads in a neuronx-distributed array; None if it contains no queries.

    Queries come first along this dim.
    """
    return 0 if _QUERIES.fullmatch(name) is not None else 1 if _OUTPUT.fullmatch(name) is not None else None


class Projection(enum.Enum):
    """Form in which the projections of queries, keys and values are stored."""

    SEPARATE = "q_proj.weight, k_proj.weight, v_proj.weight"
    STRIDED = "qkv_proj.weight"
    LINEAR = "qkv_proj.weight_q, qkv_proj.weight_k, qkv_proj.weight_v"
    FUSED = "qkv_proj.weight_qkv"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionScheme:
    """Form of a Llama-like model in neuronx-distributed."""

    projection: Projection
    copies: int = 1
    """Number of ranks that hold each key-value head: `kv_size_multiplier` in neuronx-distributed."""

    adjacent: bool = False
    """True if adjacent ranks hold the same head, as on trn2. The queries are in the Hugging Face order in that case."""

    fuse_mlp: bool = True
    """True if gate and up are fused into one array."""


def get_query_order(config: LlamaConfig, scheme: FusionScheme) -> list[tuple[int, int, int]]:
    """Return (first row in the job, first row in the Hugging Face order, rows) of queries that are contiguous in both.

    Raises:
        UsageError: The replicas do not divide the queries of a key head.
    """
    if scheme.adjacent:
        return [(0, 0, config.q_rows)]
    if config.queries_per_kv_head % scheme.copies:
        raise UsageError(
            "the queries of each key-value head cannot be divided among its copies",
            expected=f"a kv_size_multiplier that divides {config.queries_per_kv_head}, the attention heads for each "
            "key-value head",
            found=scheme.copies,
        )
    return group_query_rows(config.heads, config.kv_heads, scheme.copies, config.head_dim)


def list_segments(hf: str, config: LlamaConfig, scheme: FusionScheme) -> list[SegmentMapping]:
    """Return the segments of an array in neuronx-distributed, given its Hugging Face name.

    Raises:
        UsageError: As `get_query_order`.
    """
    if (match := _QKV.fullmatch(hf)) is not None and scheme.projection is not Projection.SEPARATE:
        return list(_list_qkv_segments(hf, match["at"], match["what"], match["kind"], config, scheme))
    if (match := _GATE_UP.fullmatch(hf)) is not None and scheme.fuse_mlp:
        first = config.intermediate if match["what"] == "up" else 0
        name = f"{match['at']}gate_up_proj.{match['kind']}"
        return [SegmentMapping(job_name=name, hf_name=hf, job_offset=first, size=config.intermediate)]
    order = get_query_order(config, scheme)
    if _OUTPUT.fullmatch(hf) is not None and len(order) > 1:
        return [SegmentMapping(job_name=hf, hf_name=hf, dim=1, job_offset=a, hf_offset=b, size=n) for a, b, n in order]
    return [SegmentMapping(job_name=hf, hf_name=hf)]


def _list_qkv_segments(
    hf: str, at: str, what: str, kind: str, config: LlamaConfig, scheme: FusionScheme
) -> Iterator[SegmentMapping]:
    first = {"q": 0, "k": config.q_rows, "v": config.q_rows + config.kv_rows}[what]
    name = f"{at}qkv_proj.{kind}"
    if scheme.projection is Projection.LINEAR:
        name, first = f"{name}_{what}", 0
    elif scheme.projection is Projection.FUSED:
        name = f"{name}_qkv"
    parts = get_query_order(config, scheme) if what == "q" else [(0, 0, config.kv_rows)]
    for offset, hf_first, size in parts:
        yield SegmentMapping(job_name=name, hf_name=hf, job_offset=first + offset, hf_offset=hf_first, size=size)


def get_hf_names(name: str) -> tuple[Projection | None, list[str]]:
    """Return the Hugging Face names of the parts of a neuronx-distributed array; empty for an unsaved buffer.

    The projection is the form that the name belongs to; None if the array is not a projection of queries, keys or
    values.
    """
    if (match := _FUSED_QKV.fullmatch(name)) is not None:
        at, kind, what = match["at"], match["kind"], match["what"]
        if what in ("q", "k", "v"):
            return Projection.LINEAR, [f"{at}{what}_proj.{kind}"]
        projection = Projection.STRIDED if what is None else Projection.FUSED
        return projection, [f"{at}{each}_proj.{kind}" for each in "qkv"]
    if _QKV.fullmatch(name) is not None:
        return Projection.SEPARATE, [name]
    if (match := _FUSED_GATE_UP.fullmatch(name)) is not None:
        return None, [f"{match['at']}{each}_proj.{match['kind']}" for each in ("gate", "up")]
    return None, [] if _BUFFER.fullmatch(name) else [name]


_MODEL_DIMS = {EMBEDDING_NAME: ("vocab", "hidden"), LM_HEAD_NAME: ("vocab", "hidden"), "model.norm.weight": ("hidden",)}

_PROJECTION_DIMS = {
    "self_attn.q_proj": ("q", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "q"),
    "mlp.gate_proj": ("intermediate", "hidden"),
    "mlp.up_proj": ("intermediate", "hidden"),
    "mlp.down_proj": ("hidden", "intermediate"),
}
"""Dims of the Hugging Face projections: rows of the weight (equal to the rows of the bias), and columns."""

_NORM_DIMS = {"input_layernorm.weight": ("hidden",), "post_attention_layernorm.weight": ("hidden",)}

_LAYER_DIMS: dict[str, tuple[str, ...]] = {
    **_NORM_DIMS,
    **{f"self_attn.{what}_norm.weight": ("head",) for what in "qk"},
    **{f"{at}.weight": dims for at, dims in _PROJECTION_DIMS.items()},
    **{f"{at}.bias": dims[:1] for at, dims in _PROJECTION_DIMS.items()},
}
for _suffix, _rows in (("", "qkv"), ("_qkv", "qkv"), ("_q", "q"), ("_k", "kv"), ("_v", "kv")):
    _LAYER_DIMS[f"self_attn.qkv_proj.weight{_suffix}"] = (_rows, "hidden")
    _LAYER_DIMS[f"self_attn.qkv_proj.bias{_suffix}"] = (_rows,)
_LAYER_DIMS |= {"mlp.gate_up_proj.weight": ("gate_up", "hidden"), "mlp.gate_up_proj.bias": ("gate_up",)}
"""Dims of each array of a layer, under the names of both libraries."""


def _get_dims(name: str) -> tuple[str, ...] | None:
    parts = name.split(".")
    known = (_LAYER_DIMS.get(".".join(parts[-3:])), _LAYER_DIMS.get(".".join(parts[-2:])))
    return _MODEL_DIMS.get(name) or known[0] or known[1]


def get_sharding(name: str, config: LlamaConfig, scheme: FusionScheme) -> Sharding:
    """Return the sharding of an array in a tensor-parallel neuronx-distributed job."""
    copies = "" if scheme.copies == 1 else f"x{scheme.copies}{' adjacent' if scheme.adjacent else ''}"
    kv = f"{config.kv_rows}{copies}" if copies else config.kv_rows
    linear = scheme.projection in (Projection.LINEAR, Projection.FUSED)
    axes: dict[str, object] = dict.fromkeys(("vocab", "q", "intermediate"), "tp")
    axes["kv"] = ("tp", [kv]) if linear else "tp"
    axes["qkv"] = ("tp", 3) if scheme.projection is Projection.STRIDED else ("tp", [config.q_rows, kv, kv])
    axes["gate_up"] = ("tp", 2)
    dims = [axes.get(dim) for dim in _get_dims(name) or ()]
    return Sharding.parse(dims if any(dim is not None for dim in dims) else None)


def build_sharding_rules(config: LlamaConfig) -> ParsedRules:
    """Return the sharding rules of a tensor-parallel job for such a model, without replicated key-value heads."""
    names = {name: re.escape(name) for name in _MODEL_DIMS}
    names |= {f"model.layers.0.{name}": rf"model\.layers\.\d+\.{re.escape(name)}" for name in _LAYER_DIMS}
    forms = {name: FusionScheme(projection=get_hf_names(name)[0] or Projection.SEPARATE) for name in names}
    return [(re.compile(f"(?:^|/){text}$"), get_sharding(name, config, forms[name])) for name, text in names.items()]


def get_array_shape(name: str, config: LlamaConfig) -> tuple[int, ...] | None:
    """Return the global shape of an array, with keys and values counted once; None for an unknown name."""
    sizes = {
        "vocab": config.vocab,
        "hidden": config.hidden,
        "q": config.q_rows,
        "kv": config.kv_rows,
        "qkv": config.q_rows + 2 * config.kv_rows,
        "head": config.head_dim,
        "intermediate": config.intermediate,
        "gate_up": 2 * config.intermediate,
    }
    dims = _get_dims(name)
    return None if dims is None else tuple(sizes[dim] for dim in dims)


def check_shape(name: str, shape: tuple[int, ...], config: LlamaConfig, leaf: str) -> None:
    """Check the shape of an array against a configuration.

    Raises:
        IncompatibleCheckpointError: The shape differs.
    """
    expected = get_array_shape(name, config)
    if expected is not None and expected != shape:
        raise IncompatibleCheckpointError(
            "the array does not have the shape that config.json gives",
            leaf=leaf,
            expected=f"{list(expected)} (hidden_size {config.hidden}, {config.heads} heads and {config.kv_heads} "
            f"key-value heads of {config.head_dim}, intermediate_size {config.intermediate}, vocab_size "
            f"{config.vocab})",
            found=list(shape),
            hint=CONFIG_HINT,
        )


def list_required_names(config: LlamaConfig) -> Iterator[str]:
    """Yield the Hugging Face names of the arrays that every such model contains."""
    yield EMBEDDING_NAME
    for i in range(config.layers):
        for at in _PROJECTION_DIMS:
            yield f"model.layers.{i}.{at}.weight"
            if config.attention_bias if at.startswith("self_attn") else config.mlp_bias:
                yield f"model.layers.{i}.{at}.bias"
        yield from (f"model.layers.{i}.{norm}" for norm in _NORM_DIMS)
    yield "model.norm.weight"
    if not config.tied:
        yield LM_HEAD_NAME


def check_names(names: Iterable[str], config: LlamaConfig) -> None:
    """Check Hugging Face names against a configuration. Additional arrays are allowed.

    Raises:
        IncompatibleCheckpointError: An array is missing, or exists although the configuration excludes it, or belongs
            to a layer that does not exist.
    """
    present = set(names)
    missing = [name for name in list_required_names(config) if name not in present]
    if missing:
        raise IncompatibleCheckpointError(
            "the model lacks arrays that config.json says it has",
            expected=f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            found=f"{len(present)} arrays, such as {', '.join(sorted(present)[:4])}",
            hint="Give the config.json of the model in this checkpoint. Only models with the names of Hugging Face's "
            "Llama, or of neuronx-distributed's Llama examples, are known.",
        )
    for name in sorted(present):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= config.layers:
            raise IncompatibleCheckpointError(
                "the checkpoint has a layer that config.json does not have",
                leaf=name,
                expected=f"{config.layers} layer{'s' * (config.layers != 1)}, counted from 0",
                found=f"layer {layer[1]}",
                hint=CONFIG_HINT,
            )
        attention = re.search(r"self_attn\.[qkvo]_proj\.bias$", name)
        mlp = re.search(r"mlp\.(gate|up|down)_proj\.bias$", name)
        if (attention and config.attention_bias is False) or (mlp and config.mlp_bias is False):
            raise IncompatibleCheckpointError(
                "the checkpoint has a bias that config.json says there is not",
                leaf=name,
                expected="attention_bias false" if attention else "mlp_bias false",
                hint=CONFIG_HINT,
            )


def build_llama_hints(config: LlamaConfig) -> dict[str, ArrayHint]:
    """Return a hint for each array that such a model may contain, by name.

    Most shapes show the sharding of an array. The sharding of fused arrays, and of keys and values, is given. The ranks
    that held replicas of keys and values are detected from the files.
    """
    # The configuration does not contain the shape of buffers, which are replicated on every rank.
    buffers = ["model.rotary_emb.inv_freq"]
    buffers += [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.layers)]
    hints = {name: ArrayHint(sharding=Sharding(), rule_text="of config.json") for name in buffers}
    for name in (*_MODEL_DIMS, *(f"model.layers.{i}.{name}" for i in range(config.layers) for name in _LAYER_DIMS)):
        projection, called = get_hf_names(name)
        form = FusionScheme(projection=projection or Projection.SEPARATE)
        said = len(called) > 1 or projection is Projection.LINEAR
        hints[name] = ArrayHint(
            shape=get_array_shape(name, config), sharding=get_sharding(name, config, form) if said else None
        )
    return hints
