"""Layers that know better than their parameters how these are split.

A parameter loses its attributes when its module goes to an XLA device, as neuronx-distributed's LoRA has its adapters
do. Its `GQAQKVColumnParallelLinear` makes its fused parameter anew after it has set them; and no attribute could say
that its rows are queries, keys and values of different sizes, or that several ranks hold the same keys and values. The
module still has the numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.torch_objects import is_lazy, is_module
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.job.mesh_source import neighbours_share_keys
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sections import Section
from xla_ckpt.sharding.sharding import Sharding, Split
from xla_ckpt.state.attributes import declared_sharding
from xla_ckpt.tree import schema

Layers = Mapping[int, Sharding]
"""Identity of a parameter -> how its layer says that it is split."""

_HINT = "Check the mesh and the arguments of the layer, or pass a shardings rule, which is asked first."


def layer_shardings(model: Any, mesh: Mesh) -> dict[int, Sharding]:
    """How the layers of a module say that their parameters are split.

    A layer is recognised by what it has, whatever its class. One of fused or separate queries, keys and values has
    `q_output_size_per_partition` and `kv_output_size_per_partition` (rows of queries, and of keys or of values, on each
    rank), `kv_size_multiplier` (how many ranks hold the same keys and values), and parameters ``weight_qkv``, or
    ``weight_q``, ``weight_k`` and ``weight_v``, and biases of such names. Any other one has `weight_partition_dim`, and
    may have `bias_partition_dim` and `stride`: it is asked for parameters that do not say it themselves.

    Args:
        model: A module; of anything else nothing is known.
        mesh: How the ranks of the job are arranged that holds it.

    Raises:
        UnsupportedStateError: The numbers of a layer contradict each other, its parameters, or the mesh.
    """
    shardings: dict[int, Sharding] = {}
    for name, layer in model.named_modules() if is_module(model) else ():
        for parameter, (leaf, sharding) in _of_layer(f"{name}." if name else "", layer, mesh):
            if shardings.setdefault(id(parameter), sharding) != sharding:
                raise _contradiction(
                    leaf, f"{shardings[id(parameter)].spec}, as another layer says of it", f"{sharding.spec}"
                )
    return shardings


_Of = Iterator[tuple[Any, tuple[str, Sharding]]]
"""The parameters of a layer, each with its leaf path and how it is split."""


def _of_layer(prefix: str, layer: Any, mesh: Mesh) -> _Of:
    q, kv = (_number(layer, f"{part}_output_size_per_partition") for part in ("q", "kv"))
    if q is not None and kv is not None:
        yield from _of_attention(prefix, layer, (q, kv), mesh.tp)
    elif (dim := _number(layer, "weight_partition_dim")) is not None:
        yield from _of_other(prefix, layer, dim, mesh)


# Layers with one dim that is split.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A parameter with the attributes that neuronx-distributed gives it, as its layer knows them."""

    parameter: Any
    partition_dim: int
    partition_stride: int
    num_partitions: int | None
    expert_model_parallel: bool
    tensor_model_parallel: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


def _of_other(prefix: str, layer: Any, dim: int, mesh: Mesh) -> _Of:
    """`ColumnParallelLinear`, `RowParallelLinear`, `ParallelEmbedding`, and layers of experts."""
    dims = {"weight": dim}
    of_bias = _number(layer, "bias_partition_dim")
    if of_bias is not None and not getattr(layer, "gather_output", False):  # else it is added to all outputs together
        dims["bias"] = of_bias
    for name, parameter in _parameters(layer, dims):
        if getattr(parameter, "tensor_model_parallel", False):
            continue  # it says so itself, and what a program has set on it by hand counts
        said = _Said(
            parameter=parameter,
            partition_dim=dims[name],
            partition_stride=_number(layer, "stride") or 1,
            num_partitions=_ranks(layer, "tensor_parallel_group") or _ranks(layer, "tensor_model_parallel_group"),
            expert_model_parallel=(_ranks(layer, "expert_model_parallel_group") or 1) > 1,
        )
        leaf = schema.weight(prefix + name)
        # A job of one rank says how it would be split: a tag of several ranks may be loaded.
        sharding = declared_sharding(said, leaf, mesh if mesh.tp > 1 else None)
        if sharding is not None:
            yield parameter, (leaf, sharding)


def _ranks(layer: Any, group: str) -> int | None:
    """How many ranks are in a process group that a layer may have."""
    size = getattr(getattr(layer, group, None), "size", None)
    return int(size()) if callable(size) else None


# Queries, keys and values.


def _number(layer: Any, name: str) -> int | None:
    """A number that a layer may have."""
    try:
        return operator.index(getattr(layer, name))
    except Exception:
        return None  # modules answer what they do not have with exceptions of all kinds


def _of_attention(prefix: str, layer: Any, local: tuple[int, int], tp: int) -> _Of:
    """`GQAQKVColumnParallelLinear`. `local` are the rows of queries, and of keys or values, that a rank has."""
    q, kv = local
    copies = _number(layer, "kv_size_multiplier") or 1
    parameters = dict(_parameters(layer, _OF_ATTENTION))
    leaf = schema.weight(prefix + next(iter(parameters), "weight_qkv"))
    if copies < 1 or tp % copies or kv * tp % copies:
        raise _contradiction(
            leaf, f"a kv_size_multiplier that divides tp={tp}, and {tp} times {kv} rows of keys", f"{copies}"
        )
    queries = Section(q * tp)
    keys = Section(kv * tp // copies, copies, copies > 1 and _adjacent(layer))
    _check_sizes(leaf, layer, (q * tp, kv * tp // copies))
    of_rows = {"q": (q, (queries,)), "k": (kv, (keys,)), "v": (kv, (keys,)), "qkv": (q + 2 * kv, (queries, keys, keys))}
    for name, parameter in parameters.items():
        rows, sections = of_rows[name.rpartition("_")[2]]
        leaf, shape = schema.weight(prefix + name), tuple(parameter.shape)
        if name.startswith("bias") and getattr(layer, "gather_output", False):
            yield parameter, (leaf, Sharding())  # it is added to the outputs of all ranks together
            continue
        if shape[:1] != (rows,):
            raise _contradiction(leaf, f"{rows} rows, {q} of queries and {kv} of keys on each rank", f"{list(shape)}")
        _check_attributes(leaf, parameter)
        yield parameter, (leaf, Sharding((Split(("tp",), sections), *(None,) * (len(shape) - 1))))


_OF_ATTENTION = tuple(f"{kind}_{part}" for kind in ("weight", "bias") for part in ("qkv", "q", "k", "v"))


def _parameters(layer: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Those of the parameters of these names that a layer has, and that have a shape."""
    for name in names:
        value = layer._parameters.get(name)
        if value is not None and not is_lazy(value):
            yield name, value


def _adjacent(layer: Any) -> bool:
    """Whether neighbouring ranks hold the same keys: the layer says so, or the groups that neuronx-distributed made."""
    own = getattr(layer, "kv_copies_adjacent", None)
    return neighbours_share_keys() if own is None else bool(own)


def _check_sizes(leaf: str, layer: Any, sizes: tuple[int, int]) -> None:
    """Compare the sizes of the whole layer with what it says elsewhere."""
    said = getattr(layer, "output_sizes", None)
    if isinstance(said, list | tuple) and tuple(said) != sizes:
        raise _contradiction(leaf, f"output_sizes {list(said)}, as the layer says", f"{list(sizes)} over all ranks")
    q, kv = (_number(layer, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if q is not None and kv is not None and min(q, kv) > 0:
        rows, key_rows = sizes
        if rows % q or key_rows % kv or rows // q != key_rows // kv:
            raise _contradiction(leaf, f"{q} heads of queries and {kv} of keys, of one size", f"{list(sizes)} rows")


def _check_attributes(leaf: str, parameter: Any) -> None:
    """Compare a parameter's attributes with a split of its rows, where it has any."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", None) or 1
    if dim not in (0, -len(parameter.shape)) or stride != 1:
        raise _contradiction(leaf, "rows that are split, as the layer says", f"partition_dim {dim}, stride {stride}")


def _contradiction(leaf: str, expected: str, actual: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        "what the layer says of its queries, keys and values does not fit",
        leaf=leaf,
        expected=expected,
        found=actual,
        hint=_HINT,
    )
