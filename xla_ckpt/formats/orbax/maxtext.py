"""MaxText names and layouts of model arrays, as name rules: a table for each model family.

In all of them layers are stacked in one array along dim 1 (`scan_layers`, with `param_scan_axis` 1, its default), or
are separate arrays. The rules are taken from its repository (AI-Hypercomputer/maxtext: `param_mapping` in
`checkpoint_conversion/utils`, and `convert_gemma_chkpt` for the first Gemma). Queries are stored divided by the square
root of the head size, if its attention does not divide scores. Norms of Gemma are stored with one added, and its
embeddings multiplied by the square root of their size.
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
"""Prefixes and suffixes of paths: in training checkpoints, of Linen and of NNX; in a bare tree of parameters; and in
the state of an NNX module, at the top or below another module."""

_HEADS_PATTERN = "embed layer head dim -> (head dim) embed"
_OUTPUT_PATTERN = "head layer dim embed -> embed (head dim)"
_UP_PATTERN, _DOWN_PATTERN = "embed layer mlp -> mlp embed", "mlp layer embed -> embed mlp"
_NORM_PATTERN = "embed layer -> embed"
_ROPE_PATTERNS = {"halves": "embed layer head dim", "interleaved": "embed layer head (pair two:2)"}
"""Patterns of queries and keys for each rotary embedding variant. transformers rotates halves."""

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
    """Names and arithmetic that the models of a family share."""

    embedding: str = ""
    """Arithmetic on the embedding, in the syntax of patterns."""

    norm: str = ""
    """Arithmetic on the final norm."""

    tied: bool = False
    """True if the output layer is the embedding by default, unless the configuration sets it."""

    layer: tuple[RuleLine, ...]
    """Rules of each layer, except for queries and keys."""

    scales_queries: bool = True
    """True if queries are stored divided by the root of the head size."""

    rope_variants: tuple[str, ...] = ("halves",)
    """Supported rotary embedding variants."""

    layer_suffixes: tuple[str, ...] = ("",)
    """Module name suffixes of the layers in a scanned block, in order."""

    layers_per_block: int = 1
    """Number of layers in a scanned block that have modules of their own."""


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
"""Model families by the `model_type` of the transformers configuration."""


def maxtext_names(
    rope: Literal["halves", "interleaved"] | None = None,
    *,
    config: Any = None,
    scan_layers: bool = True,
) -> list[tuple[str, str, str]]:
    """Return the rules that map a MaxText model to the transformers model, in both directions, for `register_names`.

    Args:
        rope: Rotary embedding variant of the run that saved the checkpoint, which does not record it. ``"halves"``:
            the two halves of a head are rotated, the default of MaxText and of all its models except one.
            ``"interleaved"``: adjacent elements are rotated, if `model_name` begins with ``llama3.1``, or `rope_type`
            is ``llama3.1``. Required for Llama and Mistral; known for other models.
        config: Configuration of the transformers model, ``model.config``, or a dict of its content. Its
            `model_type` is ``llama``, ``mistral``, ``mixtral``, ``gemma``, ``gemma2`` or ``gemma3_text``. Its numbers
            of layers and heads are checked against the arrays. Without it, the rules are for a Llama or
            a Mistral, and only for reading, because only the configuration contains the head size.
        scan_layers: True to write all layers of a model as one array. All forms can be read.

    Raises:
        UsageError: MaxText does not support the model or its number of layers, or `config` is invalid, or `rope` is
            missing or unsupported.

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
    """Return True if a tree with these paths contains a MaxText model."""
    tables = {begin + _EMBEDDING_LINE[0] + end for begin, end in _PATH_AFFIXES}
    return not tables.isdisjoint(leaves)


def get_rules_for_config(config: Mapping[str, Any]) -> Sequence[NameRule]:
    """Return the registered rules; otherwise the MaxText rules for a transformers model; otherwise no rules.

    Args:
        config: Content of the configuration of the transformers model; may be empty.

    Raises:
        UsageError: MaxText does not support the model, or the rules depend on information that neither the model nor
            the checkpoint contains.
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
    """Return an axis with its size, if it is known."""
    return f"{axis[0]}:{sizes[axis[0]]}" if sizes[axis[0]] else axis[0]


def _list_global_lines(family: _ModelFamily, *, tied: bool) -> Iterator[RuleLine]:
    """Yield the rules of arrays outside of layers."""
    path, name, pattern = _EMBEDDING_LINE
    yield path, name, pattern + family.embedding
    yield (path, "lm_head.weight", pattern + family.embedding) if tied else _LOGITS_LINE
    path, name, pattern = _FINAL_NORM_LINE
    yield path, name, pattern + family.norm


def _read_number(config: Mapping[str, Any], key: str) -> int:
    """Return a number from the configuration; 0 if it is missing.

    Raises:
        UsageError: The value is not a number.
    """
    number = config.get(key)
    if number is None:
        return 0
    if type(number) is not int or number < 0:
        raise UsageError("this is no configuration of a model", expected=f"a number for {key}", found=repr(number))
    return number


def _list_layer_lines(family: _ModelFamily, rope: str, count: int, *, scanned: bool) -> Iterator[RuleLine]:
    """Yield the rules of all layers: first in the form that is written, then in the others."""
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
    """Yield (path, number in the name, module suffix, True if there is a layer dim) of scanned layers."""
    if family.layers_per_block == 1:
        many = len(family.layer_suffixes)
        for n, kind in enumerate(family.layer_suffixes):
            yield "layers", f"{{{many}*layer+{n}}}" if many > 1 else "{layer}", kind, True
        return
    # Layers of an incomplete block are not scanned. They come first: otherwise they would match as part of a block.
    yield "layers_remainder/layers_{rest}", f"{{rest+{count - count % family.layers_per_block}}}", "", False
    for n in range(family.layers_per_block):
        yield f"layers/layers_{n}", f"{{{family.layers_per_block}*layer+{n}}}", "", True


def _list_separate_layers(family: _ModelFamily) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the same as `_list_scanned_layers`, for layers that are separate arrays."""
    many = len(family.layer_suffixes)
    for n, kind in enumerate(family.layer_suffixes):
        number = f"{{{many}*layer+{n}}}" if many > 1 else "{layer}"
        for path in ("layers_{layer}", "layers/{layer}"):
            yield path, number, kind, False


def _list_lines_of_layer(family: _ModelFamily, rope: str) -> Iterator[RuleLine]:
    """Yield the rules of the arrays in a layer."""
    before = _ROPE_PATTERNS[rope]
    after = "(head dim) embed" if rope == "halves" else "(head two pair) embed"
    root = after.removeprefix("(head ").removesuffix(") embed")
    divided = f" * sqrt({root})" if family.scales_queries else ""
    yield "self_attention/query/kernel", "self_attn.q_proj.weight", f"{before} -> {after}{divided}"
    yield "self_attention/key/kernel", "self_attn.k_proj.weight", f"{before} -> {after}"
    yield from family.layer
