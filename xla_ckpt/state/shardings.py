"""Where the arrays of a state lie in the global arrays, as one rank computes it alone.

An array that knows its place (a DTensor, an SPMD tensor, a jax array) says so. For a plain tensor the first of these
counts: a rule of the caller, neuronx-distributed's attributes on the tensor, the parameter that an optimizer state
belongs to. Everything else is the same on all ranks of a pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import require
from xla_ckpt.engine.target import Target
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.manifest.records import ArrayRecord
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.rules import Parsed, decided
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.state.attributes import declared_sharding
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an optimizer, whose place its states share."""

    name: str
    value: Any
    zero1: tuple[str, ...] = ()
    """Mesh axes over which a ZeRO-1 optimizer deals out the rows of its states."""
    shard: tuple[int, ...] | None = None
    """Shape of a ZeRO-1 shard of it."""


@dataclass(frozen=True, slots=True)
class StateShardings:
    """The places of all arrays on one rank."""

    placement: Placement = field(default_factory=Placement)
    rules: Parsed = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """By the path component that an optimizer's state has for it."""

    alone: tuple[str, ...] = ()
    """Prefixes of leaf paths that this rank alone holds."""

    _places: dict[tuple[Sharding, tuple[int, ...]], LocalArray] = field(default_factory=dict, init=False, repr=False)
    """Where tensors of a shape lie: a model has few kinds of them, and a save describes all while training waits."""

    _splits: dict[str, Sharding | None] = field(default_factory=dict, init=False, repr=False)
    """How each parameter is split, by name; None for one that knows its own place."""

    def local(self, path: str, value: Any, adapter: ArrayAdapter) -> LocalArray:
        """Where an array lies; `adapter` is its own.

        Raises:
            UsageError: A rule does not fit to it.
            UnsupportedStateError: Its attributes do not.
        """
        own = adapter.place(value, path)
        if own is not None:
            return own
        if path.startswith(self.alone):
            return whole(adapter.shape(value))
        parameter = self.parameter(path)
        if parameter is not None:
            return self._state(path, adapter.shape(value), parameter)
        sharding = self._sharding((path, schema.below_member(path)), value)
        return self._placed(path, sharding, adapter.shape(value))

    def parameter(self, path: str) -> Parameter | None:
        """The parameter that an optimizer's state belongs to; None for any other leaf."""
        owner = schema.owner_of(path)
        return None if owner is None else self.parameters.get(owner)

    def parameter_local(self, parameter: Parameter) -> LocalArray:
        """Where a parameter itself lies."""
        return self.local(schema.weight(parameter.name), parameter.value, require(parameter.value, parameter.name))

    def state_like(self, path: str, record: ArrayRecord, parameter: Parameter) -> Target | None:
        """A target for optimizer state that does not exist yet but has its parameter's shape; None for any other."""
        local = self.parameter_local(parameter)
        if local.shape != record.shape or not record.shape:
            return None
        if parameter.shard is not None and parameter.zero1:
            value = parameter.value.new_empty(parameter.shard)
            return require(value, path).like(value, self._state(path, parameter.shard, parameter), record.dtype)
        return require(parameter.value, path).like(parameter.value, local, record.dtype)

    def _split(self, parameter: Parameter) -> Sharding | None:
        if parameter.name not in self._splits:
            own = require(parameter.value, parameter.name).place(parameter.value, parameter.name)
            names = (schema.weight(parameter.name), parameter.name)
            self._splits[parameter.name] = self._sharding(names, parameter.value) if own is None else None
        return self._splits[parameter.name]

    def _state(self, path: str, shape: tuple[int, ...], parameter: Parameter) -> LocalArray:
        """State of a parameter follows it where it has its dims; a dim of one element stands for all of them."""
        full = tuple(parameter.value.shape)
        split = self._split(parameter) or Sharding()
        if parameter.zero1 and shape == parameter.shard:
            try:
                return split.zero1(full, self.placement.mesh, self.placement.rank, parameter.zero1)
            except ValueError as error:
                raise UnsupportedStateError(f"ZeRO-1 does not fit: {error}", leaf=path) from error
        return self._placed(path, split.of_state(full, shape), shape)

    def _placed(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> LocalArray:
        key = sharding, shape
        if key in self._places:
            return self._places[key]
        try:
            return self._places.setdefault(key, sharding.place(shape, self.placement.mesh, self.placement.rank))
        except ValueError as error:
            raise UsageError(
                f"the sharding {sharding.spec} does not fit: {error}",
                leaf=path,
                found=f"local shape {list(shape)}",
                hint="Check mesh, shardings and the attributes of the parameter.",
            ) from error

    def _sharding(self, names: Iterable[str], value: Any) -> Sharding:
        names = tuple(names)
        ruled = decided(self.rules, *names)
        if ruled is not None:
            return ruled
        return declared_sharding(value, names[0], self.placement.mesh) or Sharding()
