"""Hugging Face's arrays in those of a checkpoint of optimum-neuron's, as its metadata say they lie there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.optimum.metadata import Attention, Fused, StageMetadata
from xla_ckpt.plan.rearrange import Excerpt, Rearranged
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True)
class _Slice:
    """Neighbouring elements of a stored array along one dim, and where they lie in the new one."""

    name: str
    """The new array."""

    dim: int = 0
    here: int = 0
    """First element in the new array."""

    there: int = 0
    """First element in the stored array."""

    size: int | None = None
    """Elements; None for all."""


def hugging_face(shapes: Mapping[str, tuple[int, ...]], metadata: Sequence[StageMetadata]) -> dict[str, Rearranged]:
    """The arrays of the model under Hugging Face's names, with its order of the heads.

    Args:
        shapes: Global shape of each stored array, by its name.
        metadata: What is said of each pipeline stage.

    Raises:
        UnsupportedStateError: A bias or an adapter of a layer that is fused along its inputs: nothing says how it lies.
    """
    parts: dict[str, list[tuple[str, _Slice]]] = {}
    for name, shape in shapes.items():
        for piece in _slices(name, shape, metadata):
            parts.setdefault(piece.name, []).append((name, piece))
    return {name: _array(of, shapes) for name, of in parts.items()}


def _array(of: Sequence[tuple[str, _Slice]], shapes: Mapping[str, tuple[int, ...]]) -> Rearranged:
    stored, first = of[0]
    shape = list(shapes[stored])
    if first.size is not None:
        shape[first.dim] = max(piece.here + (piece.size or 0) for _, piece in of)
    moved = []
    for name, piece in of:
        new, old = Box.whole(shape), Box.whole(shapes[name])
        if piece.size is not None:
            new = new.along(piece.dim, piece.here, piece.here + piece.size)
            old = old.along(piece.dim, piece.there, piece.there + piece.size)
        moved.append(Excerpt(new, schema.weight(name), old))
    return Rearranged(shape=tuple(shape), parts=tuple(moved))


def _slices(name: str, shape: tuple[int, ...], metadata: Sequence[StageMetadata]) -> Iterator[_Slice]:
    """The parts of a stored array, and the arrays of Hugging Face's that they are."""
    for stage in metadata:
        if (place := stage.layer(name)) is not None:
            layer, below = place
            at = f"{layer.module}." if layer.module else ""
            of_layer = _of_fused if isinstance(layer, Fused) else _of_attention
            return (yield from of_layer(layer, at, below))  # type: ignore[arg-type]
        attention = stage.attention(name)
        if attention is not None and len(shape) == 2 and not _is_lora_b(name):
            return (yield from _heads(name, attention, dim=1))
    yield _Slice(name)


def _is_lora_b(name: str) -> bool:
    return "lora_B" in name.split(".")


def _of_fused(layer: Fused, at: str, below: str) -> Iterator[_Slice]:
    cut = layer.sections(below)
    if cut is None and layer.axis:
        raise UnsupportedStateError(
            "optimum-neuron does not say how biases and adapters lie of a layer that is fused along its inputs",
            leaf=schema.weight(f"{at}{layer.name}.{below}"),
        )
    firsts = [0, *accumulate(layer.sizes)]
    for part, first, size in zip(layer.parts, firsts, layer.sizes, strict=False):
        # What is not cut is one for all of them: an adapter's lora_A.
        yield _Slice(f"{at}{part}.{below}", *(() if cut is None else (cut[0], 0, first, size)))


def _of_attention(layer: Attention, at: str, below: str) -> Iterator[_Slice]:
    """Queries, keys and values; ``weight_qkv`` and its likes are ``weight`` in each of them."""
    if layer.sections(below) is None:  # an adapter's lora_A: one for all of them
        for part in (layer.query, layer.key, layer.value):
            yield _Slice(f"{at}{part}.{below}")
        return
    what, _, kind = below.rpartition("_")
    queries, keys, _ = layer.sizes
    if "q" in kind:
        yield from _heads(f"{at}{layer.query}.{what}", layer)
    for part, letter, first in ((layer.key, "k", queries), (layer.value, "v", queries + keys)):
        if letter in kind:
            yield _Slice(f"{at}{part}.{what}", 0, 0, first if kind == "qkv" else 0, keys)


def _heads(name: str, layer: Attention, dim: int = 0) -> Iterator[_Slice]:
    """The heads of the queries, each run of neighbours together."""
    order, size = layer.query_heads(), layer.head_size
    starts = [i for i, head in enumerate(order) if i == 0 or head != order[i - 1] + 1]
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        yield _Slice(name, dim, order[start] * size, start * size, (stop - start) * size)
