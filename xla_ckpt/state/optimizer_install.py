"""Putting a state into an optimizer as its `load_state_dict` does: with its hooks, `__setstate__` and own code."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.arrays.torch_objects import has_torchs, is_torch_tensor
from xla_ckpt.state.handover import PutBack
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import replaced_leaves
from xla_ckpt.tree.optimizer_schema import NUMBERS, STEP, STEP_ON_DEVICE

_PRE_HOOKS, _POST_HOOKS = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
_STATE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def has_load_hooks(optimizer: Any) -> bool:
    """Whether hooks are registered that run before or after `load_state_dict`."""
    return any(getattr(optimizer, name, None) for name in (_PRE_HOOKS, _POST_HOOKS))


def packs_state(optimizer: Any) -> bool:
    """Whether `state_dict` may return another state than the optimizer holds: by a hook, or by code of its own."""
    return not has_torchs(optimizer, "state_dict") or any(getattr(optimizer, name, None) for name in _STATE_HOOKS)


def loads_itself(optimizer: Any) -> bool:
    """Whether the optimizer has a `load_state_dict` of its own: its class overrides it, or the object has another."""
    return not has_torchs(optimizer, "load_state_dict")


def runs_code(optimizer: Any) -> bool:
    """Whether code of the program has a part in how the optimizer takes a state: it may refuse it, or change it."""
    if loads_itself(optimizer) or has_load_hooks(optimizer) or packs_state(optimizer):
        return True
    setstate = next((c for c in type(optimizer).__mro__ if "__setstate__" in vars(c)), None)
    return setstate is None or not setstate.__module__.startswith("torch.optim.")


def torch_kind(optimizer: Any) -> str | None:
    """The class of torch.optim whose `step` an optimizer has; None if that is its own."""
    # torch wraps `step` in each class that an object is made of: only its names tell where it is from.
    step = getattr(type(optimizer), "step", None)
    name, _, _ = getattr(step, "__qualname__", "").rpartition(".")
    return name if getattr(step, "__module__", "").startswith("torch.optim.") else None


@dataclass(slots=True)
class Installation:
    """A state on its way into one optimizer.

    `try_out` is for an optimizer of which `runs_code` is true, before anything else of the program is changed: what
    refuses the state raises there. `finish` is called at the end. Hooks run once: those before the load with
    `try_out`, those after it at the end, where they find the loaded weights. An optimizer's own `load_state_dict` is
    called twice.
    """

    optimizer: Any
    packed: Mapping[str, Any]
    """The state in the structure of torch's `state_dict`, with numbers in place of parameters."""

    own_code: bool
    """Whether the optimizer's own `load_state_dict` is called."""

    casts: bool = False
    """Whether all state takes the dtype of its parameter, as torch casts it."""

    _unpacked: tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]] | None = field(default=None, init=False)
    """State by parameter, and the options of each group."""

    def try_out(self) -> None:
        """Run the hooks before the load, and put the state in for a first time.

        Raises:
            Exception: Code of the program refuses the state.
        """
        if self.own_code:
            # Its code may write to what it is given, and is given the state again at the end.
            self.optimizer.load_state_dict(_copied(self.packed))
        else:
            self._put()

    def finish(self) -> None:
        """Put the state in, and run the hooks after the load."""
        if self.own_code:
            self.optimizer.load_state_dict(self.packed)
            return
        self._put()
        for hook in getattr(self.optimizer, _POST_HOOKS, {}).values():
            hook(self.optimizer)

    def _put(self) -> None:
        """As torch's `load_state_dict` ends."""
        if self._unpacked is None:
            self._unpacked = self._unpack()
        optimizer, (state, groups) = self.optimizer, self._unpacked
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        optimizer.__setstate__({schema.STATE: state, schema.GROUPS: optimizer.param_groups})

    def _unpack(self) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
        """Run the hooks before the load, and give the state that they return to the parameters, as torch does.

        State keeps the dtype that it was saved with, unless hooks changed it: that takes its parameter's, as torch
        casts all state. So does state that a hook of `state_dict` may have changed at the save.

        Raises:
            ValueError: The groups are those of other parameters.
        """
        packed, given = dict(self.packed), list[Any]()
        hooks = getattr(self.optimizer, _PRE_HOOKS, {}).values()
        casts_all = self.casts or (packs_state(self.optimizer) and torch_kind(self.optimizer) is not None)
        if hooks and not casts_all:
            replaced_leaves(packed.get(schema.STATE), lambda _, leaf: given.append(leaf))
        for hook in hooks:
            returned = hook(self.optimizer, packed)
            packed = packed if returned is None else returned
        as_stored = frozenset(map(id, given))
        groups, own = packed[schema.GROUPS], self.optimizer.param_groups
        sizes, own_sizes = ([len(g[schema.PARAMS]) for g in each] for each in (groups, own))
        if sizes != own_sizes:
            raise ValueError(f"other numbers of parameters in the groups: expected {own_sizes}, got {sizes}")
        owner: dict[Any, tuple[Any, Mapping[str, Any]]] = {}
        for new, group in zip(groups, own, strict=True):
            options = {**group, **new}
            owner.update((name, (p, options)) for name, p in zip(new[schema.PARAMS], group[schema.PARAMS], strict=True))
        state, casts = collections.defaultdict[Any, Any](dict), hooks or casts_all
        for key, value in packed[schema.STATE].items():
            if key in owner:
                parameter, group = owner[key]
                state[parameter] = _cast_as_torch(value, parameter, group, as_stored) if casts else value
            else:
                state[key] = value
        return state, [{k: v for k, v in group.items() if k != schema.PARAMS} for group in groups]


def _cast_as_torch(value: Any, parameter: Any, group: Mapping[str, Any], as_stored: frozenset[int]) -> Any:
    """The state of a parameter with its tensors in the dtype and on the device of the parameter, as torch loads it.

    A tensor of the shape of the parameter has its strides, too.

    Args:
        value: The state.
        parameter: The parameter.
        group: The options of its group.
        as_stored: The ids of tensors that stay as they are.
    """

    def cast(keys: tuple[Any, ...], leaf: Any) -> Any:
        if not is_torch_tensor(leaf) or id(leaf) in as_stored:
            return leaf
        if keys[-1:] == (STEP,):
            import torch

            on_device = any(group.get(option) for option in STEP_ON_DEVICE)
            return leaf.to(device=parameter.device, dtype=torch.float32) if on_device else leaf
        if keys and keys[-1] in NUMBERS:
            return leaf  # torch casts these, too, and loses digits of them
        casts = parameter.is_floating_point() and leaf.is_floating_point()
        leaf = leaf.to(device=parameter.device, dtype=parameter.dtype if casts else leaf.dtype)
        if leaf.shape != parameter.shape or leaf.stride() == parameter.stride():
            return leaf
        from xla_ckpt.arrays.torch_elements import copy_with_strides

        return copy_with_strides(leaf, parameter)

    return replaced_leaves(value, cast, classes=True)


def _copied(packed: Mapping[str, Any]) -> Any:
    """A copy of a state dict, with its tensors on their devices."""
    return replaced_leaves(
        packed, lambda _, leaf: leaf.detach().clone() if is_torch_tensor(leaf) else copy.deepcopy(leaf)
    )


def kept(optimizer: Any) -> PutBack:
    """Keep what an optimizer has, and return what puts it back, if its own `load_state_dict` is not called.

    What is loaded is put in the place of the former state, which is not written to.
    """
    attributes, groups = dict(vars(optimizer)), [(group, dict(group)) for group in optimizer.param_groups]

    def put_back() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, former in groups:
            group.clear()
            group.update(former)

    return put_back
