"""The JSON of optimum-neuron's metadata files, with each member checked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, naming
from xla_ckpt.layouts.optimum.metadata import WITHOUT, Attention, Fused, ParameterSplit, StageMetadata
from xla_ckpt.tree.json_object import json_value

T = TypeVar("T")


def parse_stage_metadata(data: bytes, file: str) -> StageMetadata:
    """What a metadata file says.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself.
        UnsupportedStateError: It describes layers in a way that this library does not know.
    """
    with naming(file=file, hint=_LOST):
        content = json_value(data, "a file of metadata")
    fields = _Fields(content, file, "the file")
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

    def end(self, *flags: str) -> None:
        """Refuse what was not taken: it may change what the rest means. `flags` change nothing here.

        Raises:
            CorruptCheckpointError: A flag is missing.
            UnsupportedStateError: Something is left, or the adapters are of another kind.
        """
        for flag in flags:
            self.take(flag, bool)
        kind = self.rest.pop("peft_type", None)  # the first versions did not write it
        if kind not in (None, "lora"):
            raise UnsupportedStateError(
                "the metadata describe adapters that this library does not know", file=self.file, found=repr(kind)
            )
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
        axis=axes.get(axis, -1) if isinstance(axis, int | str) else -1,
        sizes=fields.sizes("original_dims"),
        tp=fields.count("tp_size"),
    )
    fields.end("bias")
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
        tp=fields.count("tp_size"),
    )
    fields.end("fuse_qkv", "bias")
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


_KINDS: Mapping[str, Callable[[_Fields, str], Fused | Attention]] = {
    "FusedLinearsSpec": _fused,
    "GQAQKVColumnParallelLinearSpec": _attention,
}
