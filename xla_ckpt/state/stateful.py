"""Schedulers, and whatever else has `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.state.handover import Handover, kept_state
from xla_ckpt.state.loading import Loading, Stored, plan_freely, refused_alone
from xla_ckpt.state.mistakes import check_is_no_class, check_no_stateful
from xla_ckpt.state.module import load_dict
from xla_ckpt.state.rng import RNGState
from xla_ckpt.tree.skeleton import is_array


class _ByGetState:
    """An object whose calls are `get_state` and `set_state`, as grain's iterators have them."""

    def __init__(self, member: Any) -> None:
        self.state_dict = member.get_state
        self.load_state_dict = member.set_state


def with_state_dict(member: Any) -> Any:
    """A member as an object with `state_dict` and `load_state_dict`, if it has calls for its state at all."""
    if not hasattr(member, "state_dict") and hasattr(member, "get_state") and hasattr(member, "set_state"):
        return _ByGetState(member)
    return member


def tree_of(member: Any, name: str) -> Any:
    """The state of a member.

    Raises:
        UnsupportedStateError: It is neither a dict nor has it `state_dict`.
        UsageError: It is a class, or a dict of objects that have states of their own.
    """
    check_is_no_class(member, name)
    if isinstance(member, Mapping):
        check_no_stateful(member, name)
        return member
    if not callable(getattr(member, "state_dict", None)) or not callable(getattr(member, "load_state_dict", None)):
        raise UnsupportedStateError(
            f"an object of the class {type(member).__name__} has no state_dict() and load_state_dict()",
            leaf=name,
            hint="Pass an object that has both, or a dict, which may hold any tree: {'state': ...}. Plain values of a "
            "save go into user_content; the order of the arguments is model, optimizer, scheduler, user_content.",
        )
    return member.state_dict()


def load(stored: Stored, member: Any) -> Loading:
    """Prepare to load a member: its state is restored as new values, and handed to its `load_state_dict`."""
    if isinstance(member, dict):
        check_no_stateful(member, stored.prefix)
        return load_dict(stored, member)
    if is_array(stored.skeleton) and not hasattr(member, "load_state_dict"):
        return refused_alone(stored)  # `tree_of` would say to pass a dict, which does not take it either
    loading = Loading()
    plan_freely(stored, loading, tree_of(member, stored.prefix))

    def take(arrays: Mapping[str, Any]) -> None:
        member.load_state_dict(stored.build(lambda path, _: arrays[path]))

    if isinstance(member, RNGState):
        loading.finish = take  # last of all: whatever else is loaded may draw random numbers
    else:
        loading.handover = Handover(leaf=stored.prefix, take=take, keep=lambda: kept_state(member))
    return loading
