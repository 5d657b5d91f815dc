"""What MaxText calls the arrays of a Llama or a Mistral, and how they lie, as rules of names. Data alone.

MaxText stores queries divided by the root of the size of a head, and its attention then divides no scores. Layers are
one array along dim 1 (`scan_layers`, with `param_scan_axis` 1, its default), or an array each.
"""

from __future__ import annotations

from typing import Literal

from xla_ckpt.errors import UsageError

_TREES = (("params/params/", ""), ("params/", ""), ("", "/value"), ("base/", "/value"))
"""What paths begin and end with: in what training saves, with Linen and NNX alike; in a tree of parameters alone; and
in what programs save of a module of NNX, bare or below a module of theirs."""

_AROUND = (
    ("token_embedder/embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
    ("decoder/decoder_norm/scale", "model.norm.weight", "embed -> embed"),
    ("decoder/logits_dense/kernel", "lm_head.weight", "embed vocab -> vocab embed"),
)

_LAYER = (
    ("self_attention/value/kernel", "self_attn.v_proj.weight", "embed layer head dim -> (head dim) embed"),
    ("self_attention/out/kernel", "self_attn.o_proj.weight", "head layer dim embed -> embed (head dim)"),
    ("mlp/wi_0/kernel", "mlp.gate_proj.weight", "embed layer mlp -> mlp embed"),
    ("mlp/wi_1/kernel", "mlp.up_proj.weight", "embed layer mlp -> mlp embed"),
    ("mlp/wo/kernel", "mlp.down_proj.weight", "mlp layer embed -> embed mlp"),
    ("pre_self_attention_layer_norm/scale", "input_layernorm.weight", "embed layer -> embed"),
    ("post_self_attention_layer_norm/scale", "post_attention_layernorm.weight", "embed layer -> embed"),
)

_QUERY = ("self_attention/query/kernel", "self_attn.q_proj.weight")
_KEY = ("self_attention/key/kernel", "self_attn.k_proj.weight")

_TURNED = {
    "halves": (
        (*_QUERY, "embed layer head dim -> (head dim) embed * sqrt(dim)"),
        (*_KEY, "embed layer head dim -> (head dim) embed"),
    ),
    "interleaved": (
        (*_QUERY, "embed layer head (pair two:2) -> (head two pair) embed * sqrt(pair two)"),
        (*_KEY, "embed layer head (pair two:2) -> (head two pair) embed"),
    ),
}
"""Queries and keys, by what rotary embeddings turn. transformers turns halves."""


def maxtext_names(rope: Literal["halves", "interleaved"]) -> list[tuple[str, str, str]]:
    """The rules by which a Llama or a Mistral of MaxText's is that of transformers, for `register_names`.

    Args:
        rope: What rotary embeddings turn in the run that saved the checkpoint, which does not say it. ``"halves"``:
            the two halves of a head, MaxText's default, which its Llama 2, its first Llama 3 and its Mistral have.
            ``"interleaved"``: neighbours, where `model_name` begins with ``llama3.1``, or `rope_type` is ``llama3.1``.

    Raises:
        UsageError: `rope` is neither of them.

    Example:
        ``xla_ckpt.register_names(xla_ckpt.maxtext_names(rope="interleaved"))``
    """
    if rope not in _TURNED:
        raise UsageError("MaxText has two orders of rotary embeddings", expected=" or ".join(_TURNED), found=repr(rope))
    stored = [*_AROUND]
    for path, name, pattern in (*_LAYER, *_TURNED[rope]):
        stored.append((f"decoder/layers/{path}", f"model.layers.{{layer}}.{name}", pattern))
        for layer in ("layers_{layer}", "layers/{layer}"):
            alone = pattern.replace(" layer", "")
            stored.append((f"decoder/{layer}/{path}", f"model.layers.{{layer}}.{name}", alone))
    return [(before + path + after, name, pattern) for before, after in _TREES for path, name, pattern in stored]
