"""Install a state into an optimizer as torch's `load_state_dict` does: hooks, `__setstate__` and custom code."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.arrays.torch_objects import has_inherited_method, is_torch_tensor
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.nested import map_leaves
from xla_ckpt.core.tree.optimizer_schema import NUMBER_KEYS, STEP, STEP_ON_DEVICE_OPTIONS
from xla_ckpt.state.state_dict_load import Rollback

_PRE_HOOKS, _POST_HOOKS = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
_STATE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def has_load_hooks(optimizer: Any) -> bool:
    """Return True if hooks are registered that run before or after `load_state_dict`."""
    return any(getattr(optimizer, name, None) for name in (_PRE_HOOKS, _POST_HOOKS))


def has_custom_state_dict(optimizer: Any) -> bool:
    """Return True if `state_dict` may return another state than the optimizer's: it is overridden, or has hooks."""
    return not has_inherited_method(optimizer, "state_dict") or any(
        getattr(optimizer, name, None) for name in _STATE_HOOKS
    )


def has_custom_load(optimizer: Any) -> bool:
    """Return True if `load_state_dict` is overridden by the optimizer's class or object."""
    return not has_inherited_method(optimizer, "load_state_dict")


def has_program_code(optimizer: Any) -> bool:
    """Return True if code of the program runs when a state is loaded: it may raise, or change the state."""
    if has_custom_load(optimizer) or has_load_hooks(optimizer) or has_custom_state_dict(optimizer):
        return True
    setstate = next((c for c in type(optimizer).__mro__ if "__setstate__" in vars(c)), None)
    return setstate is None or not setstate.__module__.startswith("torch.optim.")


def get_torch_class_name(optimizer: Any) -> str | None:
    """Return the name of the torch.optim class whose `step` an optimizer inherits; None if it overrides `step`."""
    # torch wraps `step` in each instantiated class, so only its names identify the defining class.
    step = getattr(type(optimizer), "step", None)
    name, _, _ = getattr(step, "__qualname__", "").rpartition(".")
    return name if getattr(step, "__module__", "").startswith("torch.optim.") else None


@dataclass(slots=True)
class OptimizerInstallation:
    """The installation of a state into one optimizer.

    Call `try_load` if `has_program_code` is true for the optimizer, before anything else of the program is changed,
    because it raises if the state is rejected. Call `finish` at the end. Hooks run once: pre-hooks in `try_load`,
    post-hooks in `finish`, where they see the loaded weights. A custom `load_state_dict` is called twice.
    """

    optimizer: Any
    packed_state: Mapping[str, Any]
    """The state in the structure of a torch `state_dict`, with numbers for parameters."""

    uses_custom_load: bool
    """True if the optimizer's custom `load_state_dict` is called."""

    cast_state: bool = False
    """True if all state is cast to the dtype of its parameter, as in torch."""

    _unpacked: tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]] | None = field(default=None, init=False)
    """State by parameter, and the options of each group."""

    def try_load(self) -> None:
        """Run the pre-hooks, and install the state for the first time.

        Raises:
            Exception: If code of the program rejects the state.
        """
        if self.uses_custom_load:
            # A custom load may modify its argument, and is called with the state again at the end.
            self.optimizer.load_state_dict(_copy_packed_state(self.packed_state))
        else:
            self._set_state()

    def finish(self) -> None:
        """Install the state, and run the post-hooks."""
        if self.uses_custom_load:
            self.optimizer.load_state_dict(self.packed_state)
            return
        self._set_state()
        for hook in getattr(self.optimizer, _POST_HOOKS, {}).values():
            hook(self.optimizer)

    def _set_state(self) -> None:
        """Set the state like the last part of `Optimizer.load_state_dict` in torch."""
        if self._unpacked is None:
            self._unpacked = self._unpack()
        optimizer, (state, groups) = self.optimizer, self._unpacked
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        optimizer.__setstate__({schema.STATE: state, schema.PARAM_GROUPS: optimizer.param_groups})

    def _unpack(self) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
        """Run the pre-hooks, and assign the state that they return to the parameters, as torch does.

        State keeps its stored dtype, unless a hook changed it, or may have changed it in `state_dict` when it was
        saved. Changed state is cast to the dtype of its parameter, as torch casts all state.

        Raises:
            ValueError: If the groups do not fit the parameters.
        """
        packed, given = dict(self.packed_state), list[Any]()
        hooks = getattr(self.optimizer, _PRE_HOOKS, {}).values()
        casts_all = self.cast_state or (
            has_custom_state_dict(self.optimizer) and get_torch_class_name(self.optimizer) is not None
        )
        if hooks and not casts_all:
            map_leaves(packed.get(schema.STATE), lambda _, leaf: given.append(leaf))
        for hook in hooks:
            returned = hook(self.optimizer, packed)
            packed = packed if returned is None else returned
        as_stored = frozenset(map(id, given))
        groups, own = packed[schema.PARAM_GROUPS], self.optimizer.param_groups
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
    """Cast the tensors in a parameter's state to its dtype and device, as torch's load does.

    A tensor of the parameter's shape also gets its strides.

    Args:
        value: The state.
        parameter: The parameter.
        group: The options of its group.
        as_stored: The ids of tensors that stay unchanged.
    """

    def cast(keys: tuple[Any, ...], leaf: Any) -> Any:
        if not is_torch_tensor(leaf) or id(leaf) in as_stored:
            return leaf
        if keys[-1:] == (STEP,):
            import torch

            on_device = any(group.get(option) for option in STEP_ON_DEVICE_OPTIONS)
            return leaf.to(device=parameter.device, dtype=torch.float32) if on_device else leaf
        if keys and keys[-1] in NUMBER_KEYS:
            return leaf  # torch casts these, too, with a loss of precision
        casts = parameter.is_floating_point() and leaf.is_floating_point()
        leaf = leaf.to(device=parameter.device, dtype=parameter.dtype if casts else leaf.dtype)
        if leaf.shape != parameter.shape or leaf.stride() == parameter.stride():
            return leaf
        from xla_ckpt.arrays.torch_elements import copy_with_strides

        return copy_with_strides(leaf, parameter)

    return map_leaves(value, cast, keep_classes=True)


def _copy_packed_state(packed: Mapping[str, Any]) -> Any:
    """Copy a state dict, with its tensors on their devices."""
    return map_leaves(packed, lambda _, leaf: leaf.detach().clone() if is_torch_tensor(leaf) else copy.deepcopy(leaf))


def backup_optimizer(optimizer: Any) -> Rollback:
    """Back up an optimizer that has no custom `load_state_dict`, and return the rollback.

    A load replaces the former state and does not write to it.
    """
    attributes, groups = dict(vars(optimizer)), [(group, dict(group)) for group in optimizer.param_groups]

    def put_back() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, former in groups:
            group.clear()
            group.update(former)

    return put_back
