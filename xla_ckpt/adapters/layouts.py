"""Where the arrays of a state lie in the global arrays, as one rank computes it alone.

An array that knows its place (a DTensor, an SPMD tensor, a jax array) says so. For a plain tensor the first of these
counts: a rule of the caller, neuronx-distributed's attributes on the tensor, the parameter that an optimizer state
belongs to. Everything else is the same on all ranks of a pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.adapters.base import Placement, Target
from xla_ckpt.adapters.registry import require
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.format.manifest import ArrayRecord
from xla_ckpt.layout.local import Local, whole
from xla_ckpt.layout.sharding import Sharding, Split

Rules = Sequence[tuple[str, Any]]
"""(regular expression, spec): the first expression that is found in a leaf's path or name decides."""

STATE = "optimizer/state/"
"""Leaf paths of optimizer state: ``optimizer/state/<parameter>/<key>``."""

MASTER = "optimizer/master/"
"""Leaf paths of the master weights that a ZeRO-1 optimizer keeps in a higher precision."""


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
class Layouts:
    """The places of all arrays on one rank."""

    placement: Placement = field(default_factory=Placement)
    rules: tuple[tuple[re.Pattern[str], Sharding], ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """By the path component that an optimizer's state has for it."""

    alone: tuple[str, ...] = ()
    """Prefixes of leaf paths that this rank alone holds."""

    def local(self, path: str, value: Any) -> Local:
        """Where an array lies.

        Raises:
            UsageError: A rule does not fit to it.
            UnsupportedStateError: Its attributes do not.
        """
        adapter = require(value, path)
        own = adapter.place(value, path)
        if own is not None:
            return own
        if path.startswith(self.alone):
            return whole(adapter.shape(value))
        parameter = self.parameter(path)
        if parameter is not None:
            return self._state(path, adapter.shape(value), parameter)
        sharding = self._sharding((path, path.partition("/")[2]), value)
        return self._placed(path, sharding, adapter.shape(value))

    def parameter(self, path: str) -> Parameter | None:
        """The parameter that an optimizer's state belongs to; None for any other leaf."""
        for prefix in (STATE, MASTER):
            if path.startswith(prefix):
                return self.parameters.get(path[len(prefix) :].split("/", maxsplit=1)[0])
        return None

    def parameter_local(self, parameter: Parameter) -> Local:
        """Where a parameter itself lies."""
        own = require(parameter.value, parameter.name).place(parameter.value, parameter.name)
        return own or self._placed(f"model/{parameter.name}", self._of(parameter), tuple(parameter.value.shape))

    def state_like(self, path: str, record: ArrayRecord, parameter: Parameter) -> Target | None:
        """A target for optimizer state that does not exist yet but has its parameter's shape; None for any other."""
        local = self.parameter_local(parameter)
        if local.shape != record.shape or not record.shape:
            return None
        if parameter.shard is not None and parameter.zero1:
            value = parameter.value.new_empty(parameter.shard)
            return require(value, path).like(value, self._state(path, parameter.shard, parameter), record.dtype)
        return require(parameter.value, path).like(parameter.value, local, record.dtype)

    def _of(self, parameter: Parameter) -> Sharding:
        return self._sharding((f"model/{parameter.name}", parameter.name), parameter.value)

    def _state(self, path: str, shape: tuple[int, ...], parameter: Parameter) -> Local:
        """State of a parameter follows it where it has its dims; a dim of one element stands for all of them."""
        full = tuple(parameter.value.shape)
        if parameter.zero1 and shape == parameter.shard:
            try:
                return self._of(parameter).zero1(full, self.placement.mesh, self.placement.rank, parameter.zero1)
            except ValueError as error:
                raise UnsupportedStateError(f"ZeRO-1 does not fit: {error}", leaf=path) from error
        sharding = Sharding()
        if len(shape) == len(full) and require(parameter.value, path).place(parameter.value, path) is None:
            of = self._of(parameter)
            if all(n in (1, m) for n, m in zip(shape, full, strict=True)):
                dims = zip(of.dims, shape, full, strict=False)
                true = None if of.shape is None else tuple(
                    t if n == m else None for t, n, m in zip(of.shape, shape, full, strict=True)
                )  # fmt: skip
                sharding = Sharding(tuple(s if n == m else None for s, n, m in dims), true)
        return self._placed(path, sharding, shape)

    def _placed(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> Local:
        try:
            return sharding.place(shape, self.placement.mesh, self.placement.rank)
        except ValueError as error:
            raise UsageError(
                f"the sharding {sharding.spec} does not fit: {error}", leaf=path, found=f"local shape {list(shape)}",
                hint="Check mesh, shardings and the attributes of the parameter.",
            ) from error  # fmt: skip

    def _sharding(self, names: Iterable[str], value: Any) -> Sharding:
        names = tuple(names)
        for pattern, sharding in self.rules:
            if any(pattern.search(name) for name in names):
                return sharding
        return attributes(value, names[0], self.placement)


def parse_rules(rules: Rules | None) -> tuple[tuple[re.Pattern[str], Sharding], ...]:
    """The caller's rules.

    Raises:
        UsageError: One of them is malformed.
    """
    found = []
    for rule in rules or ():
        try:
            pattern, spec = rule
            found.append((re.compile(pattern), Sharding.parse(spec)))
        except (ValueError, TypeError, re.error) as error:
            raise UsageError(
                f"a rule of shardings makes no sense: {error}", found=repr(rule),
                hint="Write (regular expression, spec), as in (r'layers\\.\\d+\\.up', ('tp', None)).",
            ) from error  # fmt: skip
    return tuple(found)


def attributes(value: Any, path: str, placement: Placement) -> Sharding:
    """The sharding that neuronx-distributed's and Megatron's attributes on a parameter name.

    Raises:
        UnsupportedStateError: They contradict each other or the mesh.
    """
    dims: list[Split | None] = [None] * len(getattr(value, "shape", ()))
    if getattr(value, "tensor_model_parallel", False) and (dim := getattr(value, "partition_dim", -1)) is not None:
        parts = getattr(value, "num_partitions", placement.mesh.tp) or placement.mesh.tp
        if not -len(dims) <= dim < len(dims) or parts not in (1, placement.mesh.tp):
            raise UnsupportedStateError(
                "the tensor-parallel attributes do not fit", leaf=path,
                expected=f"a dim of {list(value.shape)}, {placement.mesh.tp} partitions",
                found=f"partition_dim {dim}, num_partitions {parts}", hint="Check the mesh, or pass a shardings rule.",
            )  # fmt: skip
        if parts > 1:
            dims[dim] = Split(("tp",), getattr(value, "partition_stride", 1) or 1)
    if getattr(value, "expert_model_parallel", False) and placement.mesh.ep > 1:
        if dims and dims[0] is not None:
            raise UnsupportedStateError("experts and tensor parallelism split the same dim", leaf=path)
        dims[0] = Split(("ep",))
    shape = getattr(value, "global_shape", None)
    return Sharding(tuple(dims), None if shape is None or len(shape) != len(dims) else tuple(shape))


def with_parameters(layouts: Layouts, parameters: Mapping[str, Parameter]) -> Layouts:
    """The same layouts, for a state with these optimizer parameters."""
    return replace(layouts, parameters=parameters)
