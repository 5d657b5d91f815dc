"""MaxText's names and layouts of model arrays, as name rules: a table for each model family.

In all of them layers are one array along dim 1 (`scan_layers`, with `param_scan_axis` 1, its default), or an array
each. The rules are those of its repository (AI-Hypercomputer/maxtext: `param_mapping` in `checkpoint_conversion/utils`,
and `convert_gemma_chkpt` for the first Gemma). Queries are stored divided by the root of the head size, if its
attention does not divide scores. Norms of Gemma are stored with one added, and its embeddings multiplied by the root of
their size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from xla_ckpt.errors import UsageError
from xla_ckpt.formats.orbax.name_rules import NameRule, get_registered_rules, parse_name_rules
from xla_ckpt.keywords import suggest

RuleLine = tuple[str, str, str]
"""Path below a layer or the model, name below it, pattern."""

_PATH_AFFIXES = (("params/params/", ""), ("params/", ""), ("", "/value"), ("base/", "/value"))
"""What paths begin and end with: in what training saves, with Linen and NNX alike; in a tree of parameters alone; and
in what programs save of a module of NNX, bare or below a module of theirs."""

_HEADS_PATTERN = "embed layer head dim -> (head dim) embed"
_OUTPUT_PATTERN = "head layer dim embed -> embed (head dim)"
_UP_PATTERN, _DOWN_PATTERN = "embed layer mlp -> mlp embed", "mlp layer embed -> embed mlp"
_NORM_PATTERN = "embed layer -> embed"
_ROPE_PATTERNS = {"halves": "embed layer head dim", "interleaved": "embed layer head (pair two:2)"}
"""How queries and keys lie, by what rotary embeddings turn. transformers turns halves."""

_EMBEDDING_LINE = ("token_embedder/embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed")
_FINAL_NORM_LINE = ("decoder/decoder_norm/scale", "model.norm.weight", "embed -> embed")
_LOGITS_LINE = ("decoder/logits_dense/kernel", "lm_head.weight", "embed vocab -> vocab embed")
_VALUE_LINE = ("self_attention/value/kernel", "self_attn.v_proj.weight", _HEADS_PATTERN)
_OUTPUT_LINE = ("self_attention/out/kernel", "self_attn.o_proj.weight", _OUTPUT_PATTERN)
_MLP_LINES = (
    ("mlp/wi_0/kernel", "mlp.gate_proj.weight", _UP_PATTERN),
    ("mlp/wi_1/kernel", "mlp.up_proj.weight", _UP_PATTERN),
    ("mlp/wo/kernel", "mlp.down_proj.weight", _DOWN_PATTERN),
)
_EXPERT_LINES = (
    ("MoeBlock_0/gate/kernel", "block_sparse_moe.gate.weight", "embed layer expert -> expert embed"),
    ("MoeBlock_0/wi_0", "block_sparse_moe.experts.{expert}.w1.weight", "expert layer embed mlp -> mlp embed"),
    ("MoeBlock_0/wi_1", "block_sparse_moe.experts.{expert}.w3.weight", "expert layer embed mlp -> mlp embed"),
    ("MoeBlock_0/wo", "block_sparse_moe.experts.{expert}.w2.weight", "expert layer mlp embed -> embed mlp"),
)
_LLAMA_NORMS = (
    ("pre_self_attention_layer_norm/scale", "input_layernorm.weight", _NORM_PATTERN),
    ("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", _NORM_PATTERN),
)
_GEMMA_NORMS = (
    ("pre_self_attention_norm/scale", "input_layernorm.weight", f"{_NORM_PATTERN} - 1"),
    ("pre_ffw_norm/scale", "post_attention_layernorm.weight", f"{_NORM_PATTERN} - 1"),
)
_GEMMA_2_NORMS = (
    ("pre_self_attention_norm/scale", "input_layernorm.weight", f"{_NORM_PATTERN} - 1"),
    ("post_self_attention_norm/scale", "post_attention_layernorm.weight", f"{_NORM_PATTERN} - 1"),
    ("pre_ffw_norm/scale", "pre_feedforward_layernorm.weight", f"{_NORM_PATTERN} - 1"),
    ("post_ffw_norm/scale", "post_feedforward_layernorm.weight", f"{_NORM_PATTERN} - 1"),
)
_QK_NORM_LINES = (
    ("self_attention/query_norm/scale", "self_attn.q_norm.weight", "dim layer -> dim - 1"),
    ("self_attention/key_norm/scale", "self_attn.k_norm.weight", "dim layer -> dim - 1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFamily:
    """What the models of a family have."""

    embedding: str = ""
    """What is computed with the embedding, as patterns say it."""

    norm: str = ""
    """What is computed with the last norm."""

    tied: bool = False
    """Whether the output layer is the embedding, unless the configuration says it."""

    layer: tuple[RuleLine, ...]
    """Of each layer, beside queries and keys."""

    scales_queries: bool = True
    """Whether queries are stored divided."""

    rope_variants: tuple[str, ...] = ("halves",)
    """What rotary embeddings may turn."""

    layer_suffixes: tuple[str, ...] = ("",)
    """A block of layers has one of each, in this order; its arrays are in modules whose names end so."""

    layers_per_block: int = 1
    """Layers of which each has a module of its own in a block that is scanned."""


_LLAMA = _ModelFamily(
    layer=(_VALUE_LINE, _OUTPUT_LINE, *_MLP_LINES, *_LLAMA_NORMS), rope_variants=("halves", "interleaved")
)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _ModelFamily(layer=(_VALUE_LINE, _OUTPUT_LINE, *_EXPERT_LINES, *_LLAMA_NORMS)),
    "gemma": _ModelFamily(
        embedding=" / sqrt(embed)",
        norm=" - 1",
        tied=True,
        layer=(_VALUE_LINE, _OUTPUT_LINE, *_MLP_LINES, *_GEMMA_NORMS),
    ),
    "gemma2": _ModelFamily(
        embedding=" / sqrt(embed)",
        norm=" - 1",
        tied=True,
        layer=(_VALUE_LINE, _OUTPUT_LINE, *_MLP_LINES, *_GEMMA_2_NORMS),
        layer_suffixes=("_local", "_global"),
    ),
    "gemma3_text": _ModelFamily(
        embedding=" / bfloat16(sqrt(embed))",
        norm=" - 1",
        tied=True,
        layer=(_VALUE_LINE, _OUTPUT_LINE, *_MLP_LINES, *_GEMMA_2_NORMS, *_QK_NORM_LINES),
        scales_queries=False,
        layers_per_block=6,
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
            f"no names of MaxText's are known for this model_type{suggest(name, [*_FAMILIES])}",
            expected=" or ".join(_FAMILIES),
            found=repr(name),
            hint="Rules of your own for xla_ckpt.register_names say what another program of jax calls it.",
        )
    turned = family.rope_variants[0] if rope is None and len(family.rope_variants) == 1 else rope
    if turned not in family.rope_variants:
        raise UsageError(
            f"rope= says what the rotary embeddings of a {name} turn in MaxText",
            expected=" or ".join(family.rope_variants),
            found=repr(rope),
        )
    around = _list_global_lines(family, tied=bool(about.get("tie_word_embeddings", family.tied)))
    layers, together = _read_number(about, "num_hidden_layers"), len(family.layer_suffixes)
    if layers % together:
        raise UsageError(
            f"a layer of a {name} in MaxText is {together} of transformers'",
            expected=f"num_hidden_layers is a multiple of {together}",
            found=layers,
        )
    stored = [*around, *_list_layer_lines(family, turned, layers, scanned=scan_layers)]
    heads = _read_number(about, "num_attention_heads")
    dim = _read_number(about, "head_dim") or _read_number(about, "hidden_size") // (heads or 1)
    sizes = {"dim": dim, "pair": dim // 2, "layer": layers // (together * family.layers_per_block)}
    rules = []
    for path, array, pattern in stored:
        before, arrow, after = pattern.partition("->")
        of_keys = "k_proj" in array or "v_proj" in array
        sizes["head"] = (of_keys and _read_number(about, "num_key_value_heads")) or heads
        rules.append((path, array, _AXIS.sub(partial(_add_axis_size, sizes), before) + arrow + after))
    return [(begin + path + end, array, pattern) for begin, end in _PATH_AFFIXES for path, array, pattern in rules]


def is_maxtext_tree(leaves: Iterable[str]) -> bool:
    """Whether a tree with these paths has a model of MaxText's."""
    tables = {begin + _EMBEDDING_LINE[0] + end for begin, end in _PATH_AFFIXES}
    return not tables.isdisjoint(leaves)


def get_rules_for_config(config: Mapping[str, Any]) -> Sequence[NameRule]:
    """The rules that a program registered; else those of MaxText's for a model of transformers'; else none.

    Args:
        config: What the configuration of transformers' model says; or nothing.

    Raises:
        UsageError: MaxText has no such model, or the rules depend on what neither model nor checkpoint says.
    """
    if (registered := get_registered_rules()) or not config:
        return registered
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is not None and len(family.rope_variants) > 1:
        raise UsageError(
            f"MaxText has several ways to store a {config['model_type']}, and neither model nor checkpoint says which",
            expected="rules for it",
            hint="Call xla_ckpt.register_names(xla_ckpt.maxtext_names(rope=..., config=model.config)) first "
            "(docs/from-orbax.md#maxtexts-models).",
        )
    return parse_name_rules(maxtext_names(config=config))


_AXIS = re.compile(r"\b(?:dim|pair|layer|head)\b(?!:)")


def _add_axis_size(sizes: Mapping[str, int], axis: re.Match[str]) -> str:
    """An axis with its size, if that is known."""
    return f"{axis[0]}:{sizes[axis[0]]}" if sizes[axis[0]] else axis[0]


def _list_global_lines(family: _ModelFamily, *, tied: bool) -> Iterator[RuleLine]:
    """The arrays of no layer."""
    path, name, pattern = _EMBEDDING_LINE
    yield path, name, pattern + family.embedding
    yield (path, "lm_head.weight", pattern + family.embedding) if tied else _LOGITS_LINE
    path, name, pattern = _FINAL_NORM_LINE
    yield path, name, pattern + family.norm


def _read_number(config: Mapping[str, Any], key: str) -> int:
    """A number of the configuration; 0 if it is not there."""
    number = config.get(key)
    if number is None:
        return 0
    if type(number) is not int or number < 0:
        raise UsageError("this is no configuration of a model", expected=f"a number for {key}", found=repr(number))
    return number


def _list_layer_lines(family: _ModelFamily, rope: str, count: int, *, scanned: bool) -> Iterator[RuleLine]:
    """The rules of all layers, in the form that is written first, and in the others."""
    together = [*_list_scanned_layers(family, count)]
    apart = [*_list_separate_layers(family)]
    for path, number, lines_kind, layers in (*together, *apart) if scanned else (*apart, *together):
        for below, name, pattern in _list_lines_of_layer(family, rope):
            module, slash, rest = below.partition("/")
            yield (
                f"decoder/{path}/{module}{lines_kind}{slash}{rest}",
                f"model.layers.{number}.{name}",
                pattern if layers else pattern.replace(" layer", ""),
            )


def _list_scanned_layers(family: _ModelFamily, count: int) -> Iterator[tuple[str, str, str, bool]]:
    """Where layers lie that are scanned: path, number in the name, kind, whether there is a dim of layers."""
    if family.layers_per_block == 1:
        many = len(family.layer_suffixes)
        for n, kind in enumerate(family.layer_suffixes):
            yield "layers", f"{{{many}*layer+{n}}}" if many > 1 else "{layer}", kind, True
        return
    # Layers that make no whole block are not scanned. They come first: else a block would seem to go on with them.
    yield "layers_remainder/layers_{rest}", f"{{rest+{count - count % family.layers_per_block}}}", "", False
    for n in range(family.layers_per_block):
        yield f"layers/layers_{n}", f"{{{family.layers_per_block}*layer+{n}}}", "", True


def _list_separate_layers(family: _ModelFamily) -> Iterator[tuple[str, str, str, bool]]:
    """As `_list_scanned_layers`, of layers that are arrays of their own."""
    many = len(family.layer_suffixes)
    for n, kind in enumerate(family.layer_suffixes):
        number = f"{{{many}*layer+{n}}}" if many > 1 else "{layer}"
        for path in ("layers_{layer}", "layers/{layer}"):
            yield path, number, kind, False


def _list_lines_of_layer(family: _ModelFamily, rope: str) -> Iterator[RuleLine]:
    """The arrays of a layer."""
    before = _ROPE_PATTERNS[rope]
    after = "(head dim) embed" if rope == "halves" else "(head two pair) embed"
    root = after.removeprefix("(head ").removesuffix(") embed")
    divided = f" * sqrt({root})" if family.scales_queries else ""
    yield "self_attention/query/kernel", "self_attn.q_proj.weight", f"{before} -> {after}{divided}"
    yield "self_attention/key/kernel", "self_attn.k_proj.weight", f"{before} -> {after}"
    yield from family.layer
