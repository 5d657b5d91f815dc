"""Recognize torch objects without importing torch.

A program that has not imported torch has no torch objects, so nothing is imported to check. Only this module checks
whether torch is loaded or installed. Modules that import torch at their top are imported if a program has one of its
objects, or asks for one; otherwise only inside of `xla_ckpt.extras.naming_extras`.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from xla_ckpt.extras import is_installed

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Whether a value is an object of a class. Nothing is imported: without its module, a class has no objects.

    >>> is_instance_of(1, "builtins", "int"), is_instance_of(1, "no_such_module", "int")
    (True, False)
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_torch_tensor(value: Any) -> TypeIs[torch.Tensor]:
    """Whether a value is a tensor of torch's, of whatever class."""
    return is_instance_of(value, "torch", "Tensor")


def is_parameter(value: Any) -> TypeIs[torch.nn.Parameter]:
    """Whether a value is a parameter of a module."""
    return is_instance_of(value, "torch.nn", "Parameter")


def is_module(value: Any) -> TypeIs[torch.nn.Module]:
    """Whether a value is a module of torch's."""
    return is_instance_of(value, "torch.nn", "Module")


def is_torch_optimizer(value: Any) -> TypeIs[torch.optim.Optimizer]:
    """Whether a value is an optimizer of torch's."""
    return is_instance_of(value, "torch.optim", "Optimizer")


def is_lazy(value: Any) -> bool:
    """Whether a value is a parameter or buffer that has no shape yet."""
    return is_instance_of(value, "torch.nn.parameter", "UninitializedTensorMixin")


def is_torch_tensor_class(value: Any) -> bool:
    """Whether a value is of one of torch's own classes of tensors, which add nothing to a tensor."""
    return type(value).__module__ in ("torch", "torch.nn.parameter")


def has_inherited_method(optimizer: Any, method: str) -> bool:
    """Whether a method of an optimizer is that of torch's base class: neither its class nor the object has another."""
    base = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    if base is None or method in getattr(optimizer, "__dict__", ()):
        return False
    return getattr(type(optimizer), method, None) is getattr(base, method)


def disable_inference_mode() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are ordinary ones, which may be trained, wherever it is entered."""
    torch_module: Any = sys.modules.get("torch")
    if not is_torch_loaded() or not torch_module.is_inference_mode_enabled():
        return nullcontext()
    return torch_module.inference_mode(False)  # type: ignore[no-any-return]


def is_torch_loaded() -> bool:
    """Whether the program has imported torch, all of it: another thread may be at it."""
    return hasattr(sys.modules.get("torch"), "Tensor") and "torch.nn" in sys.modules


@functools.cache
def is_torch_installed() -> bool:
    """Whether torch can be imported, for what a program asks for without having an object of torch's."""
    return is_torch_loaded() or is_installed("torch")
