"""Unwrap models, and view them as modules with the names of their wrappers. Imports torch.

`ModelView` shares the parameters and buffers of the model, so a load reaches the model. It is used for pipeline
stages, LoRA models, and modules inside of torch.compile, DDP, FSDP1 and activation checkpointing wrappers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from xla_ckpt.arrays.torch_elements import allow_inference_writes
from xla_ckpt.arrays.torch_objects import is_lazy
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.state_dict import (
    attach_module_metadata,
    copy_module_metadata,
    get_module_metadata,
)
from xla_ckpt.logs import get_logger
from xla_ckpt.state.wrappers import PLAIN_PROPERTY, get_modules, unwrap_model

logger = get_logger(__name__)

_NXD_CONFIG = "nxd_config"
"""What neuronx-distributed's own wrappers have, whose `load_state_dict` is that of what they wrap."""


class ModelView(torch.nn.Module):
    """A wrapped model as an ordinary module: its state under the names that the wrapper gives it.

    It holds the parameters and buffers of the model itself, so that a load reaches the model.

    Attributes:
        says_missing: Whether `load_state_dict` returns which members are missing, by the names of the view.

    Args:
        entries: What is saved, by name.
        parameters: All parameters, by name: an optimizer's state is called by these names.
        parts: The modules whose state this is.
        put: Takes a state dict, or a part of one, into the model.
    """

    reports_missing_keys = False

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        parameters: Sequence[tuple[str, Any]],
        wrapped_modules: Sequence[torch.nn.Module],
        load_entries: Callable[[Mapping[str, Any]], object],
    ) -> None:
        super().__init__()
        self._entries = copy_module_metadata(entries, dict(entries))
        self._named_params = tuple(parameters)
        self.wrapped_modules = tuple(wrapped_modules)
        self._load_entries = load_entries

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]  # only ever one form of it
        """The model's own parameters and buffers, and plain values, by name."""
        return copy_module_metadata(self._entries, dict(self._entries))

    def select_entries(self, stored: Container[str]) -> dict[str, Any]:
        """What a load fills, by the name that it has in a tag; `stored` are the names in the tag."""
        return dict(self._entries)

    def get_legacy_names(self) -> dict[str, str]:
        """Return other name -> the name here, of what a tag of an earlier version may call by another name."""
        return {}

    def get_aliased_entries(self) -> dict[str, Any]:
        """What a tag may hold under other names than those of `state_dict`, by such a name."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Put what could not be read straight into the model's arrays into it, as the wrapper does."""
        return self._load_entries(state_dict)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        """All parameters, by name."""
        return _yield_named(self._named_params, prefix, once=remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in the state that are no parameters, by name."""
        parameters = {id(p) for _, p in self._named_params}
        others = [(n, v) for n, v in self._entries.items() if isinstance(v, torch.Tensor) and id(v) not in parameters]
        return _yield_named(others, prefix, once=remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules whose state this is, under the names that they have inside of the wrapper."""
        memo = set() if memo is None else memo
        for part in self.wrapped_modules:
            yield from part.named_modules(memo, prefix, remove_duplicate)


class LoraModelView(ModelView):
    """neuronx-distributed's `LoraModel`: a base model, and adapters for some of its layers."""

    def select_entries(self, stored: Container[str]) -> dict[str, Any]:
        """See `ModelView`. A tag holds the adapters, with the base model or without it; or the base model alone.

        If it holds no adapters, the base model has to be there, and the adapters stay as they are. Its layers have the
        names then that they had without adapters.
        """
        live = {name: value for name, value in self._entries.items() if name != schema.LORA_CONFIG}
        trained = {id(p) for _, p in self._named_params if p.requires_grad}
        if any(schema.ADAPTER_PREFIX in name and name in stored for name in live):
            chosen = {n: v for n, v in live.items() if n in stored or id(v) in trained}
        else:
            chosen = {
                n: v
                for n, v in live.items()
                if schema.ADAPTER_PREFIX not in n and n.replace(schema.BASE_LAYER_SUFFIX, "") not in stored
            }
            chosen |= {called: value for called, value in self.get_aliased_entries().items() if called in stored}
            logger.info("no adapters are stored: they stay as they are")
        if schema.LORA_CONFIG in stored:
            chosen[schema.LORA_CONFIG] = self._entries[schema.LORA_CONFIG]
        return chosen

    def get_aliased_entries(self) -> dict[str, Any]:
        """See `ModelView`: what the base model was called before it got adapters."""
        return {
            n.replace(schema.BASE_LAYER_SUFFIX, ""): v
            for n, v in self._entries.items()
            if schema.ADAPTER_PREFIX not in n
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """See `ModelView`. The configuration of the adapters stays that of the model; a difference is a warning."""
        names = {name.replace(schema.BASE_LAYER_SUFFIX, ""): name for name in self._entries}
        entries = {names.get(n, n): v for n, v in state_dict.items() if n != schema.LORA_CONFIG}
        config, stored_config = self._entries[schema.LORA_CONFIG], state_dict.get(schema.LORA_CONFIG)
        if isinstance(stored_config, Mapping):
            stored = schema.sort_lora_config(stored_config)
            differing = sorted(k for k in config if k in stored and config[k] != stored[k])
            if differing:
                logger.warning("the adapters were saved with another configuration: %s", ", ".join(differing))
        return self._load_entries(copy_module_metadata(state_dict, entries)) if entries else None


class UnwrappedModelView(ModelView):
    """A model in which modules are wrapped, by torch.compile for instance, under the names that it has without that.

    Args:
        model: The model.
    """

    reports_missing_keys = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._module_paths = tuple(_walk_module_paths(model))
        self._plain_prefixes = {place.state_dict_prefix: place.plain_prefix for place in self._module_paths}
        self._state_dict_prefixes = {place.plain_prefix: place.state_dict_prefix for place in self._module_paths}
        entries = model.state_dict(keep_vars=True)
        plain = {_replace_prefix(name, self._plain_prefixes): value for name, value in entries.items()}
        metadata = get_module_metadata(entries) or {}
        plain_of = {place.actual_prefix: place.plain_prefix for place in self._module_paths}
        # torch's own: the wrappers' `named_parameters` leave out their own step, and no one's below.
        named = [*torch.nn.Module.named_parameters(model, remove_duplicate=False)]
        super().__init__(
            attach_module_metadata(
                plain,
                {
                    place.plain_prefix[:-1]: metadata[place.actual_prefix[:-1]]
                    for place in self._module_paths
                    if place.actual_prefix[:-1] in metadata
                },
            ),
            parameters=[(_replace_prefix(name, plain_of), value) for name, value in named],
            wrapped_modules=[model],
            load_entries=lambda state_dict: None,
        )
        self._plain_names = {name: _replace_prefix(name, plain_of) for name, _ in named}
        self._plain_names |= {name: _replace_prefix(name, self._plain_prefixes) for name in entries}

    def get_legacy_names(self) -> dict[str, str]:
        """See `ModelView`: the names with wrappers, in the state dict and in `named_parameters`."""
        return dict(self._plain_names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, *_: Any, **__: Any) -> Any:
        """See `ModelView`.

        Raises:
            RuntimeError: Something does not fit, as torch's own raises it.
        """
        answer = self.load_by_own_names(state_dict, strict=strict)
        if strict and any(answer):
            (model,) = self.wrapped_modules
            missing, unexpected = answer
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}:\n\tMissing key(s): {missing}. "
                f"Unexpected key(s): {unexpected}."
            )
        return answer

    def load_by_own_names(self, state_dict: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
        """Call `load_state_dict` of the model with the names that it has itself (see `call_load_state_dict`)."""
        (model,) = self.wrapped_modules
        state = {_replace_prefix(name, self._state_dict_prefixes): value for name, value in state_dict.items()}
        metadata = get_module_metadata(state_dict)
        if metadata is not None:
            own_metadata = {
                p.actual_prefix[:-1]: of
                for p in self._module_paths
                if (of := metadata.get(p.plain_prefix[:-1])) is not None
            }
            state = attach_module_metadata(state, own_metadata)
        answer = call_load_state_dict(model, state, strict=strict)
        missing, unexpected = (getattr(answer, kind, ()) for kind in ("missing_keys", "unexpected_keys"))
        return _IncompatibleKeys(
            [_replace_prefix(name, self._plain_prefixes) for name in missing],
            [_replace_prefix(name, self._plain_prefixes) for name in unexpected],
        )

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules, wrappers included, under the names that they have without wrappers."""
        memo = set() if memo is None else memo
        for place in self._module_paths:
            if not remove_duplicate or place.module not in memo:
                memo.add(place.module)
                yield f"{prefix}.{place.plain_prefix}"[:-1] if prefix else place.plain_prefix[:-1], place.module


@dataclass(frozen=True, slots=True)
class _ModulePath:
    """How the names of the members of a module begin: with the names of the modules around it, each with a dot."""

    module: torch.nn.Module
    actual_prefix: str
    state_dict_prefix: str
    """In the state dict of the model: some wrappers leave their own step out."""
    plain_prefix: str
    """Without wrappers."""


def _walk_module_paths(
    module: torch.nn.Module, actual_prefix: str = "", state_dict_prefix: str = "", plain_prefix: str = ""
) -> Iterator[_ModulePath]:
    yield _ModulePath(module, actual_prefix, state_dict_prefix, plain_prefix)
    step, is_said = _get_wrapper_step(module)
    for name, child in module._modules.items():
        if child is not None:
            added = f"{name}."
            is_inner = name == step
            yield from _walk_module_paths(
                child,
                actual_prefix + added,
                state_dict_prefix if is_inner and not is_said else state_dict_prefix + added,
                plain_prefix if is_inner else plain_prefix + added,
            )


def _get_wrapper_step(module: torch.nn.Module) -> tuple[str | None, bool]:
    """Return the step that a torch wrapper adds to names, and whether its state dict contains that step.

    The step is None if the module is not a wrapper.
    """
    kind: Any = type(module)  # mypy takes classes of modules for unhashable
    return _find_class_step(kind)


@functools.lru_cache(maxsize=4096)
def _find_class_step(module_class: Any) -> tuple[str | None, bool]:
    for above in module_class.__mro__:
        if (found := _WRAPPER_STEPS.get(f"{above.__module__}.{above.__qualname__}")) is not None:
            return found
    return None, True


_WRAPPER_STEPS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module", True),
    "torch.nn.parallel.data_parallel.DataParallel": ("module", True),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", True),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module",
        False,
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("_fsdp_wrapped_module", False),
}


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with another beginning: that of the innermost module around it that is known."""
    module, own = name, ""
    while module:
        module, dot, last = module.rpartition(".")
        own = f"{last}.{own}" if own else last
        if module + dot in prefixes:
            return prefixes[module + dot] + own
    return name


def is_overridden(module: torch.nn.Module, method: str) -> bool:
    """Return whether a method of a module is not torch's own: its class has another one, or it has one itself."""
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def call_load_state_dict(module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Call `load_state_dict` of a module. A program's own is strict if the load is, as far as it takes that.

    torch's own returns what does not fit, and the caller raises one error for all of it.
    """
    if isinstance(module, UnwrappedModelView):
        return module.load_by_own_names(state, strict=strict)
    with allow_inference_writes(t for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)):
        if not is_overridden(module, "load_state_dict"):
            return module.load_state_dict(state, strict=False)
        parameters = inspect.signature(module.load_state_dict).parameters.values()
        takes = any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in parameters)
        return module.load_state_dict(state, strict=strict) if takes else module.load_state_dict(state)


class NamesOnly(ModelView):
    """A model that only says what the parameters of an optimizer are called, and how they are split.

    An optimizer is loaded with it where the weights are to stay as they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        bare = unwrap_model(model, loading=True)
        super().__init__(
            bare.state_dict(keep_vars=True),
            parameters=list(bare.named_parameters(remove_duplicate=False)),
            wrapped_modules=get_modules(bare),
            load_entries=lambda state_dict: None,
        )


def unwrap_module(model: Any, *, loading: bool = False, stored: Container[str] = ()) -> Any:
    """The model inside of wrappers, under the names that it has without any: see `_unwrap_module`."""
    inside = _unwrap_module(model, loading=loading, stored=stored)
    if isinstance(inside, ModelView) or not any(_get_wrapper_step(part)[0] for part in inside.modules()):
        return inside
    return UnwrappedModelView(inside)


def _unwrap_module(model: Any, *, loading: bool, stored: Container[str]) -> Any:
    """The model inside of wrappers such as neuronx-distributed's `NxDModel`; any other one as it is.

    What a pipeline stage has of a model (`NxDPPModel`), and a model with adapters (`LoraModel`), become a `ModelView`.
    torch's DistributedDataParallel, DataParallel and torch.compile put a step before all names. It says nothing of the
    state, and is left out, as `get_state_dict` of torch.distributed.checkpoint leaves it out.

    Args:
        model: A module, or a dict of modules.
        loading: Whether it is loaded into. A `LoraModel` that is saved decides itself what is saved of it.
        stored: Names in the tag that is loaded: earlier versions have saved torch's wrappers with their step.
    """
    if isinstance(model, Mapping):
        return torch.nn.ModuleDict(model)  # a generator and a discriminator
    if hasattr(type(model), PLAIN_PROPERTY):
        return unwrap_model(getattr(model, PLAIN_PROPERTY), loading=loading, stored=stored)
    bare = _unwrap_torch_wrapper(model)
    if bare is not None:
        bare_model = unwrap_model(bare, loading=loading, stored=stored)
        own = list(model.state_dict(keep_vars=True))
        is_stored = bool(own) and all(name in stored for name in own)
        return model if is_stored and own[0] not in bare_model.state_dict(keep_vars=True) else bare_model
    if all(callable(getattr(type(model), name, None)) for name in ("local_state_dict", "local_modules")):
        return _view_pipeline_stage(model)
    # torch's own: the `named_children` of neuronx-distributed's wrapper are those of what it wraps.
    inner = dict(torch.nn.Module.named_children(model)).get("module")
    if inner is None or type(model).state_dict is torch.nn.Module.state_dict:
        return model
    if schema.LORA_CONFIG in vars(model):
        return _view_lora_model(model, inner, loading)
    seen = unwrap_model(inner, loading=loading)
    return seen if _is_transparent_wrapper(model, seen) else model


def _unwrap_torch_wrapper(model: torch.nn.Module) -> torch.nn.Module | None:
    """What is in torch's own wrappers, which only put a step before all names; None for any other module.

    Hooks that a program has registered on the wrapper are a part of how it saves and loads.
    """
    step, is_said = _get_wrapper_step(model)
    hooks = (
        model._state_dict_pre_hooks,
        model._state_dict_hooks,
        model._load_state_dict_pre_hooks,
        model._load_state_dict_post_hooks,
    )
    return model._modules[step] if step is not None and is_said and not any(hooks) else None


def _is_transparent_wrapper(wrapper: Any, inner: torch.nn.Module) -> bool:
    """Whether a wrapper has nothing but what it wraps, and gives it the same names."""
    if len(wrapper._modules) > 1 or wrapper._parameters or wrapper._buffers:
        return False
    if isinstance(inner, LoraModelView):
        return True  # asking a LoraModel for its state may merge its adapters into it
    loads = type(wrapper).load_state_dict is not torch.nn.Module.load_state_dict
    if loads and not isinstance(inner, ModelView) and _NXD_CONFIG not in vars(wrapper):
        return False  # nobody knows what else its own load_state_dict does
    try:
        entries, own = wrapper.state_dict(keep_vars=True), inner.state_dict(keep_vars=True)
    except TypeError:  # it does not take what torch's own takes: it is no such wrapper
        return False
    return entries.keys() == own.keys() and all(_is_same(v, own[k]) for k, v in entries.items())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or not (isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor))


def _view_pipeline_stage(model: Any) -> ModelView:
    """What this rank has of a pipeline.

    neuronx-distributed's `local_named_parameters` and `local_named_buffers` do not take `remove_duplicate`, and the
    latter raises KeyError for buffers that are not saved. So the state dict says the names of both.
    """
    entries = model.local_state_dict(keep_vars=True)
    return ModelView(
        entries,
        parameters=[(n, v) for n, v in entries.items() if isinstance(v, torch.nn.Parameter)],
        wrapped_modules=[*model.local_modules()],
        load_entries=lambda state_dict: model.load_state_dict(state_dict, strict=False),
    )


def _view_lora_model(model: Any, inner: Any, loading: bool) -> LoraModelView:
    base = unwrap_model(inner, loading=loading)
    live = base.state_dict(keep_vars=True)
    entries = copy_module_metadata(live, dict(live) if loading else _replace_aliases(model.state_dict(), live))
    # Adapters mean nothing without their configuration, and neuronx-distributed leaves it out unless told otherwise.
    if loading or any(schema.ADAPTER_PREFIX in name for name in entries):
        entries[schema.LORA_CONFIG] = _get_lora_fields(model.lora_config)
    return LoraModelView(
        entries,
        parameters=list(base.named_parameters(remove_duplicate=False)),
        wrapped_modules=[base],
        load_entries=lambda state_dict: base.load_state_dict(state_dict, strict=False),
    )


def _get_lora_fields(config: Any) -> dict[str, Any]:
    """What the configuration of adapters says of a checkpoint of them."""
    fields: dict[str, Any] = config.selected_fields_to_save() if hasattr(config, "selected_fields_to_save") else {}
    return schema.sort_lora_config(fields)


def _replace_aliases(chosen: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the model's own tensors in place of aliases of them, which have lost their attributes."""
    bare = {name.replace(schema.BASE_LAYER_SUFFIX, ""): value for name, value in live.items()}
    return {n: live.get(n, bare.get(n, v)) if isinstance(v, torch.Tensor) else v for n, v in chosen.items()}


def _yield_named(members: Sequence[tuple[str, Any]], prefix: str, *, once: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in members:
        if not once or id(value) not in seen:
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value
