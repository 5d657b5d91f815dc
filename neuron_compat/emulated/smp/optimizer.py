"""`DistributedOptimizer`: SMP's methods for a torch optimizer.

The optimizer remains the same object: its class is replaced by a subclass with `DistributedMixin` before the original
class.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.emulated.smp import replicas
from neuron_compat.emulated.smp.mixed_precision import (
    MasterWeights,
    Scaler,
    clip_gradients,
    create_scaler,
    dump_scaler,
    load_scaler,
)
from neuron_compat.smp import job
from neuron_compat.smp.errors import (
    DistributedModelNotWrappedError,
    SMPInvalidArgumentError,
    SMPRuntimeError,
    SMPValidationError,
)
from neuron_compat.smp.optimizer_state import OptimizerStateMixin
from neuron_compat.smp.state_entries import StateEntry
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


@dataclass(slots=True)
class OptimizerRuntime:
    """State that `DistributedOptimizer` adds to an optimizer."""

    model: Any
    dynamic: bool
    masters: MasterWeights | None
    """Master weights in float16 and bfloat16 training."""

    def parameters(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters, ordered by their indices in its state dict."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def numbers(self, optimizer: Any) -> list[range]:
        """Return the parameter indices of each group."""
        ends = itertools.accumulate((len(group["params"]) for group in optimizer.param_groups), initial=0)
        return [range(first, last) for first, last in itertools.pairwise(ends)]

    def masters_by_number(self, optimizer: Any) -> dict[int, torch.nn.Parameter]:
        """Return {index: parameter} for the parameters that are master weights."""
        own = set() if self.masters is None else {id(master) for _, master in self.masters}
        return {number: p for number, p in enumerate(self.parameters(optimizer)) if id(p) in own}

    def entries(self, optimizer: Any) -> list[StateEntry]:
        """Return the entry of the model for each parameter."""
        known = {id(e.value): e for e in self.model.entries() if e.is_tensor}
        return [known[id(p)] for p in self._get_model_parameters(optimizer)]

    def names(self, optimizer: Any) -> list[str]:
        """Return the name in the model of each parameter; the first name if it is tied."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        return [known[id(p)] for p in self._get_model_parameters(optimizer)]

    def _get_model_parameters(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """Return the parameter of the model for each parameter, also for master weights."""
        narrow = {} if self.masters is None else {id(master): p for p, master in self.masters}
        return [narrow.get(id(p), p) for p in self.parameters(optimizer)]

    def shares(self, optimizer: Any) -> list[int] | None:
        """Return the rank (`rdp_rank`) that has the states of each parameter; None if all ranks have all states."""
        if not job.state.cfg.shard_optimizer_state:
            return None
        return assign_shares([p.numel() * p.element_size() for p in self.parameters(optimizer)], job.rdp_size())

    def stored_scale(self) -> dict[str, Any]:
        """Return the loss scale as a plain dict."""
        assert self.masters is not None
        return dump_scaler(self.masters.scaler)

    def take_scale(self, kept: Mapping[str, Any]) -> None:
        """Load the loss scale that is stored with ``fp16`` states, if there is one."""
        if self.masters is not None and "loss_scaler" in kept:
            self.masters.scaler = load_scaler(kept["loss_scaler"])
            self.masters.overflow = bool(kept.get("overflow", False))
            self.dynamic = bool(kept.get("dynamic_loss_scale", self.dynamic))


def assign_shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each item, in order, to the rank with the smallest total so far.

    >>> assign_shares([4, 1, 1, 1, 1], 2)
    [0, 1, 1, 1, 1]
    """
    loads = [0] * ranks
    rank_of = []
    for size in sizes:
        rank = loads.index(min(loads))
        loads[rank] += size
        rank_of.append(rank)
    return rank_of


class DistributedMixin(OptimizerStateMixin):
    """SMP's optimizer methods, which override the methods of the optimizer's own class."""

    _smp: OptimizerRuntime

    @property
    def xla_ckpt_plain(self) -> Any:
        """Optimizer with its original class, which `xla_ckpt` saves and loads instead of this one."""
        plain: Any = object.__new__(_get_original_class(type(self)))
        plain.__dict__ = self.__dict__  # shares the state and groups, even if they are replaced
        return plain

    # -- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step, and return the result of `closure`.

        With ``shard_optimizer_state``, each rank updates its share of the parameters, and receives the others from
        their ranks: all ranks make the call. With master weights, these are updated and copied to the model; after an
        overflow, nothing is updated.
        """
        base: Any = super()
        runtime = self._smp
        shares = runtime.shares(self)
        if runtime.masters is None and shares is None:
            return base.step() if closure is None else base.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        if runtime.masters is not None and runtime.masters.overflow:
            logger.info("gradients had an overflow: this step is skipped, with loss scale %g", self.loss_scale)
            return loss
        self._step_own(base.step, shares)
        if runtime.masters is not None:
            runtime.masters.give_weights()
        return loss

    def _step_own(self, step: Callable[[], Any], shares: list[int] | None) -> None:
        """Update this rank's share of the parameters, and receive the others from their ranks."""
        parameters = self._smp.parameters(self)
        if shares is None:
            step()
            return
        here = job.rdp_rank()
        others = [(p, p.grad) for p, rank in zip(parameters, shares, strict=True) if rank != here]
        for parameter, _ in others:
            parameter.grad = None  # an optimizer skips parameters without a gradient, and creates no state for them
        step()
        for parameter, gradient in others:
            parameter.grad = gradient
        ranks = job.get_rdp_group()
        if len(ranks) > 1:
            for parameter, rank in zip(parameters, shares, strict=True):
                replicas.broadcast_in_place(parameter, ranks[rank], "rdp")

    step.hooked = True  # type: ignore[attr-defined]  # torch would otherwise run the hooks of a step twice

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; with master weights, also the model's gradients."""
        base: Any = super()
        base.zero_grad(*args, **kwargs)
        if self._smp.masters is not None:
            self._smp.masters.forget_gradients()

    # -- master weights and loss scale

    @property
    def loss_scale(self) -> float:
        """Factor that `DistributedModel.backward` applies to a loss; 1 without ``fp16``."""
        return 1.0 if self._smp.masters is None else self._smp.masters.scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._smp.masters is None:
            raise SMPValidationError("there is a loss scale with fp16 only", found="fp16: False")
        self._smp.masters.scaler.cur_scale = float(value)

    @property
    def loss_scaler(self) -> Scaler | None:
        """Loss scaler; None without master weights."""
        return None if self._smp.masters is None else self._smp.masters.scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._smp.dynamic

    @property
    def overflow(self) -> bool:
        """True if the gradients of the last step had an overflow."""
        return self._smp.masters is not None and self._smp.masters.overflow

    @property
    def first_closure_call_this_step(self) -> bool:
        """True; SMP stores this value."""
        return True

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Master weights, group by group; empty without any."""
        return [] if self._smp.masters is None else [[master for _, master in g] for g in self._smp.masters.pairs]

    def update_master_grads(self) -> None:
        """Copy the gradients of the model to the master weights, without the loss scale. A step does so at its end."""
        masters = self._smp.masters
        if masters is not None:
            own = self._smp.masters_by_number(self)
            masters.take_gradients([p for number, p in enumerate(self._smp.parameters(self)) if number not in own])

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float | None:
        """Clip the gradients of the master weights to a norm over the whole model; return the norm before clipping.

        Return None without master weights, or after an overflow. Call it on all ranks.
        """
        if self._smp.masters is None or self._smp.masters.overflow:
            return None
        return clip_gradients(self._smp.parameters(self), max_norm, norm_type)


@functools.cache
def make_distributed_class(own: Hashable) -> type:
    """Return a subclass of an optimizer class with the methods of `DistributedMixin`."""
    assert isinstance(own, type)
    return type(own.__name__, (DistributedMixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _get_original_class(distributed: type) -> type:
    """Return the class that `make_distributed_class` was called with."""
    own: type = distributed.__bases__[1]
    return own


def DistributedOptimizer(  # noqa: N802  # SMP's name
    optimizer: Any,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
) -> Any:
    """Add SMP's methods to an optimizer, and return the same object.

    Args:
        optimizer: An optimizer for parameters of the `DistributedModel`.
        static_loss_scale: With ``fp16``, factor for losses.
        dynamic_loss_scale: With ``fp16``, begin with a large scale, and decrease it whenever gradients overflow.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_scale``, ``delayed_shift`` and
            ``consecutive_hysteresis`` of the dynamic scale.

    Raises:
        DistributedModelNotWrappedError: There is no `DistributedModel`.
        SMPRuntimeError: A parameter does not belong to the model.
        SMPValidationError: A parameter occurs twice, or the optimizer is already distributed.
        SMPInvalidArgumentError: It is not a torch optimizer.
    """
    model = job.state.model
    if model is None:
        raise DistributedModelNotWrappedError(
            "smp.DistributedModel call must take place before smp.DistributedOptimizer."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SMPInvalidArgumentError("DistributedOptimizer wraps a torch.optim.Optimizer", found=f"{optimizer!r:.60}")
    if isinstance(optimizer, DistributedMixin):
        raise SMPValidationError("this optimizer is a DistributedOptimizer already")
    _check_parameters(optimizer, model)
    scheduled = optimizer.__dict__.pop("step", None)
    distributed: Any = optimizer
    distributed.__class__ = make_distributed_class(distributed.__class__)
    scaler = create_scaler(static_loss_scale, dynamic_loss_scale and job.state.cfg.fp16, dynamic_loss_args)
    masters = MasterWeights(optimizer, scaler) if model.narrow_type is not None else None
    distributed._smp = OptimizerRuntime(model, bool(dynamic_loss_scale), masters)
    if scheduled is not None:
        distributed.step = _wrap_scheduled_step(distributed)
    job.state.optimizer = distributed
    job.state.apply_pending_loads()
    return distributed


def _wrap_scheduled_step(optimizer: Any) -> Callable[..., Any]:
    """Wrap the step of an optimizer whose scheduler already exists, with the attributes that schedulers read."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _check_parameters(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Raise an error for parameters that do not belong to the model, or occur twice."""
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
