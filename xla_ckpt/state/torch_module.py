"""Modules of torch's, to a state tree and back. Imported where torch is."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from xla_ckpt.arrays.registry import Adapters, new_array
from xla_ckpt.arrays.torch_elements import PLAIN, attributes_of, dtype_of
from xla_ckpt.arrays.torch_objects import is_lazy
from xla_ckpt.errors import IncompatibleCheckpointError, LoadError
from xla_ckpt.lightweight import cached_property
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.state import rank_numbers
from xla_ckpt.state.handover import Handover, PutBack, copied
from xla_ckpt.state.loading import ArrayAt, Loading, Stored, other_shape, plan_arrays, plan_freely, refused_alone
from xla_ckpt.state.model_view import ModelView, call_load_state_dict, overrides
from xla_ckpt.state.module import compare_keys, identity_of, renamed_members
from xla_ckpt.state.problems import UNWANTED, Problem, incompatible
from xla_ckpt.state.wrappers import modules_in
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.module_metadata import module_metadata, renamed_metadata, with_module_metadata
from xla_ckpt.tree.parameter_names import UNMISTAKABLE, canonical
from xla_ckpt.tree.skeleton import ABSENT


def entries_of(model: torch.nn.Module) -> OrderedDict[str, Any]:
    """The state dict of a module with its metadata, and with the module's own parameters in it."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    special = {k: v for k, v in entries.items() if type(v) not in PLAIN and isinstance(v, torch.Tensor)}
    beside = {k: attributes for k, v in special.items() if (attributes := attributes_of(v))}
    own = {**entries, **_bare(entries, beside)} if beside else entries
    return with_module_metadata(own, module_metadata(entries) or {})


def _bare(entries: Mapping[str, Any], beside: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Any]:
    """The tensors that have others as attributes, without these, where the state dict has all of these itself.

    bitsandbytes' 8-bit weights (`Int8Params`) have their scales as an attribute until the first pass, and its layer
    saves them beside the weight. Tensors with anything else to lose are refused when they are stored.
    """
    adapters = Adapters()
    saved = {identity_of(value, adapters) for value in entries.values()} - {None}
    return {
        name: entries[name].detach()
        for name, attributes in beside.items()
        if all(identity_of(attribute, adapters) in saved for attribute in attributes)
    }


def load_module(stored: Stored, module: torch.nn.Module) -> Loading:
    """Prepare to load a module: straight into its parameters and buffers where its `load_state_dict` does no more.

    Where it does more, it is called, as torch calls it: with hooks, versions, and all that is stored.
    """
    saved = stored.build()
    if not isinstance(saved, Mapping):
        return refused_alone(stored)
    loading = Loading(cast=stored.cast)
    own = entries_of(module)
    entries = module.wanted(saved) if isinstance(module, ModelView) else own
    own_names = renamed_members(saved, entries, module)
    stored_names = {name: key for key, name in own_names.items()}
    entries = {stored_names.get(name, name): value for name, value in entries.items()}
    of_other_ranks = rank_numbers.unfit(stored, entries)
    tied = _other_names(entries, saved)
    entries = {key: value for key, value in entries.items() if key not in of_other_ranks and key not in tied}
    compare_keys(stored, loading, entries, {k: v for k, v in saved.items() if k not in of_other_ranks})
    metadata = _metadata_of(stored, saved, own, own_names)
    here = module_metadata(own) or {}
    homes = {name.rpartition(".")[0] for name in own}
    same = all(metadata.get(home) == here.get(home) for home in homes)
    as_it_is = not loading.problems and not loading.unwanted and same
    how = _how_it_loads(module, as_it_is=as_it_is)
    if any(_is_scalar(value) and stored.has_shape(key, (1,)) for key, value in entries.items() if key in saved):
        how = _How.FREELY  # torch 0.3 had no scalars, and torch takes them still
    load = _ModuleLoad(
        stored=stored,
        module=module,
        loading=loading,
        own=entries,
        saved=saved,
        tied=tied,
        own_names=own_names,
        withheld=frozenset(own_names.get(key, key) for key in of_other_ranks),
        metadata=metadata,
        how=how,
    )
    straight = load.plan()
    loading.problems += of_other_ranks.values()
    loading.handover = load.handover([path for path in loading.targets if path not in straight])
    return loading


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value) and value.dim() == 0


def own_state(stored: Stored, module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored state dict of a module as its `load_state_dict` takes it: by its own names, with metadata."""
    own = entries_of(module)
    own_names = renamed_members(state, own, module)
    metadata = _metadata_of(stored, state, own, own_names)
    return with_module_metadata({own_names.get(name, name): value for name, value in state.items()}, metadata)


def _metadata_of(
    stored: Stored, saved: Mapping[str, Any], own: Mapping[str, Any], own_names: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """The metadata of the stored modules, by the module's names.

    Where nothing says them, a module is of the version that the program has if what is stored of it are the members
    that it has now. Of any other module the version is unknown, which `_load_from_state_dict` takes for an old one.
    """
    metadata = stored.metadata_at(stored.prefix)
    if metadata is not None:
        # What is wrapped comes behind its wrapper, whose metadata say nothing.
        metadata = {canonical(name, UNMISTAKABLE): of for name, of in metadata.items()}
        names = {canonical(name, UNMISTAKABLE): own_names.get(name, name) for name in saved} if own_names else {}
        return renamed_metadata(metadata, names)
    here = module_metadata(own) or {}
    differ = {own_names.get(key, key) for key in saved} ^ own.keys()
    others = {name[:end] for name in differ for end, step in enumerate(name) if step == "."}
    if differ:
        others.add("")
    return {name: of for name, of in here.items() if name not in others}


class _How(enum.IntEnum):
    """How the state of a module is loaded."""

    STRAIGHT = 0
    """Its arrays are overwritten, and nothing else."""

    BY_NAMES = 1
    """By its `load_state_dict`, which wants what its own `state_dict` has."""

    FREELY = 2
    """By its `load_state_dict`, which may take other names and shapes."""


@dataclass(frozen=True, kw_only=True)
class _ModuleLoad:
    """One load of a module: the entries of its state dict, and what is stored for them."""

    stored: Stored
    module: torch.nn.Module
    loading: Loading
    own: Mapping[str, Any]
    """The entries that are loaded, with the values of now, by the name that each is stored under."""

    saved: Mapping[str, Any]
    """All that is stored: an `ArrayAt` for each array."""

    tied: Mapping[str, str]
    """Names of tied parameters that are not stored -> the name under which each is."""

    own_names: Mapping[str, str]
    """Stored name -> the module's, where they differ."""

    withheld: frozenset[str]
    """Entries of the module that are not loaded."""

    metadata: Mapping[str, Mapping[str, Any]]
    how: _How

    differing: list[Problem] = field(default_factory=list)
    """What does not fit, unless the module's `load_state_dict` takes it."""

    @cached_property
    def direct(self) -> bool:
        """Whether to load the module means no more than to overwrite its own arrays."""
        parts = self.module.modules()
        owned = {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
        strangers = [key for key, value in self.own.items() if id(value) not in owned and not is_extra(key)]
        return self.how == _How.STRAIGHT and not any(map(self._is_array, strangers))

    @cached_property
    def free(self) -> bool:
        """Whether the module itself may take what does not fit. Of pipeline stages, no one wants all that is stored."""
        return self.how == _How.FREELY and self.stored.shardings.placement.mesh.pp == 1

    def _is_array(self, key: str) -> bool:
        return self.stored.shardings.adapters.kind(self.own[key]) is not None

    def _is_saved_array(self, key: str) -> bool:
        return isinstance(self.saved[key], ArrayAt)

    def _path(self, key: str) -> str:
        return paths.join(self.stored.prefix, paths.escape(key))

    def plan(self) -> set[str]:
        """Want all that is stored; the leaf paths of the arrays that are read straight into those of the module."""
        loading = self.loading
        path_of = {key: self._path(key) for key in self.own if key in self.saved}
        if self.direct:
            arrays = {path: self.own[key] for key, path in path_of.items() if self._is_saved_array(key)}
            loading.targets.update(self.stored.over_whole(arrays, owned=True))
        if self.free:
            self.differing.extend([*loading.problems, *loading.unwanted])
            loading.problems.clear()
            loading.unwanted.clear()
            for key in self.saved.keys() - self.own.keys():
                self._take_freely(key)
        straight = set(loading.targets) if self.direct else set()
        by_object: dict[int, str] = {}
        for key, path in path_of.items():
            if path not in straight and self._wants(key, path) and self.direct:
                straight.add(path)
                # Of several names of one parameter and of one stored array, one is read.
                earlier = by_object.get(id(self.own[key]))
                if earlier is not None and self.stored.is_same(earlier, path):
                    del loading.targets[earlier]
                by_object[id(self.own[key])] = path
        return straight

    def _take_freely(self, key: str, value: Any = None) -> None:
        """Want what is stored under a name as it was saved."""
        if (part := self.stored.at(paths.escape(key))) is not None:
            plan_freely(part, self.loading, value)

    def _wants(self, key: str, path: str) -> bool:
        """Want what is stored of an entry, whatever it is; whether that is an array, which fits."""
        value, is_array = self.own[key], self._is_saved_array(key)
        if is_extra(key):
            self._take_freely(key, value)  # the module's own business: it may have grown, or been None
            return False
        # This raises where the tag says why nobody can have it, which is not what is told below.
        record = self.stored.manifest.required(path) if is_array else None
        if record is not None and is_lazy(value):  # its `load_state_dict` gives it the shape that is stored
            target = new_array(dtype_of(value, path), whole(record.shape), "torch", value.device)
            return self.loading.want(path, target, record.form)
        if self._is_array(key) != is_array:
            self._differs(key, Problem(path, f"stored is {_what(is_array)}, wanted {_what(not is_array)}"))
        elif record is not None:
            target = self.stored.into(path, value, owned=True) if self.direct else self.stored.handed(path, value)
            if self.free and target.shape != record.shape:
                self._differs(key, Problem(path, other_shape(record.shape, target.shape)))
                return False
            return self.loading.want(path, target, record.form)
        elif (part := self.stored.at(paths.escape(key))) is not None:  # a value that the module's hooks have put there
            plan_arrays(part, self.loading, {})
        return False

    def _differs(self, key: str, problem: Problem) -> None:
        if not self.free:
            self.loading.problems.append(problem)
            return
        self.differing.append(problem)
        self._take_freely(key, self.own[key])

    def handover(self, paths_of_others: Collection[str]) -> Handover | None:
        """What the module's `load_state_dict` takes: all of it, or those entries that are no arrays of its own."""
        if not self.direct:
            keep = partial(_kept_module, self.module) if self.differing else None
            return Handover(leaf=self.stored.prefix, take=self._take, keep=keep, arrays=self._arrays)
        others = {k: v for k, v in self.own.items() if k in self.saved and (is_extra(k) or not self._is_saved_array(k))}
        if not others:
            return None
        keep = partial(_kept, self.module, {self.own_names.get(k, k): v for k, v in others.items()})
        return Handover(leaf=self.stored.prefix, take=self._take, keep=keep, paths=paths_of_others)

    def _arrays(self) -> Iterable[Any]:
        return [t for part in modules_in(self.module) for t in (*part.parameters(), *part.buffers())]

    def _take(self, arrays: Mapping[str, Any]) -> None:
        """Have the module load what was not read straight into its arrays.

        Raises:
            IncompatibleCheckpointError: The module does not take what does not fit, or leaves entries of its own out.
            LoadError: It leaves some of it unread, without a word: a part of its state would be lost.
        """
        state = self._state(arrays)
        if not state and self.direct:
            return
        strict = self.stored.strict and not self.withheld and not self.direct
        try:
            answer = call_load_state_dict(self.module, self._with_metadata(state), strict=strict)
        except Exception as error:
            said = str(error)
            if not self.differing:
                raise
            if self.stored.strict or not said.startswith(_GATHERED):
                raise self._incompatible(self.differing, said) from error
            # torch's own goes on to the end, and then says what did not fit.
            self.loading.left += [Problem(self.stored.prefix, line.strip()) for line in said.splitlines()[1:]]
            return
        ignored = set(getattr(answer, "unexpected_keys", ())) & set(state)
        unread = sorted(ignored - _taken_by_quantized(self.module, {k: state[k] for k in ignored}))
        absent = []
        if not self.direct and not (isinstance(self.module, ModelView) and not self.module.says_missing):
            absent = sorted(set(getattr(answer, "missing_keys", ())) - self.withheld)
        if (unread or absent) and self.free:
            left = [Problem(self._path(key), ABSENT) for key in absent]
            left += [Problem(self._path(key), UNWANTED) for key in unread]
            if self.stored.strict:
                raise self._incompatible(left, "")
            self.loading.left += left
        elif unread:
            raise LoadError(
                f"the module saves members of its state that its load_state_dict() ignores: {paths.listed(unread)}",
                leaf=self._path(unread[0]),
                hint="Put them into get_extra_state() and set_extra_state() of the module, or into extras.",
            )

    def _state(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The members of a state dict that the module takes, by its own names."""
        state = {}
        for key, value in self.stored.build(lambda path, _: arrays.get(path)).items():
            is_there = self._is_saved_array(key) and (self.direct or value is None) and not is_extra(key)
            if (key in self.own or self.free) and not is_there:
                state[self.own_names.get(key, key)] = value
        return state | {name: state[key] for name, key in self.tied.items() if key in state}

    def _with_metadata(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return with_module_metadata(state, {name: dict(of) for name, of in self.metadata.items()})

    def _incompatible(self, problems: Sequence[Problem], said: str) -> IncompatibleCheckpointError:
        error = incompatible(problems, fits=bool(self.loading.targets), optional=True)
        error.details = "\n".join(filter(None, [error.details, said and f"load_state_dict() raised: {said}"]))
        return error


def _other_names(entries: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Names of tied parameters that are not stored -> the name under which each is.

    Files of Hugging Face's have tied parameters once, and the program's model has a name for each of their places.
    """
    stored_as = {id(value): key for key, value in entries.items() if key in stored and value is not None}
    return {key: stored_as[id(value)] for key, value in entries.items() if key not in stored and id(value) in stored_as}


def _taken_by_quantized(module: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Give quantized weights their scales; the names of those.

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


_GATHERED = "Error(s) in loading state_dict"
"""How the error of torch's `load_state_dict` begins."""


def is_extra(key: str) -> bool:
    """Whether a member of a module's state dict is what its `get_extra_state` has returned."""
    return key.endswith(_EXTRA_STATE_KEY_SUFFIX) and key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _kept(module: torch.nn.Module, former: Mapping[str, Any]) -> PutBack:
    copy = with_module_metadata(copied(former), module_metadata(entries_of(module)) or {})
    return lambda: module.load_state_dict(copy, strict=False)


def _kept_module(module: torch.nn.Module) -> PutBack:
    """Copy a module that may change more than the values of its arrays; what puts all of it back."""

    def members_of(part: torch.nn.Module) -> tuple[dict[str, Any], ...]:
        return part._parameters, part._buffers, part._modules

    parts = [(part, {**vars(part)}, [{**members} for members in members_of(part)]) for part in module.modules()]
    tensors = [(t, copied(t)) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)]

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


def _what(is_array: bool) -> str:
    return "an array" if is_array else "a plain value"


_PLAIN_HOOKS = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "xla_ckpt.state.guard")
"""Modules of hooks that change nothing of a load: the first gives names back that the state dict does not have, and the
second waits for a save."""

_KNOWN_HOOKS = ("torch.nn.modules.lazy", "torch.distributed.fsdp._fully_shard")
"""Modules of hooks that have to run, and that rename nothing."""

_NORMS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Modules of layers whose `_load_from_state_dict` does no more than torch's own, but for what older versions saved."""


def _how_it_loads(module: torch.nn.Module, *, as_it_is: bool) -> _How:
    """How a module is loaded.

    Args:
        module: The module.
        as_it_is: Whether the members that are stored are those of the module, of its version.
    """
    if any(overrides(top, "load_state_dict") for top in modules_in(module)):
        return _How.FREELY
    return max((_how_a_part_loads(part, as_it_is=as_it_is) for part in module.modules()), default=_How.STRAIGHT)


def _how_a_part_loads(part: torch.nn.Module, *, as_it_is: bool) -> _How:
    if overrides(part, "_load_from_state_dict"):
        own = getattr(part._load_from_state_dict, "__func__", None)
        if not as_it_is or own is not type(part)._load_from_state_dict or own.__module__ not in _NORMS:
            return _How.FREELY
    hooks = [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]
    homes = [str(getattr(getattr(hook, "hook", hook), "__module__", "")) for hook in hooks]
    needed = [home for home in homes if home not in _PLAIN_HOOKS]
    if not needed:
        return _How.STRAIGHT
    return _How.BY_NAMES if all(home.startswith(_KNOWN_HOOKS) for home in needed) else _How.FREELY
