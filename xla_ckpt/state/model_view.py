"""Models as modules with the names that their wrappers give them, and what is in a wrapper. Imported where torch is."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from xla_ckpt.logs import get_logger
from xla_ckpt.state.wrappers import PLAIN_PROPERTY, modules_in, unwrapped_model
from xla_ckpt.tree import lora

logger = get_logger(__name__)

_CONFIG = "nxd_config"
"""What neuronx-distributed's own wrappers have, whose `load_state_dict` is that of what they wrap."""


class ModelView(torch.nn.Module):
    """A wrapped model as an ordinary module: its state under the names that the wrapper gives it.

    It holds the parameters and buffers of the model itself, so that a load reaches the model.

    Args:
        entries: What is saved, by name.
        parameters: All parameters, by name: an optimizer's state is called by these names.
        parts: The modules whose state this is.
        put: Takes a state dict, or a part of one, into the model.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        parameters: Sequence[tuple[str, Any]],
        parts: Sequence[torch.nn.Module],
        put: Callable[[Mapping[str, Any]], object],
    ) -> None:
        super().__init__()
        self._entries = dict(entries)
        self._named = tuple(parameters)
        self.parts = tuple(parts)
        self._put = put

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]  # only ever one form of it
        """The model's own parameters and buffers, and plain values, by name."""
        return dict(self._entries)

    def wanted(self, stored: Container[str]) -> dict[str, Any]:
        """What a load fills, by the name that it has in a tag; `stored` are the names in the tag."""
        return dict(self._entries)

    def other_names(self) -> dict[str, Any]:
        """What a tag may hold under other names than those of `state_dict`, by such a name."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Put what could not be read straight into the model's arrays into it, as the wrapper does."""
        return self._put(state_dict)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        """All parameters, by name."""
        return _named(self._named, prefix, once=remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in the state that are no parameters, by name."""
        parameters = {id(p) for _, p in self._named}
        others = [(n, v) for n, v in self._entries.items() if isinstance(v, torch.Tensor) and id(v) not in parameters]
        return _named(others, prefix, once=remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules whose state this is, under the names that they have inside of the wrapper."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)


class Adapted(ModelView):
    """neuronx-distributed's `LoraModel`: a base model, and adapters for some of its layers."""

    def wanted(self, stored: Container[str]) -> dict[str, Any]:
        """See `ModelView`. A tag holds the adapters, with the base model or without it; or the base model alone.

        If it holds no adapters, the base model has to be there, and the adapters stay as they are. Its layers have the
        names then that they had without adapters.
        """
        live = {name: value for name, value in self._entries.items() if name != lora.LORA_CONFIG}
        trained = {id(p) for _, p in self._named if p.requires_grad}
        if any(lora.ADAPTER in name and name in stored for name in live):
            chosen = {n: v for n, v in live.items() if n in stored or id(v) in trained}
        else:
            chosen = {
                n: v for n, v in live.items() if lora.ADAPTER not in n and n.replace(lora.BASE_LAYER, "") not in stored
            }
            chosen |= {called: value for called, value in self.other_names().items() if called in stored}
            logger.info("no adapters are stored: they stay as they are")
        if lora.LORA_CONFIG in stored:
            chosen[lora.LORA_CONFIG] = self._entries[lora.LORA_CONFIG]
        return chosen

    def other_names(self) -> dict[str, Any]:
        """See `ModelView`: what the base model was called before it got adapters."""
        return {n.replace(lora.BASE_LAYER, ""): v for n, v in self._entries.items() if lora.ADAPTER not in n}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """See `ModelView`. The configuration of the adapters stays that of the model; a difference is a warning."""
        names = {name.replace(lora.BASE_LAYER, ""): name for name in self._entries}
        entries = {names.get(n, n): v for n, v in state_dict.items() if n != lora.LORA_CONFIG}
        config, stored_config = self._entries[lora.LORA_CONFIG], state_dict.get(lora.LORA_CONFIG)
        if isinstance(stored_config, Mapping):
            stored = lora.lora_fields(stored_config)
            differing = sorted(k for k in config if k in stored and config[k] != stored[k])
            if differing:
                logger.warning("the adapters were saved with another configuration: %s", ", ".join(differing))
        return self._put(entries) if entries else None


class NamesOnly(ModelView):
    """A model that only says what the parameters of an optimizer are called, and how they are split.

    An optimizer is loaded with it where the weights are to stay as they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        bare = unwrapped_model(model, loading=True)
        super().__init__(
            bare.state_dict(keep_vars=True),
            parameters=list(bare.named_parameters(remove_duplicate=False)),
            parts=modules_in(bare),
            put=lambda state_dict: None,
        )


def module_inside(model: Any, *, loading: bool = False, stored: Container[str] = ()) -> Any:
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
        return unwrapped_model(getattr(model, PLAIN_PROPERTY), loading=loading, stored=stored)
    bare = _without_step(model)
    if bare is not None:
        bare_model = unwrapped_model(bare, loading=loading, stored=stored)
        own = list(model.state_dict(keep_vars=True))
        is_stored = bool(own) and all(name in stored for name in own)
        return model if is_stored and own[0] not in bare_model.state_dict(keep_vars=True) else bare_model
    if all(callable(getattr(type(model), name, None)) for name in ("local_state_dict", "local_modules")):
        return _stage(model)
    # torch's own: the `named_children` of neuronx-distributed's wrapper are those of what it wraps.
    inner = dict(torch.nn.Module.named_children(model)).get("module")
    if inner is None or type(model).state_dict is torch.nn.Module.state_dict:
        return model
    if lora.LORA_CONFIG in vars(model):
        return _adapted(model, inner, loading)
    seen = unwrapped_model(inner, loading=loading)
    return seen if _is_alike(model, seen) else model


def _without_step(model: torch.nn.Module) -> torch.nn.Module | None:
    """What is in torch's own wrappers, which only put a step before all names; None for any other module."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return model._modules["module"]
    compiled = (type(model).__module__, type(model).__name__) == ("torch._dynamo.eval_frame", "OptimizedModule")
    return model._modules["_orig_mod"] if compiled else None


def _is_alike(wrapper: Any, seen: torch.nn.Module) -> bool:
    """Whether a wrapper has nothing but what it wraps, and gives it the same names."""
    if len(wrapper._modules) > 1 or wrapper._parameters or wrapper._buffers:
        return False
    if isinstance(seen, Adapted):
        return True  # asking a LoraModel for its state may merge its adapters into it
    loads = type(wrapper).load_state_dict is not torch.nn.Module.load_state_dict
    if loads and not isinstance(seen, ModelView) and _CONFIG not in vars(wrapper):
        return False  # nobody knows what else its own load_state_dict does
    try:
        entries, own = wrapper.state_dict(keep_vars=True), seen.state_dict(keep_vars=True)
    except TypeError:  # it does not take what torch's own takes: it is no such wrapper
        return False
    return entries.keys() == own.keys() and all(_is_same(v, own[k]) for k, v in entries.items())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or not (isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor))


def _stage(model: Any) -> ModelView:
    """What this rank has of a pipeline.

    neuronx-distributed's `local_named_parameters` and `local_named_buffers` do not take `remove_duplicate`, and the
    latter raises KeyError for buffers that are not saved. So the state dict says the names of both.
    """
    entries = model.local_state_dict(keep_vars=True)
    return ModelView(
        entries,
        parameters=[(n, v) for n, v in entries.items() if isinstance(v, torch.nn.Parameter)],
        parts=[*model.local_modules()],
        put=lambda state_dict: model.load_state_dict(state_dict, strict=False),
    )


def _adapted(model: Any, inner: Any, loading: bool) -> Adapted:
    base = unwrapped_model(inner, loading=loading)
    live = base.state_dict(keep_vars=True)
    entries = dict(live) if loading else _live_of(model.state_dict(), live)
    # Adapters mean nothing without their configuration, and neuronx-distributed leaves it out unless told otherwise.
    if loading or any(lora.ADAPTER in name for name in entries):
        entries[lora.LORA_CONFIG] = _fields(model.lora_config)
    return Adapted(
        entries,
        parameters=list(base.named_parameters(remove_duplicate=False)),
        parts=[base],
        put=lambda state_dict: base.load_state_dict(state_dict, strict=False),
    )


def _fields(config: Any) -> dict[str, Any]:
    """What the configuration of adapters says of a checkpoint of them."""
    fields: dict[str, Any] = config.selected_fields_to_save() if hasattr(config, "selected_fields_to_save") else {}
    return lora.lora_fields(fields)


def _live_of(chosen: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the model's own tensors in place of aliases of them, which have lost their attributes."""
    bare = {name.replace(lora.BASE_LAYER, ""): value for name, value in live.items()}
    return {n: live.get(n, bare.get(n, v)) if isinstance(v, torch.Tensor) else v for n, v in chosen.items()}


def _named(members: Sequence[tuple[str, Any]], prefix: str, *, once: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in members:
        if not once or id(value) not in seen:
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value
