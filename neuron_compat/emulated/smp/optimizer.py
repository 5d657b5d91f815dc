"""`DistributedOptimizer`: an optimizer with SMP's calls. It is the object that it was given, with methods replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from neuron_compat.emulated.smp.loss_scale import scaler_of
from neuron_compat.emulated.smp.master_weights import MasterWeights
from neuron_compat.emulated.smp.optimizer_methods import Distributed, Runtime, distributed_class
from neuron_compat.smp import job
from neuron_compat.smp.errors import (
    DistributedModelNotWrappedError,
    SMPInvalidArgumentError,
    SMPRuntimeError,
    SMPValidationError,
)


def DistributedOptimizer(  # noqa: N802  # SMP's name
    optimizer: Any,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
) -> Any:
    """Give an optimizer SMP's methods; the same object.

    Args:
        optimizer: One of the parameters of the `DistributedModel`.
        static_loss_scale: With ``fp16``, by what losses are multiplied.
        dynamic_loss_scale: With ``fp16``, begin with a large scale, and lower it whenever gradients overflow.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_scale``, ``delayed_shift`` and
            ``consecutive_hysteresis`` of that.

    Raises:
        DistributedModelNotWrappedError: There is no `DistributedModel`.
        SMPRuntimeError: A parameter does not belong to the model.
        SMPValidationError: A parameter is there twice, or the optimizer is one already.
        SMPInvalidArgumentError: It is no optimizer of torch's.
    """
    model = job.state.model
    if model is None:
        raise DistributedModelNotWrappedError(
            "smp.DistributedModel call must take place before smp.DistributedOptimizer."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SMPInvalidArgumentError("DistributedOptimizer wraps a torch.optim.Optimizer", found=f"{optimizer!r:.60}")
    if isinstance(optimizer, Distributed):
        raise SMPValidationError("this optimizer is a DistributedOptimizer already")
    _check_parameters(optimizer, model)
    scheduled = optimizer.__dict__.pop("step", None)
    distributed: Any = optimizer
    distributed.__class__ = distributed_class(distributed.__class__)
    scaler = scaler_of(static_loss_scale, dynamic_loss_scale and job.state.cfg.fp16, dynamic_loss_args)
    masters = MasterWeights(optimizer, scaler) if model.narrow_type is not None else None
    distributed._smp = Runtime(model, bool(dynamic_loss_scale), masters)
    if scheduled is not None:
        distributed.step = _counted(distributed)
    job.state.optimizer = distributed
    job.state.apply_pending()
    return distributed


def _counted(optimizer: Any) -> Callable[..., Any]:
    """The step of an optimizer whose scheduler was made before: torch's schedulers look at these marks."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _check_parameters(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Refuse parameters that are not the model's, or that are there twice."""
    known = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise SMPRuntimeError(
                    "Found parameter in optimizer that is not part of smp.DistributedModel, which might lead to "
                    "incorrect results. This might be because the optimizer is initialized with the model parameters "
                    "*before* calling the smp.DistributedModel wrapper. Please make sure to initialize the optimizer "
                    "with the parameters of the smp.DistributedModel object."
                )
            if id(parameter) in seen:
                raise SMPValidationError(
                    "a parameter is in the optimizer twice, so that its state would be loaded twice",
                    leaf=known[id(parameter)],
                    hint="Give the optimizer each parameter once: model.parameters() does, for tied ones, too.",
                )
            seen.add(id(parameter))
