"""Where the arrays of a state lie in the global arrays, as one rank computes it alone.

An array that knows its place (a DTensor, an SPMD tensor, a jax array) says so. For a plain tensor the first of these
counts: a rule of the caller, the layer that the tensor is a parameter of, neuronx-distributed's attributes on the
tensor, the parameter that an optimizer state belongs to. Everything else is the same on all ranks of a pipeline stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.chunks import held_shape, names_chunks
from xla_ckpt.arrays.registry import Adapters
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.lightweight import cached_property
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.row_order import other_heads, other_sections
from xla_ckpt.plan.stored_shardings import state_sharding, stored_sharding
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.rules import Parsed, decided
from xla_ckpt.sharding.sections import has_sections
from xla_ckpt.sharding.sharding import UNSPLIT, Sharding
from xla_ckpt.state.attributes import declared_sharding, is_declared
from xla_ckpt.state.layers import Layers, layer_shardings
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.optimizer_schema import MASTER_RULE, TORCH, Lies, OptimizerSchema, StateRule, misfit

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of an optimizer, whose place its states share."""

    name: str
    value: Any
    zero1: tuple[str, ...] = ()
    """Mesh axes over which a ZeRO-1 optimizer deals out the rows of its states."""
    shard: tuple[int, ...] | None = None
    """Shape of a ZeRO-1 shard of it."""
    states: OptimizerSchema = TORCH
    """How its states lie."""

    def rule(self, path: str) -> StateRule:
        """How one of its states lies, or its master weight."""
        place = schema.place_of(path)
        return MASTER_RULE if place.role is schema.Role.MASTER else self.states.rule(place.keys)


@dataclass(frozen=True)
class StateShardings:
    """The places of all arrays on one rank."""

    placement: Placement = field(default_factory=Placement)
    rules: Parsed = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """By the path component that an optimizer's state has for it."""

    alone: tuple[str, ...] = ()
    """Leaf paths of what this rank alone holds: they begin the paths of its leaves."""

    layers: Layers = field(default_factory=dict)
    """What the layers of the model say."""

    adapters: Adapters = field(default_factory=Adapters)
    """Who answers for which array of this call."""

    _told: set[str] = field(default_factory=set, init=False, repr=False)
    """Leaf paths of which a warning said that their heads are in another order: once a load."""

    _places: dict[Any, LocalArray] = field(default_factory=dict, init=False, repr=False)
    """Where tensors lie: a model has few kinds of them, and a save describes all while training waits. By the sharding
    and the shape; by the shape alone of those that are not split, which is several times as fast."""

    _states: dict[Any, LocalArray] = field(default_factory=dict, init=False, repr=False)
    """Where states lie, for the same reason: by how parameter and state lie, and their shapes."""

    _splits: dict[str, Sharding | None] = field(default_factory=dict, init=False, repr=False)
    """How each parameter is split, by name; None for one that knows its own place."""

    def of_model(self, model: Any) -> StateShardings:
        """The same, with what the layers of a model say.

        Raises:
            UnsupportedStateError: A layer contradicts itself.
        """
        return replace(self, layers=layer_shardings(model, self.placement.mesh))

    @cached_property
    def unsplit(self) -> bool:
        """Whether only what an array says itself can split it, or a part of the state of an optimizer."""
        parameters = self.parameters.values()
        split = any(p.zero1 or is_declared(p.value) or names_chunks(p.value) for p in parameters)
        return not self.rules and not self.layers and not split

    def local(self, path: str, value: Any, adapter: ArrayAdapter) -> LocalArray:
        """Where an array lies; `adapter` is its own.

        Raises:
            UsageError: A rule does not fit to it.
            UnsupportedStateError: Its attributes do not.
        """
        parameter = self.parameter(path) if self.parameters else None
        if parameter is not None and names_chunks(parameter.value) and not names_chunks(value):
            return self._state_in_chunks(path, held_shape(value), parameter)
        own = adapter.place(value, path)
        if own is not None:
            return own
        shape = adapter.shape(value)
        if path.startswith(self.alone):
            return whole(shape)
        if parameter is not None:
            return self._state(path, shape, parameter)
        return self._placed(path, self._sharding(path, value), shape)

    def forms(self, arrays: Mapping[str, Any], adapters: Sequence[ArrayAdapter]) -> Iterator[tuple[DType, LocalArray]]:
        """The element types of some arrays, and where they lie: one value for all of one look that nobody names.

        Args:
            arrays: By leaf path.
            adapters: The adapter of each.

        Raises:
            UsageError: A rule does not fit.
            UnsupportedStateError: One of them cannot be stored, or its attributes do not fit.
        """
        known: dict[Hashable, tuple[DType, LocalArray]] = {}
        layers, ruled = self.layers, bool(self.rules)
        named = (*self.alone, paths.join(schema.OPTIMIZER, "")) if self.parameters else self.alone
        for (path, value), adapter in zip(arrays.items(), adapters, strict=True):
            look = None if ruled or id(value) in layers or path.startswith(named) else adapter.look(value)
            form = known.get(look)
            if form is None:
                form = adapter.dtype(value, path), self.local(path, value, adapter)
                if look is not None:
                    known[look] = form
            yield form

    def compare(self, path: str, record: ArrayRecord, local: LocalArray, manifest: Manifest, *, own: bool) -> None:
        """Compare the order of the rows that a stored array has with the one that this job expects.

        Args:
            path: Leaf path.
            record: What is stored.
            local: Where the program's array lies.
            manifest: The manifest that the record is from.
            own: Whether the program's array knows its own place: then it has the rows of the global array in order.

        Raises:
            IncompatibleCheckpointError: The array was saved in other sections than it is wanted in.
        """
        if not any(map(has_sections, (*(record.spec or ()), *(local.spec or ())))):
            return  # as of nearly all arrays: a load must not parse the split of each
        if schema.member_of(path) != schema.MODEL:
            return
        stored, wanted = stored_sharding(record), Sharding() if own else Sharding.parse(local.spec)
        mesh, saved = self.placement.mesh, Mesh.parse(manifest.mesh or "")
        different = other_sections(stored, wanted, record.shape) if mesh.tp > 1 and saved.tp > 1 else None
        if different is not None:
            raise IncompatibleCheckpointError(
                f"the array was saved in other sections than it is wanted in: {different}",
                leaf=path,
                expected=f"{stored.spec}, as it was saved",
                found=f"{wanted.spec}",
                hint="Say so by a rule of shardings=, by partition_sections on the parameter, or by the layer.",
            )
        heads = other_heads(stored, wanted)
        if heads is not None and not self._told and self.placement.rank == 0:
            logger.warning(
                "tag %s: %s %s. The heads of the queries, and the columns of the output projection, stay in the order "
                "of the other job: a model that takes them in another order computes something else. To reorder them: "
                "xla-ckpt convert --config config.json --kv-size-multiplier N (docs/parallelism.md)",
                manifest.head.tag,
                path,
                heads,
            )
            self._told.add(path)

    def parameter(self, path: str) -> Parameter | None:
        """The parameter that an optimizer's state belongs to; None for any other leaf."""
        owner = schema.owner_of(path) if self.parameters else None
        return None if owner is None else self.parameters.get(owner)

    def parameter_local(self, parameter: Parameter) -> LocalArray:
        """Where a parameter itself lies."""
        return self.local(schema.weight(parameter.name), parameter.value, self.adapters.require(parameter.value))

    def state_like(self, path: str, record: ArrayRecord, parameter: Parameter, dtype: DType) -> Target | None:
        """A target for optimizer state that does not exist yet, split as its parameter is; None if it is whole here.

        Args:
            path: Leaf path of the state.
            record: What is stored.
            parameter: Its parameter.
            dtype: The dtype of the target.

        Raises:
            IncompatibleCheckpointError: It cannot be state of this parameter, as its kind of optimizer keeps it.
        """
        rule, local = parameter.rule(path), self.parameter_local(parameter)
        try:
            dims = rule.dims_over(local.shape, record.shape)
        except ValueError as error:
            raise misfit(IncompatibleCheckpointError, error, path, local.shape, record.shape) from error
        dealt = parameter.shard if parameter.zero1 else None
        if dealt is None and dims and dims == tuple(range(len(local.shape))):
            return self.adapters.require(parameter.value, path).like(parameter.value, local, dtype)
        shard_shape = dealt or tuple(parameter.value.shape)
        shape = tuple(n if d is None else shard_shape[d] for d, n in zip(dims, record.shape, strict=True))
        if shape == record.shape and not (dealt and 0 in dims):
            return None
        value = parameter.value.new_empty(shape)
        return self.adapters.require(value, path).like(value, self._state(path, shape, parameter), dtype)

    def _split(self, parameter: Parameter) -> Sharding | None:
        if parameter.name not in self._splits:
            own = self.adapters.require(parameter.value, parameter.name).place(parameter.value, parameter.name)
            path = schema.weight(parameter.name)
            self._splits[parameter.name] = (
                self._sharding(path, parameter.value, parameter.name) if own is None else None
            )
        return self._splits[parameter.name]

    def _state_in_chunks(self, path: str, held: tuple[int, ...], parameter: Parameter) -> LocalArray:
        """The place of state of a parameter that names its chunks, of which this rank holds a tensor of shape `held`.

        Raises:
            UnsupportedStateError: It is neither a number nor of the parameter's shape.
        """
        if not held:
            return whole(held)
        if held != held_shape(parameter.value):
            raise UnsupportedStateError(
                "state of a parameter that names its chunks has another shape, and names none",
                leaf=path,
                expected=f"shape {list(held_shape(parameter.value))}, or a number",
                found=f"shape {list(held)}",
                hint="Set the attributes of a CheckpointableTensor on it, too.",
            )
        return self.parameter_local(parameter)

    def _state(self, path: str, shape: tuple[int, ...], parameter: Parameter) -> LocalArray:
        """State of a parameter lies as its kind of optimizer says; without a word of it, by its shape."""
        if names_chunks(parameter.value):
            return self._state_in_chunks(path, shape, parameter)
        rule, split, full = parameter.rule(path), self._split(parameter) or UNSPLIT, tuple(parameter.value.shape)
        shard = parameter.shard if parameter.zero1 else None
        key = rule, split, full, shard, parameter.zero1, shape
        if key not in self._states:
            self._states[key] = self._place_state(path, rule, split, shape, parameter)
        return self._states[key]

    def _place_state(
        self, path: str, rule: StateRule, split: Sharding, shape: tuple[int, ...], parameter: Parameter
    ) -> LocalArray:
        full, shard = tuple(parameter.value.shape), parameter.shard if parameter.zero1 else None
        try:
            # Of what nobody declared only the exact shape of a shard says that ZeRO-1 dealt it out.
            sharding = state_sharding(split, rule, full if shard is None or not rule.declared else shard, shape)
        except ValueError as error:
            raise misfit(UsageError, error, path, shard or full, shape) from error
        if shard is None or not self._is_dealt(path, rule, shard, shape):
            return self._placed(path, sharding, shape)
        rows = sharding if rule.lies is Lies.ALONG else split
        try:
            return rows.zero1((full[0], *shape[1:]), self.placement.mesh, self.placement.rank, parameter.zero1)
        except ValueError as error:
            raise UnsupportedStateError(f"ZeRO-1 does not fit: {error}", leaf=path) from error

    @staticmethod
    def _is_dealt(path: str, rule: StateRule, shard: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a state has the rows that a ZeRO-1 rank has of its parameter."""
        if rule.lies is not Lies.ALONG:
            return shape == shard and rule.lies in (Lies.ELEMENTWISE, Lies.BY_SHAPE)
        dims = rule.dims_over(shard, shape)
        if 0 in dims[1:]:
            raise UnsupportedStateError(
                "ZeRO-1 deals out the rows of a parameter, and this state has them in another dim than the first",
                leaf=path,
                found=f"dims {list(dims)}",
            )
        return dims[:1] == (0,)

    def _placed(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> LocalArray:
        key = shape if sharding is UNSPLIT else (sharding, shape)
        known = self._places.get(key)
        if known is not None:
            return known
        try:
            return self._places.setdefault(key, sharding.place(shape, self.placement.mesh, self.placement.rank))
        except ValueError as error:
            raise UsageError(
                f"the sharding {sharding.spec} does not fit: {error}",
                leaf=path,
                found=f"local shape {list(shape)}",
                hint="Check mesh, shardings and the attributes of the parameter.",
            ) from error

    def _sharding(self, path: str, value: Any, name: str = "") -> Sharding:
        """What a rule says of the leaf path or the parameter's name, else its layer, else its attributes."""
        if self.rules and (ruled := decided(self.rules, path, name or schema.below_member(path))) is not None:
            return ruled
        known = self.layers.get(id(value))
        return known or declared_sharding(value, path, self.placement.mesh) or UNSPLIT
