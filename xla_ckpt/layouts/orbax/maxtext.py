"""What MaxText calls the arrays of a model, and how they lie, as rules of names: a table for each family. Data alone.

In all of them layers are one array along dim 1 (`scan_layers`, with `param_scan_axis` 1, its default), or an array
each. The rules are those of its repository (AI-Hypercomputer/maxtext: `param_mapping` in
`checkpoint_conversion/utils`, and `convert_gemma_chkpt` for the first Gemma). Queries are stored divided by the root of
the size of a head, where its attention divides no scores. Norms of Gemma's are stored with one added, and its
embeddings multiplied by the root of their size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import meant
from xla_ckpt.layouts.orbax.name_rules import NameRule, parse_names, registered_names

Line = tuple[str, str, str]
"""Path below a layer or the model, name below it, pattern."""

_TREES = (("params/params/", ""), ("params/", ""), ("", "/value"), ("base/", "/value"))
"""What paths begin and end with: in what training saves, with Linen and NNX alike; in a tree of parameters alone; and
in what programs save of a module of NNX, bare or below a module of theirs."""

_HEADS = "embed layer head dim -> (head dim) embed"
_OUT = "head layer dim embed -> embed (head dim)"
_WIDER, _NARROWER = "embed layer mlp -> mlp embed", "mlp layer embed -> embed mlp"
_NORM = "embed layer -> embed"
_TURNED = {"halves": "embed layer head dim", "interleaved": "embed layer head (pair two:2)"}
"""How queries and keys lie, by what rotary embeddings turn. transformers turns halves."""

_TABLE = ("token_embedder/embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed")
_LAST_NORM = ("decoder/decoder_norm/scale", "model.norm.weight", "embed -> embed")
_LOGITS = ("decoder/logits_dense/kernel", "lm_head.weight", "embed vocab -> vocab embed")
_VALUE = ("self_attention/value/kernel", "self_attn.v_proj.weight", _HEADS)
_OUTPUT = ("self_attention/out/kernel", "self_attn.o_proj.weight", _OUT)
_MLP = (
    ("mlp/wi_0/kernel", "mlp.gate_proj.weight", _WIDER),
    ("mlp/wi_1/kernel", "mlp.up_proj.weight", _WIDER),
    ("mlp/wo/kernel", "mlp.down_proj.weight", _NARROWER),
)
_EXPERTS = (
    ("MoeBlock_0/gate/kernel", "block_sparse_moe.gate.weight", "embed layer expert -> expert embed"),
    ("MoeBlock_0/wi_0", "block_sparse_moe.experts.{expert}.w1.weight", "expert layer embed mlp -> mlp embed"),
    ("MoeBlock_0/wi_1", "block_sparse_moe.experts.{expert}.w3.weight", "expert layer embed mlp -> mlp embed"),
    ("MoeBlock_0/wo", "block_sparse_moe.experts.{expert}.w2.weight", "expert layer mlp embed -> embed mlp"),
)
_LLAMA_NORMS = (
    ("pre_self_attention_layer_norm/scale", "input_layernorm.weight", _NORM),
    ("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", _NORM),
)
_GEMMA_NORMS = (
    ("pre_self_attention_norm/scale", "input_layernorm.weight", f"{_NORM} - 1"),
    ("pre_ffw_norm/scale", "post_attention_layernorm.weight", f"{_NORM} - 1"),
)
_GEMMA_2_NORMS = (
    ("pre_self_attention_norm/scale", "input_layernorm.weight", f"{_NORM} - 1"),
    ("post_self_attention_norm/scale", "post_attention_layernorm.weight", f"{_NORM} - 1"),
    ("pre_ffw_norm/scale", "pre_feedforward_layernorm.weight", f"{_NORM} - 1"),
    ("post_ffw_norm/scale", "post_feedforward_layernorm.weight", f"{_NORM} - 1"),
)
_NORMED_HEADS = (
    ("self_attention/query_norm/scale", "self_attn.q_norm.weight", "dim layer -> dim - 1"),
    ("self_attention/key_norm/scale", "self_attn.k_norm.weight", "dim layer -> dim - 1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the models of a family have."""

    embedding: str = ""
    """What is computed with the embedding, as patterns say it."""

    norm: str = ""
    """What is computed with the last norm."""

    tied: bool = False
    """Whether the output layer is the embedding, unless the configuration says it."""

    layer: tuple[Line, ...]
    """Of each layer, beside queries and keys."""

    divided: bool = True
    """Whether queries are stored divided."""

    ropes: tuple[str, ...] = ("halves",)
    """What rotary embeddings may turn."""

    kinds: tuple[str, ...] = ("",)
    """A block of layers has one of each, in this order; its arrays are in modules whose names end so."""

    block: int = 1
    """Layers of which each has a module of its own in a block that is scanned."""


_LLAMA = _Family(layer=(_VALUE, _OUTPUT, *_MLP, *_LLAMA_NORMS), ropes=("halves", "interleaved"))
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _Family(layer=(_VALUE, _OUTPUT, *_EXPERTS, *_LLAMA_NORMS)),
    "gemma": _Family(embedding=" / sqrt(embed)", norm=" - 1", tied=True, layer=(_VALUE, _OUTPUT, *_MLP, *_GEMMA_NORMS)),
    "gemma2": _Family(
        embedding=" / sqrt(embed)",
        norm=" - 1",
        tied=True,
        layer=(_VALUE, _OUTPUT, *_MLP, *_GEMMA_2_NORMS),
        kinds=("_local", "_global"),
    ),
    "gemma3_text": _Family(
        embedding=" / bfloat16(sqrt(embed))",
        norm=" - 1",
        tied=True,
        layer=(_VALUE, _OUTPUT, *_MLP, *_GEMMA_2_NORMS, *_NORMED_HEADS),
        divided=False,
        block=6,
    ),
}
"""By the `model_type` of transformers' configuration."""


def maxtext_names(
    rope: Literal["halves", "interleaved"] | None = None,
    *,
    config: Any = None,
    scan_layers: bool = True,
) -> list[tuple[str, str, str]]:
    """The rules by which a model of MaxText's is that of transformers, in both directions, for `register_names`.

    Args:
        rope: What rotary embeddings turn in the run that saved the checkpoint, which does not say it. ``"halves"``:
            the two halves of a head, MaxText's default, which all its models have but one. ``"interleaved"``:
            neighbours, where `model_name` begins with ``llama3.1``, or `rope_type` is ``llama3.1``. A Llama or a
            Mistral has to be told; of others it is known.
        config: The configuration of transformers' model, ``model.config``, or a dict of what it holds. Its
            `model_type` is ``llama``, ``mistral``, ``mixtral``, ``gemma``, ``gemma2`` or ``gemma3_text``. What it says
            of layers and heads is compared with the arrays. Without it, the rules are for a Llama or
            a Mistral, and for reading alone: how many elements a head has stands nowhere else.
        scan_layers: Whether a model that is written has all layers in one array. All forms are read.

    Raises:
        UsageError: MaxText has no such model, or not with so many layers, or `config` is none, or `rope` is not known,
            or is another one.

    Example:
        ``xla_ckpt.register_names(xla_ckpt.maxtext_names(config=model.config))``
    """
    about = {"model_type": "llama"} if config is None else config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(about, Mapping):
        raise UsageError(
            "config= is no configuration of a model",
            expected="model.config, or a dict of what it holds",
            found=repr(about)[:80],
        )
    name = about.get("model_type")
    if (family := _FAMILIES.get(str(name))) is None:
        raise UsageError(
            f"no names of MaxText's are known for this model_type{meant(name, [*_FAMILIES])}",
            expected=" or ".join(_FAMILIES),
            found=repr(name),
            hint="Rules of your own for xla_ckpt.register_names say what another program of jax calls it.",
        )
    turned = family.ropes[0] if rope is None and len(family.ropes) == 1 else rope
    if turned not in family.ropes:
        raise UsageError(
            f"rope= says what the rotary embeddings of a {name} turn in MaxText",
            expected=" or ".join(family.ropes),
            found=repr(rope),
        )
    around = _around(family, tied=bool(about.get("tie_word_embeddings", family.tied)))
    layers, together = _number(about, "num_hidden_layers"), len(family.kinds)
    if layers % together:
        raise UsageError(
            f"a layer of a {name} in MaxText is {together} of transformers'",
            expected=f"num_hidden_layers is a multiple of {together}",
            found=layers,
        )
    stored = [*around, *_layers(family, turned, layers, scanned=scan_layers)]
    heads = _number(about, "num_attention_heads")
    dim = _number(about, "head_dim") or _number(about, "hidden_size") // (heads or 1)
    sizes = {"dim": dim, "pair": dim // 2, "layer": layers // (together * family.block)}
    rules = []
    for path, array, pattern in stored:
        before, arrow, after = pattern.partition("->")
        of_keys = "k_proj" in array or "v_proj" in array
        sizes["head"] = (of_keys and _number(about, "num_key_value_heads")) or heads
        rules.append((path, array, _AXIS.sub(partial(_sized, sizes), before) + arrow + after))
    return [(begin + path + end, array, pattern) for begin, end in _TREES for path, array, pattern in rules]


def is_tree_of_maxtext(leaves: Iterable[str]) -> bool:
    """Whether a tree with these paths has a model of MaxText's."""
    tables = {begin + _TABLE[0] + end for begin, end in _TREES}
    return not tables.isdisjoint(leaves)


def rules_for(config: Mapping[str, Any]) -> Sequence[NameRule]:
    """The rules that a program registered; else those of MaxText's for a model of transformers'; else none.

    Args:
        config: What the configuration of transformers' model says; or nothing.

    Raises:
        UsageError: MaxText has no such model, or the rules depend on what neither model nor checkpoint says.
    """
    if (registered := registered_names()) or not config:
        return registered
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is not None and len(family.ropes) > 1:
        raise UsageError(
            f"MaxText has several ways to store a {config['model_type']}, and neither model nor checkpoint says which",
            expected="rules for it",
            hint="Call xla_ckpt.register_names(xla_ckpt.maxtext_names(rope=..., config=model.config)) first "
            "(docs/from-orbax.md#maxtexts-models).",
        )
    return parse_names(maxtext_names(config=config))


_AXIS = re.compile(r"\b(?:dim|pair|layer|head)\b(?!:)")


def _sized(sizes: Mapping[str, int], axis: re.Match[str]) -> str:
    """An axis with its size, if that is known."""
    return f"{axis[0]}:{sizes[axis[0]]}" if sizes[axis[0]] else axis[0]


def _around(family: _Family, *, tied: bool) -> Iterator[Line]:
    """The arrays of no layer."""
    path, name, pattern = _TABLE
    yield path, name, pattern + family.embedding
    yield (path, "lm_head.weight", pattern + family.embedding) if tied else _LOGITS
    path, name, pattern = _LAST_NORM
    yield path, name, pattern + family.norm


def _number(config: Mapping[str, Any], key: str) -> int:
    """A number of the configuration; 0 if it is not there."""
    number = config.get(key)
    if number is None:
        return 0
    if type(number) is not int or number < 0:
        raise UsageError("this is no configuration of a model", expected=f"a number for {key}", found=repr(number))
    return number


def _layers(family: _Family, turned: str, count: int, *, scanned: bool) -> Iterator[Line]:
    """The rules of all layers, in the form that is written first, and in the others."""
    together = [*_scanned(family, count)]
    apart = [*_apart(family)]
    for path, number, lines_kind, layers in (*together, *apart) if scanned else (*apart, *together):
        for below, name, pattern in _of_layer(family, turned):
            module, slash, rest = below.partition("/")
            yield (
                f"decoder/{path}/{module}{lines_kind}{slash}{rest}",
                f"model.layers.{number}.{name}",
                pattern if layers else pattern.replace(" layer", ""),
            )


def _scanned(family: _Family, count: int) -> Iterator[tuple[str, str, str, bool]]:
    """Where layers lie that are scanned: path, number in the name, kind, whether there is a dim of layers."""
    if family.block == 1:
        many = len(family.kinds)
        for n, kind in enumerate(family.kinds):
            yield "layers", f"{{{many}*layer+{n}}}" if many > 1 else "{layer}", kind, True
        return
    # Layers that make no whole block are not scanned. They come first: else a block would seem to go on with them.
    yield "layers_remainder/layers_{rest}", f"{{rest+{count - count % family.block}}}", "", False
    for n in range(family.block):
        yield f"layers/layers_{n}", f"{{{family.block}*layer+{n}}}", "", True


def _apart(family: _Family) -> Iterator[tuple[str, str, str, bool]]:
    """As `_scanned`, of layers that are arrays of their own."""
    many = len(family.kinds)
    for n, kind in enumerate(family.kinds):
        number = f"{{{many}*layer+{n}}}" if many > 1 else "{layer}"
        for path in ("layers_{layer}", "layers/{layer}"):
            yield path, number, kind, False


def _of_layer(family: _Family, turned: str) -> Iterator[Line]:
    """The arrays of a layer."""
    before = _TURNED[turned]
    after = "(head dim) embed" if turned == "halves" else "(head two pair) embed"
    root = after.removeprefix("(head ").removesuffix(") embed")
    divided = f" * sqrt({root})" if family.divided else ""
    yield "self_attention/query/kernel", "self_attn.q_proj.weight", f"{before} -> {after}{divided}"
    yield "self_attention/key/kernel", "self_attn.k_proj.weight", f"{before} -> {after}"
    yield from family.layer
