"""Conversion between a Lightning checkpoint dict and the objects of a save.

A checkpoint is the dict of `_CheckpointConnector.dump_checkpoint` (lightning 2.6). Weights, optimizers and schedulers
become the objects of `save_checkpoint`, so optimizer state is stored by parameter name. The remaining entries are
stored as the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.migration import migrate_checkpoint

from xla_ckpt.arrays.registry import AdapterRegistry
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.state_dict import RESERVED_WRAPPERS, strip_wrappers
from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.logs import get_logger
from xla_ckpt.state.model_state import (
    find_parameter_name,
    get_array_identity,
    get_parameter_names,
    match_renamed_members,
)
from xla_ckpt.state.optimizer import is_standard
from xla_ckpt.state.stateful import restore_key_types

logger = get_logger(__name__)

RUN = "lightning"
"""Key of the rest in the `user_content` of a tag. Tags of older versions have an extra of this name instead, with the
loops and the states of callbacks and of the precision plugin.
"""

MONITORED = "monitored"
"""Key of the stored `Resumed.monitored` values in the `user_content`."""

LOADERS = "combined_loader"
"""Key of the data loader states in the state of a fit loop (`_FitLoop.on_save_checkpoint`)."""


_EXTRA = "_extra_state"
"""torch's key for the return value of a module's `get_extra_state`."""


def shards_itself(trainer: Any) -> bool:
    """Return True if the strategy shards the module, and loads weights and optimizers into the shards itself."""
    return bool(trainer.strategy.restore_checkpoint_after_setup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Objects that a save stores for a Lightning checkpoint."""

    model: Any
    optimizers: list[Any]
    schedulers: list[Any]
    loaders: list[Any]
    """States of the data loaders, which differ between ranks."""

    rest: dict[str, Any]


def contents_of(checkpoint: Mapping[str, Any], trainer: Any, module: Any) -> Contents:
    """Split a Lightning checkpoint into the objects of a save.

    If no hook has changed the weights or the state of an optimizer, the object itself is saved, because it records
    which of its arrays differ between ranks, and how they are sharded.
    """
    rest = dict(checkpoint)
    weights, states = rest.pop("state_dict", {}), rest.pop("optimizer_states", [])
    schedulers = rest.pop("lr_schedulers", [])
    loaders = _fit_loop(rest).pop(LOADERS, [])
    model, optimizers = module, list(trainer.optimizers)
    if not shards_itself(trainer):
        own = module.state_dict()
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        # A module returns a new extra state in each call, so it cannot be compared by identity.
        if weights.keys() != own.keys() or not _is_same(tensors, {name: own[name] for name in tensors}):
            model = _as_module(weights, _trained(module))
        names = get_parameter_names(module)
        optimizers = [
            optimizer if _is_whole_in(optimizer, state, model is module) else _DumpedOptimizer(optimizer, state, names)
            for optimizer, state in zip(optimizers, states, strict=False)
        ]
    return Contents(model=model, optimizers=optimizers, schedulers=schedulers, loaders=loaders, rest=rest)


def _is_whole_in(optimizer: Any, state: Any, has_its_model: bool) -> bool:
    """Return True if the optimizer object itself is saved, with the model that provides its parameter names."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return True  # the save raises an error with a hint: only rank 0 has the state here
    return has_its_model and _is_same(state, optimizer.state_dict())


def numbered(kind: str, objects: Iterable[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the first object, or None, and the other objects under their names as extras."""
    first, *others = [*objects] or [None]
    return first, {f"{kind}_{number}": other for number, other in enumerate(others, 1)}


def _fit_loop(rest: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two states contain the same arrays and equal plain values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        identity = get_array_identity(one, AdapterRegistry())
        return identity is not None and identity == get_array_identity(other, AdapterRegistry())
    return type(one) is type(other) and isinstance(one, bool | int | float | str | bytes) and one == other


def _trained(module: Any) -> dict[str, bool]:
    """Return {name: True if trained} for all parameters, under the names that a save uses."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {strip_wrappers(name, RESERVED_WRAPPERS): parameter.requires_grad for name, parameter in parameters}


class _Holder(torch.nn.Module):
    """Module that only contains weights."""


class _HolderWithExtra(_Holder):
    """Module with weights and extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self._extra = extra

    def get_extra_state(self) -> Any:
        return self._extra

    def set_extra_state(self, state: Any) -> None:
        self._extra = state


def _as_module(weights: Mapping[str, Any], trained: Mapping[str, bool]) -> Any:
    """Return weights as a new module, with the names in `trained` as parameters and all others as buffers.

    Buffers may differ between ranks. If a hook has added values that are not weights, return the dict unchanged.
    """
    if not all(isinstance(value, torch.Tensor) or name.endswith(_EXTRA) for name, value in weights.items()):
        return dict(weights)
    named = {strip_wrappers(name, RESERVED_WRAPPERS): value for name, value in weights.items()}
    holders: dict[str, Any] = {}

    def holder(path: str) -> Any:
        if path not in holders:
            extra = f"{path}.{_EXTRA}" if path else _EXTRA
            holders[path] = _HolderWithExtra(named[extra]) if extra in named else _Holder()
            if path:
                above, _, last = path.rpartition(".")
                holder(above).add_module(last, holders[path])
        return holders[path]

    for name, value in named.items():
        path, _, last = name.rpartition(".")
        if name in trained:
            trains = trained[name] and value.is_floating_point()
            holder(path).register_parameter(last, torch.nn.Parameter(value, requires_grad=trains))
        elif last == _EXTRA:
            holder(path)
        else:
            holder(path).register_buffer(last, value)
    return holder("")


class _DumpedOptimizer:
    """Optimizer state of a checkpoint, with the names of its parameters."""

    def __init__(self, optimizer: Any, state: Any, names: Mapping[Any, str]) -> None:
        self._state = state
        self.param_groups = [
            {"params": group["params"], "param_names": [find_parameter_name(p, names) for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Raise an error, because this object can only be saved."""
        raise NotImplementedError


def rename_weights(weights: dict[str, Any], module: Any) -> None:
    """Rename weights to the names in a module, whose wrappers, such as `torch.compile`, may add prefixes."""
    for stored, name in match_renamed_members(weights.keys(), module.state_dict().keys(), module).items():
        weights[name] = weights.pop(stored)


class Resumed:
    """Lightning checkpoint built from a stored state, used until Lightning has restored it.

    Args:
        tree: The stored state. If it contains no optimizers and no model, Lightning restores only the rest.
        path: Root directory of the tag.
        tag: The tag.
        strict: False ignores entries that do not fit.

    Raises:
        IncompatibleCheckpointError: The tag was not saved from a Lightning run.
    """

    def __init__(self, tree: Mapping[str, Any], *, path: str, tag: str, strict: bool) -> None:
        self._tag, self._strict = tag, strict
        self._states = _members(tree, schema.OPTIMIZER)
        self._by_position = [_by_position(state) for state in self._states]
        self._has_adapters_alone = schema.BASE in tree
        self.has_weights = self.has_begun = False
        """True after the weights have been loaded, and after the first batch has started."""

        content = tree.get(schema.USER_CONTENT) or {}
        self.monitored: Mapping[int, Any] = content.get(MONITORED, {})
        """Scheduler index -> the value with which Lightning steps it after the save."""

        self.checkpoint, _ = migrate_checkpoint(
            {
                **_rest_of(tree, path, tag),
                "state_dict": tree.get(schema.MODEL, {}),
                "optimizer_states": list(self._by_position),
                "lr_schedulers": _members(tree, schema.SCHEDULER),
            }
        )
        """Checkpoint that Lightning restores. Hooks of the program may change it."""

    def put_loaders(self, states: list[Any]) -> None:
        """Add the states of this rank's data loaders."""
        if states:
            _fit_loop(self.checkpoint)[LOADERS] = states

    def fit_weights(self, module: Any, weights: dict[str, Any], compare_base: Callable[[Any], Any]) -> None:
        """Adapt a state dict to the module that is about to load it, after all hooks have changed it.

        Without `strict`, entries that do not fit are replaced by the module's current values.

        Args:
            module: The module.
            weights: The state dict, which is changed in place.
            compare_base: Loads the tag's weights into a model. If the tag contains only adapters, this compares the
                base weights, which the module keeps.
        """
        self.has_weights = True
        own = module.state_dict()
        rename_weights(weights, module)
        if self._has_adapters_alone:
            copies = {
                name: torch.empty_like(value) if name in weights and isinstance(value, torch.Tensor) else value
                for name, value in own.items()
            }
            compare_base(_as_module(copies, _trained(module)))
            weights.update({name: value for name, value in own.items() if name not in weights})
        if self._strict:
            return
        for name in [*weights]:
            if name not in own:
                self._leave_out(name, "the module has no such member")
                del weights[name]
        for name, value in own.items():
            if name not in weights:
                self._leave_out(name, "it is not stored")
                weights[name] = value
            elif isinstance(value, torch.Tensor) and value.shape != weights[name].shape:
                shapes = f"{tuple(weights[name].shape)} in the place of {tuple(value.shape)}"
                self._leave_out(name, f"the stored shape is {shapes}")
                weights[name] = value

    def fit_optimizers(self, trainer: Any, module: Any) -> None:
        """Adapt the states of optimizers and schedulers to the Trainer's objects, which exist at this point.

        Lightning loads them by position. A state that no hook has replaced is reordered by parameter name if it has the
        same parameters in another order.
        """
        names = get_parameter_names(module)
        states = self.checkpoint.get("optimizer_states", [])
        for number, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            if number < len(self._states) and state is self._by_position[number]:
                states[number] = _in_order_of(optimizer, names, self._states[number], state, module)
            if not self._strict and _sizes(states[number]) != _sizes(optimizer.state_dict()):
                self._leave_out(f"optimizer {number}", "its groups have other numbers of parameters")
                states[number] = optimizer.state_dict()
        schedulers = self.checkpoint.get("lr_schedulers", [])
        for number, (state, config) in enumerate(zip(schedulers, trainer.lr_scheduler_configs, strict=False)):
            schedulers[number] = restore_key_types(state, config.scheduler.state_dict())

    def _leave_out(self, name: str, why: str) -> None:
        logger.warning("tag %s: not loaded: %s: %s", self._tag, name, why)


def _rest_of(tree: Mapping[str, Any], path: str, tag: str) -> dict[str, Any]:
    """Return the entries of the Lightning checkpoint other than weights, optimizers and schedulers."""
    content, extras = tree.get(schema.USER_CONTENT), tree.get(schema.EXTRAS, {})
    if isinstance(content, Mapping) and RUN in content:
        return dict(content[RUN])
    if RUN not in extras or not isinstance(content, Mapping):
        raise IncompatibleCheckpointError(
            "the tag has no state of a Lightning Trainer",
            path=path,
            tag=tag,
            hint="Resume from a tag of CheckpointCallback. Of other tags, xla_ckpt.load_checkpoint loads the weights.",
        )
    older = extras[RUN]  # there was one precision plugin with state, and its class was not stored
    precision = {"MixedPrecision": older["precision"]} if older["precision"] else {}
    return {
        "epoch": content["epoch"],
        "global_step": content["step"],
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": older["fit_loop"]},
        "callbacks": older["callbacks"],
        **precision,
    }


def _members(tree: Mapping[str, Any], kind: str) -> list[Any]:
    """Return the stored states that `numbered` has named."""
    extras = tree.get(schema.EXTRAS, {})
    states = [tree[kind]] if kind in tree else []
    while (name := f"{kind}_{len(states)}") in extras and states:
        states.append(extras[name])
    return states


def _by_position(state: Any) -> Any:
    """Return an optimizer state in torch's form: parameter indices instead of names, in the order of the groups."""
    if not is_standard(state):
        return state
    numbers = {name: number for number, name in enumerate(dict.fromkeys(schema.get_parameter_names(state)))}
    # Some layouts store all dict keys as strings.
    return schema.rename_parameters(state, {**{str(name): number for name, number in numbers.items()}, **numbers})


def _in_order_of(optimizer: Any, names: Mapping[Any, str], stored: Any, state: Any, module: Any) -> Any:
    """Return a state by position, with each group's parameters in the order of the optimizer's group."""
    if not is_standard(stored) or len(stored[schema.PARAM_GROUPS]) != len(optimizer.param_groups):
        return state
    own = [[find_parameter_name(p, names) for p in group[schema.PARAMS]] for group in optimizer.param_groups]
    called = schema.get_parameter_names(stored)
    if not all(isinstance(name, str) for name in called):
        return state
    renamed = match_renamed_members(called, [name for group in own for name in group if name], module)
    numbers = {renamed.get(name, name): number for number, name in enumerate(dict.fromkeys(called))}
    groups = [
        {**group, schema.PARAMS: [numbers[name] for name in members]}
        if sorted(numbers.get(name, -1) for name in members) == sorted(group[schema.PARAMS])
        else group
        for group, members in zip(state[schema.PARAM_GROUPS], own, strict=True)
    ]
    return {**state, schema.PARAM_GROUPS: groups}


def _sizes(state: Any) -> list[int]:
    """Return the number of parameters in each group of an optimizer state."""
    return [len(group[schema.PARAMS]) for group in state[schema.PARAM_GROUPS]] if is_standard(state) else []
