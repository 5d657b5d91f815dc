"""`GradScaler` for mixed precision, on any device; `smp.amp.GradScaler` in place of torch's."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler as TorchScaler

from neuron_compat.emulated.smp.master_weights import any_rank
from neuron_compat.smp.errors import SMPAMPError


class GradScaler(TorchScaler):
    """torch's `GradScaler`, on the device of the gradients. If gradients overflow on one rank, all ranks skip the step.

    Args:
        init_scale: The first scale.
        growth_factor: By what it is multiplied after `growth_interval` steps without an overflow.
        backoff_factor: By what it is multiplied after an overflow.
        growth_interval: See `growth_factor`.
        enabled: False does nothing.
        device: Of the gradients: ``"cpu"`` by default.

    Raises:
        SMPAMPError: Used on an XLA device: torch_xla has a scaler of its own, and bfloat16 needs none.
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
        """As torch's, with the finding of all ranks. All of them make the same call."""
        inf_by_device = super()._unscale_grads_(*args, **kwargs)
        overflow = any_rank(any(bool(value) for value in inf_by_device.values()))
        for value in inf_by_device.values():
            value.fill_(float(overflow))
        return inf_by_device
