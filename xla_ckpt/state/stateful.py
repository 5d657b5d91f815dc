"""Save and load objects with `state_dict` and `load_state_dict`: schedulers, data loaders, members of extras."""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
from collections.abc import Mapping
from itertools import starmap, zip_longest
from typing import Any

from xla_ckpt.arrays.pytree import has_methods
from xla_ckpt.arrays.torch_objects import is_module, is_torch_optimizer
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.skeleton import get_children, is_array
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.state.argument_checks import check_no_stateful, check_not_class, is_scheduler
from xla_ckpt.state.model_state import convert_model_state, plan_dict_load
from xla_ckpt.state.optimizer_load import plan_load_by_position
from xla_ckpt.state.part_load import PartLoadPlan, StoredPart, plan_flexible, reject_bare_value
from xla_ckpt.state.problems import LoadProblem
from xla_ckpt.state.rng import RNGState
from xla_ckpt.state.state_dict_load import StateDictLoad, backup_state_dict
from xla_ckpt.state.wrappers import unwrap_model


class _GetStateAdapter:
    """An adapter for objects with `get_state` and `set_state`, such as grain's iterators."""

    def __init__(self, member: Any) -> None:
        self.state_dict = member.get_state
        self.load_state_dict = member.set_state


def with_state_dict(member: Any) -> Any:
    """Return an object with `state_dict` and `load_state_dict` for a member, if it has methods for its state."""
    if not hasattr(member, "state_dict") and has_methods(member, "get_state", "set_state"):
        return _GetStateAdapter(member)
    return member


def get_member_tree(member: Any, name: str) -> Any:
    """Return the state of a member.

    Raises:
        UnsupportedStateError: If it is not a dict and has no `state_dict`.
        UsageError: If it is a class, or a dict of objects with state.
    """
    check_not_class(member, name)
    if isinstance(member, Mapping):
        check_no_stateful(member, name)
        return member
    if is_module(member):
        return unwrap_model(member).state_dict()
    if not has_methods(member, "state_dict", "load_state_dict"):
        raise UnsupportedStateError(
            f"an object of the class {type(member).__name__} has no state_dict() and load_state_dict()",
            leaf=name,
            hint="Pass an object that has both, or a dict, which may hold any tree: {'state': ...}. Plain values of a "
            "save go into user_content; the order of the arguments is model, optimizer, scheduler, user_content.",
        )
    return member.state_dict()


def plan_member_load(stored: StoredPart, member: Any) -> PartLoadPlan:
    """Plan the load of a member: its state is restored as new values, and passed to its `load_state_dict`."""
    if isinstance(member, dict):
        check_no_stateful(member, stored.prefix)
        return plan_dict_load(stored, member)
    if is_array(stored.skeleton) and not has_methods(member, "load_state_dict"):
        return reject_bare_value(stored)  # `get_member_tree` would suggest a dict, which does not fit either
    if is_torch_optimizer(member) and (by_position := plan_load_by_position(stored, member)) is not None:
        return by_position
    if is_module(member):
        member = unwrap_model(member, loading=True)
    loading = PartLoadPlan()
    own = get_member_tree(member, stored.prefix)
    plan_flexible(stored, loading, own)
    if is_scheduler(member):
        loading.problems += _find_class_mismatch(stored, member, own)

    def take(arrays: Mapping[str, Any]) -> None:
        state = stored.build(lambda path, _: arrays[path])
        member.load_state_dict(
            convert_model_state(stored, member, state) if is_module(member) else restore_key_types(state, own)
        )

    if isinstance(member, RNGState):
        loading.finish = take  # last, because loading other objects may draw random numbers
    else:
        loading.state_dict_load = StateDictLoad(leaf=stored.prefix, load=take, backup=lambda: backup_state_dict(member))
    return loading


def _find_class_mismatch(stored: StoredPart, member: Any, own: Any) -> list[LoadProblem]:
    """Return problems for the values that only one of two schedulers has.

    torch's `load_state_dict` silently accepts the state of any scheduler, and the learning rate would follow neither
    run. For torch's classes, only the names of their options, and of other torch schedulers' options, are compared,
    because other attributes vary between versions of torch.
    """
    names = {paths.unescape(part) for part in get_children(stored.skeleton) or ()}
    own_class, own_names = type(member), {*own} if isinstance(own, Mapping) else set()
    differ = {name for name in names ^ own_names if not str(name).startswith("_")} - {"verbose"}
    kinds = _list_torch_schedulers()
    if any(kind in kinds for kind in own_class.__mro__):
        own_options = {name for kind in own_class.__mro__ for name in _get_init_options(kind)}
        options = {name for kind in kinds for name in _get_init_options(kind)} - own_options
        differ &= (options & names) | (own_options - names)
    problems = []
    for name in sorted(map(str, differ)):
        has, lacks = ("the tag", own_class.__name__) if name in names else (own_class.__name__, "the tag")
        text = f"{has} has it, and {lacks} has not: the stored scheduler is probably of another class"
        problems.append(LoadProblem(paths.join(stored.prefix, paths.escape(name)), text, is_ignorable=True))
    return problems


def _list_torch_schedulers() -> list[type]:
    """List torch's scheduler classes, without base classes that define no `__init__`."""
    module = sys.modules.get("torch.optim.lr_scheduler")
    base = getattr(module, "LRScheduler", None)
    every = [] if base is None else [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base)]
    return [kind for kind in every if "__init__" in vars(kind) and kind is not base]


def _get_init_options(kind: type) -> set[str]:
    """Return the names of a class's constructor arguments."""
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    return set() if code is None else {*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]}


def restore_key_types(value: Any, own: Any) -> Any:
    """Restore numeric keys of dicts in a stored state, where an object's own state has numeric keys.

    torch.distributed.checkpoint stores all keys as strings, and all dicts as plain dicts. `own` is the object's current
    state, which shows the key types and the classes of the dicts.

    >>> restore_key_types([{"at": {"3": 1, "12": 2}}], [{"at": collections.Counter([5])}])
    [{'at': Counter({12: 2, 3: 1})}]
    """
    if isinstance(value, Mapping) and isinstance(own, Mapping):
        key_of = _parse_numeric_keys(value, own)
        members = {
            key_of.get(k, k): restore_key_types(member, own.get(key_of.get(k, k))) for k, member in value.items()
        }
        if type(value) is dict and type(own) is not dict and isinstance(own, dict):
            return _create_dict_like(own, members)
        return members if type(value) is dict else value
    if type(value) in (list, tuple) and isinstance(own, list | tuple):
        return type(value)(starmap(restore_key_types, zip_longest(value, own[: len(value)])))
    return value


def _parse_numeric_keys(value: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Parse keys of `value` as numbers; empty unless all keys of `own` are numbers of one type."""
    kinds = {*map(type, own)} or ({int} if isinstance(own, collections.Counter) else set())
    if len(kinds) != 1 or not kinds <= {int, float} or not all(isinstance(key, str) for key in value):
        return {}
    (kind,) = kinds
    numbers = {}
    for key in value:
        with contextlib.suppress(ValueError):
            if str(number := kind(key)) == key:
                numbers[key] = number
    return numbers if len(numbers) == len(value) else {}


def _create_dict_like(own: dict[Any, Any], members: Mapping[Any, Any]) -> dict[Any, Any]:
    """Create a dict of the class of `own` with these members."""
    made = copy.copy(own)
    made.clear()
    for key, member in members.items():
        made[key] = member  # `update` of a Counter would add
    return made
