"""`DistributedOptimizer`: SMP's methods for a torch optimizer.

The optimizer stays the same object: its class is replaced by one that has `DistributedMixin` in front of its own
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
    """What `DistributedOptimizer` adds to an optimizer."""

    model: Any
    dynamic: bool
    masters: MasterWeights | None
    """In float16 and bfloat16 training."""

    def parameters(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """The optimizer's parameters, in the order of the numbers that they have in its state dict."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def numbers(self, optimizer: Any) -> list[range]:
        """The numbers of the parameters of each group."""
        ends = itertools.accumulate((len(group["params"]) for group in optimizer.param_groups), initial=0)
        return [range(first, last) for first, last in itertools.pairwise(ends)]

    def masters_by_number(self, optimizer: Any) -> dict[int, torch.nn.Parameter]:
        """The parameters that are master weights."""
        own = set() if self.masters is None else {id(master) for _, master in self.masters}
        return {number: p for number, p in enumerate(self.parameters(optimizer)) if id(p) in own}

    def entries(self, optimizer: Any) -> list[StateEntry]:
        """The entry of the model that each of them is."""
        known = {id(e.value): e for e in self.model.entries() if e.is_tensor}
        return [known[id(p)] for p in self._get_model_parameters(optimizer)]

    def names(self, optimizer: Any) -> list[str]:
        """The name that each of them has in the model; the first one of a tied parameter."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        return [known[id(p)] for p in self._get_model_parameters(optimizer)]

    def _get_model_parameters(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """The parameter of the model that each of them is, or whose master weight it is."""
        narrow = {} if self.masters is None else {id(master): p for p, master in self.masters}
        return [narrow.get(id(p), p) for p in self.parameters(optimizer)]

    def shares(self, optimizer: Any) -> list[int] | None:
        """The rank (`rdp_rank`) that has the states of each parameter; None if all ranks have those of all."""
        if not job.state.cfg.shard_optimizer_state:
            return None
        return assign_shares([p.numel() * p.element_size() for p in self.parameters(optimizer)], job.rdp_size())

    def stored_scale(self) -> dict[str, Any]:
        """The loss scale as a plain dict."""
        assert self.masters is not None
        return dump_scaler(self.masters.scaler)

    def take_scale(self, kept: Mapping[str, Any]) -> None:
        """Take the loss scale that is stored with ``fp16`` states, if there is one."""
        if self.masters is not None and "loss_scaler" in kept:
            self.masters.scaler = load_scaler(kept["loss_scaler"])
            self.masters.overflow = bool(kept.get("overflow", False))
            self.dynamic = bool(kept.get("dynamic_loss_scale", self.dynamic))


def assign_shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that each of these goes to: in their order, always the one that has least.

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
    """The methods of SMP's optimizers, in front of those of the optimizer's own class."""

    _smp: OptimizerRuntime

    @property
    def xla_ckpt_plain(self) -> Any:
        """The optimizer as its own class has it: what `xla_ckpt` saves and loads in the place of this one."""
        plain: Any = object.__new__(_get_original_class(type(self)))
        plain.__dict__ = self.__dict__  # the same state and groups, whoever replaces them
        return plain

    # -- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; what `closure` returned.

        With ``shard_optimizer_state`` each rank steps its share of the parameters, and gets the others from their
        ranks: all ranks make the call. With master weights they are stepped, and the model gets their values; after an
        overflow nothing is stepped.
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
        """Step this rank's share of the parameters, and take the others from their ranks."""
        parameters = self._smp.parameters(self)
        if shares is None:
            step()
            return
        here = job.rdp_rank()
        others = [(p, p.grad) for p, rank in zip(parameters, shares, strict=True) if rank != here]
        for parameter, _ in others:
            parameter.grad = None  # without a gradient an optimizer leaves a parameter alone, and makes no state for it
        step()
        for parameter, gradient in others:
            parameter.grad = gradient
        ranks = job.get_rdp_group()
        if len(ranks) > 1:
            for parameter, rank in zip(parameters, shares, strict=True):
                replicas.broadcast_in_place(parameter, ranks[rank], "rdp")

    step.hooked = True  # type: ignore[attr-defined]  # torch would otherwise run the hooks of a step twice

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Remove the gradients; with master weights also those of the model."""
        base: Any = super()
        base.zero_grad(*args, **kwargs)
        if self._smp.masters is not None:
            self._smp.masters.forget_gradients()

    # -- master weights and loss scale

    @property
    def loss_scale(self) -> float:
        """By what `DistributedModel.backward` multiplies a loss; 1 without ``fp16``."""
        return 1.0 if self._smp.masters is None else self._smp.masters.scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._smp.masters is None:
            raise SMPValidationError("there is a loss scale with fp16 only", found="fp16: False")
        self._smp.masters.scaler.cur_scale = float(value)

    @property
    def loss_scaler(self) -> Scaler | None:
        """The loss scale; None without master weights."""
        return None if self._smp.masters is None else self._smp.masters.scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self._smp.dynamic

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last step had an overflow."""
        return self._smp.masters is not None and self._smp.masters.overflow

    @property
    def first_closure_call_this_step(self) -> bool:
        """True; SMP stores it."""
        return True

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The master weights, group by group; empty without any."""
        return [] if self._smp.masters is None else [[master for _, master in g] for g in self._smp.masters.pairs]

    def update_master_grads(self) -> None:
        """Give the master weights the gradients of the model, without the loss scale. A step does so at its end."""
        masters = self._smp.masters
        if masters is not None:
            own = self._smp.masters_by_number(self)
            masters.take_gradients([p for number, p in enumerate(self._smp.parameters(self)) if number not in own])

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float | None:
        """Scale the gradients of the master weights down to a norm over the whole model; the norm before.

        None without master weights, or after an overflow. All ranks make the same call.
        """
        if self._smp.masters is None or self._smp.masters.overflow:
            return None
        return clip_gradients(self._smp.parameters(self), max_norm, norm_type)


@functools.cache
def make_distributed_class(own: Hashable) -> type:
    """A class of optimizers with the methods of `DistributedMixin` in front of their own."""
    assert isinstance(own, type)
    return type(own.__name__, (DistributedMixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _get_original_class(distributed: type) -> type:
    """The class that `make_distributed_class` was made of."""
    own: type = distributed.__bases__[1]
    return own


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
