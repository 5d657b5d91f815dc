"""Unwrap models and optimizers, neuronx-distributed's wrappers included.

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
"""A property by which a wrapper's class says what is saved and loaded in the place of the wrapper."""


def unwrap_optimizer(optimizer: Any, shared_keys: Iterable[str] = ()) -> Any:
    """The optimizer inside of wrappers such as neuronx-distributed's `NxDOptimizer`; any other one as it is.

    Args:
        optimizer: The optimizer, or its wrapper.
        shared_keys: Of a tag that is loaded, the keys of the state that belongs to no parameter. A wrapper that has it
            only after its first step (pytorch_optimizer's TRAC) is otherwise taken for one that adds nothing.
    """
    if hasattr(type(optimizer), PLAIN_PROPERTY):
        return unwrap_optimizer(getattr(optimizer, PLAIN_PROPERTY), shared_keys)
    inner = getattr(optimizer, "optimizer", None)
    if not is_torch_optimizer(inner) or inner is optimizer:
        return optimizer
    shares = getattr(optimizer, schema.PARAM_GROUPS, None) is inner.param_groups
    # A wrapper with a state of its own (Lookahead's slow weights) would lose it.
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
    """Whether the state dict of a wrapper holds anything else than that of what it wraps."""
    if zero1.is_zero1(inner):
        zero1.get_zero1_parts(inner)  # it has no state dict before it has its shards
    whole, own = wrapper.state_dict(), inner.state_dict()
    return not _has_same_keys(whole, own)


def _has_same_keys(whole: Any, own: Any) -> bool:
    """Whether two state dicts have the same keys on all levels."""
    if not isinstance(own, Mapping):
        return not isinstance(whole, Mapping)
    if not isinstance(whole, Mapping) or whole.keys() != own.keys():
        return False
    return all(_has_same_keys(whole[k], own[k]) for k in own)


def unwrap_model(model: Any, *, loading: bool = False, stored: Container[str] = ()) -> Any:
    """The model inside of wrappers: see `unwrap_module`. What is no module, nor a dict of them, is returned itself."""
    if isinstance(model, Mapping):
        if not model or not all(map(is_module, model.values())):
            return model
    elif not is_module(model):
        return model
    from xla_ckpt.state.model_view import unwrap_module

    return unwrap_module(model, loading=loading, stored=stored)


_MODEL_VIEW_MODULE = "xla_ckpt.state.model_view"


def is_model_view(model: Any) -> bool:
    """Whether a model is a `ModelView`."""
    return is_instance_of(model, _MODEL_VIEW_MODULE, "ModelView")


def is_names_only(model: Any) -> bool:
    """Whether a model is `NamesOnly`."""
    return is_instance_of(model, _MODEL_VIEW_MODULE, "NamesOnly")


def get_modules(model: Any) -> Sequence[torch.nn.Module]:
    """The modules whose state a model has; none, if it is no module."""
    return model.wrapped_modules if is_model_view(model) else [model] if is_module(model) else []
