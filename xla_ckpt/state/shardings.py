"""Find the regions of a rank's arrays in the global arrays, without communication.

An array with its own sharding (a DTensor, an SPMD tensor, a jax array) provides it. For a plain tensor the first match
counts: a sharding rule of the caller, the layer that owns the parameter, the attributes that neuronx-distributed or
Megatron set on the tensor, the parameter that an optimizer state belongs to. Any other array is replicated on all ranks
of a pipeline stage.

Layers take precedence over attributes because a parameter loses its attributes when its module moves to an XLA device,
and because no attribute can describe fused queries, keys and values of different sizes, or replicated KV heads.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.declared_chunks import (
    GLOBAL_SHAPE,
    check_chunk_attributes,
    get_local_shape,
    has_declared_chunks,
    is_checkpointable,
)
from xla_ckpt.arrays.registry import AdapterRegistry
from xla_ckpt.arrays.torch_objects import is_lazy, is_module, is_torch_tensor_class
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.stored_sharding import (
    derive_state_sharding,
    describe_head_order_mismatch,
    describe_section_mismatch,
    get_stored_sharding,
)
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.core.sharding.mesh import Mesh, RankInfo
from xla_ckpt.core.sharding.sharding import (
    REPLICATED,
    STAGE_AXES,
    DimSharding,
    ParsedRules,
    Section,
    Sharding,
    count_parts,
    find_sharding,
    has_sections,
    parse_section,
)
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import (
    MASTER_RULE,
    TORCH_SCHEMA,
    OptimizerSchema,
    StateLayout,
    StateRule,
    create_mismatch_error,
)
from xla_ckpt.distributed.mesh_source import has_adjacent_kv_replicas
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.loading.target import Target
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParameter:
    """A parameter of an optimizer, whose sharding its states share."""

    name: str
    value: Any
    zero1_axes: tuple[str, ...] = ()
    """Mesh axes over which a ZeRO-1 optimizer shards the rows of its states."""
    shard_shape: tuple[int, ...] | None = None
    """Shape of the parameter's ZeRO-1 shard."""
    state_schema: OptimizerSchema = TORCH_SCHEMA
    """Layout of its states."""

    def get_rule(self, path: str) -> StateRule:
        """Return the layout rule of one of its states, or of its master weight."""
        place = schema.parse_leaf_path(path)
        return MASTER_RULE if place.role is schema.LeafRole.MASTER else self.state_schema.rule(place.keys)


@dataclass(frozen=True)
class StateShardings:
    """The shardings of all arrays on one rank."""

    placement: RankInfo = field(default_factory=RankInfo)
    rules: ParsedRules = ()
    parameters: Mapping[str, OptimizerParameter] = field(default_factory=dict)
    """Optimizer parameters, by their path component in the optimizer state."""

    rank_local_prefixes: tuple[str, ...] = ()
    """Leaf path prefixes of rank-local state."""

    layers: LayerShardings = field(default_factory=dict)
    """Shardings declared by the layers of the model."""

    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    """Registry of the adapters of this call's arrays."""

    _warned_paths: set[str] = field(default_factory=set, init=False, repr=False)
    """Leaf paths for which a warning about another head order was logged, once per load."""

    _placement_cache: dict[Any, LocalArray] = field(default_factory=dict, init=False, repr=False)
    """Cache of tensor regions, because a save describes all tensors while training waits, and a model has few kinds.
    Keyed by sharding and shape, or for unsharded tensors by the shape only, which is several times as fast."""

    _state_cache: dict[Any, LocalArray] = field(default_factory=dict, init=False, repr=False)
    """Cache of state regions, keyed by the layouts and shapes of parameter and state."""

    _parameter_shardings: dict[str, Sharding | None] = field(default_factory=dict, init=False, repr=False)
    """Sharding of each parameter by name; None for a parameter with its own sharding."""

    def with_model(self, model: Any) -> StateShardings:
        """Return a copy with the shardings declared by the layers of a model.

        Raises:
            UnsupportedStateError: If the attributes of a layer are contradictory.
        """
        return replace(self, layers=get_layer_shardings(model, self.placement.mesh))

    @cached_property
    def unsplit(self) -> bool:
        """True if only an array's own sharding, or an optimizer, can shard an array."""
        parameters = self.parameters.values()
        split = any(
            p.zero1_axes or has_sharding_attributes(p.value) or has_declared_chunks(p.value) for p in parameters
        )
        return not self.rules and not self.layers and not split

    def locate(self, path: str, value: Any, adapter: ArrayAdapter) -> LocalArray:
        """Return the region of an array; `adapter` is its adapter.

        Raises:
            UsageError: If a rule does not fit the array.
            UnsupportedStateError: If its attributes do not fit.
        """
        parameter = self.find_parameter(path) if self.parameters else None
        if parameter is not None and has_declared_chunks(parameter.value) and not has_declared_chunks(value):
            return self._locate_state_in_chunks(path, get_local_shape(value), parameter)
        own = adapter.locate(value, path)
        if own is not None:
            return own
        shape = adapter.get_shape(value)
        if path.startswith(self.rank_local_prefixes):
            return create_unsharded(shape)
        if parameter is not None:
            return self._locate_state(path, shape, parameter)
        return self.place(path, self._find_sharding(path, value), shape)

    def iterate_forms(
        self, arrays: Mapping[str, Any], adapters: Sequence[ArrayAdapter]
    ) -> Iterator[tuple[DType, LocalArray]]:
        """Iterate over the dtypes and regions of arrays. Arrays of one form without a declared sharding share one
        value.

        Args:
            arrays: Arrays by leaf path.
            adapters: The adapter of each array.

        Raises:
            UsageError: If a rule does not fit.
            UnsupportedStateError: If an array cannot be stored, or its attributes do not fit.
        """
        known: dict[Hashable, tuple[DType, LocalArray]] = {}
        layers, ruled = self.layers, bool(self.rules)
        named = (
            (*self.rank_local_prefixes, paths.join(schema.OPTIMIZER, ""))
            if self.parameters
            else self.rank_local_prefixes
        )
        for (path, value), adapter in zip(arrays.items(), adapters, strict=True):
            look = None if ruled or id(value) in layers or path.startswith(named) else adapter.get_form_key(value)
            form = known.get(look)
            if form is None:
                form = adapter.get_dtype(value, path), self.locate(path, value, adapter)
                if look is not None:
                    known[look] = form
            yield form

    def check_row_order(
        self, path: str, record: ArrayRecord, local: LocalArray, manifest: Manifest, *, knows_place: bool
    ) -> None:
        """Compare the row order of a stored array with the order that this job expects.

        Args:
            path: Leaf path.
            record: Record of the stored array.
            local: Region of the program's array.
            manifest: The manifest that contains the record.
            knows_place: True if the program's array has its own sharding, which means rows in global order.

        Raises:
            IncompatibleCheckpointError: If the array was saved with other sections than requested.
        """
        if not any(map(has_sections, (*(record.spec or ()), *(local.spec or ())))):
            return  # as for nearly all arrays: do not parse the sharding of each during a load
        if schema.get_member(path) != schema.MODEL:
            return
        stored, wanted = get_stored_sharding(record), Sharding() if knows_place else Sharding.parse(local.spec)
        mesh, saved = self.placement.mesh, Mesh.parse(manifest.mesh or "")
        different = describe_section_mismatch(stored, wanted, record.shape) if mesh.tp > 1 and saved.tp > 1 else None
        if different is not None:
            raise IncompatibleCheckpointError(
                f"the array was saved in other sections than it is wanted in: {different}",
                leaf=path,
                expected=f"{stored.spec}, as it was saved",
                found=f"{wanted.spec}",
                hint="Say so by a rule of shardings=, by partition_sections on the parameter, or by the layer.",
            )
        heads = describe_head_order_mismatch(stored, wanted)
        if heads is not None and not self._warned_paths and self.placement.rank == 0:
            logger.warning(
                "tag %s: %s %s. The heads of the queries, and the columns of the output projection, stay in the order "
                "of the other job: a model that takes them in another order computes something else. To reorder them: "
                "xla-ckpt convert --config config.json --kv-size-multiplier N (docs/parallelism.md)",
                manifest.header.tag,
                path,
                heads,
            )
            self._warned_paths.add(path)

    def find_parameter(self, path: str) -> OptimizerParameter | None:
        """Return the parameter that an optimizer state belongs to; None for any other leaf."""
        owner = schema.get_owner(path) if self.parameters else None
        return None if owner is None else self.parameters.get(owner)

    def locate_parameter(self, parameter: OptimizerParameter) -> LocalArray:
        """Return the region of a parameter."""
        return self.locate(
            schema.get_weight_path(parameter.name), parameter.value, self.adapters.require(parameter.value)
        )

    def create_state_target(
        self, path: str, record: ArrayRecord, parameter: OptimizerParameter, dtype: DType
    ) -> Target | None:
        """Create a target for new optimizer state, sharded like its parameter; None if the state is unsharded here.

        Args:
            path: Leaf path of the state.
            record: Record of the stored state.
            parameter: Its parameter.
            dtype: The dtype of the target.

        Raises:
            IncompatibleCheckpointError: If it cannot be state of this parameter in this kind of optimizer.
        """
        rule, local = parameter.get_rule(path), self.locate_parameter(parameter)
        try:
            dims = rule.map_dims(local.shape, record.shape)
        except ValueError as error:
            raise create_mismatch_error(IncompatibleCheckpointError, error, path, local.shape, record.shape) from error
        dealt = parameter.shard_shape if parameter.zero1_axes else None
        if dealt is None and dims and dims == tuple(range(len(local.shape))):
            return self.adapters.require(parameter.value, path).create_target_like(parameter.value, local, dtype)
        shard_shape = dealt or tuple(parameter.value.shape)
        shape = tuple(n if d is None else shard_shape[d] for d, n in zip(dims, record.shape, strict=True))
        if shape == record.shape and not (dealt and 0 in dims):
            return None
        value = parameter.value.new_empty(shape)
        return self.adapters.require(value, path).create_target_like(
            value, self._locate_state(path, shape, parameter), dtype
        )

    def _get_parameter_sharding(self, parameter: OptimizerParameter) -> Sharding | None:
        if parameter.name not in self._parameter_shardings:
            own = self.adapters.require(parameter.value, parameter.name).locate(parameter.value, parameter.name)
            path = schema.get_weight_path(parameter.name)
            self._parameter_shardings[parameter.name] = (
                self._find_sharding(path, parameter.value, parameter.name) if own is None else None
            )
        return self._parameter_shardings[parameter.name]

    def _locate_state_in_chunks(
        self, path: str, local_shape: tuple[int, ...], parameter: OptimizerParameter
    ) -> LocalArray:
        """Return the region of state of a parameter with declared chunks; `local_shape` is the shape of the state here.

        Raises:
            UnsupportedStateError: If the state is neither a number nor of the parameter's shape.
        """
        if not local_shape:
            return create_unsharded(local_shape)
        if local_shape != get_local_shape(parameter.value):
            raise UnsupportedStateError(
                "state of a parameter that names its chunks has another shape, and names none",
                leaf=path,
                expected=f"shape {list(get_local_shape(parameter.value))}, or a number",
                found=f"shape {list(local_shape)}",
                hint="Set the attributes of a CheckpointableTensor on it, too.",
            )
        return self.locate_parameter(parameter)

    def _locate_state(self, path: str, shape: tuple[int, ...], parameter: OptimizerParameter) -> LocalArray:
        """Return the region of a state: as its kind of optimizer declares it, otherwise derived from its shape."""
        if has_declared_chunks(parameter.value):
            return self._locate_state_in_chunks(path, shape, parameter)
        rule, split, full = (
            parameter.get_rule(path),
            self._get_parameter_sharding(parameter) or REPLICATED,
            tuple(parameter.value.shape),
        )
        shard = parameter.shard_shape if parameter.zero1_axes else None
        key = rule, split, full, shard, parameter.zero1_axes, shape
        if key not in self._state_cache:
            self._state_cache[key] = self._place_state(path, rule, split, shape, parameter)
        return self._state_cache[key]

    def _place_state(
        self, path: str, rule: StateRule, split: Sharding, shape: tuple[int, ...], parameter: OptimizerParameter
    ) -> LocalArray:
        full, shard = tuple(parameter.value.shape), parameter.shard_shape if parameter.zero1_axes else None
        try:
            # For undeclared state, only the exact shape of a shard shows that ZeRO-1 sharded it.
            sharding = derive_state_sharding(split, rule, full if shard is None or not rule.declared else shard, shape)
        except ValueError as error:
            raise create_mismatch_error(UsageError, error, path, shard or full, shape) from error
        if shard is None or not self._is_split_by_zero1(path, rule, shard, shape):
            return self.place(path, sharding, shape)
        rows = sharding if rule.layout is StateLayout.ALONG_DIMS else split
        try:
            return rows.map_zero1_shape(
                (full[0], *shape[1:]), self.placement.mesh, self.placement.rank, parameter.zero1_axes
            )
        except ValueError as error:
            raise UnsupportedStateError(f"ZeRO-1 does not fit: {error}", leaf=path) from error

    @staticmethod
    def _is_split_by_zero1(path: str, rule: StateRule, shard: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Return True if a state has the rows of a ZeRO-1 rank's shard.

        Raises:
            UnsupportedStateError: If the state has the rows of the parameter in another dim than the first.
        """
        if rule.layout is not StateLayout.ALONG_DIMS:
            return shape == shard and rule.layout in (StateLayout.ELEMENTWISE, StateLayout.BY_SHAPE)
        dims = rule.map_dims(shard, shape)
        if 0 in dims[1:]:
            raise UnsupportedStateError(
                "ZeRO-1 deals out the rows of a parameter, and this state has them in another dim than the first",
                leaf=path,
                found=f"dims {list(dims)}",
            )
        return dims[:1] == (0,)

    def place(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> LocalArray:
        key = shape if sharding is REPLICATED else (sharding, shape)
        known = self._placement_cache.get(key)
        if known is not None:
            return known
        try:
            return self._placement_cache.setdefault(
                key, sharding.map_local_shape(shape, self.placement.mesh, self.placement.rank)
            )
        except ValueError as error:
            raise UsageError(
                f"the sharding {sharding.spec} does not fit: {error}",
                leaf=path,
                found=f"local shape {list(shape)}",
                hint="Check mesh, shardings and the attributes of the parameter.",
            ) from error

    def _find_sharding(self, path: str, value: Any, name: str = "") -> Sharding:
        """Return the sharding from a rule for the leaf path or the parameter's name, otherwise from its layer or
        attributes.
        """
        if self.rules and (ruled := find_sharding(self.rules, path, name or schema.strip_member(path))) is not None:
            return ruled
        known = self.layers.get(id(value))
        return known or get_declared_sharding(value, path, self.placement.mesh) or REPLICATED


LayerShardings = Mapping[int, Sharding]
"""Identity of a parameter -> sharding declared by its layer."""

_LAYER_HINT = "Check the mesh and the arguments of the layer, or pass a shardings rule, which is asked first."


def get_layer_shardings(model: Any, mesh: Mesh) -> dict[int, Sharding]:
    """Return the shardings that the layers of a module declare for their parameters.

    A layer is recognized by its attributes, whatever its class. A layer of fused or separate queries, keys and values
    has `q_output_size_per_partition` and `kv_output_size_per_partition` (rows of queries, and of keys or values, per
    rank), `kv_size_multiplier` (number of ranks with the same keys and values), and parameters ``weight_qkv``, or
    ``weight_q``, ``weight_k`` and ``weight_v``, and biases with such names. Any other layer has `weight_partition_dim`,
    and may have `bias_partition_dim` and `stride`, which apply to parameters without attributes.

    Args:
        model: A module; other objects have no layers.
        mesh: Mesh of the job that holds the model.

    Raises:
        UnsupportedStateError: If the sizes of a layer contradict each other, its parameters, or the mesh.
    """
    shardings: dict[int, Sharding] = {}
    for name, layer in model.named_modules() if is_module(model) else ():
        for parameter, (leaf, sharding) in _yield_layer_shardings(f"{name}." if name else "", layer, mesh):
            if shardings.setdefault(id(parameter), sharding) != sharding:
                raise _create_layer_error(
                    leaf, f"{shardings[id(parameter)].spec}, as another layer says of it", f"{sharding.spec}"
                )
    return shardings


_ParameterShardings = Iterator[tuple[Any, tuple[str, Sharding]]]
"""The parameters of a layer, each with its leaf path and sharding."""


def _yield_layer_shardings(prefix: str, layer: Any, mesh: Mesh) -> _ParameterShardings:
    q, kv = (_get_int_attribute(layer, f"{part}_output_size_per_partition") for part in ("q", "kv"))
    if q is not None and kv is not None:
        yield from _yield_attention_shardings(prefix, layer, (q, kv), mesh.tp)
    elif (dim := _get_int_attribute(layer, "weight_partition_dim")) is not None:
        yield from _yield_linear_shardings(prefix, layer, dim, mesh)


# Layers with one sharded dim.


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeclaredSplit:
    """A parameter with the neuronx-distributed attributes that its layer declares."""

    parameter: Any
    partition_dim: int
    partition_stride: int
    num_partitions: int | None
    expert_model_parallel: bool
    tensor_model_parallel: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


def _yield_linear_shardings(prefix: str, layer: Any, dim: int, mesh: Mesh) -> _ParameterShardings:
    """Yield shardings of `ColumnParallelLinear`, `RowParallelLinear`, `ParallelEmbedding`, and layers of experts."""
    dims = {"weight": dim}
    of_bias = _get_int_attribute(layer, "bias_partition_dim")
    # With gather_output, the bias is added to the gathered output, and is replicated.
    if of_bias is not None and not getattr(layer, "gather_output", False):
        dims["bias"] = of_bias
    for name, parameter in _iterate_parameters(layer, dims):
        if getattr(parameter, "tensor_model_parallel", False):
            continue  # its own attributes, including ones that the program set manually, take precedence
        said = _DeclaredSplit(
            parameter=parameter,
            partition_dim=dims[name],
            partition_stride=_get_int_attribute(layer, "stride") or 1,
            num_partitions=_count_group_ranks(layer, "tensor_parallel_group")
            or _count_group_ranks(layer, "tensor_model_parallel_group"),
            expert_model_parallel=(_count_group_ranks(layer, "expert_model_parallel_group") or 1) > 1,
        )
        leaf = schema.get_weight_path(prefix + name)
        # A job of one rank declares the split as well, so that it can load a tag of several ranks.
        sharding = get_declared_sharding(said, leaf, mesh if mesh.tp > 1 else None)
        if sharding is not None:
            yield parameter, (leaf, sharding)


def _count_group_ranks(layer: Any, group: str) -> int | None:
    """Return the number of ranks in a layer's process group, if it has one."""
    size = getattr(getattr(layer, group, None), "size", None)
    return int(size()) if callable(size) else None


# Queries, keys and values.


def _get_int_attribute(layer: Any, name: str) -> int | None:
    """Return an integer attribute of a layer, or None."""
    try:
        return operator.index(getattr(layer, name))
    except Exception:
        return None  # modules raise all kinds of exceptions for missing attributes


def _yield_attention_shardings(prefix: str, layer: Any, local_rows: tuple[int, int], tp: int) -> _ParameterShardings:
    """Yield the shardings of `GQAQKVColumnParallelLinear`; `local_rows` are a rank's rows of queries, and of keys or
    values.

    Raises:
        UnsupportedStateError: If the sizes contradict each other or the mesh.
    """
    q, kv = local_rows
    copies = _get_int_attribute(layer, "kv_size_multiplier") or 1
    parameters = dict(_iterate_parameters(layer, _ATTENTION_PARAMETERS))
    leaf = schema.get_weight_path(prefix + next(iter(parameters), "weight_qkv"))
    if copies < 1 or tp % copies or kv * tp % copies:
        raise _create_layer_error(
            leaf, f"a kv_size_multiplier that divides tp={tp}, and {tp} times {kv} rows of keys", f"{copies}"
        )
    queries = Section(q * tp)
    keys = Section(kv * tp // copies, copies, copies > 1 and _has_adjacent_kv_copies(layer))
    _check_sizes(leaf, layer, (q * tp, kv * tp // copies))
    of_rows = {"q": (q, (queries,)), "k": (kv, (keys,)), "v": (kv, (keys,)), "qkv": (q + 2 * kv, (queries, keys, keys))}
    for name, parameter in parameters.items():
        rows, sections = of_rows[name.rpartition("_")[2]]
        leaf, shape = schema.get_weight_path(prefix + name), tuple(parameter.shape)
        if name.startswith("bias") and getattr(layer, "gather_output", False):
            yield parameter, (leaf, Sharding())  # it is added to the concatenated outputs of all ranks
            continue
        if shape[:1] != (rows,):
            raise _create_layer_error(
                leaf, f"{rows} rows, {q} of queries and {kv} of keys on each rank", f"{list(shape)}"
            )
        _check_split_attributes(leaf, parameter)
        yield parameter, (leaf, Sharding((DimSharding(("tp",), sections), *(None,) * (len(shape) - 1))))


_ATTENTION_PARAMETERS = tuple(f"{kind}_{part}" for kind in ("weight", "bias") for part in ("qkv", "q", "k", "v"))


def _iterate_parameters(layer: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Iterate over a layer's parameters with these names that have a shape."""
    for name in names:
        value = layer._parameters.get(name)
        if value is not None and not is_lazy(value):
            yield name, value


def _has_adjacent_kv_copies(layer: Any) -> bool:
    """Return True if adjacent ranks hold the same keys, according to the layer or to neuronx-distributed's groups."""
    own = getattr(layer, "kv_copies_adjacent", None)
    return has_adjacent_kv_replicas() if own is None else bool(own)


def _check_sizes(leaf: str, layer: Any, sizes: tuple[int, int]) -> None:
    """Compare the sizes of the whole layer with its other attributes.

    Raises:
        UnsupportedStateError: If they differ.
    """
    said = getattr(layer, "output_sizes", None)
    if isinstance(said, list | tuple) and tuple(said) != sizes:
        raise _create_layer_error(
            leaf, f"output_sizes {list(said)}, as the layer says", f"{list(sizes)} over all ranks"
        )
    q, kv = (_get_int_attribute(layer, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if q is not None and kv is not None and min(q, kv) > 0:
        rows, key_rows = sizes
        if rows % q or key_rows % kv or rows // q != key_rows // kv:
            raise _create_layer_error(
                leaf, f"{q} heads of queries and {kv} of keys, of one size", f"{list(sizes)} rows"
            )


def _check_split_attributes(leaf: str, parameter: Any) -> None:
    """Compare a parameter's attributes, if it has any, with a split of its rows.

    Raises:
        UnsupportedStateError: If they differ.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", None) or 1
    if dim not in (0, -len(parameter.shape)) or stride != 1:
        raise _create_layer_error(
            leaf, "rows that are split, as the layer says", f"partition_dim {dim}, stride {stride}"
        )


def _create_layer_error(leaf: str, expected: str, actual: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        "what the layer says of its queries, keys and values does not fit",
        leaf=leaf,
        expected=expected,
        found=actual,
        hint=_LAYER_HINT,
    )


UNPADDED_SHAPE = "unpadded_shape"

_SHARDING_ATTRIBUTES = frozenset({"tensor_model_parallel", "expert_model_parallel", UNPADDED_SHAPE, GLOBAL_SHAPE})


def has_sharding_attributes(value: Any) -> bool:
    """Return True if attributes of a parameter declare its sharding."""
    own = getattr(value, "__dict__", None)
    if not own and is_torch_tensor_class(value):
        return False  # as for nearly all arrays
    return any(hasattr(value, name) for name in _SHARDING_ATTRIBUTES)


def get_declared_sharding(value: Any, path: str, mesh: Mesh | None = None) -> Sharding | None:
    """Return the sharding declared by a parameter's attributes; None without them.

    The attributes are ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``, ``num_partitions``,
    ``expert_model_parallel`` (the first dim holds experts), and two of this library: ``unpadded_shape``, the global
    shape of a padded parameter without its padding, and ``partition_sections``, sections of different sizes in the
    syntax of sharding rules.

    Args:
        value: The parameter.
        path: Its leaf path, for errors.
        mesh: Mesh of the job that holds it: axes of size one split nothing, and ``num_partitions`` applies, which is 1
            for a weight that is replicated. None returns the sharding for any other mesh, ignoring the sizes of this
            one.

    Raises:
        UnsupportedStateError: If the attributes contradict each other, the parameter or the mesh.
    """
    if not has_sharding_attributes(value):
        return None  # as for nearly all arrays
    check_chunk_attributes(value, path)
    shape = tuple(getattr(value, "shape", ()))
    dims: list[DimSharding | None] = [None] * len(shape)
    if getattr(value, "tensor_model_parallel", False):
        dim, stride = getattr(value, "partition_dim", None), getattr(value, "partition_stride", None) or 1
        partitions = getattr(value, "num_partitions", None) or None
        fits = type(dim) is int and -len(dims) <= dim < len(dims) and type(stride) is int and stride > 0
        axes = _get_split_axes(value, dim, partitions, mesh) if fits and dim is not None else None
        if dim is None or axes is None:
            raise UnsupportedStateError(
                "the tensor-parallel attributes do not fit",
                leaf=path,
                expected=f"a dim of {list(shape)}, a stride" + (f", {mesh.tp} partitions" if mesh is not None else ""),
                found=f"partition_dim {dim}, partition_stride {stride}, num_partitions {partitions}",
                hint="Check the mesh, or pass a shardings rule.",
            )
        sections = _parse_partition_sections(value, path, stride)
        if mesh is None or (count_parts(axes, mesh.sizes) > 1 and partitions != 1) or sections:
            dims[dim] = DimSharding(axes, sections) if sections else DimSharding.from_stride(axes, stride)
    if getattr(value, "expert_model_parallel", False) and (mesh is None or mesh.ep > 1):
        if not dims or dims[0] is not None:
            raise UnsupportedStateError(
                "experts and tensor parallelism split the same dim" if dims else "a number cannot hold experts",
                leaf=path,
                hint="Check the attributes of the parameter, or pass a shardings rule.",
            )
        dims[0] = DimSharding(("ep",))
    true = get_unpadded_shape(value)
    return Sharding(tuple(dims), true) if any(dims) or true is not None else None


def _get_split_axes(value: Any, dim: int, partitions: int | None, mesh: Mesh | None) -> tuple[str, ...] | None:
    """Return the mesh axes over which a dim is split into `num_partitions`; None if the mesh has no such axes.

    The axes are tp, except for the numbers that neuronx-distributed's `SPMDRank` assigns to each rank of the world, for
    the rank itself and its experts: integers with one row per rank.
    """
    if not value.is_floating_point() and value.shape[dim] == 1 and (mesh is None or partitions == mesh.size != mesh.tp):
        return STAGE_AXES  # other stages have parameters with other names
    return ("tp",) if mesh is None or partitions in (None, 1, mesh.tp) else None


def get_unpadded_shape(value: Any) -> tuple[int, ...] | None:
    """Return the global shape without padding, from a parameter's ``unpadded_shape``; None without a fitting one.

    The older name is ``global_shape``, which torch's `CheckpointableTensor` uses for another purpose, together with
    other attributes.
    """
    older = None if is_checkpointable(value) else getattr(value, GLOBAL_SHAPE, None)
    named = getattr(value, UNPADDED_SHAPE, older)
    return None if named is None or len(named) != len(value.shape) else tuple(named)


def _parse_partition_sections(value: Any, path: str, stride: int) -> tuple[Section, ...]:
    """Parse the sections in a parameter's ``partition_sections``; empty without it.

    Raises:
        UnsupportedStateError: If the sections are invalid.
    """
    named = getattr(value, "partition_sections", None)
    if named is None:
        return ()
    try:
        sections = tuple(map(parse_section, named))
        DimSharding(("tp",), sections)
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"the partition_sections of a parameter make no sense: {error}", leaf=path, found=repr(named)
        ) from error
    if stride not in (1, len(sections)):
        raise UnsupportedStateError(
            "a parameter has sections, and another number of strided blocks",
            leaf=path,
            found=f"partition_sections {list(named)}, partition_stride {stride}",
        )
    return sections
