"""Sharding of optimizer states by key: elementwise, along some dims, replicated, or per rank.

`OptimizerSchema` is the public description of a kind of optimizer. Keys that it does not name follow torch's own
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
"""For each dim of a state the dim of its parameter that it is, or None (see `OptimizerSchema`)."""

Reshard = Callable[[Sequence[Any], int, int], Any]
"""From what each rank had, by rank, and the rank and number of ranks of now, to what this rank has."""


class StateLayout(enum.Enum):
    """How a state lies."""

    ELEMENTWISE = "as its parameter: it has its shape"
    ALONG_DIMS = "along dims of its parameter that are named"
    REPLICATED = "whole on every rank, beside its parameter"
    ON_HOST = "whole on every rank, in host memory"
    PER_RANK = "every rank has its own"
    BY_SHAPE = "along the dims of its parameter that it has: a dim of one element stands for all of the parameter's"


@dataclass(frozen=True, slots=True)
class StateRule:
    """What is known about a state."""

    layout: StateLayout
    dims: Dims = ()
    """Where it lies along dims of its parameter: which."""

    declared: bool = False
    """Whether somebody registered it; else it goes by torch's usual keys, or by its shape."""

    def map_dims(self, parameter_shape: Sequence[int], shape: Sequence[int]) -> tuple[int | None, ...]:
        """For each dim of a state of this shape, the dim of its parameter that it lies along; None for its own.

        Args:
            parameter_shape: Shape of the parameter.
            shape: Shape of the state; both local, or both global.

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
        """The dims by their numbers from the front, for a parameter and a state of so many dims."""
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
    """The error for a state whose shape is none that its rule allows, as `StateRule.map_dims` said."""
    return error_class(
        f"what is registered of the optimizer does not fit to its state: {error}",
        leaf=leaf,
        found=f"{list(shape)} of a parameter {list(parameter_shape)}",
        hint="Check the OptimizerSchema that was given to xla_ckpt.register_optimizer.",
    )


MASTER_RULE = StateRule(StateLayout.ELEMENTWISE)
"""How master weights lie."""

BY_SHAPE = StateRule(StateLayout.BY_SHAPE)
"""How a state lies of which only the shape is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSchema:
    """How the states of a kind of optimizer lie over the ranks, by the keys of ``optimizer.state[parameter]``.

    It need only name states that lie otherwise than torch's: a key that is not named lies as its parameter does if it
    has its shape, or its shape with 1 in place of some dims, and else is taken to be the same on all ranks.

    Args:
        elementwise: Keys of states that have the shape of their parameter, and are split as it is.
        dims: For keys of states that have some dims of their parameter: which of them each dim is, or None for a dim of
            its own. ``{"left": (0, None)}`` is a factor of as many rows as the parameter. Negative numbers count from
            the end, and ``...`` stands for all dims that are left, counted from the front: ``(..., -2)`` is the
            parameter without its last dim. Where the parameter is split, the state is.
        replicated: Keys of states that are the same on all ranks, of any shape, on the device of their parameter.
        host: Keys of states that are the same on all ranks, and stay in host memory when they are loaded.
        per_rank: Keys of which every rank has its own: the error of compressed gradients, say. Keys of state that
            belongs to no parameter (``optimizer.state["key"]``) may be named, too. A mapping says, for each key, how
            another number of ranks takes over: ``function(states, rank, world)`` is given what all ranks had, with
            tensors in host memory, and returns this rank's. Without a function only as many ranks can load it.

    Raises:
        UsageError: A key is named twice, or in a way that makes no sense.
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
        """How a state lies whose leaf path ends with these components, below its parameter."""
        names = [paths.unescape(key) for key in keys]
        for name in (*names[:1], *names[-1:]):
            if name in self._rules:
                return self._rules[name]
        return _TORCH_RULES.get(names[-1] if names else "", BY_SHAPE)

    def reshard(self, key: str) -> Reshard | None:
        """What makes a rank's own state of those that another number of ranks had."""
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
"""States of torch's optimizers that have the shape of their parameter (torch/optim, 2.9)."""

STEP = "step"
"""How often torch's optimizers have stepped a parameter: in host memory, unless the group has it on the device."""

_HOST_KEYS = (STEP, "mu_product")
"""Numbers of torch's optimizers that lie in host memory, unless a group has one of `STEP_ON_DEVICE_OPTIONS`."""

NUMBER_KEYS = frozenset({*_HOST_KEYS, "eta", "mu"})
"""Numbers that torch's optimizers keep beside a parameter, and whose dtype does not depend on the parameter's."""

_TORCH_RULES = {
    **dict.fromkeys(_ELEMENTWISE_KEYS, MASTER_RULE),
    **dict.fromkeys(_HOST_KEYS, StateRule(StateLayout.ON_HOST)),
}

STEP_ON_DEVICE_OPTIONS = frozenset({"capturable", "fused"})
"""Options of a group with which torch's optimizers keep ``step`` on the device of the parameter."""

TORCH_SCHEMA = OptimizerSchema()
"""What holds for an optimizer that nobody registered."""

ASGD_SCHEMA = OptimizerSchema(replicated=(STEP, "eta", "mu"))
"""What holds for torch's ASGD, which keeps its numbers on the device of the parameter (torch/optim/asgd.py, 2.9)."""

UNSUPPORTED_OPTIONS = {"fused": frozenset({"xla"}), "capturable": frozenset({"cpu"})}
"""Options of torch's optimizers with which a step raises, by the types of device where it does (torch/optim, 2.9)."""


def get_required_members(kind: str, options: Mapping[str, Any], ndim: int) -> frozenset[str]:
    """The members that a step of an optimizer of torch's asks for in the state of a parameter that has been stepped.

    Args:
        kind: The name of the class in torch.optim.
        options: The options of the parameter's group.
        ndim: Dims of the parameter.

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
"""What each of torch's optimizers asks for; Muon, SGD and LBFGS make what they lack (torch/optim, 2.9)."""

_REQUIRED_WITH_OPTION = (
    ("Adam", "amsgrad", "max_exp_avg_sq"),
    ("RMSprop", "centered", "grad_avg"),
    ("RMSprop", "momentum", "momentum_buffer"),
)
"""(kind, option, what is asked for with it)."""
