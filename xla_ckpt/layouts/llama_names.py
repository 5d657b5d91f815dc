"""The names of a Llama-like model's arrays: Hugging Face's, and those of neuronx-distributed's examples. Pure.

neuronx-distributed fuses projections: ``gate_up_proj`` is gate and up, ``qkv_proj`` is queries, keys and values. With
keys and values that several ranks hold (``kv_size_multiplier``) it also has the queries' heads, and the columns of
``o_proj``, in another order: the ranks that hold a head of keys have its queries in turn.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.array_links import ArrayLink, query_runs
from xla_ckpt.layouts.llama_config import OTHER_CONFIG, LlamaConfig
from xla_ckpt.plan.hints import ArrayHint
from xla_ckpt.sharding.rules import Parsed
from xla_ckpt.sharding.sharding import Sharding

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_QKV = re.compile(r"(?P<at>.*self_attn\.)(?P<what>[qkv])_proj\.(?P<kind>weight|bias)")
_FUSED_QKV = re.compile(r"(?P<at>.*self_attn\.)qkv_proj\.(?P<kind>weight|bias)(?:_(?P<what>qkv|q|k|v))?")
_GATE_UP = re.compile(r"(?P<at>.*mlp\.)(?P<what>gate|up)_proj\.(?P<kind>weight|bias)")
_FUSED_GATE_UP = re.compile(r"(?P<at>.*mlp\.)gate_up_proj\.(?P<kind>weight|bias)")
_OUTPUT = re.compile(r".*self_attn\.o_proj\.weight")
_BUFFER = re.compile(r"(?:.*\.)?rotary_emb\.\w+")


_QUERIES = re.compile(r".*self_attn\.qkv_proj\.(?:weight|bias)_(?:q|qkv)")


def query_dim(name: str) -> int | None:
    """The tensor dim of a neuronx-distributed array along which the heads of queries lie; None if it has none.

    Queries come first there, if anything else follows.
    """
    return 0 if _QUERIES.fullmatch(name) is not None else 1 if _OUTPUT.fullmatch(name) is not None else None


class Projection(enum.Enum):
    """How the projections of queries, keys and values are stored."""

    SEPARATE = "q_proj.weight, k_proj.weight, v_proj.weight"
    STRIDED = "qkv_proj.weight"
    LINEAR = "qkv_proj.weight_q, qkv_proj.weight_k, qkv_proj.weight_v"
    FUSED = "qkv_proj.weight_qkv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How neuronx-distributed has a Llama-like model."""

    projection: Projection
    copies: int = 1
    """How many ranks hold each head of keys and values: its `kv_size_multiplier`."""

    adjacent: bool = False
    """Whether neighbouring ranks hold the same head, as on trn2. Then the queries are in Hugging Face's order."""

    fuse_mlp: bool = True
    """Whether gate and up are one array."""


def query_order(config: LlamaConfig, form: Form) -> list[tuple[int, int, int]]:
    """(first row there, first row in Hugging Face's order, rows) of the queries that stay together.

    Raises:
        UsageError: The copies do not divide the queries of a head of keys.
    """
    if form.adjacent:
        return [(0, 0, config.q_rows)]
    if config.group % form.copies:
        raise UsageError(
            "the queries of each key-value head cannot be divided among its copies",
            expected=f"a kv_size_multiplier that divides {config.group}, the attention heads for each key-value head",
            found=form.copies,
        )
    return query_runs(config.heads, config.kv_heads, form.copies, config.head_dim)


def links(hf: str, config: LlamaConfig, form: Form) -> list[ArrayLink]:
    """Where neuronx-distributed has the parts of an array, by Hugging Face's name.

    Raises:
        UsageError: As `query_order`.
    """
    if (match := _QKV.fullmatch(hf)) is not None and form.projection is not Projection.SEPARATE:
        return list(_qkv_links(hf, match["at"], match["what"], match["kind"], config, form))
    if (match := _GATE_UP.fullmatch(hf)) is not None and form.fuse_mlp:
        first = config.intermediate if match["what"] == "up" else 0
        name = f"{match['at']}gate_up_proj.{match['kind']}"
        return [ArrayLink(theirs=name, hf=hf, there=first, size=config.intermediate)]
    order = query_order(config, form)
    if _OUTPUT.fullmatch(hf) is not None and len(order) > 1:
        return [ArrayLink(theirs=hf, hf=hf, dim=1, there=a, here=b, size=n) for a, b, n in order]
    return [ArrayLink(theirs=hf, hf=hf)]


def _qkv_links(hf: str, at: str, what: str, kind: str, config: LlamaConfig, form: Form) -> Iterator[ArrayLink]:
    first = {"q": 0, "k": config.q_rows, "v": config.q_rows + config.kv_rows}[what]
    name = f"{at}qkv_proj.{kind}"
    if form.projection is Projection.LINEAR:
        name, first = f"{name}_{what}", 0
    elif form.projection is Projection.FUSED:
        name = f"{name}_qkv"
    parts = query_order(config, form) if what == "q" else [(0, 0, config.kv_rows)]
    for offset, hf_first, size in parts:
        yield ArrayLink(theirs=name, hf=hf, there=first + offset, here=hf_first, size=size)


def hf_names(name: str) -> tuple[Projection | None, list[str]]:
    """Hugging Face's names of the parts of an array of neuronx-distributed's; none of a buffer that it does not store.

    The projection is the form that the name is of; None for a name that has nothing to do with one.
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


_OF_MODEL = {EMBEDDING: ("vocab", "hidden"), HEAD: ("vocab", "hidden"), "model.norm.weight": ("hidden",)}

_PROJECTIONS = {
    "self_attn.q_proj": ("q", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "q"),
    "mlp.gate_proj": ("intermediate", "hidden"),
    "mlp.up_proj": ("intermediate", "hidden"),
    "mlp.down_proj": ("hidden", "intermediate"),
}
"""Hugging Face's projections: the rows of the weight, which are those of the bias, and its columns."""

_NORMS = {"input_layernorm.weight": ("hidden",), "post_attention_layernorm.weight": ("hidden",)}

_OF_LAYER: dict[str, tuple[str, ...]] = {
    **_NORMS,
    **{f"self_attn.{what}_norm.weight": ("head",) for what in "qk"},
    **{f"{at}.weight": dims for at, dims in _PROJECTIONS.items()},
    **{f"{at}.bias": dims[:1] for at, dims in _PROJECTIONS.items()},
}
for _suffix, _rows in (("", "qkv"), ("_qkv", "qkv"), ("_q", "q"), ("_k", "kv"), ("_v", "kv")):
    _OF_LAYER[f"self_attn.qkv_proj.weight{_suffix}"] = (_rows, "hidden")
    _OF_LAYER[f"self_attn.qkv_proj.bias{_suffix}"] = (_rows,)
_OF_LAYER |= {"mlp.gate_up_proj.weight": ("gate_up", "hidden"), "mlp.gate_up_proj.bias": ("gate_up",)}
"""The dims of each array of a layer, in either of the two ways to name them."""


def _dims(name: str) -> tuple[str, ...] | None:
    parts = name.split(".")
    known = (_OF_LAYER.get(".".join(parts[-3:])), _OF_LAYER.get(".".join(parts[-2:])))
    return _OF_MODEL.get(name) or known[0] or known[1]


def split_of(name: str, config: LlamaConfig, form: Form) -> Sharding:
    """How the ranks of a tensor-parallel job divide an array of neuronx-distributed's name."""
    copies = "" if form.copies == 1 else f"x{form.copies}{' adjacent' if form.adjacent else ''}"
    kv = f"{config.kv_rows}{copies}" if copies else config.kv_rows
    linear = form.projection in (Projection.LINEAR, Projection.FUSED)
    axes: dict[str, object] = dict.fromkeys(("vocab", "q", "intermediate"), "tp")
    axes["kv"] = ("tp", [kv]) if linear else "tp"
    axes["qkv"] = ("tp", 3) if form.projection is Projection.STRIDED else ("tp", [config.q_rows, kv, kv])
    axes["gate_up"] = ("tp", 2)
    dims = [axes.get(dim) for dim in _dims(name) or ()]
    return Sharding.parse(dims if any(dim is not None for dim in dims) else None)


def llama_rules(config: LlamaConfig) -> Parsed:
    """How a tensor-parallel job whose ranks hold each head once divides the arrays of such a model, as rules."""
    names = {name: re.escape(name) for name in _OF_MODEL}
    names |= {f"model.layers.0.{name}": rf"model\.layers\.\d+\.{re.escape(name)}" for name in _OF_LAYER}
    forms = {name: Form(projection=hf_names(name)[0] or Projection.SEPARATE) for name in names}
    return [(re.compile(f"(?:^|/){text}$"), split_of(name, config, forms[name])) for name, text in names.items()]


def shape_of(name: str, config: LlamaConfig) -> tuple[int, ...] | None:
    """The global shape of an array, keys and values counted once; None for a name that is not known."""
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
    dims = _dims(name)
    return None if dims is None else tuple(sizes[dim] for dim in dims)


def check_shape(name: str, shape: tuple[int, ...], config: LlamaConfig, leaf: str) -> None:
    """Compare the shape of an array with a configuration.

    Raises:
        IncompatibleCheckpointError: It is another one.
    """
    expected = shape_of(name, config)
    if expected is not None and expected != shape:
        raise IncompatibleCheckpointError(
            "the array does not have the shape that config.json gives",
            leaf=leaf,
            expected=f"{list(expected)} (hidden_size {config.hidden}, {config.heads} heads and {config.kv_heads} "
            f"key-value heads of {config.head_dim}, intermediate_size {config.intermediate}, vocab_size "
            f"{config.vocab})",
            found=list(shape),
            hint=OTHER_CONFIG,
        )


def required(config: LlamaConfig) -> Iterator[str]:
    """Hugging Face's names of the arrays that such a model has in any case."""
    yield EMBEDDING
    for i in range(config.layers):
        for at in _PROJECTIONS:
            yield f"model.layers.{i}.{at}.weight"
            if config.attention_bias if at.startswith("self_attn") else config.mlp_bias:
                yield f"model.layers.{i}.{at}.bias"
        yield from (f"model.layers.{i}.{norm}" for norm in _NORMS)
    yield "model.norm.weight"
    if not config.tied:
        yield HEAD


def check_names(names: Iterable[str], config: LlamaConfig) -> None:
    """Compare Hugging Face's names with a configuration. Further arrays are the model's own affair.

    Raises:
        IncompatibleCheckpointError: One is missing, or is there although the configuration says that it is not, or
            belongs to a layer that does not exist.
    """
    present = set(names)
    missing = [name for name in required(config) if name not in present]
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
                hint=OTHER_CONFIG,
            )
        attention = re.search(r"self_attn\.[qkvo]_proj\.bias$", name)
        mlp = re.search(r"mlp\.(gate|up|down)_proj\.bias$", name)
        if (attention and config.attention_bias is False) or (mlp and config.mlp_bias is False):
            raise IncompatibleCheckpointError(
                "the checkpoint has a bias that config.json says there is not",
                leaf=name,
                expected="attention_bias false" if attention else "mlp_bias false",
                hint=OTHER_CONFIG,
            )


def llama_hints(config: LlamaConfig) -> dict[str, ArrayHint]:
    """What a configuration says about each array that such a model may have, by its name.

    Most shapes show how an array was split. Of fused ones, and of keys and values, it is said. How many ranks held the
    same keys and values, and which ones, is found out from the files.
    """
    # The shape of buffers is not in the configuration, and every rank has them whole.
    buffers = ["model.rotary_emb.inv_freq"]
    buffers += [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.layers)]
    hints = {name: ArrayHint(sharding=Sharding(), rule="of config.json") for name in buffers}
    for name in (*_OF_MODEL, *(f"model.layers.{i}.{name}" for i in range(config.layers) for name in _OF_LAYER)):
        projection, called = hf_names(name)
        form = Form(projection=projection or Projection.SEPARATE)
        said = len(called) > 1 or projection is Projection.LINEAR
        hints[name] = ArrayHint(shape=shape_of(name, config), sharding=split_of(name, config, form) if said else None)
    return hints
