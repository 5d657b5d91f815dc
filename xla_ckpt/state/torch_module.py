"""Modules of torch's, to a state tree and back. Imported where torch is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from xla_ckpt.arrays.registry import Adapters
from xla_ckpt.arrays.torch_elements import PLAIN, attributes_of
from xla_ckpt.errors import LoadError
from xla_ckpt.lightweight import cached_property
from xla_ckpt.state import rank_numbers
from xla_ckpt.state.handover import Handover, PutBack, copied
from xla_ckpt.state.loading import ArrayAt, Loading, Stored, plan_arrays, plan_freely, refused_alone
from xla_ckpt.state.model_view import ModelView
from xla_ckpt.state.module import compare_keys, identity_of
from xla_ckpt.state.wrappers import modules_in
from xla_ckpt.tree import path as paths


def entries_of(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict of a module, with its own parameters in it."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    special = {k: v for k, v in entries.items() if type(v) not in PLAIN and isinstance(v, torch.Tensor)}
    beside = {k: attributes for k, v in special.items() if (attributes := attributes_of(v))}
    return {**entries, **_bare(entries, beside)} if beside else dict(entries)


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
    """Prepare to load a module: straight into its parameters and buffers where nothing speaks against it."""
    saved = stored.build()
    if not isinstance(saved, Mapping):
        return refused_alone(stored)
    loading = Loading(cast=stored.cast)
    entries = module.wanted(saved) if isinstance(module, ModelView) else entries_of(module)
    of_other_ranks = rank_numbers.unfit(stored, entries)
    tied = _other_names(entries, saved)
    entries = {key: value for key, value in entries.items() if key not in of_other_ranks and key not in tied}
    compare_keys(stored, loading, entries, {k: v for k, v in saved.items() if k not in of_other_ranks})
    loading.problems += of_other_ranks.values()
    own = _Entries(stored=stored, module=module, own=entries, saved=saved, tied=tied)
    straight = own.plan(loading)
    loading.handover = own.handover([path for path in loading.targets if path not in straight])
    return loading


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """The entries of a module's state dict, and what is stored for them."""

    stored: Stored
    module: torch.nn.Module
    own: Mapping[str, Any]
    """Those that are loaded, with the values of now."""

    saved: Mapping[str, Any]
    """All that is stored: an `ArrayAt` for each array."""

    tied: Mapping[str, str]
    """Names of tied parameters that are not stored -> the name under which each is."""

    @cached_property
    def direct(self) -> bool:
        """Whether to load the module means no more than to overwrite its own arrays."""
        parts = self.module.modules()
        owned = {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
        strangers = [key for key, value in self.own.items() if id(value) not in owned and not is_extra(key)]
        return not _has_load_logic(self.module) and not any(map(self._is_array, strangers))

    def _is_array(self, key: str) -> bool:
        return self.stored.shardings.adapters.kind(self.own[key]) is not None

    def _is_saved_array(self, key: str) -> bool:
        return isinstance(self.saved[key], ArrayAt)

    def plan(self, loading: Loading) -> set[str]:
        """Want all that is stored; the leaf paths of the arrays that are read straight into those of the module."""
        path_of = {key: paths.join(self.stored.prefix, paths.escape(key)) for key in self.own if key in self.saved}
        if self.direct:
            arrays = {path: self.own[key] for key, path in path_of.items() if self._is_saved_array(key)}
            loading.targets.update(self.stored.over_whole(arrays, owned=True))
        straight = set(loading.targets)
        by_object: dict[int, str] = {}
        for key, path in path_of.items():
            if path not in straight and self._wants(loading, key, path) and self.direct:
                straight.add(path)
                # Of several names of one parameter and of one stored array, one is read.
                earlier = by_object.get(id(self.own[key]))
                if earlier is not None and self.stored.is_same(earlier, path):
                    del loading.targets[earlier]
                by_object[id(self.own[key])] = path
        return straight

    def _wants(self, loading: Loading, key: str, path: str) -> bool:
        """Want what is stored of an entry, whatever it is; whether that is an array, which fits."""
        value, is_array = self.own[key], self._is_saved_array(key)
        if is_extra(key):
            if (part := self.stored.at(paths.escape(key))) is not None:
                plan_freely(part, loading, value)  # the module's own business: it may have grown, or been None
            return False
        # This raises where the tag says why nobody can have it, which is not what is told below.
        record = self.stored.manifest.required(path) if is_array else None
        if self._is_array(key) != is_array:
            loading.add_problem(path, f"stored is {_what(is_array)}, wanted {_what(not is_array)}")
        elif record is not None:
            target = self.stored.into(path, value, owned=True) if self.direct else self.stored.handed(path, value)
            return loading.want(path, target, record.form)
        elif (part := self.stored.at(paths.escape(key))) is not None:  # a value that the module's hooks have put there
            plan_arrays(part, loading, {})
        return False

    def handover(self, paths_of_others: Collection[str]) -> Handover | None:
        """What the module's `load_state_dict` takes: all of it, or those entries that are no arrays of its own."""
        if not self.direct:
            return Handover(leaf=self.stored.prefix, take=self._take, keep=None, arrays=self._arrays)
        others = {k: v for k, v in self.own.items() if k in self.saved and (is_extra(k) or not self._is_saved_array(k))}
        if not others:
            return None
        keep = partial(_kept, self.module, others)
        return Handover(leaf=self.stored.prefix, take=self._take, keep=keep, paths=paths_of_others)

    def _arrays(self) -> Iterable[Any]:
        return self.module.state_dict(keep_vars=True).values()

    def _take(self, arrays: Mapping[str, Any]) -> None:
        """Have the module load what was not read straight into its arrays.

        Raises:
            LoadError: It leaves some of it unread, without a word: a part of its state would be lost.
        """
        state = {}
        for key, value in self.stored.build(lambda path, _: arrays.get(path)).items():
            is_there = self._is_saved_array(key) and (self.direct or value is None) and not is_extra(key)
            if key in self.own and not is_there:
                state[key] = value
        state |= {name: state[key] for name, key in self.tied.items() if key in state}
        if not state:
            return
        answer = self.module.load_state_dict(state, strict=False)
        ignored = set(getattr(answer, "unexpected_keys", ())) & set(state)
        left = sorted(ignored - _taken_by_quantized(self.module, {k: state[k] for k in ignored}))
        if left:
            raise LoadError(
                f"the module saves members of its state that its load_state_dict() ignores: {paths.listed(left)}",
                leaf=paths.join(self.stored.prefix, paths.escape(left[0])),
                hint="Put them into get_extra_state() and set_extra_state() of the module, or into extras.",
            )


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


def is_extra(key: str) -> bool:
    """Whether a member of a module's state dict is what its `get_extra_state` has returned."""
    return key.endswith(_EXTRA_STATE_KEY_SUFFIX) and key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _kept(module: torch.nn.Module, former: Mapping[str, Any]) -> PutBack:
    copy = copied(former)
    return lambda: module.load_state_dict(copy, strict=False)


def _what(is_array: bool) -> str:
    return "an array" if is_array else "a plain value"


def _has_load_logic(module: torch.nn.Module) -> bool:
    """Whether loading this module means more than overwriting its arrays."""
    if any(type(top).load_state_dict is not torch.nn.Module.load_state_dict for top in modules_in(module)):
        return True
    for part in module.modules():
        own = type(part)._load_from_state_dict
        if (part._load_state_dict_pre_hooks and not _only_renames(part)) or part._load_state_dict_post_hooks:
            return True
        if own is not torch.nn.Module._load_from_state_dict and not own.__module__.startswith("torch.nn."):
            return True
    return False


def _only_renames(part: torch.nn.Module) -> bool:
    """Whether its one hook gives names back that its own state dict does not have: torch's activation checkpoints."""
    home = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    return len(part._load_state_dict_pre_hooks) == 1 and any(
        (c.__module__, c.__name__) == (home, "ActivationWrapper") for c in type(part).__mro__
    )
