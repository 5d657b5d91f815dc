"""Kinds of optimizers whose states do not lie as those of torch's own do: what a program has said about them."""

from __future__ import annotations

from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.state import zero1
from xla_ckpt.tree.optimizer_schema import ASGD, TORCH, OptimizerSchema

_registered: dict[type | str, OptimizerSchema] = {"torch.optim.asgd.ASGD": ASGD}


def register_optimizer(kind: type | str, schema: OptimizerSchema) -> None:
    """Say how the states of a kind of optimizer lie over the ranks of a job.

    It holds for all saves and loads of this process that follow, and every rank has to say the same. The last word
    about a kind counts.

    Args:
        kind: A class, or its name, with its module or without, so that it need not be imported:
            ``"transformers.optimization.Adafactor"`` or ``"Adafactor"``. It holds for classes derived from it, too,
            of which nobody said anything, and for the optimizer inside of a ZeRO-1 optimizer.
        schema: How its states lie.

    Raises:
        UsageError: An argument is something else.

    Example:
        ``register_optimizer("LowRank", OptimizerSchema(dims={"left": (0, None), "right": (None, 1)}))``
    """
    if not isinstance(kind, type | str):
        raise UsageError(
            "a kind of optimizer is named by its class", expected="a class, or its name", found=type(kind).__name__
        )
    if not isinstance(schema, OptimizerSchema):
        raise UsageError(
            "what is registered of an optimizer is an OptimizerSchema",
            expected="xla_ckpt.OptimizerSchema(...)",
            found=type(schema).__name__,
        )
    _registered[kind] = schema


def schema_of(optimizer: Any) -> OptimizerSchema:
    """How the states of an optimizer lie; torch's rules, if nobody said anything."""
    if zero1.is_zero1(optimizer):
        optimizer = optimizer.base_optimizer
    for cls in type(optimizer).__mro__:
        for name in (cls, f"{cls.__module__}.{cls.__qualname__}", cls.__qualname__):
            if name in _registered:
                return _registered[name]
    return TORCH
