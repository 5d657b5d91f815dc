"""Recognize torch objects without importing torch.

A program that has not imported torch has no torch objects, so nothing is imported to check. Only this module checks if
torch is loaded or installed. Modules that import torch at the top are imported if a program has one of its objects, or
requests one; otherwise only inside `xla_ckpt.extras.wrap_missing_packages`.
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
    """Return True if a value is an instance of a class. Nothing is imported: without its module, a class has no
    instances.

    >>> is_instance_of(1, "builtins", "int"), is_instance_of(1, "no_such_module", "int")
    (True, False)
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_torch_tensor(value: Any) -> TypeIs[torch.Tensor]:
    """Return True for a torch tensor, of any class."""
    return is_instance_of(value, "torch", "Tensor")


def is_parameter(value: Any) -> TypeIs[torch.nn.Parameter]:
    """Return True for a parameter of a module."""
    return is_instance_of(value, "torch.nn", "Parameter")


def is_module(value: Any) -> TypeIs[torch.nn.Module]:
    """Return True for a torch module."""
    return is_instance_of(value, "torch.nn", "Module")


def is_torch_optimizer(value: Any) -> TypeIs[torch.optim.Optimizer]:
    """Return True for a torch optimizer."""
    return is_instance_of(value, "torch.optim", "Optimizer")


def is_lazy(value: Any) -> bool:
    """Return True for a parameter or buffer that has no shape yet."""
    return is_instance_of(value, "torch.nn.parameter", "UninitializedTensorMixin")


def is_torch_tensor_class(value: Any) -> bool:
    """Return True if a value is of a torch tensor class that adds nothing to a tensor."""
    return type(value).__module__ in ("torch", "torch.nn.parameter")


def has_inherited_method(optimizer: Any, method: str) -> bool:
    """Return True if a method of an optimizer is inherited from torch's base class, and the object does not override
    it.
    """
    base = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    if base is None or method in getattr(optimizer, "__dict__", ()):
        return False
    return getattr(type(optimizer), method, None) is getattr(base, method)


def disable_inference_mode() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are ordinary, trainable ones, even inside inference mode."""
    torch_module: Any = sys.modules.get("torch")
    if not is_torch_loaded() or not torch_module.is_inference_mode_enabled():
        return nullcontext()
    return torch_module.inference_mode(False)  # type: ignore[no-any-return]


def is_torch_loaded() -> bool:
    """Return True if the program has completely imported torch: another thread may still be importing it."""
    return hasattr(sys.modules.get("torch"), "Tensor") and "torch.nn" in sys.modules


@functools.cache
def is_torch_installed() -> bool:
    """Return True if torch can be imported, for requests of a program that has no torch objects."""
    return is_torch_loaded() or is_installed("torch")
