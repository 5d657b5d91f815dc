"""neuronx-distributed's AdamW: weight decay after the step, and an integer step count."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from neuron_compat.nxd.exports import attach_exports
from xla_ckpt import UsageError

__getattr__, __dir__ = attach_exports(__name__)


class AdamW_FP32OptimParams(torch.optim.Optimizer):  # noqa: N801  # neuronx-distributed's name
    """AdamW as computed by neuronx-distributed and Hugging Face's older `AdamW`.

    It differs from `torch.optim.AdamW` in three ways: `eps` is added to the root of the second moment before its bias
    correction, weights decay after the step, and ``step`` is an int.

    The moments have the dtype of the gradients. They are float32 if the gradients are, as in ZeRO-1 shards; and float64
    with XLA_DOWNCAST_BF16=1 in the environment, under which Neuron's compiler treats float64 as float32.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: Each step subtracts ``lr * weight_decay`` times the weight.
        correct_bias: Correct the bias of the moments, which start at 0.
        no_deprecation_warning: False warns, as Hugging Face's optimizer did.
        differentiable: Unsupported.
        capturable: Stored in the groups, as in neuronx-distributed; without effect.

    Raises:
        ValueError: A number is out of its range.
        xla_ckpt.UsageError: `differentiable` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr} and eps={eps} have to be at least 0, and betas={betas} in [0, 1)")
        if differentiable:
            raise UsageError(
                "this optimizer cannot be differentiated through", hint="torch.optim.AdamW(differentiable=True) can."
            )
        if not no_deprecation_warning:
            warnings.warn("Hugging Face deprecated this AdamW for torch.optim.AdamW", FutureWarning, stacklevel=2)
        self.upcast_optim_states = os.environ.get("XLA_DOWNCAST_BF16", "0") == "1"
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
            "capturable": capturable,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step, and return the result of `closure`, which computes the gradients if it is given.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place, with the options of its group."""
        gradient: Any = parameter.grad
        if gradient.is_sparse:
            raise RuntimeError("this optimizer takes no sparse gradients; torch.optim.SparseAdam does")
        gradient = gradient.double() if self.upcast_optim_states else gradient
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
        state["step"] += 1
        (beta1, beta2), rate = group["betas"], group["lr"]
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        size = rate
        if group["correct_bias"]:
            size = rate * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
        parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)
        if group["weight_decay"] > 0:
            parameter.add_(parameter, alpha=-rate * group["weight_decay"])
