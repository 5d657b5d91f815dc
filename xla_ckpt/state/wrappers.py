"""Unwrap models and optimizers, including neuronx-distributed's wrappers.

A wrapper is recognized by its attributes, so that its package need not be installed. A wrapper that adds something to
the state of the wrapped object is kept, so that no state is lost. Models are unwrapped by `model_view`, which imports
torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.torch_objects import is_instance_of, is_module, is_torch_optimizer
from xla_ckpt.core.tree import schema
from xla_ckpt.state import zero1

if TYPE_CHECKING:
    import torch

PLAIN_PROPERTY = "xla_ckpt_plain"
"""Name of a property by which a wrapper class returns the object to save and load in its place."""


def unwrap_optimizer(optimizer: Any, shared_keys: Iterable[str] = ()) -> Any:
    """Unwrap wrappers such as neuronx-distributed's `NxDOptimizer`; return any other optimizer unchanged.

    Args:
        optimizer: The optimizer, or its wrapper.
        shared_keys: In a load, the stored keys of state that belongs to no parameter. A wrapper that only has such
            state after its first step (pytorch_optimizer's TRAC) would otherwise be unwrapped.
    """
    if hasattr(type(optimizer), PLAIN_PROPERTY):
        return unwrap_optimizer(getattr(optimizer, PLAIN_PROPERTY), shared_keys)
    inner = getattr(optimizer, "optimizer", None)
    if not is_torch_optimizer(inner) or inner is optimizer:
        return optimizer
    shares = getattr(optimizer, schema.PARAM_GROUPS, None) is inner.param_groups
    # A wrapper with its own state (Lookahead's slow weights) would lose it.
    if (
        not shares
        or getattr(optimizer, schema.STATE, inner.state) is not inner.state
        or _has_own_state(optimizer, inner)
    ):
        return optimizer
    if any(key not in inner.state for key in shared_keys):
        return optimizer
    return unwrap_optimizer(inner, shared_keys)


def _has_own_state(wrapper: Any, inner: Any) -> bool:
    """Return True if the state dict of a wrapper contains more than the wrapped object's."""
    if zero1.is_zero1(inner):
        zero1.get_zero1_parts(inner)  # without its shards it has no state dict yet
    whole, own = wrapper.state_dict(), inner.state_dict()
    return not _has_same_keys(whole, own)


def _has_same_keys(whole: Any, own: Any) -> bool:
    """Return True if two state dicts have the same keys on all levels."""
    if not isinstance(own, Mapping):
        return not isinstance(whole, Mapping)
    if not isinstance(whole, Mapping) or whole.keys() != own.keys():
        return False
    return all(_has_same_keys(whole[k], own[k]) for k in own)


def unwrap_model(model: Any, *, loading: bool = False, stored: Container[str] = ()) -> Any:
    """Unwrap a model: see `unwrap_module`. Objects other than modules and dicts of modules are returned unchanged."""
    if isinstance(model, Mapping):
        if not model or not all(map(is_module, model.values())):
            return model
    elif not is_module(model):
        return model
    from xla_ckpt.state.model_view import unwrap_module

    return unwrap_module(model, loading=loading, stored=stored)


_MODEL_VIEW_MODULE = "xla_ckpt.state.model_view"


def is_model_view(model: Any) -> bool:
    """Return True if a model is a `ModelView`."""
    return is_instance_of(model, _MODEL_VIEW_MODULE, "ModelView")


def is_names_only(model: Any) -> bool:
    """Return True if a model is `NamesOnly`."""
    return is_instance_of(model, _MODEL_VIEW_MODULE, "NamesOnly")


def get_modules(model: Any) -> Sequence[torch.nn.Module]:
    """Return the modules that own the state of a model; empty for other objects."""
    return model.wrapped_modules if is_model_view(model) else [model] if is_module(model) else []
