"""Hugging Face's arrays in those of a checkpoint of optimum-neuron's, as its metadata say they lie there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.array_links import ArrayLink, query_runs
from xla_ckpt.layouts.optimum.metadata import Attention, Fused, StageMetadata
from xla_ckpt.tree import schema


def links_of(shapes: Mapping[str, tuple[int, ...]], metadata: Sequence[StageMetadata]) -> Iterator[ArrayLink]:
    """The arrays of the model under Hugging Face's names, with its order of the heads: the elements of all of them.

    Args:
        shapes: Global shape of each stored array, by its name.
        metadata: What is said of each pipeline stage.

    Raises:
        UnsupportedStateError: A bias or an adapter of a layer that is fused along its inputs: nothing says how it lies.
    """
    for name, shape in shapes.items():
        yield from _links(name, shape, metadata)


def _links(name: str, shape: tuple[int, ...], metadata: Sequence[StageMetadata]) -> Iterator[ArrayLink]:
    """The parts of a stored array, and the arrays of Hugging Face's that they are."""
    for stage in metadata:
        if (place := stage.layer(name)) is not None:
            layer, below = place
            at = f"{layer.module}." if layer.module else ""
            of_layer = _of_fused if isinstance(layer, Fused) else _of_attention
            return (yield from of_layer(layer, name, at, below))  # type: ignore[arg-type]
        attention = stage.attention(name)
        if attention is not None and len(shape) == 2 and "lora_B" not in name.split("."):
            return (yield from _heads(name, name, attention, dim=1))
    yield ArrayLink(theirs=name, hf=name)


def _of_fused(layer: Fused, name: str, at: str, below: str) -> Iterator[ArrayLink]:
    cut = layer.sections(below)
    if cut is None and layer.axis:
        raise UnsupportedStateError(
            "optimum-neuron does not say how biases and adapters lie of a layer that is fused along its inputs",
            leaf=schema.weight(f"{at}{layer.name}.{below}"),
        )
    firsts = [0, *accumulate(layer.sizes)]
    for part, first, size in zip(layer.parts, firsts, layer.sizes, strict=False):
        hf = f"{at}{part}.{below}"
        if cut is None:  # an adapter's lora_A: one for all of them
            yield ArrayLink(theirs=name, hf=hf)
        else:
            yield ArrayLink(theirs=name, hf=hf, dim=cut[0], there=first, size=size)


def _of_attention(layer: Attention, name: str, at: str, below: str) -> Iterator[ArrayLink]:
    """Queries, keys and values; ``weight_qkv`` and its likes are ``weight`` in each of them."""
    if layer.sections(below) is None:  # an adapter's lora_A: one for all of them
        for part in (layer.query, layer.key, layer.value):
            yield ArrayLink(theirs=name, hf=f"{at}{part}.{below}")
        return
    what, _, kind = below.rpartition("_")
    queries, keys, _ = layer.sizes
    if "q" in kind:
        yield from _heads(name, f"{at}{layer.query}.{what}", layer)
    for part, letter, first in ((layer.key, "k", queries), (layer.value, "v", queries + keys)):
        if letter in kind:
            yield ArrayLink(theirs=name, hf=f"{at}{part}.{what}", there=first if kind == "qkv" else 0, size=keys)


def _heads(name: str, hf: str, layer: Attention, dim: int = 0) -> Iterator[ArrayLink]:
    """The heads of the queries, each run of neighbours together."""
    for there, here, size in query_runs(layer.heads, layer.kv_heads, layer.copies, layer.head_size):
        yield ArrayLink(theirs=name, hf=hf, dim=dim, there=there, here=here, size=size)
