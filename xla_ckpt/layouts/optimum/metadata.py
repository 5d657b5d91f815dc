"""What optimum-neuron says of its checkpoints: the files ``mp_metadata_pp_rank_<n>.json``, one a pipeline stage. Pure.

Each says of every parameter whether and how it is split over tp, and which modules have several layers of the
Hugging Face model in one: linear layers that are fused (`FusedLinearsSpec`), and queries, keys and values of
grouped-query attention (`GQAQKVColumnParallelLinearSpec`), of which several ranks may hold the same keys and values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.sharding.sections import Section
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.tree import schema

T = TypeVar("T")

METADATA_FILE = re.compile(r"mp_metadata_pp_rank_(\d+)\.json")
"""Name of a metadata file; the number is that of the pipeline stage."""

_ADAPTER = re.compile(r"(?<=\.lora_[AB])\.[^.]+(?=\.)|(?<=\.lora_embedding_[AB])\.[^.]+$")
"""The name of an adapter within the name of a parameter. Tags of adapters leave it out."""

WITHOUT = (
    "Without the files mp_metadata_pp_rank_*.json the directory is one of neuronx-distributed's: then a model or rules "
    "have to say how its arrays are split."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """How one parameter is split."""

    dim: int | None
    """The dim that is split over tp; None if each rank has all of the parameter."""

    stride: int = 1
    """`partition_stride`: blocks that each rank holds."""

    ranks: int | None = None
    """`num_partitions`: over how many ranks; None if it does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Several linear layers in one (`FusedLinearsSpec`): each rank has its part of the first, then of the second..."""

    module: str
    """Path of the module that has the layer."""

    name: str
    """The layer's name in it."""

    parts: tuple[str, ...]
    """Names of the layers that it stands for."""

    bias: bool
    axis: int
    """The dim along which they are fused."""

    sizes: tuple[int, ...]
    """Elements of that dim in each of them, all ranks together."""

    tp: int
    lora: bool = False
    """Whether it has adapters."""

    def sections(self, below: str) -> tuple[int, tuple[Section, ...]] | None:
        """(dim, what it consists of) of a tensor of the layer, by its name below it; None if it is like any other."""
        role, what = _role(below)
        if what not in ("weight", "bias") or role == "lora_A" or (self.axis and (role == "lora_B" or what == "bias")):
            return None
        return self.axis, tuple(Section(size) for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Queries, keys and values of grouped-query attention in one layer (`GQAQKVColumnParallelLinearSpec`)."""

    module: str
    name: str
    query: str
    key: str
    value: str
    output: str
    """Names of the layers that it stands for, and of the one that takes the heads' outputs."""

    heads: int
    kv_heads: int
    copies: int
    """`kv_size_multiplier`: how many ranks hold the same keys and values."""

    query_rows: int
    """Rows of queries on each rank."""

    kv_rows: int
    """Rows of keys, and of values, on each rank."""

    fused: bool
    """Whether queries, keys and values are one tensor."""

    bias: bool
    tp: int
    lora: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values, each of them counted once."""
        kv = self.kv_rows * self.tp // self.copies
        return self.query_rows * self.tp, kv, kv

    @property
    def head_size(self) -> int:
        """Rows of one head."""
        return self.sizes[0] // self.heads

    def sections(self, below: str) -> tuple[int, tuple[Section, ...]] | None:
        """As `Fused.sections`."""
        role, what = _role(below)
        if role == "lora_A":
            return None
        queries, keys, values = self.sizes
        sections = {
            "qkv": (Section(queries), Section(keys, self.copies), Section(values, self.copies)),
            "q": (Section(queries),),
            "k": (Section(keys, self.copies),),
            "v": (Section(values, self.copies),),
        }
        kind, _, part = what.rpartition("_")
        if kind not in ("weight", "bias") or part not in sections:
            return None
        return 0, sections[part]

    def query_heads(self) -> list[int]:
        """Which head of the Hugging Face model each stored head of the queries is, in the order of the ranks.

        The keys and values lie on the ranks as a whole, once for each copy. The queries of one key-value head are dealt
        out to its copies.
        """
        of_one, per_copy = self.heads // self.kv_heads, self.heads // self.kv_heads // self.copies
        return [
            head * of_one + copy * per_copy + i
            for copy in range(self.copies)
            for head in range(self.kv_heads)
            for i in range(per_copy)
        ]


def _role(below: str) -> tuple[str, str]:
    """(layer of an adapter or empty, name of the tensor) from a name below a layer."""
    role, _, what = below.rpartition(".")
    return ("" if role == "base_layer" else role), what


@dataclass(frozen=True)
class StageMetadata:
    """What a metadata file says."""

    file: str
    parameters: Mapping[str, ParameterSplit]
    """In the order of the model."""

    layers: tuple[Fused | Attention, ...]

    @cached_property
    def _without_adapters(self) -> dict[str, str]:
        return {_ADAPTER.sub("", name): name for name in reversed(list(self.parameters))}

    def parameter(self, name: str) -> str | None:
        """The parameter that is stored under a name; None if there is none: it is a buffer, or another name of one."""
        return name if name in self.parameters else self._without_adapters.get(name)

    @cached_property
    def _layers(self) -> dict[str, Fused | Attention]:
        return {f"{layer.module}.{layer.name}".lstrip("."): layer for layer in self.layers}

    def layer(self, name: str) -> tuple[Fused | Attention, str] | None:
        """The layer that a parameter is of, and its name below that; None if it is of no such layer."""
        text = _ADAPTER.sub("", name)
        for at in (m.start() for m in re.finditer(r"\.", text)):
            if (layer := self._layers.get(text[:at])) is not None:
                return layer, text[at + 1 :]
        return None

    def sharding(self, name: str) -> Sharding:
        """How a parameter is split over the ranks.

        Raises:
            CorruptCheckpointError: Two places contradict each other.
        """
        split, special = self.parameters[name], self._sections(name)
        if special is None:
            return Sharding() if split.dim is None else _along(split.dim, Split.strided(("tp",), split.stride))
        dim, sections = special
        # neuronx-distributed loses the attributes of a fused weight_qkv, so that it counts as not split.
        if split.dim not in (None, dim) or split.stride not in (1, len(sections)):
            raise CorruptCheckpointError(
                "the metadata of a fused layer contradict those of its parameter",
                leaf=schema.weight(name),
                file=self.file,
                expected=f"dim {dim} in {len(sections)} parts",
                found=f"dim {split.dim}, stride {split.stride}",
                hint=WITHOUT,
            )
        if len(set(sections)) == 1:
            sections = tuple(replace(s, size=None) for s in sections)  # a stride says it, too
        return _along(dim, Split(("tp",), sections))

    def size(self, name: str) -> tuple[int, int] | None:
        """(dim, elements of it in the global array) of a parameter of such a layer; None for any other."""
        special = self._sections(name)
        return None if special is None else (special[0], sum(s.size or 0 for s in special[1]))

    def attention(self, name: str) -> Attention | None:
        """The grouped-query attention whose heads a parameter has: its queries, or what takes their outputs."""
        of_layer = self.layer(name)
        if of_layer is not None and isinstance(of_layer[0], Attention):
            return of_layer[0] if of_layer[0].sections(of_layer[1]) is not None else None
        return next((layer for path, layer in self._outputs.items() if name.startswith(path)), None)

    @cached_property
    def _outputs(self) -> dict[str, Attention]:
        attentions = [layer for layer in self.layers if isinstance(layer, Attention)]
        return {f"{layer.module}.{layer.output}.".lstrip("."): layer for layer in attentions}

    def _sections(self, name: str) -> tuple[int, tuple[Section, ...]] | None:
        of_layer = self.layer(name)
        return None if of_layer is None else of_layer[0].sections(of_layer[1])


def _along(dim: int, split: Split) -> Sharding:
    return Sharding((*(None,) * dim, split))


def parse_stage_metadata(data: bytes, file: str) -> StageMetadata:
    """What a metadata file says.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UnsupportedStateError: It describes layers in a way that this library does not know.
    """
    try:
        read = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the metadata are no JSON: {error}", file=file, hint=_LOST) from error
    fields = _Fields(read, file, "the file")
    splits = fields.take("parameters", dict)
    parameters = {name: _parameter(_Fields(value, file, name), name) for name, value in splits.items()}
    layers = [
        layer
        for module in fields.take("model_weight_transformation_specs", list)
        for layer in _layers_of(_Fields(module, file, "model_weight_transformation_specs"))
    ]
    return StageMetadata(file, parameters, tuple(layers))


_LOST = f"Restore the file from a copy. {WITHOUT}"


class _Fields:
    """The members of a JSON object, each taken with its type."""

    def __init__(self, value: Any, file: str, where: str) -> None:
        self.file = file
        self.where = where
        if not isinstance(value, dict):
            raise self.error("a JSON object", type(value).__name__)
        self.rest = dict(value)

    def error(self, expected: object, actual: object) -> CorruptCheckpointError:
        """The error for something that is not as it is written."""
        return CorruptCheckpointError(
            f"the metadata are damaged at {self.where}", file=self.file, expected=expected, found=actual, hint=_LOST
        )

    def take(self, name: str, kind: type[T]) -> T:
        """A member that has to be there.

        Raises:
            CorruptCheckpointError: It is not, or has another type.
        """
        value = self.rest.pop(name, None)
        if type(value) is not kind:
            raise self.error(f"{name} of the type {kind.__name__}", repr(value)[:100])
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names."""
        values = self.take(name, list)
        if not all(isinstance(v, str) for v in values):
            raise self.error(f"{name}: names", repr(values)[:100])
        return tuple(values)

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of sizes."""
        values = self.take(name, list)
        if not values or not all(type(v) is int and v > 0 for v in values):
            raise self.error(f"{name}: sizes", repr(values)[:100])
        return tuple(values)

    def count(self, name: str) -> int:
        """A number that is at least 1."""
        value = self.take(name, int)
        if value < 1:
            raise self.error(f"{name} of at least 1", value)
        return value

    def end(self) -> None:
        """Refuse what was not taken: it may change what the rest means.

        Raises:
            UnsupportedStateError: Something is left.
        """
        if self.rest:
            raise UnsupportedStateError(
                f"the metadata of {self.where} say more than this library knows",
                file=self.file,
                found=", ".join(sorted(self.rest)),
                hint=WITHOUT,
            )


def _parameter(fields: _Fields, name: str) -> ParameterSplit:
    if not fields.take("tensor_model_parallel", bool):
        return ParameterSplit(dim=None)
    dim, stride = fields.take("partition_dim", int), fields.count("partition_stride")
    if dim < 0:
        raise fields.error("a partition_dim that is not negative", f"{dim} of {name}")
    return ParameterSplit(
        dim=dim, stride=stride, ranks=fields.count("num_partitions") if "num_partitions" in fields.rest else None
    )


def _layers_of(module: _Fields) -> Iterable[Fused | Attention]:
    name = module.take("module_fully_qualified_name", str)
    for entry in module.take("specs", list):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise module.error("pairs of a class and its members", repr(entry)[:100])
        kind, value = entry
        make = _KINDS.get(kind)
        if make is None:
            raise UnsupportedStateError(
                "the metadata describe a kind of layer that this library does not know",
                file=module.file,
                expected=" or ".join(_KINDS),
                found=f"{kind} in {name}",
                hint=WITHOUT,
            )
        yield make(_Fields(value, module.file, f"{kind} of {name}"), name)


def _fused(fields: _Fields, module: str) -> Fused:
    axes = {0: 0, 1: 1, "column": 0, "row": 1}
    axis = fields.rest.pop("fuse_axis", None)
    layer = Fused(
        module=module,
        name=fields.take("fused_linear_name", str),
        parts=fields.names("linear_names"),
        bias=fields.take("bias", bool),
        axis=axes.get(axis, -1) if isinstance(axis, int | str) else -1,
        sizes=fields.sizes("original_dims"),
        tp=fields.count("tp_size"),
        lora=_lora(fields),
    )
    fields.end()
    if layer.axis < 0:
        raise fields.error("a fuse_axis of 0, 1, column or row", repr(axis)[:100])
    if len(layer.parts) != len(layer.sizes):
        raise fields.error(f"a size for each of {', '.join(layer.parts)}", f"original_dims {list(layer.sizes)}")
    uneven = next((size for size in layer.sizes if size % layer.tp), None)
    if uneven is not None:
        raise fields.error(f"original_dims that {layer.tp} ranks divide", uneven)
    return layer


def _attention(fields: _Fields, module: str) -> Attention:
    layer = Attention(
        module=module,
        name=fields.take("gqa_qkv_projection_name", str),
        query=fields.take("query_projection_name", str),
        key=fields.take("key_projection_name", str),
        value=fields.take("value_projection_name", str),
        output=fields.take("output_projection_name", str),
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        copies=fields.count("kv_size_multiplier"),
        query_rows=fields.count("q_output_size_per_partition"),
        kv_rows=fields.count("kv_output_size_per_partition"),
        fused=fields.take("fuse_qkv", bool),
        bias=fields.take("bias", bool),
        tp=fields.count("tp_size"),
        lora=_lora(fields),
    )
    fields.end()
    if layer.tp % layer.copies:
        raise fields.error(f"a kv_size_multiplier that divides {layer.tp} ranks", layer.copies)
    if layer.heads % (layer.kv_heads * layer.copies):
        raise fields.error(
            "heads of queries that divide by those of keys with all copies",
            f"{layer.heads} by {layer.kv_heads} times {layer.copies}",
        )
    rows = (layer.query_rows * layer.tp, layer.kv_rows * layer.tp)
    size = rows[0] // layer.heads
    if rows != (size * layer.heads, size * layer.kv_heads * layer.copies):
        raise fields.error(
            f"rows of {layer.heads} heads of queries, and of {layer.kv_heads} heads of keys in {layer.copies} copies",
            f"{rows[0]} and {rows[1]} rows on {layer.tp} ranks",
        )
    return layer


def _lora(fields: _Fields) -> bool:
    kind = fields.rest.pop("peft_type", None)  # the first versions did not write it
    if kind not in (None, "lora"):
        raise UnsupportedStateError(
            "the metadata describe adapters that this library does not know", file=fields.file, found=repr(kind)
        )
    return kind is not None


_KINDS: Mapping[str, Callable[[_Fields, str], Fused | Attention]] = {
    "FusedLinearsSpec": _fused,
    "GQAQKVColumnParallelLinearSpec": _attention,
}
