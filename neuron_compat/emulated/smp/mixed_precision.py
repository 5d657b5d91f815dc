"""16-bit training: loss scaling, float32 master weights, and SMP's `GradScaler`.

Loss scales are stored as plain dicts, so that files do not reference classes of this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchScaler

from neuron_compat.emulated import collectives, grads
from neuron_compat.smp import job
from neuron_compat.smp.errors import SMPAMPError, SMPCheckpointError, SMPInvalidArgumentError


@dataclass(slots=True)
class LossScaler:
    """Constant loss scale."""

    cur_scale: float = 1.0

    @property
    def loss_scale(self) -> float:
        """Factor for losses."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Record an overflow of a step's gradients, which does not change a constant scale."""


@dataclass(slots=True)
class DynamicLossScaler:
    """Loss scale that is decreased after an overflow, and increased after `scale_window` steps without one.

    The first ``delayed_shift - 1`` overflows do not change it (`cur_hysteresis` counts them). The count restarts when
    the scale is increased, or, with `consecutive_hysteresis`, after each step without an overflow.
    """

    cur_scale: float = 2.0**32
    cur_iter: int = 0
    last_overflow_iter: int = -1
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    cur_hysteresis: int = 1
    consecutive_hysteresis: bool = False

    @property
    def loss_scale(self) -> float:
        """Factor for losses."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Update the scale, depending on an overflow of a step's gradients.

        >>> scaler = DynamicLossScaler(cur_scale=8.0, scale_window=2)
        >>> for overflow in (True, False, False):
        ...     scaler.update_scale(overflow)
        >>> scaler.cur_scale, scaler.cur_iter
        (8.0, 3)
        """
        if overflow:
            if self.cur_hysteresis <= 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            raises = (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0
            if self.consecutive_hysteresis or raises:
                self.cur_hysteresis = self.delayed_shift
            if raises:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


Scaler = LossScaler | DynamicLossScaler


def create_scaler(static: float, dynamic: bool, arguments: Mapping[str, Any] | None) -> Scaler:
    """Create the scaler for the arguments of `DistributedOptimizer`.

    Raises:
        SMPInvalidArgumentError: An argument is unknown.
    """
    if not dynamic:
        return LossScaler(float(static))
    given = dict(arguments or {})
    known = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SMPInvalidArgumentError(
            "dynamic_loss_args has an unknown entry", expected=", ".join(known), found=", ".join(map(str, unknown))
        )
    return DynamicLossScaler(
        cur_scale=float(given.pop("init_scale", 2.0**32)), **given, cur_hysteresis=given.get("delayed_shift", 1)
    )


def dump_scaler(scaler: Scaler) -> dict[str, Any]:
    """Return a scaler as a plain dict."""
    return {"kind": type(scaler).__name__, **asdict(scaler)}


def load_scaler(value: Any) -> Scaler:
    """Return the scaler of a `dump_scaler` dict, or of another program's scaler object, by its attributes.

    Raises:
        SMPCheckpointError: It is not a loss scale.
    """
    attributes = dict(value) if isinstance(value, Mapping) else dict(vars(value)) if hasattr(value, "__dict__") else {}
    kind = DynamicLossScaler if "scale_window" in attributes else LossScaler
    known = {f.name for f in fields(kind)}
    if "cur_scale" not in attributes:
        raise SMPCheckpointError(
            "a loss scaler has no scale", expected="cur_scale", found=", ".join(attributes) or "nothing"
        )
    return kind(**{name: inner for name, inner in attributes.items() if name in known})


distributed: Any = torch.distributed

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Float32 master weights of an optimizer's 16-bit parameters, which replace them in its groups.

    Attributes:
        pairs: (parameter, its master weight), group by group.
        overflow: True if the gradients of the last step had an overflow, in which case the optimizer does not step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Scaler) -> None:
        self.scaler = scaler
        self.overflow = False
        self.used_scale = scaler.loss_scale
        self.pairs: list[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]] = []
        for group in optimizer.param_groups:
            self.pairs.append([])
            for number, parameter in enumerate(group["params"]):
                if parameter.dtype not in HALF_PRECISION_DTYPES:
                    continue
                master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                vars(master).update(vars(parameter))  # sharding attributes
                group["params"][number] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(parameter)
                self.pairs[-1].append((parameter, master))

    def __iter__(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return (pair for group in self.pairs for pair in group)

    @torch.no_grad()
    def take_gradients(self, others: Sequence[torch.nn.Parameter]) -> None:
        """Copy gradients from the parameters to the master weights, divided by the loss scale.

        Args:
            others: Parameters of the optimizer without a master weight, whose gradients are also unscaled.
        """
        self.used_scale = self.scaler.loss_scale
        gradients = [p.grad for p, _ in self if p.grad is not None] + [p.grad for p in others if p.grad is not None]
        # As in SMP, overflows are only checked if they have consequences.
        follows = isinstance(self.scaler, DynamicLossScaler)
        self.overflow = follows and reduce_any(any(not bool(torch.isfinite(g).all()) for g in gradients))
        self.scaler.update_scale(self.overflow)
        for narrow, master in self:
            master.grad = None if narrow.grad is None or self.overflow else narrow.grad.float() / self.used_scale

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copy the master weights to the parameters."""
        for narrow, master in self:
            narrow.copy_(master)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy the parameters to the master weights, after the model was loaded."""
        for narrow, master in self:
            master.copy_(narrow)

    def forget_gradients(self) -> None:
        """Clear the gradients of parameters and master weights."""
        for pair in self:
            for parameter in pair:
                parameter.grad = None


def get_master_weights(optimizer: Any) -> MasterWeights | None:
    """Return the master weights of a `DistributedOptimizer`; None for other optimizers, or without master weights."""
    masters: MasterWeights | None = getattr(getattr(optimizer, "_smp", None), "masters", None)
    return masters


def reduce_any(value: bool) -> bool:
    """Return True if the value is True on any rank of the job. Call it on all ranks."""
    if job.size() == 1:
        return value
    said = torch.tensor([value], dtype=torch.int32, device="cpu")
    distributed.all_reduce(said, op=distributed.ReduceOp.MAX, group=job.get_process_group("world"))
    return bool(said.item())


@torch.no_grad()
def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0) -> float:
    """Scale gradients down to a norm, over the whole model, of at most `max_norm`; return the norm before scaling.

    Sharded parameters count on each tensor-parallel rank, all others once.
    """
    total, _ = grads.sum_gradient_powers(parameters, norm_type, force_spmd=True)
    infinite = math.isinf(norm_type)
    collectives.reduce_in_place(
        [total], collectives.get_rank_groups("tp"), collectives.MAX if infinite else collectives.SUM
    )
    norm = total if infinite else total.pow(1 / norm_type)
    return float(grads.clip_grads_with_norm(parameters, norm, max_norm))


class GradScaler(TorchScaler):
    """torch's `GradScaler`, on the device of the gradients. If gradients overflow on one rank, all ranks skip the step.

    Args:
        init_scale: Initial scale.
        growth_factor: Factor for the scale after `growth_interval` steps without an overflow.
        backoff_factor: Factor for the scale after an overflow.
        growth_interval: See `growth_factor`.
        enabled: False disables scaling.
        device: Device of the gradients: ``"cpu"`` by default.

    Raises:
        SMPAMPError: It is used on an XLA device: torch_xla has its own scaler, and bfloat16 needs none.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        device: str = "cpu",
    ) -> None:
        if enabled and device.partition(":")[0] == "xla":
            raise SMPAMPError(
                "smp.amp.GradScaler is for CPU and CUDA devices",
                found=device,
                hint="Use bfloat16, which needs no scaler, or torch_xla.amp.GradScaler.",
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        """Unscale as torch does, and combine the overflow of all ranks. Called on all ranks."""
        inf_by_device = super()._unscale_grads_(*args, **kwargs)
        overflow = reduce_any(any(bool(value) for value in inf_by_device.values()))
        for value in inf_by_device.values():
            value.fill_(float(overflow))
        return inf_by_device
