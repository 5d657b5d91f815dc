"""Utilities for modules: transparent wrappers, tied parameters, meta-device initialization, and device moves.

Moves keep ties between parameters and their sharding attributes, which torch drops on the way to XLA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as registration

from xla_ckpt import UsageError
from xla_ckpt.display import join_lines

Self = TypeVar("Self", bound="TransparentModule")


class TransparentModule(torch.nn.Module):
    """Wrapper whose only child is `module`, and whose parameter names have no prefix.

    torch.nn.Module iterates over children, and these are the children of the inner module: without the methods here,
    train(), to() and apply() would skip the inner module itself, and names would begin with "module".
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet: the lookup would recurse forever
                raise
            return getattr(self.module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        modules: Iterator[tuple[str, torch.nn.Module]] = self.module.named_modules(*args, **kwargs)
        return modules

    def train(self: Self, mode: bool = True) -> Self:
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self: Self, fn: Callable[[torch.nn.Module], Any]) -> Self:
        self.module.apply(fn)
        return self

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


ParameterInit = Callable[[torch.nn.Module, torch.device], Any]


def is_hf_pretrained_model(model: Any) -> bool:
    """Return True if the model is a Hugging Face transformers model."""
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).mro())


# -- ties and attributes


def analyze_shared_parameters(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    by_object: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(parameter), []).append(name)
    return [names for names in by_object.values() if len(names) > 1]


def retie_shared_weights(module: torch.nn.Module, shared_weight_names: list[list[str]]) -> None:
    """Tie the parameters in each list of names to the first one."""
    for first, *others in shared_weight_names:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, parameter)


@contextlib.contextmanager
def preserve_shared_weights(model: torch.nn.Module, ignore_hf: bool = False) -> Iterator[None]:  # noqa: ARG001  # NxD's
    """Tie parameters again after a block that moves a module to XLA, which creates a parameter for each name."""
    tied = analyze_shared_parameters(model)
    try:
        yield
    finally:
        retie_shared_weights(model, tied)


@contextlib.contextmanager
def preserve_parallel_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes of parameters after a block, including how they are sharded."""
    said = {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for attribute, value in said.get(name, {}).items():
                if attribute not in vars(parameter):
                    setattr(parameter, attribute, value)


# -- device moves


def move_model_to_device(model: torch.nn.Module, device: torch.device | str) -> None:
    """Move a module in place. Ties between parameters and their attributes are kept."""
    with preserve_shared_weights(model), preserve_parallel_attributes(model):
        model.to(device)


@contextlib.contextmanager
def init_on_device(
    device: torch.device | str,
    include_buffers: bool = False,
    force_custom_init_on_device: bool = False,  # noqa: ARG001  # neuronx-distributed's signature
) -> Iterator[None]:
    """Create all parameters of modules in this block on a device, such as ``meta``.

    Args:
        device: The device.
        include_buffers: Create buffers there, too.
        force_custom_init_on_device: Accepted; accelerate is never used.
    """
    where = torch.device(device)

    def moved_parameter(_module: Any, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.device == where:  # already moved, so a tied parameter stays tied
            return parameter
        moved = torch.nn.Parameter(parameter.detach().to(where), parameter.requires_grad)
        vars(moved).update(vars(parameter))
        return moved

    hooks = [registration.register_module_parameter_registration_hook(moved_parameter)]  # type: ignore[arg-type]
    if include_buffers:
        hooks.append(registration.register_module_buffer_registration_hook(lambda _, __, buffer: buffer.to(where)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def reinit_model(model: torch.nn.Module, device: torch.device | str, param_init_fn: ParameterInit) -> None:
    """Create new parameters on a device, and fill each submodule's parameters with ``param_init_fn(part, device)``.

    Raises:
        xla_ckpt.UsageError: The function left some parameters, or buffers on the meta device, unfilled.
    """
    where = torch.device(device)
    with preserve_shared_weights(model), preserve_parallel_attributes(model):
        for part in model.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, _make_unfilled_parameter(parameter, where))
            param_init_fn(part, where)
        _check_filled(model)


def _make_unfilled_parameter(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """Return a parameter of the same shape, dtype and attributes on a device; floating-point ones are NaN."""
    value = torch.empty_like(parameter, device=device)
    if value.is_floating_point():
        value.fill_(float("nan"))  # lets `_check_filled` detect unfilled parameters
    unfilled = torch.nn.Parameter(value, parameter.requires_grad)
    vars(unfilled).update(vars(parameter))
    return unfilled


def _check_filled(model: torch.nn.Module) -> None:
    """Raise an error for parameters that are all NaN, and for buffers on the meta device."""
    left = [n for n, p in model.named_parameters() if p.is_floating_point() and p.numel() and p.isnan().all()]
    if left:
        raise UsageError(
            f"param_init_fn gave {len(left)} parameters no values",
            leaf=left[0],
            hint="It is called for each module, and has to fill the module's own parameters.",
            details=join_lines(left[1:11]) or None,
        )
    buffers = [n for n, b in model.named_buffers() if b.is_meta]
    if buffers:
        raise UsageError(
            f"{len(buffers)} buffers are on the meta device, and nothing says their values",
            leaf=buffers[0],
            hint="Pass include_buffers=False to initialize_parallel_model, or have param_init_fn make them.",
        )


def get_model_sequential(
    model: torch.nn.Module,
    device: torch.device | str,
    sequential_move_factor: int = 11,  # noqa: ARG001  # neuronx-distributed's signature
    param_init_fn: ParameterInit | None = None,
) -> torch.nn.Module:
    """Fill the parameters with `param_init_fn`, if it is given, and move the module to a device; return the module.

    All ranks of a host move at once, regardless of `sequential_move_factor`, which only affects memory use.
    """
    if param_init_fn is not None:
        reinit_model(model, "cpu", param_init_fn)
    move_model_to_device(model, device)
    return model
