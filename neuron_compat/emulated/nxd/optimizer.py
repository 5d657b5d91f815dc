"""The optimizer of a job that was set up by `initialize_parallel_optimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from neuron_compat.emulated import grads
from xla_ckpt import UsageError


class _Inner:
    """An attribute that is the inner optimizer's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return getattr(owner.optimizer, self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner.optimizer, self.name, value)


class NxDOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps begin with the mean of the replicas' gradients, and clip them.

    A ZeRO-1 optimizer does both itself. State, groups and defaults are the inner optimizer's own.

    Attributes:
        optimizer: The inner optimizer.
        nxd_config: What `neuronx_distributed_config` returned.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: dict[str, Any]) -> None:
        # The constructor of torch's class is not called: it would make groups of its own.
        self.optimizer: Any = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients of the last step, before they were clipped; None without clipping."""
        return self._grad_norm

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    state = _Inner()
    param_groups = _Inner()
    defaults = _Inner()

    def __getstate__(self) -> Any:  # torch_xla's reduce_gradients asks it for the groups
        return self.optimizer.__getstate__()

    def __setstate__(self, state: Any) -> None:
        self.optimizer.__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients over the replicas, clip them, and take a step; what `closure` returned.

        `closure` computes the gradients, once, before all of that.
        """
        options = self.nxd_config["optimizer_config"]
        if options["zero_one_enabled"]:
            loss = self.optimizer.step(closure=closure)
            self._grad_norm = self.optimizer.grad_norm
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        self._reduce_gradients()
        if options["grad_clipping"]:
            self._grad_norm = grads.clip_grad_norm(self.params, options["max_grad_norm"])
        self.optimizer.step()
        return loss

    def _reduce_gradients(self) -> None:
        """Give all replicas the mean of their gradients, in place."""
        grads.bucket_allreduce_gradients(p.grad for p in self.params if p.grad is not None)
        # What is no expert has replicas on the other expert-parallel ranks, too.
        common = [p for p in self.params if not getattr(p, "expert_model_parallel", False)]
        grads.bucket_allreduce_gradients((p.grad for p in common if p.grad is not None), reduce_over_ep_group=True)

    def save_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """`NeuronZero1Optimizer.save_sharded_state_dict` of the inner optimizer.

        Raises:
            xla_ckpt.UsageError: It is none of ZeRO-1.
        """
        self._zero1().save_sharded_state_dict(output_dir, num_workers_per_step)

    def load_state_dict_from(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """`NeuronZero1Optimizer.load_sharded_state_dict` of the inner optimizer.

        Raises:
            xla_ckpt.UsageError: It is none of ZeRO-1.
        """
        self._zero1().load_sharded_state_dict(output_dir, num_workers_per_step)

    def _zero1(self) -> Any:
        """The inner optimizer, if it is one of ZeRO-1."""
        if not self.nxd_config["optimizer_config"]["zero_one_enabled"]:
            raise UsageError("only the shards of ZeRO-1 are in files of this kind", hint="Use nxd.save_checkpoint.")
        return self.optimizer
