"""Get the state dict of a torch module, and plan its load. Imports torch.

Arrays are read directly into the module's parameters and buffers if its `load_state_dict` only copies. Otherwise
(hooks, versions, custom code) it is called as torch calls it, with everything that is stored.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from xla_ckpt.arrays.registry import AdapterRegistry, create_array_target
from xla_ckpt.arrays.torch_elements import PLAIN_CLASSES, get_tensor_attributes, get_tensor_dtype
from xla_ckpt.arrays.torch_objects import is_lazy
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.skeleton import NOT_STORED
from xla_ckpt.core.tree.state_dict import (
    RESERVED_WRAPPERS,
    attach_module_metadata,
    get_module_metadata,
    rename_module_metadata,
    strip_wrappers,
)
from xla_ckpt.errors import IncompatibleCheckpointError, LoadError
from xla_ckpt.state import model_state
from xla_ckpt.state.model_state import compare_keys, get_array_identity, match_renamed_members
from xla_ckpt.state.model_view import ModelView, call_load_state_dict, is_overridden
from xla_ckpt.state.part_load import (
    ArrayPlaceholder,
    PartLoadPlan,
    StoredPart,
    describe_shape_mismatch,
    plan_arrays,
    plan_flexible,
    reject_bare_value,
)
from xla_ckpt.state.problems import UNEXPECTED, LoadProblem, create_incompatible_error
from xla_ckpt.state.state_dict_load import Rollback, StateDictLoad, copy_state_dict
from xla_ckpt.state.wrappers import get_modules


def get_module_entries(model: torch.nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of a module with its metadata, and with the module's own parameters in it."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    special = {k: v for k, v in entries.items() if type(v) not in PLAIN_CLASSES and isinstance(v, torch.Tensor)}
    beside = {k: attributes for k, v in special.items() if (attributes := get_tensor_attributes(v))}
    own = {**entries, **_strip_attributes(entries, beside)} if beside else entries
    return attach_module_metadata(own, get_module_metadata(entries) or {})


def _strip_attributes(entries: Mapping[str, Any], attached: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Strip attributes from tensors with tensors as attributes, if the state dict contains these as entries.

    bitsandbytes' 8-bit weights (`Int8Params`) have their scales as an attribute until the first pass, and its layer
    saves them next to the weight. Tensors with other attributes that would be lost raise an error when they are stored.
    """
    adapters = AdapterRegistry()
    saved = {get_array_identity(value, adapters) for value in entries.values()} - {None}
    return {
        name: entries[name].detach()
        for name, attributes in attached.items()
        if all(get_array_identity(attribute, adapters) in saved for attribute in attributes)
    }


def plan_module_load(stored: StoredPart, module: torch.nn.Module) -> PartLoadPlan:
    """Plan the load of a module: directly into its parameters and buffers if its `load_state_dict` only copies.

    Otherwise its `load_state_dict` is called as torch calls it, with hooks, versions, and everything that is stored.
    """
    saved = stored.build()
    if not isinstance(saved, Mapping):
        return reject_bare_value(stored)
    loading = PartLoadPlan(cast=stored.cast)
    own = get_module_entries(module)
    entries = module.select_entries(saved) if isinstance(module, ModelView) else own
    own_names = match_renamed_members(saved, entries, module)
    stored_names = {name: key for key, name in own_names.items()}
    entries = {stored_names.get(name, name): value for name, value in entries.items()}
    of_other_ranks = model_state.find_mismatched_numbers(stored, entries)
    tied = _find_tied_names(entries, saved)
    entries = {key: value for key, value in entries.items() if key not in of_other_ranks and key not in tied}
    compare_keys(stored, loading, entries, {k: v for k, v in saved.items() if k not in of_other_ranks})
    metadata = _get_module_metadata(stored, saved, own, own_names)
    here = get_module_metadata(own) or {}
    homes = {name.rpartition(".")[0] for name in own}
    same = all(metadata.get(home) == here.get(home) for home in homes)
    as_it_is = not loading.problems and not loading.unexpected and same
    how = _choose_load_mode(module, matches_program=as_it_is)
    if any(_is_scalar(value) and stored.has_shape(key, (1,)) for key, value in entries.items() if key in saved):
        how = _LoadMode.FLEXIBLE  # torch 0.3 had no scalars, and torch still accepts its tensors of one element
    load = _ModuleLoadPlanner(
        stored=stored,
        module=module,
        part_plan=loading,
        entries=entries,
        saved=saved,
        tied_names=tied,
        own_names=own_names,
        excluded=frozenset(own_names.get(key, key) for key in of_other_ranks),
        metadata=metadata,
        mode=how,
    )
    straight = load.plan()
    loading.problems += of_other_ranks.values()
    loading.state_dict_load = load.create_state_dict_load([path for path in loading.targets if path not in straight])
    return loading


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value) and value.dim() == 0


def convert_state_dict(stored: StoredPart, module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a stored state dict for the `load_state_dict` of a module: with its own names, and metadata."""
    own = get_module_entries(module)
    own_names = match_renamed_members(state, own, module)
    metadata = _get_module_metadata(stored, state, own, own_names)
    return attach_module_metadata({own_names.get(name, name): value for name, value in state.items()}, metadata)


def _get_module_metadata(
    stored: StoredPart, saved: Mapping[str, Any], own: Mapping[str, Any], own_names: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of the stored modules, by the module's names.

    Without stored metadata, a module has the program's version if its stored members are the current ones. Otherwise
    its version is unknown, which `_load_from_state_dict` treats as an old one.
    """
    metadata = stored.get_module_metadata(stored.prefix)
    if metadata is not None:
        # Wrapped modules follow their wrapper, whose metadata is empty.
        metadata = {strip_wrappers(name, RESERVED_WRAPPERS): of for name, of in metadata.items()}
        names = (
            {strip_wrappers(name, RESERVED_WRAPPERS): own_names.get(name, name) for name in saved} if own_names else {}
        )
        return rename_module_metadata(metadata, names)
    here = get_module_metadata(own) or {}
    differ = {own_names.get(key, key) for key in saved} ^ own.keys()
    others = {name[:end] for name in differ for end, step in enumerate(name) if step == "."}
    if differ:
        others.add("")
    return {name: of for name, of in here.items() if name not in others}


class _LoadMode(enum.IntEnum):
    """Modes of loading a module."""

    DIRECT = 0
    """Only its arrays are overwritten."""

    BY_NAMES = 1
    """Through its `load_state_dict`, which requires the keys of its own `state_dict`."""

    FLEXIBLE = 2
    """Through its `load_state_dict`, which may accept other names and shapes."""


@dataclass(frozen=True, kw_only=True)
class _ModuleLoadPlanner:
    """A planner for one load of a module: the entries of its state dict, and the stored entries."""

    stored: StoredPart
    module: torch.nn.Module
    part_plan: PartLoadPlan
    entries: Mapping[str, Any]
    """The entries to load with their current values, by stored name."""

    saved: Mapping[str, Any]
    """All stored entries, with an `ArrayPlaceholder` for each array."""

    tied_names: Mapping[str, str]
    """Names of tied parameters that are not stored -> the name under which each is stored."""

    own_names: Mapping[str, str]
    """Stored name -> the module's name, if they differ."""

    excluded: frozenset[str]
    """Entries of the module that are not loaded."""

    metadata: Mapping[str, Mapping[str, Any]]
    mode: _LoadMode

    differences: list[LoadProblem] = field(default_factory=list)
    """Mismatches, which are problems unless the module's `load_state_dict` accepts them."""

    @cached_property
    def is_direct(self) -> bool:
        """True if loading the module only overwrites its own arrays."""
        parts = self.module.modules()
        owned = {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
        strangers = [key for key, value in self.entries.items() if id(value) not in owned and not is_extra_state(key)]
        return self.mode == _LoadMode.DIRECT and not any(map(self._is_array, strangers))

    @cached_property
    def is_flexible(self) -> bool:
        """True if the module may accept mismatches. Not for pipeline stages, none of which loads everything that is
        stored.
        """
        return self.mode == _LoadMode.FLEXIBLE and self.stored.shardings.placement.mesh.pp == 1

    def _is_array(self, key: str) -> bool:
        return self.stored.shardings.adapters.get_kind(self.entries[key]) is not None

    def _is_saved_array(self, key: str) -> bool:
        return isinstance(self.saved[key], ArrayPlaceholder)

    def _get_path(self, key: str) -> str:
        return paths.join(self.stored.prefix, paths.escape(key))

    def plan(self) -> set[str]:
        """Plan the load of everything that is stored. Return the leaf paths of arrays read directly into the module's
        arrays.
        """
        loading = self.part_plan
        path_of = {key: self._get_path(key) for key in self.entries if key in self.saved}
        if self.is_direct:
            arrays = {path: self.entries[key] for key, path in path_of.items() if self._is_saved_array(key)}
            loading.targets.update(self.stored.create_whole_targets(arrays, owned=True))
        if self.is_flexible:
            self.differences.extend([*loading.problems, *loading.unexpected])
            loading.problems.clear()
            loading.unexpected.clear()
            for key in self.saved.keys() - self.entries.keys():
                self._plan_flexible(key)
        straight = set(loading.targets) if self.is_direct else set()
        by_object: dict[int, str] = {}
        for key, path in path_of.items():
            if path not in straight and self._plan_entry(key, path) and self.is_direct:
                straight.add(path)
                # If a parameter and a stored array both have several names, the array is read once.
                earlier = by_object.get(id(self.entries[key]))
                if earlier is not None and self.stored.is_same_array(earlier, path):
                    del loading.targets[earlier]
                by_object[id(self.entries[key])] = path
        return straight

    def _plan_flexible(self, key: str, value: Any = None) -> None:
        """Plan to read a stored entry as it was saved."""
        if (part := self.stored.find_part(paths.escape(key))) is not None:
            plan_flexible(part, self.part_plan, value)

    def _plan_entry(self, key: str, path: str) -> bool:
        """Plan to read the stored value of an entry. Return True if it is an array that fits."""
        value, is_array = self.entries[key], self._is_saved_array(key)
        if is_extra_state(key):
            self._plan_flexible(key, value)  # the module decides: extra state may have grown, or been None
            return False
        # This raises if the array is unreadable, with the reason, instead of the problem below.
        record = self.stored.manifest.get_array(path) if is_array else None
        if record is not None and is_lazy(value):  # its `load_state_dict` gives it the stored shape
            target = create_array_target(
                get_tensor_dtype(value, path), create_unsharded(record.shape), "torch", value.device
            )
            return self.part_plan.add_target(path, target, record.metadata)
        if self._is_array(key) != is_array:
            self._add_difference(
                key, LoadProblem(path, f"stored is {_describe_kind(is_array)}, wanted {_describe_kind(not is_array)}")
            )
        elif record is not None:
            target = (
                self.stored.create_in_place_target(path, value, owned=True)
                if self.is_direct
                else self.stored.create_copied_target(path, value)
            )
            if self.is_flexible and target.shape != record.shape:
                self._add_difference(key, LoadProblem(path, describe_shape_mismatch(record.shape, target.shape)))
                return False
            return self.part_plan.add_target(path, target, record.metadata)
        elif (part := self.stored.find_part(paths.escape(key))) is not None:  # a value that hooks of the module added
            plan_arrays(part, self.part_plan, {})
        return False

    def _add_difference(self, key: str, problem: LoadProblem) -> None:
        if not self.is_flexible:
            self.part_plan.problems.append(problem)
            return
        self.differences.append(problem)
        self._plan_flexible(key, self.entries[key])

    def create_state_dict_load(self, paths_of_others: Collection[str]) -> StateDictLoad | None:
        """Create the load through `load_state_dict`: of all entries, or of those that are not arrays of the module."""
        if not self.is_direct:
            keep = partial(_backup_module, self.module) if self.differences else None
            return StateDictLoad(
                leaf=self.stored.prefix, load=self._load_state_dict, backup=keep, get_arrays=self._list_arrays
            )
        others = {
            k: v
            for k, v in self.entries.items()
            if k in self.saved and (is_extra_state(k) or not self._is_saved_array(k))
        }
        if not others:
            return None
        keep = partial(_backup_entries, self.module, {self.own_names.get(k, k): v for k, v in others.items()})
        return StateDictLoad(leaf=self.stored.prefix, load=self._load_state_dict, backup=keep, paths=paths_of_others)

    def _list_arrays(self) -> Iterable[Any]:
        return [t for part in get_modules(self.module) for t in (*part.parameters(), *part.buffers())]

    def _load_state_dict(self, arrays: Mapping[str, Any]) -> None:
        """Load entries that were not read directly into the module's arrays.

        Raises:
            IncompatibleCheckpointError: If the module rejects mismatches, or does not load some of its entries.
            LoadError: If the module silently ignores stored entries: a part of its state would be lost.
        """
        state = self._build_state_dict(arrays)
        if not state and self.is_direct:
            return
        strict = self.stored.strict and not self.excluded and not self.is_direct
        try:
            answer = call_load_state_dict(self.module, self._with_metadata(state), strict=strict)
        except Exception as error:
            said = str(error)
            if not self.differences:
                raise
            if self.stored.strict or not said.startswith(_TORCH_ERROR_PREFIX):
                raise self._create_error(self.differences, said) from error
            # torch's own loads everything it can, and then reports mismatches.
            self.part_plan.left_by_program += [
                LoadProblem(self.stored.prefix, line.strip()) for line in said.splitlines()[1:]
            ]
            return
        ignored = set(getattr(answer, "unexpected_keys", ())) & set(state)
        unread = sorted(ignored - _load_quantization_state(self.module, {k: state[k] for k in ignored}))
        absent = []
        if not self.is_direct and not (isinstance(self.module, ModelView) and not self.module.reports_missing_keys):
            absent = sorted(set(getattr(answer, "missing_keys", ())) - self.excluded)
        if (unread or absent) and self.is_flexible:
            left = [LoadProblem(self._get_path(key), NOT_STORED) for key in absent]
            left += [LoadProblem(self._get_path(key), UNEXPECTED) for key in unread]
            if self.stored.strict:
                raise self._create_error(left, "")
            self.part_plan.left_by_program += left
        elif unread:
            raise LoadError(
                "the module saves members of its state that its load_state_dict() ignores: "
                f"{paths.format_leaves(unread)}",
                leaf=self._get_path(unread[0]),
                hint="Put them into get_extra_state() and set_extra_state() of the module, or into extras.",
            )

    def _build_state_dict(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state dict for the module, by its own names."""
        state = {}
        for key, value in self.stored.build(lambda path, _: arrays.get(path)).items():
            is_there = self._is_saved_array(key) and (self.is_direct or value is None) and not is_extra_state(key)
            if (key in self.entries or self.is_flexible) and not is_there:
                state[self.own_names.get(key, key)] = value
        return state | {name: state[key] for name, key in self.tied_names.items() if key in state}

    def _with_metadata(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return attach_module_metadata(state, {name: dict(of) for name, of in self.metadata.items()})

    def _create_error(self, problems: Sequence[LoadProblem], message: str) -> IncompatibleCheckpointError:
        error = create_incompatible_error(problems, any_fits=bool(self.part_plan.targets), can_load_partially=True)
        error.details = "\n".join(filter(None, [error.details, message and f"load_state_dict() raised: {message}"]))
        return error


def _find_tied_names(entries: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Return names of tied parameters that are not stored -> the name under which each is stored.

    Hugging Face files contain tied parameters once, and the program's model has a name for each use.
    """
    stored_as = {id(value): key for key, value in entries.items() if key in stored and value is not None}
    return {key: stored_as[id(value)] for key, value in entries.items() if key not in stored and id(value) in stored_as}


def _load_quantization_state(module: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Load the scales of quantized weights. Return their names.

    bitsandbytes saves the scales of 4-bit weights as ``weight.absmax`` and so on, and does not load them: it has
    `QuantState.from_dict` for that (bitsandbytes/functional.py), which transformers calls.
    """
    taken: set[str] = set()
    for name, owner in module.named_modules() if state else ():
        weight = owner._parameters.get("weight")
        make = getattr(getattr(weight, "quant_state", None), "from_dict", None)
        step = f"{name}.weight." if name else "weight."
        own_state = {key.removeprefix(step): value for key, value in state.items() if key.startswith(step)}
        if weight is not None and own_state and callable(make):
            weight.quant_state = owner.quant_state = make(dict(own_state), weight.device)
            taken |= {step + key for key in own_state}
    return taken


_TORCH_ERROR_PREFIX = "Error(s) in loading state_dict"
"""Prefix of the error of the torch `load_state_dict`."""


def is_extra_state(key: str) -> bool:
    """Return True if an entry of a module's state dict is the result of its `get_extra_state`."""
    return key.endswith(_EXTRA_STATE_KEY_SUFFIX) and key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _backup_entries(module: torch.nn.Module, entries: Mapping[str, Any]) -> Rollback:
    copy = attach_module_metadata(copy_state_dict(entries), get_module_metadata(get_module_entries(module)) or {})
    return lambda: module.load_state_dict(copy, strict=False)


def _backup_module(module: torch.nn.Module) -> Rollback:
    """Back up a module that may change more than the values of its arrays, and return the rollback."""

    def members_of(part: torch.nn.Module) -> tuple[dict[str, Any], ...]:
        return part._parameters, part._buffers, part._modules

    parts = [(part, {**vars(part)}, [{**members} for members in members_of(part)]) for part in module.modules()]
    tensors = [(t, copy_state_dict(t)) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)]

    def put_back() -> None:
        for part, attributes, members in parts:
            vars(part).clear()
            vars(part).update(attributes)
            for now, former in zip(members_of(part), members, strict=True):
                now.clear()
                now.update(former)
        with torch.no_grad():
            for tensor, former_value in tensors:
                if tensor.shape == former_value.shape:
                    tensor.copy_(former_value)
                else:
                    tensor.data = former_value.to(tensor.device)

    return put_back


def _describe_kind(is_array: bool) -> str:
    return "an array" if is_array else "a plain value"


_HARMLESS_HOOK_MODULES = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "xla_ckpt.state.guard")
"""Modules of hooks that do not affect a load: the first restores names that the state dict does not contain, and the
second waits for a save."""

_REQUIRED_HOOK_MODULES = ("torch.nn.modules.lazy", "torch.distributed.fsdp._fully_shard")
"""Modules of hooks that must run, and that rename nothing."""

_NORM_MODULES = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Modules of layers whose `_load_from_state_dict` only differs from torch's own for states of older versions."""


def _choose_load_mode(module: torch.nn.Module, *, matches_program: bool) -> _LoadMode:
    """Choose the mode of loading a module.

    Args:
        module: The module.
        matches_program: True if the stored members are the module's, in its version.
    """
    if any(is_overridden(top, "load_state_dict") for top in get_modules(module)):
        return _LoadMode.FLEXIBLE
    return max(
        (_choose_part_load_mode(part, matches_program=matches_program) for part in module.modules()),
        default=_LoadMode.DIRECT,
    )


def _choose_part_load_mode(part: torch.nn.Module, *, matches_program: bool) -> _LoadMode:
    if is_overridden(part, "_load_from_state_dict"):
        own = getattr(part._load_from_state_dict, "__func__", None)
        if not matches_program or own is not type(part)._load_from_state_dict or own.__module__ not in _NORM_MODULES:
            return _LoadMode.FLEXIBLE
    hooks = [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]
    homes = [str(getattr(getattr(hook, "hook", hook), "__module__", "")) for hook in hooks]
    needed = [home for home in homes if home not in _HARMLESS_HOOK_MODULES]
    if not needed:
        return _LoadMode.DIRECT
    return _LoadMode.BY_NAMES if all(home.startswith(_REQUIRED_HOOK_MODULES) for home in needed) else _LoadMode.FLEXIBLE
