"""Parse optimum-neuron metadata files ``mp_metadata_pp_rank_<n>.json``, one for each pipeline stage. Pure.

A file records for each parameter whether and how it is sharded over tp, and which modules fuse several layers of the
Hugging Face model: fused linear layers (`FusedLinearsSpec`), and queries, keys and values of grouped-query attention
(`GQAQKVColumnParallelLinearSpec`), whose keys and values may be replicated on several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from xla_ckpt.core.json_data import parse_json
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.sharding.sharding import DimSharding, Section, Sharding
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, annotate_errors

METADATA_FILE_NAME = re.compile(r"mp_metadata_pp_rank_(\d+)\.json")
"""Name of a metadata file; the number is the pipeline stage."""

_ADAPTER_PART = re.compile(r"(?<=\.lora_[AB])\.[^.]+(?=\.)|(?<=\.lora_embedding_[AB])\.[^.]+$")
"""Name of an adapter within the name of a parameter. Checkpoints of adapters omit it."""

NO_METADATA_HINT = (
    "Without the files mp_metadata_pp_rank_*.json the directory is one of neuronx-distributed's: then a model or rules "
    "have to say how its arrays are split."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """Sharding of one parameter."""

    dim: int | None
    """Dim that is sharded over tp; None if each rank has the whole parameter."""

    stride: int = 1
    """`partition_stride`: number of blocks on each rank."""

    ranks: int | None = None
    """`num_partitions`: number of ranks; None if it is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """Several linear layers fused into one (`FusedLinearsSpec`): each rank stores its parts one after the other."""

    module: str
    """Path of the module that contains the layer."""

    name: str
    """Name of the layer in the module."""

    parts: tuple[str, ...]
    """Names of the layers that it replaces."""

    axis: int
    """Dim along which they are fused."""

    sizes: tuple[int, ...]
    """Global size of that dim in each of them."""

    tp: int

    def get_sections(self, name: str) -> tuple[int, tuple[Section, ...]] | None:
        """Return (dim, its sections) of a tensor, by its name in the layer; None if the tensor is not fused."""
        role, what = _parse_role(name)
        if what not in ("weight", "bias") or role == "lora_A" or (self.axis and (role == "lora_B" or what == "bias")):
            return None
        return self.axis, tuple(Section(size) for size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Queries, keys and values of grouped-query attention in one layer (`GQAQKVColumnParallelLinearSpec`)."""

    module: str
    name: str
    query: str
    key: str
    value: str
    output: str
    """Names of the layers that it replaces, and of the output projection."""

    heads: int
    kv_heads: int
    copies: int
    """`kv_size_multiplier`: number of ranks that replicate the same keys and values."""

    query_rows: int
    """Number of rows of queries on each rank."""

    kv_rows: int
    """Number of rows of keys, and of values, on each rank."""

    tp: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Global numbers of rows of queries, keys and values, without replicas."""
        kv = self.kv_rows * self.tp // self.copies
        return self.query_rows * self.tp, kv, kv

    @property
    def head_size(self) -> int:
        """Number of rows of one head."""
        return self.sizes[0] // self.heads

    def get_sections(self, name: str) -> tuple[int, tuple[Section, ...]] | None:
        """Return (dim, its sections) of a tensor, as `FusedLinear.get_sections`."""
        role, what = _parse_role(name)
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


def _parse_role(name: str) -> tuple[str, str]:
    """Split a name in a layer into (layer of an adapter or empty, name of the tensor)."""
    role, _, what = name.rpartition(".")
    return ("" if role == "base_layer" else role), what


@dataclass(frozen=True)
class StageMetadata:
    """Contents of a metadata file."""

    file: str
    parameters: Mapping[str, ParameterSplit]
    """Shardings of the parameters by name, in the order of the model."""

    layers: tuple[FusedLinear | GroupedQueryAttention, ...]

    @cached_property
    def _without_adapters(self) -> dict[str, str]:
        return {_ADAPTER_PART.sub("", name): name for name in reversed(list(self.parameters))}

    def find_parameter(self, name: str) -> str | None:
        """Return the parameter that is stored under a name; None for a buffer, or for another name of a parameter."""
        return name if name in self.parameters else self._without_adapters.get(name)

    @cached_property
    def _layers_by_path(self) -> dict[str, FusedLinear | GroupedQueryAttention]:
        return {f"{layer.module}.{layer.name}".lstrip("."): layer for layer in self.layers}

    def find_layer(self, name: str) -> tuple[FusedLinear | GroupedQueryAttention, str] | None:
        """Return the fused layer that contains a parameter, and the parameter's name in it; None if it is not fused."""
        text = _ADAPTER_PART.sub("", name)
        for at in (m.start() for m in re.finditer(r"\.", text)):
            if (layer := self._layers_by_path.get(text[:at])) is not None:
                return layer, text[at + 1 :]
        return None

    def get_sharding(self, name: str) -> Sharding:
        """Return the sharding of a parameter over the ranks.

        Raises:
            CorruptCheckpointError: The metadata of the layer and of the parameter contradict each other.
        """
        split, special = self.parameters[name], self._get_sections(name)
        if special is None:
            return (
                Sharding()
                if split.dim is None
                else _shard_along(split.dim, DimSharding.from_stride(("tp",), split.stride))
            )
        dim, sections = special
        # neuronx-distributed loses the attributes of a fused weight_qkv, so its metadata describe it as not sharded.
        if split.dim not in (None, dim) or split.stride not in (1, len(sections)):
            raise CorruptCheckpointError(
                "the metadata of a fused layer contradict those of its parameter",
                leaf=schema.get_weight_path(name),
                file=self.file,
                expected=f"dim {dim} in {len(sections)} parts",
                found=f"dim {split.dim}, stride {split.stride}",
                hint=NO_METADATA_HINT,
            )
        if len(set(sections)) == 1:
            sections = tuple(replace(s, size=None) for s in sections)  # equivalent to a stride
        return _shard_along(dim, DimSharding(("tp",), sections))

    def get_split_size(self, name: str) -> tuple[int, int] | None:
        """Return (dim, its global size) of a parameter in a fused layer; None for any other parameter."""
        special = self._get_sections(name)
        return None if special is None else (special[0], sum(s.size or 0 for s in special[1]))

    def find_attention(self, name: str) -> GroupedQueryAttention | None:
        """Return the grouped-query attention whose head order applies to a parameter: its queries, or the output
        projection.
        """
        of_layer = self.find_layer(name)
        if of_layer is not None and isinstance(of_layer[0], GroupedQueryAttention):
            return of_layer[0] if of_layer[0].get_sections(of_layer[1]) is not None else None
        return next((layer for path, layer in self._attention_by_output.items() if name.startswith(path)), None)

    @cached_property
    def _attention_by_output(self) -> dict[str, GroupedQueryAttention]:
        attentions = [layer for layer in self.layers if isinstance(layer, GroupedQueryAttention)]
        return {f"{layer.module}.{layer.output}.".lstrip("."): layer for layer in attentions}

    def _get_sections(self, name: str) -> tuple[int, tuple[Section, ...]] | None:
        of_layer = self.find_layer(name)
        return None if of_layer is None else of_layer[0].get_sections(of_layer[1])


def _shard_along(dim: int, split: DimSharding) -> Sharding:
    return Sharding((*(None,) * dim, split))


T = TypeVar("T")


def parse_stage_metadata(data: bytes, file: str) -> StageMetadata:
    """Parse a metadata file.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UnsupportedStateError: It describes layers in an unsupported form.
    """
    with annotate_errors(file=file, hint=_RESTORE_HINT):
        content = parse_json(data, "a file of metadata")
    fields = _JsonFields(content, file, "the file")
    splits = fields.take("parameters", dict)
    parameters = {name: _parse_parameter(_JsonFields(value, file, name), name) for name, value in splits.items()}
    layers = [
        layer
        for module in fields.take("model_weight_transformation_specs", list)
        for layer in _parse_layers(_JsonFields(module, file, "model_weight_transformation_specs"))
    ]
    return StageMetadata(file, parameters, tuple(layers))


_RESTORE_HINT = f"Restore the file from a copy. {NO_METADATA_HINT}"


class _JsonFields:
    """Members of a JSON object, removed one by one with a type check."""

    def __init__(self, value: Any, file: str, where: str) -> None:
        self.file = file
        self.where = where
        if not isinstance(value, dict):
            raise self.make_error("a JSON object", type(value).__name__)
        self.remaining = dict(value)

    def make_error(self, expected: object, actual: object) -> CorruptCheckpointError:
        """Return the error for an invalid member."""
        return CorruptCheckpointError(
            f"the metadata are damaged at {self.where}",
            file=self.file,
            expected=expected,
            found=actual,
            hint=_RESTORE_HINT,
        )

    def take(self, name: str, kind: type[T]) -> T:
        """Remove and return a required member.

        Raises:
            CorruptCheckpointError: It is missing, or has another type.
        """
        value = self.remaining.pop(name, None)
        if type(value) is not kind:
            raise self.make_error(f"{name} of the type {kind.__name__}", repr(value)[:100])
        return value

    def take_names(self, name: str) -> tuple[str, ...]:
        """Remove and return a list of names.

        Raises:
            CorruptCheckpointError: It is missing or invalid.
        """
        values = self.take(name, list)
        if not all(isinstance(v, str) for v in values):
            raise self.make_error(f"{name}: names", repr(values)[:100])
        return tuple(values)

    def take_sizes(self, name: str) -> tuple[int, ...]:
        """Remove and return a list of sizes.

        Raises:
            CorruptCheckpointError: It is missing or invalid.
        """
        values = self.take(name, list)
        if not values or not all(type(v) is int and v > 0 for v in values):
            raise self.make_error(f"{name}: sizes", repr(values)[:100])
        return tuple(values)

    def take_count(self, name: str) -> int:
        """Remove and return an integer of at least 1.

        Raises:
            CorruptCheckpointError: It is missing or invalid.
        """
        value = self.take(name, int)
        if value < 1:
            raise self.make_error(f"{name} of at least 1", value)
        return value

    def check_all_taken(self, *flags: str) -> None:
        """Check that no members remain, because they may change the meaning of the others. `flags` have no effect here.

        Raises:
            CorruptCheckpointError: A flag is missing.
            UnsupportedStateError: Members remain, or the adapters are of another kind.
        """
        for flag in flags:
            self.take(flag, bool)
        kind = self.remaining.pop("peft_type", None)  # the first versions did not write it
        if kind not in (None, "lora"):
            raise UnsupportedStateError(
                "the metadata describe adapters that this library does not know", file=self.file, found=repr(kind)
            )
        if self.remaining:
            raise UnsupportedStateError(
                f"the metadata of {self.where} say more than this library knows",
                file=self.file,
                found=", ".join(sorted(self.remaining)),
                hint=NO_METADATA_HINT,
            )


def _parse_parameter(fields: _JsonFields, name: str) -> ParameterSplit:
    if not fields.take("tensor_model_parallel", bool):
        return ParameterSplit(dim=None)
    dim, stride = fields.take("partition_dim", int), fields.take_count("partition_stride")
    if dim < 0:
        raise fields.make_error("a partition_dim that is not negative", f"{dim} of {name}")
    return ParameterSplit(
        dim=dim,
        stride=stride,
        ranks=fields.take_count("num_partitions") if "num_partitions" in fields.remaining else None,
    )


def _parse_layers(module: _JsonFields) -> Iterable[FusedLinear | GroupedQueryAttention]:
    name = module.take("module_fully_qualified_name", str)
    for entry in module.take("specs", list):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise module.make_error("pairs of a class and its members", repr(entry)[:100])
        kind, value = entry
        make = _LAYER_PARSERS.get(kind)
        if make is None:
            raise UnsupportedStateError(
                "the metadata describe a kind of layer that this library does not know",
                file=module.file,
                expected=" or ".join(_LAYER_PARSERS),
                found=f"{kind} in {name}",
                hint=NO_METADATA_HINT,
            )
        yield make(_JsonFields(value, module.file, f"{kind} of {name}"), name)


def _parse_fused_linear(fields: _JsonFields, module: str) -> FusedLinear:
    axes = {0: 0, 1: 1, "column": 0, "row": 1}
    axis = fields.remaining.pop("fuse_axis", None)
    layer = FusedLinear(
        module=module,
        name=fields.take("fused_linear_name", str),
        parts=fields.take_names("linear_names"),
        axis=axes.get(axis, -1) if isinstance(axis, int | str) else -1,
        sizes=fields.take_sizes("original_dims"),
        tp=fields.take_count("tp_size"),
    )
    fields.check_all_taken("bias")
    if layer.axis < 0:
        raise fields.make_error("a fuse_axis of 0, 1, column or row", repr(axis)[:100])
    if len(layer.parts) != len(layer.sizes):
        raise fields.make_error(f"a size for each of {', '.join(layer.parts)}", f"original_dims {list(layer.sizes)}")
    uneven = next((size for size in layer.sizes if size % layer.tp), None)
    if uneven is not None:
        raise fields.make_error(f"original_dims that {layer.tp} ranks divide", uneven)
    return layer


def _parse_attention(fields: _JsonFields, module: str) -> GroupedQueryAttention:
    layer = GroupedQueryAttention(
        module=module,
        name=fields.take("gqa_qkv_projection_name", str),
        query=fields.take("query_projection_name", str),
        key=fields.take("key_projection_name", str),
        value=fields.take("value_projection_name", str),
        output=fields.take("output_projection_name", str),
        heads=fields.take_count("num_attention_heads"),
        kv_heads=fields.take_count("num_key_value_heads"),
        copies=fields.take_count("kv_size_multiplier"),
        query_rows=fields.take_count("q_output_size_per_partition"),
        kv_rows=fields.take_count("kv_output_size_per_partition"),
        tp=fields.take_count("tp_size"),
    )
    fields.check_all_taken("fuse_qkv", "bias")
    if layer.tp % layer.copies:
        raise fields.make_error(f"a kv_size_multiplier that divides {layer.tp} ranks", layer.copies)
    if layer.heads % (layer.kv_heads * layer.copies):
        raise fields.make_error(
            "heads of queries that divide by those of keys with all copies",
            f"{layer.heads} by {layer.kv_heads} times {layer.copies}",
        )
    rows = (layer.query_rows * layer.tp, layer.kv_rows * layer.tp)
    size = rows[0] // layer.heads
    if rows != (size * layer.heads, size * layer.kv_heads * layer.copies):
        raise fields.make_error(
            f"rows of {layer.heads} heads of queries, and of {layer.kv_heads} heads of keys in {layer.copies} copies",
            f"{rows[0]} and {rows[1]} rows on {layer.tp} ranks",
        )
    return layer


_LAYER_PARSERS: Mapping[str, Callable[[_JsonFields, str], FusedLinear | GroupedQueryAttention]] = {
    "FusedLinearsSpec": _parse_fused_linear,
    "GQAQKVColumnParallelLinearSpec": _parse_attention,
}
