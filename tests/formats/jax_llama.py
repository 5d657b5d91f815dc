"""A small Llama as programs of jax have it: python -m tests.formats.jax_llama FOLDER saves it over eight devices.

Its layers are one array each, along a dim of layers; kernels are (in, out), heads are a dim of their own, and rotary
embeddings turn neighbours, (0, 1), (2, 3), where transformers turns the two halves of a head. It is written from that
description alone, and is no program of anybody's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, THETA = 32, 16, 4, 4, 2, 8, 24, 10000.0

ATTENTION = "params/decoder/layers/attention"
QUERY = "embed layer head (pair two:2) -> (head two pair) embed"

RULES = [
    ("params/embedder/embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
    ("params/decoder/norm/scale", "model.norm.weight", "embed -> embed"),
    ("params/decoder/logits/kernel", "lm_head.weight", "embed vocab -> vocab embed"),
    (f"{ATTENTION}/query/kernel", "model.layers.{layer}.self_attn.q_proj.weight", QUERY),
    (f"{ATTENTION}/key/kernel", "model.layers.{layer}.self_attn.k_proj.weight", QUERY),
    (f"{ATTENTION}/value/kernel", "model.layers.{layer}.self_attn.v_proj.weight",
     "embed layer head dim -> (head dim) embed"),
    (f"{ATTENTION}/out/kernel", "model.layers.{layer}.self_attn.o_proj.weight",
     "head layer dim embed -> embed (head dim)"),
    ("params/decoder/layers/mlp/gate/kernel", "model.layers.{layer}.mlp.gate_proj.weight",
     "embed layer mlp -> mlp embed"),
    ("params/decoder/layers/mlp/up/kernel", "model.layers.{layer}.mlp.up_proj.weight", "embed layer mlp -> mlp embed"),
    ("params/decoder/layers/mlp/down/kernel", "model.layers.{layer}.mlp.down_proj.weight",
     "mlp layer embed -> embed mlp"),
    ("params/decoder/layers/norm_0/scale", "model.layers.{layer}.input_layernorm.weight", "embed layer -> embed"),
    ("params/decoder/layers/norm_1/scale", "model.layers.{layer}.post_attention_layernorm.weight",
     "embed layer -> embed"),
]  # fmt: skip
"""How its arrays are those of transformers' model."""


def params() -> dict[str, Any]:
    """The state: random, and the same each time."""
    random = np.random.default_rng(7)

    def array(*shape: int) -> Floats:
        return (random.standard_normal(shape) / 4).astype(np.float32)

    def kernel(*shape: int) -> dict[str, Floats]:
        return {"kernel": array(*shape)}

    layers = {
        "attention": {
            "query": kernel(HIDDEN, LAYERS, HEADS, HEAD),
            "key": kernel(HIDDEN, LAYERS, KV_HEADS, HEAD),
            "value": kernel(HIDDEN, LAYERS, KV_HEADS, HEAD),
            "out": kernel(HEADS, LAYERS, HEAD, HIDDEN),
        },
        "mlp": {
            "gate": kernel(HIDDEN, LAYERS, INNER),
            "up": kernel(HIDDEN, LAYERS, INNER),
            "down": kernel(INNER, LAYERS, HIDDEN),
        },
        "norm_0": {"scale": 1 + array(HIDDEN, LAYERS)},
        "norm_1": {"scale": 1 + array(HIDDEN, LAYERS)},
    }
    decoder = {"layers": layers, "norm": {"scale": 1 + array(HIDDEN)}, "logits": kernel(HIDDEN, VOCAB)}
    return {"params": {"decoder": decoder, "embedder": {"embedding": array(VOCAB, HIDDEN)}}, "step": 3}


def logits(state: dict[str, Any], tokens: npt.NDArray[np.int64]) -> Floats:
    """What the model says of a row of tokens, by its own convention."""
    tree = state["params"]
    decoder, length = tree["decoder"], len(tokens)
    angles = np.arange(length)[:, None] / THETA ** (np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: Floats, scale: Floats) -> Floats:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale  # type: ignore[no-any-return]

    def turned(x: Floats) -> Floats:
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = tree["embedder"]["embedding"][tokens]
    hidden = np.triu(np.full((length, length), -np.inf), 1)
    for layer in range(LAYERS):
        of = {name: {k: v["kernel"].take(layer, 1) for k, v in decoder["layers"][name].items()}
              for name in ("attention", "mlp")}  # fmt: skip
        scales = [decoder["layers"][f"norm_{n}"]["scale"][:, layer] for n in (0, 1)]
        y, attention, mlp = norm(x, scales[0]), of["attention"], of["mlp"]
        query, key, value = (np.einsum("te,ehd->thd", y, attention[name]) for name in ("query", "key", "value"))
        query, key = turned(query), turned(key)
        key, value = (part.repeat(HEADS // KV_HEADS, 1) for part in (key, value))
        scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(HEAD) + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd,hde->te", weights, value, attention["out"])
        y = norm(x, scales[1])
        gate = y @ mlp["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"]
    return norm(x, decoder["norm"]["scale"]) @ decoder["logits"]["kernel"]  # type: ignore[no-any-return]


def main(folder: Path) -> None:
    """Save it three times: first with its first dims over devices, then with other ones, then not cut at all."""
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    for name, specs in {"first": ("x",), "last": (None, None, "y", "x"), "whole": ()}.items():

        def placed(leaf: Any, specs: tuple[str | None, ...] = specs) -> Any:
            if not isinstance(leaf, np.ndarray):
                return leaf
            sizes = {"x": 4, "y": 2, None: 1}
            axes = [axis if n % sizes[axis] == 0 else None for axis, n in zip(specs, leaf.shape, strict=False)]
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / name, jax.tree.map(placed, params()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
