"""Unwrap models, and view them as modules with the names of their wrappers. Imports torch.

`ModelView` shares the parameters and buffers of the model, so a load reaches the model. It is used for pipeline stages,
LoRA models, and modules inside torch.compile, DDP, FSDP1 and activation checkpointing wrappers.
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
"""Attribute of neuronx-distributed wrappers, whose `load_state_dict` calls the wrapped module's."""


class ModelView(torch.nn.Module):
    """A view of a wrapped model as an ordinary module, with the names that the wrapper uses.

    It shares the parameters and buffers of the model, so that a load reaches the model.

    Attributes:
        reports_missing_keys: True if `load_state_dict` returns missing keys, with the names of the view.

    Args:
        entries: The saved entries, by name.
        parameters: All parameters, by the names that an optimizer's state uses.
        wrapped_modules: The modules that own the state.
        load_entries: Loads a state dict, or a part of one, into the model.
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
        """Return the model's own parameters and buffers, and plain values, by name."""
        return copy_module_metadata(self._entries, dict(self._entries))

    def select_entries(self, stored: Container[str]) -> dict[str, Any]:
        """Return the entries to load, by their names in a tag; `stored` are the names in the tag."""
        return dict(self._entries)

    def get_legacy_names(self) -> dict[str, str]:
        """Map other names, which tags of earlier versions may contain, to the names in this view."""
        return {}

    def get_aliased_entries(self) -> dict[str, Any]:
        """Return entries by other names than in `state_dict` that a tag may contain."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Load entries that could not be read directly into the model's arrays, as the wrapper does."""
        return self._load_entries(state_dict)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        """Iterate over all parameters, by name."""
        return _yield_named(self._named_params, prefix, once=remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors in the state that are not parameters, by name."""
        parameters = {id(p) for _, p in self._named_params}
        others = [(n, v) for n, v in self._entries.items() if isinstance(v, torch.Tensor) and id(v) not in parameters]
        return _yield_named(others, prefix, once=remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Iterate over the modules that own the state, by their names inside the wrapper."""
        memo = set() if memo is None else memo
        for part in self.wrapped_modules:
            yield from part.named_modules(memo, prefix, remove_duplicate)


class LoraModelView(ModelView):
    """A view of a neuronx-distributed `LoraModel`: a base model with adapters for some layers."""

    def select_entries(self, stored: Container[str]) -> dict[str, Any]:
        """See `ModelView`. A tag may contain the adapters, the base model, or both.

        Without adapters, the tag must contain the base model, and the adapters stay unchanged. Its layers then have
        their names from before adapters were injected.
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
        """See `ModelView`: the base model by its names from before adapters were injected."""
        return {
            n.replace(schema.BASE_LAYER_SUFFIX, ""): v
            for n, v in self._entries.items()
            if schema.ADAPTER_PREFIX not in n
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """See `ModelView`. The model keeps its adapter configuration, with a warning if the stored one differs."""
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
    """A view of a model with wrapped modules, for instance by torch.compile, by their names without wrappers.

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
        # Module.named_parameters of torch, because the wrappers' own strip only their own prefix from names, and no
        # nested one.
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
        """See `ModelView`: the names with wrapper prefixes, in the state dict and in `named_parameters`."""
        return dict(self._plain_names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, *_: Any, **__: Any) -> Any:
        """See `ModelView`.

        Raises:
            RuntimeError: If keys are missing or unexpected and `strict` is True, as in torch.
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
        """Call `load_state_dict` of the model with its own names (see `call_load_state_dict`)."""
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
        """Iterate over the modules, including wrappers, by their names without wrapper prefixes."""
        memo = set() if memo is None else memo
        for place in self._module_paths:
            if not remove_duplicate or place.module not in memo:
                memo.add(place.module)
                yield f"{prefix}.{place.plain_prefix}"[:-1] if prefix else place.plain_prefix[:-1], place.module


@dataclass(frozen=True, slots=True)
class _ModulePath:
    """The name prefixes of a module's members: the names of the enclosing modules, each followed by a dot."""

    module: torch.nn.Module
    actual_prefix: str
    state_dict_prefix: str
    """In the state dict of the model: some wrappers omit their own prefix."""
    plain_prefix: str
    """Without wrappers."""


def _walk_module_paths(
    module: torch.nn.Module, actual_prefix: str = "", state_dict_prefix: str = "", plain_prefix: str = ""
) -> Iterator[_ModulePath]:
    yield _ModulePath(module, actual_prefix, state_dict_prefix, plain_prefix)
    step, is_declared = _get_wrapper_step(module)
    for name, child in module._modules.items():
        if child is not None:
            added = f"{name}."
            is_inner = name == step
            yield from _walk_module_paths(
                child,
                actual_prefix + added,
                state_dict_prefix if is_inner and not is_declared else state_dict_prefix + added,
                plain_prefix if is_inner else plain_prefix + added,
            )


def _get_wrapper_step(module: torch.nn.Module) -> tuple[str | None, bool]:
    """Return the prefix that a torch wrapper adds to names, and whether its state dict contains the prefix.

    The prefix is None if the module is not a wrapper.
    """
    kind: Any = type(module)  # mypy treats module classes as unhashable
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
    """Replace the prefix of a name by the mapped one of the innermost known enclosing module."""
    module, own = name, ""
    while module:
        module, dot, last = module.rpartition(".")
        own = f"{last}.{own}" if own else last
        if module + dot in prefixes:
            return prefixes[module + dot] + own
    return name


def is_overridden(module: torch.nn.Module, method: str) -> bool:
    """Return True if a method of a module is not torch's own: its class overrides it, or the object does."""
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def call_load_state_dict(module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Call `load_state_dict` of a module. A custom one is passed `strict=True` in strict loads, if it accepts it.

    torch's own returns incompatible keys, and the caller raises one error for all of them.
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
    """A view of a model that only provides parameter names and shardings for loading an optimizer.

    Used if the weights must not be loaded.
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
    """Unwrap a model, and return it by its names without wrappers: see `_unwrap_module`."""
    inside = _unwrap_module(model, loading=loading, stored=stored)
    if isinstance(inside, ModelView) or not any(_get_wrapper_step(part)[0] for part in inside.modules()):
        return inside
    return UnwrappedModelView(inside)


def _unwrap_module(model: Any, *, loading: bool, stored: Container[str]) -> Any:
    """Unwrap wrappers such as neuronx-distributed's `NxDModel`; return any other model unchanged.

    A pipeline stage (`NxDPPModel`) and a model with adapters (`LoraModel`) become a `ModelView`. torch's
    DistributedDataParallel, DataParallel and torch.compile prefix all names. The prefix is not part of the state and is
    stripped, as `get_state_dict` of torch.distributed.checkpoint does.

    Args:
        model: A module, or a dict of modules.
        loading: True for a load. A `LoraModel` that is saved selects its own state.
        stored: Names in the tag to load: earlier versions saved torch's wrappers with their prefix.
    """
    if isinstance(model, Mapping):
        return torch.nn.ModuleDict(model)  # such as a generator and a discriminator
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
    # Module.named_children of torch, because neuronx-distributed's wrapper returns the children of the wrapped module.
    inner = dict(torch.nn.Module.named_children(model)).get("module")
    if inner is None or type(model).state_dict is torch.nn.Module.state_dict:
        return model
    if schema.LORA_CONFIG in vars(model):
        return _view_lora_model(model, inner, loading)
    seen = unwrap_model(inner, loading=loading)
    return seen if _is_transparent_wrapper(model, seen) else model


def _unwrap_torch_wrapper(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside torch's own wrappers that only prefix all names; None for any other module.

    A wrapper with hooks registered by the program is kept, because they affect saving and loading.
    """
    step, is_declared = _get_wrapper_step(model)
    hooks = (
        model._state_dict_pre_hooks,
        model._state_dict_hooks,
        model._load_state_dict_pre_hooks,
        model._load_state_dict_post_hooks,
    )
    return model._modules[step] if step is not None and is_declared and not any(hooks) else None


def _is_transparent_wrapper(wrapper: Any, inner: torch.nn.Module) -> bool:
    """Return True if a wrapper has the same state as the wrapped module, under the same names."""
    if len(wrapper._modules) > 1 or wrapper._parameters or wrapper._buffers:
        return False
    if isinstance(inner, LoraModelView):
        return True  # state_dict() of a LoraModel may merge its adapters into it
    loads = type(wrapper).load_state_dict is not torch.nn.Module.load_state_dict
    if loads and not isinstance(inner, ModelView) and _NXD_CONFIG not in vars(wrapper):
        return False  # its custom load_state_dict may do anything
    try:
        entries, own = wrapper.state_dict(keep_vars=True), inner.state_dict(keep_vars=True)
    except TypeError:  # its state_dict does not accept torch's arguments
        return False
    return entries.keys() == own.keys() and all(_is_same(v, own[k]) for k, v in entries.items())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or not (isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor))


def _view_pipeline_stage(model: Any) -> ModelView:
    """Return a view of this rank's stage of a pipeline.

    neuronx-distributed's `local_named_parameters` and `local_named_buffers` do not accept `remove_duplicate`, and the
    latter raises KeyError for buffers that are not saved. The names of both are therefore taken from the state dict.
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
    # Adapters are useless without their configuration, which neuronx-distributed only saves on request.
    if loading or any(schema.ADAPTER_PREFIX in name for name in entries):
        entries[schema.LORA_CONFIG] = _get_lora_fields(model.lora_config)
    return LoraModelView(
        entries,
        parameters=list(base.named_parameters(remove_duplicate=False)),
        wrapped_modules=[base],
        load_entries=lambda state_dict: base.load_state_dict(state_dict, strict=False),
    )


def _get_lora_fields(config: Any) -> dict[str, Any]:
    """Return the fields of an adapter configuration that its checkpoints contain."""
    fields: dict[str, Any] = config.selected_fields_to_save() if hasattr(config, "selected_fields_to_save") else {}
    return schema.sort_lora_config(fields)


def _replace_aliases(chosen: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases in a state dict, which lack the attributes, by the model's own tensors."""
    bare = {name.replace(schema.BASE_LAYER_SUFFIX, ""): value for name, value in live.items()}
    return {n: live.get(n, bare.get(n, v)) if isinstance(v, torch.Tensor) else v for n, v in chosen.items()}


def _yield_named(members: Sequence[tuple[str, Any]], prefix: str, *, once: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in members:
        if not once or id(value) not in seen:
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value
