"""Wrappers around models and optimizers, neuronx-distributed's among them: what is in them is what is saved and loaded.

A wrapper is known by what it offers, so that its package need not be there. One that adds something to the state of
what it wraps is left as it is, so that nothing of a state is lost. What is in a model's is found by `model_view`, which
imports torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.torch_objects import is_module, is_of, is_torch_optimizer
from xla_ckpt.state import zero1
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    import torch

PLAIN_PROPERTY = "xla_ckpt_plain"
"""A property by which a wrapper's class says what is saved and loaded in the place of the wrapper."""


def unwrapped_optimizer(optimizer: Any, common: Iterable[str] = ()) -> Any:
    """The optimizer inside of wrappers such as neuronx-distributed's `NxDOptimizer`; any other one as it is.

    Args:
        optimizer: The optimizer, or its wrapper.
        common: Of a tag that is loaded, the keys of the state that belongs to no parameter. A wrapper that has it only
            after its first step (pytorch_optimizer's TRAC) is otherwise taken for one that adds nothing.
    """
    if hasattr(type(optimizer), PLAIN_PROPERTY):
        return unwrapped_optimizer(getattr(optimizer, PLAIN_PROPERTY), common)
    inner = getattr(optimizer, "optimizer", None)
    if not is_torch_optimizer(inner) or inner is optimizer:
        return optimizer
    shares = getattr(optimizer, schema.GROUPS, None) is inner.param_groups
    # A wrapper with a state of its own (Lookahead's slow weights) would lose it.
    if not shares or getattr(optimizer, schema.STATE, inner.state) is not inner.state or _adds_state(optimizer, inner):
        return optimizer
    if any(key not in inner.state for key in common):
        return optimizer
    return unwrapped_optimizer(inner, common)


def _adds_state(wrapper: Any, inner: Any) -> bool:
    """Whether the state dict of a wrapper holds anything else than that of what it wraps."""
    if zero1.is_zero1(inner):
        zero1.parts_of(inner)  # it has no state dict before it has its shards
    whole, own = wrapper.state_dict(), inner.state_dict()
    return not _same_members(whole, own)


def _same_members(whole: Any, own: Any) -> bool:
    """Whether two state dicts have the same keys on all levels."""
    if not isinstance(own, Mapping):
        return not isinstance(whole, Mapping)
    if not isinstance(whole, Mapping) or whole.keys() != own.keys():
        return False
    return all(_same_members(whole[k], own[k]) for k in own)


def unwrapped_model(model: Any, *, loading: bool = False, stored: Container[str] = ()) -> Any:
    """The model inside of wrappers: see `module_inside`. What is no module, nor a dict of them, is returned itself."""
    if isinstance(model, Mapping):
        if not model or not all(map(is_module, model.values())):
            return model
    elif not is_module(model):
        return model
    from xla_ckpt.state.model_view import module_inside

    return module_inside(model, loading=loading, stored=stored)


_VIEWS = "xla_ckpt.state.model_view"


def is_view(model: Any) -> bool:
    """Whether a model is a `ModelView`."""
    return is_of(model, _VIEWS, "ModelView")


def is_names_only(model: Any) -> bool:
    """Whether a model is `NamesOnly`."""
    return is_of(model, _VIEWS, "NamesOnly")


def modules_in(model: Any) -> Sequence[torch.nn.Module]:
    """The modules whose state a model has; none, if it is no module."""
    return model.parts if is_view(model) else [model] if is_module(model) else []
