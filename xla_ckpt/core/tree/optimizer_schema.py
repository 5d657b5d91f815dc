"""Sharding of optimizer states by key: elementwise, along some dims, replicated, or per rank.

`OptimizerSchema` is the public description of an optimizer class. Keys that it does not contain follow torch's own
optimizers, and otherwise the shape of the state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from xla_ckpt.core.tree import path as paths
from xla_ckpt.errors import CheckpointError, UsageError

Dims = tuple[int | EllipsisType | None, ...]
"""Parameter dim for each dim of a state, or None (see `OptimizerSchema`)."""

Reshard = Callable[[Sequence[Any], int, int], Any]
"""Function from all saved ranks' states, this rank and the number of ranks to this rank's state."""


class StateLayout(enum.Enum):
    """Relation of a state to its parameter."""

    ELEMENTWISE = "as its parameter: it has its shape"
    ALONG_DIMS = "along dims of its parameter that are named"
    REPLICATED = "whole on every rank, beside its parameter"
    ON_HOST = "whole on every rank, in host memory"
    PER_RANK = "every rank has its own"
    BY_SHAPE = "along the dims of its parameter that it has: a dim of one element stands for all of the parameter's"


@dataclass(frozen=True, slots=True)
class StateRule:
    """Layout of one state."""

    layout: StateLayout
    dims: Dims = ()
    """Parameter dim of each state dim, for `ALONG_DIMS`."""

    declared: bool = False
    """True if the rule was registered. False if it follows torch's usual keys, or the shape."""

    def map_dims(self, parameter_shape: Sequence[int], shape: Sequence[int]) -> tuple[int | None, ...]:
        """Return the parameter dim of each dim of a state, or None for dims that the parameter does not have.

        Args:
            parameter_shape: Shape of the parameter.
            shape: Shape of the state. Both shapes are local, or both global.

        Raises:
            ValueError: The state cannot have this shape.

        >>> StateRule(StateLayout.ALONG_DIMS, (..., -2)).map_dims((4, 5, 6), (4, 5))
        (0, 1)
        >>> StateRule(StateLayout.BY_SHAPE).map_dims((4,), (7,))
        (None,)
        """
        if self.layout is StateLayout.ALONG_DIMS:
            dims = self._resolve_dims(len(parameter_shape), len(shape))
        elif self.layout is StateLayout.ELEMENTWISE and self.declared:
            dims = tuple(range(len(parameter_shape)))
        elif self.layout in (StateLayout.ELEMENTWISE, StateLayout.BY_SHAPE):
            fits = len(parameter_shape) == len(shape) and all(
                n in (1, m) for n, m in zip(shape, parameter_shape, strict=True)
            )
            return tuple(d if fits and n == parameter_shape[d] else None for d, n in enumerate(shape))
        else:
            dims = (None,) * len(shape)
        expected = tuple(n if d is None else parameter_shape[d] for d, n in zip(dims, shape, strict=False))
        if len(dims) != len(shape) or expected != tuple(shape):
            raise ValueError(f"a state that lies {self.layout.value} has the shape {list(expected)}")
        return dims

    def _resolve_dims(self, parameter_ndim: int, ndim: int) -> tuple[int | None, ...]:
        """Return the dims as non-negative indices, for a parameter and a state with these numbers of dims.

        Raises:
            ValueError: The dims are out of range, or not distinct.
        """
        dims: list[int | None] = []
        for place, d in enumerate(self.dims):
            if isinstance(d, EllipsisType):
                dims += range(place, place + ndim - len(self.dims) + 1)
            else:
                dims.append(d + parameter_ndim if d is not None and d < 0 else d)
        named = [d for d in dims if d is not None]
        if len(set(named)) < len(named) or any(not 0 <= d < parameter_ndim for d in named):
            raise ValueError(f"a parameter of {parameter_ndim} dims has no dims {self.dims}, each once")
        return tuple(dims)


def create_mismatch_error(
    error_class: type[CheckpointError],
    error: ValueError,
    leaf: str,
    parameter_shape: Sequence[int],
    shape: Sequence[int],
) -> CheckpointError:
    """Create the error for a state whose shape contradicts its rule (see `StateRule.map_dims`)."""
    return error_class(
        f"what is registered of the optimizer does not fit to its state: {error}",
        leaf=leaf,
        found=f"{list(shape)} of a parameter {list(parameter_shape)}",
        hint="Check the OptimizerSchema that was given to xla_ckpt.register_optimizer.",
    )


MASTER_RULE = StateRule(StateLayout.ELEMENTWISE)
"""Rule of master weights."""

BY_SHAPE = StateRule(StateLayout.BY_SHAPE)
"""Rule of a state of which only the shape is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSchema:
    """Sharding of the states of an optimizer class, by the keys of ``optimizer.state[parameter]``.

    Only states that are not sharded like torch's need to be listed. By default a state with the parameter's shape, or
    with its shape except for some dims of size 1, is sharded like the parameter. Any other state is replicated.

    Args:
        elementwise: Keys of states with the shape and the sharding of their parameter.
        dims: For keys of states that have some dims of their parameter: the parameter dim of each state dim, or None
            for a dim that the parameter does not have. ``{"left": (0, None)}`` is a factor with as many rows as the
            parameter. Negative numbers count from the end, and ``...`` represents all remaining dims from the front:
            ``(..., -2)`` is the parameter without its last dim. The state is split along the dims along which the
            parameter is.
        replicated: Keys of states that are replicated on all ranks, of any shape, on the device of their parameter.
        host: Keys of states that are replicated on all ranks, and stay in host memory when they are loaded.
        per_rank: Keys of rank-local states, such as the error of compressed gradients. Keys of state that belongs to no
            parameter (``optimizer.state["key"]``) are allowed, too. A mapping contains, for each key, a function that
            converts the state to another number of ranks: ``function(states, rank, world)`` receives the states of all
            ranks, with tensors in host memory, and returns the state of this rank. Without a function the state can
            only be loaded on the same number of ranks.

    Raises:
        UsageError: A key is listed twice, or a value is invalid.
    """

    elementwise: Collection[str] = ()
    dims: Mapping[str, Sequence[int | EllipsisType | None]] = field(default_factory=dict)
    replicated: Collection[str] = ()
    host: Collection[str] = ()
    per_rank: Collection[str] | Mapping[str, Reshard | None] = ()
    _rules: dict[str, StateRule] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = {
            StateLayout.ELEMENTWISE: self.elementwise,
            StateLayout.REPLICATED: self.replicated,
            StateLayout.ON_HOST: self.host,
        }
        for lies, keys in (*plain.items(), (StateLayout.ALONG_DIMS, self.dims), (StateLayout.PER_RANK, self.per_rank)):
            if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
                raise UsageError("the keys of an optimizer's states are strings, in a tuple or a set", found=repr(keys))
            for key in keys:
                if key in self._rules:
                    raise UsageError(
                        f"the state {key!r} is said to lie in two ways",
                        found=f"{self._rules[key].layout.value}; {lies.value}",
                    )
                self._rules[key] = StateRule(
                    lies, self._parse_dims(key) if lies is StateLayout.ALONG_DIMS else (), declared=True
                )

    def _parse_dims(self, key: str) -> Dims:
        dims = tuple(self.dims[key])
        numbers = [d for d in dims if d is not None and d is not ...]
        if not all(type(d) is int for d in numbers) or len(set(numbers)) < len(numbers) or dims.count(...) > 1:
            raise UsageError(
                f"the dims of the state {key!r} make no sense",
                expected="numbers of dims of its parameter, None for dims of its own, and at most one ...",
                found=repr(dims),
            )
        return dims

    def rule(self, keys: Sequence[str]) -> StateRule:
        """Return the rule of a state.

        Args:
            keys: Components of the leaf path below the parameter.
        """
        names = [paths.unescape(key) for key in keys]
        for name in (*names[:1], *names[-1:]):
            if name in self._rules:
                return self._rules[name]
        return _TORCH_RULES.get(names[-1] if names else "", BY_SHAPE)

    def reshard(self, key: str) -> Reshard | None:
        """Return the function that converts a rank-local state to another number of ranks, or None."""
        return self.per_rank.get(key) if isinstance(self.per_rank, Mapping) else None


_ELEMENTWISE_KEYS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "ax",
    }
)
"""States of torch optimizers that have the shape of their parameter (torch/optim, 2.9)."""

STEP = "step"
"""Step count of torch optimizers. In host memory, unless the group keeps it on the device."""

_HOST_KEYS = (STEP, "mu_product")
"""Scalars of torch optimizers in host memory, unless a group has one of `STEP_ON_DEVICE_OPTIONS`."""

NUMBER_KEYS = frozenset({*_HOST_KEYS, "eta", "mu"})
"""Scalars of torch optimizers whose dtype does not depend on the parameter."""

_TORCH_RULES = {
    **dict.fromkeys(_ELEMENTWISE_KEYS, MASTER_RULE),
    **dict.fromkeys(_HOST_KEYS, StateRule(StateLayout.ON_HOST)),
}

STEP_ON_DEVICE_OPTIONS = frozenset({"capturable", "fused"})
"""Group options with which torch optimizers keep ``step`` on the device of the parameter."""

TORCH_SCHEMA = OptimizerSchema()
"""Schema of optimizers that are not registered."""

ASGD_SCHEMA = OptimizerSchema(replicated=(STEP, "eta", "mu"))
"""Schema of torch's ASGD, which keeps its scalars on the device of the parameter (torch/optim/asgd.py, 2.9)."""

UNSUPPORTED_OPTIONS = {"fused": frozenset({"xla"}), "capturable": frozenset({"cpu"})}
"""Options of torch optimizers -> device types on which a step raises an error (torch/optim, 2.9)."""


def get_required_members(kind: str, options: Mapping[str, Any], ndim: int) -> frozenset[str]:
    """Return the state keys that a step of a torch optimizer requires for a parameter that has been stepped.

    Args:
        kind: Name of the class in torch.optim.
        options: Options of the parameter's group.
        ndim: Number of dims of the parameter.

    >>> sorted(get_required_members("Adam", {"amsgrad": True}, 2))
    ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step']
    """
    needed = {*_REQUIRED.get(kind, ())}
    if kind == "Adafactor":
        needed |= {"row_var", "col_var"} if ndim > 1 else {"variance"}
    needed |= {key for of_kind, option, key in _REQUIRED_WITH_OPTION if of_kind == kind and options.get(option)}
    return frozenset(needed)


_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "ASGD": (STEP, "ax", "eta", "mu"),
    "Adadelta": (STEP, "acc_delta", "square_avg"),
    "Adafactor": (STEP,),
    "Adagrad": (STEP, "sum"),
    "Adam": (STEP, "exp_avg", "exp_avg_sq"),
    "Adamax": (STEP, "exp_avg", "exp_inf"),
    "NAdam": (STEP, "exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": (STEP, "exp_avg", "exp_avg_sq"),
    "RMSprop": (STEP, "square_avg"),
    "Rprop": (STEP, "prev", "step_size"),
    "SparseAdam": (STEP, "exp_avg", "exp_avg_sq"),
}
"""Required state keys of torch optimizers. Muon, SGD and LBFGS create missing state (torch/optim, 2.9)."""

_REQUIRED_WITH_OPTION = (
    ("Adam", "amsgrad", "max_exp_avg_sq"),
    ("RMSprop", "centered", "grad_avg"),
    ("RMSprop", "momentum", "momentum_buffer"),
)
"""(kind, option, state key that the option requires)."""
