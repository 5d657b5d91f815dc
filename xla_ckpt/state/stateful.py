"""Schedulers, and whatever else has `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.state.handover import Handover, kept_state
from xla_ckpt.state.loading import Loading, Stored, plan_freely, refused_alone
from xla_ckpt.state.mistakes import check_is_no_class, check_no_stateful, is_scheduler
from xla_ckpt.state.module import load_dict
from xla_ckpt.state.problems import Problem
from xla_ckpt.state.rng import RNGState
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.skeleton import children, is_array


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
    own = tree_of(member, stored.prefix)
    plan_freely(stored, loading, own)
    if is_scheduler(member):
        loading.problems += _of_another_class(stored, type(member).__name__, own)

    def take(arrays: Mapping[str, Any]) -> None:
        member.load_state_dict(stored.build(lambda path, _: arrays[path]))

    if isinstance(member, RNGState):
        loading.finish = take  # last of all: whatever else is loaded may draw random numbers
    else:
        loading.handover = Handover(leaf=stored.prefix, take=take, keep=lambda: kept_state(member))
    return loading


def _of_another_class(stored: Stored, own_class: str, own: Any) -> list[Problem]:
    """The values that one of two schedulers has and the other has not.

    torch's `load_state_dict` takes any scheduler's state without a word, and the learning rate would go on as in
    neither run. Versions of one class differ in names that begin with an underscore, and in `verbose`, which torch has
    dropped.
    """
    names = {paths.unescape(part) for part in children(stored.skeleton) or ()}
    differ = names.symmetric_difference(own if isinstance(own, Mapping) else ()) - {"verbose"}
    problems = []
    for name in sorted(str(name) for name in differ if not str(name).startswith("_")):
        has, lacks = ("the tag", own_class) if name in names else (own_class, "the tag")
        text = f"{has} has it, and {lacks} has not: the stored scheduler is probably of another class"
        problems.append(Problem(paths.join(stored.prefix, paths.escape(name)), text, stays=True))
    return problems
