"""torch_xla's ZeRO-1 optimizer over the groups of `parallel_state`."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from neuron_compat.emulated import grads, parallel_state
from neuron_compat.groups import list_rank_groups
from neuron_compat.nxd.exports import EXPERTS_HINT
from neuron_compat.nxd.optimizer.shard_files import ShardFilesMixin
from xla_ckpt import Mesh, UsageError


def _get_mesh() -> Mesh:
    """Return the mesh of the job."""
    return Mesh(**{axis: parallel_state.get_size(axis) for axis in ("pp", "dp", "cp", "tp")})


def _get_replica_groups() -> list[list[int]]:
    """Return the groups of ranks that hold the same weights: dp and cp."""
    mesh = _get_mesh()
    return parallel_state.get_replica_groups("dp") if mesh.cp == 1 else list_rank_groups(mesh, "dp_cp")


def _get_model_groups() -> list[list[int]]:
    """Return the groups of ranks that together hold a model: pp and tp."""
    mesh = _get_mesh()
    return parallel_state.get_replica_groups("tp") if mesh.pp == 1 else list_rank_groups(mesh, "pp_tp")


class NeuronZero1Optimizer(ShardFilesMixin, ZeroRedundancyOptimizer):  # type: ignore[misc]  # torch_xla has no types
    """torch_xla's `ZeroRedundancyOptimizer`, which shards states over the data-parallel groups by default.

    The gradient norm is computed over the whole model: summed over the model-parallel groups, where a parameter that is
    replicated on all tensor-parallel ranks counts once, and one that is ``shared`` with another stage does not count.
    Copies of keys and values on several ranks count once, too.

    Raises:
        RuntimeError: `parallel_state` is not initialized.
        xla_ckpt.UsageError: Some parameters are experts, which are not replicated on the data-parallel ranks; or are
            not on the XLA device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("call initialize_model_parallel() before making a NeuronZero1Optimizer")
        if kwargs.get("sharding_groups") is None:
            kwargs["sharding_groups"] = _get_replica_groups()
        if kwargs.get("grad_norm_groups") is None:
            kwargs["grad_norm_groups"] = _get_model_groups()
        super().__init__(*args, **kwargs)

    def _shard_parameters(self) -> Any:
        """Check the parameters, then shard them as torch_xla does. Called by `__init__`."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if elsewhere := {p.device.type for p in parameters} - {"xla"}:  # torch_xla asserts it, without a message
            raise UsageError(
                "NeuronZero1Optimizer is torch_xla's, which takes parameters on the XLA device alone",
                found=", ".join(sorted(elsewhere)),
                hint='Call model.to("xla") before you make it: on CPUs, too, where PJRT_DEVICE is CPU.',
            )
        if parallel_state.get_size("ep") > 1 and any(getattr(p, "expert_model_parallel", False) for p in parameters):
            raise UsageError(
                "NeuronZero1Optimizer does not shard experts: their replicas are fewer than the data-parallel ranks",
                hint=EXPERTS_HINT,
            )
        return super()._shard_parameters()

    @torch.no_grad()
    def _calc_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the 2-norm of the gradients of the whole model, a 0-d tensor, which torch_xla uses to clip them."""
        if norm_type != 2.0:
            raise RuntimeError(f"only norm type 2 is supported, not {norm_type}")
        copies = parallel_state.get_size("tp")
        total = torch.zeros([], dtype=self.optimizer_dtype, device=self.device)
        for outer, inner in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            for parameter, shard in zip(outer["params"], inner["params"], strict=True):
                if shard.grad is not None and not getattr(parameter, "shared", False):
                    squares = shard.grad.detach().to(self.optimizer_dtype).pow(2)
                    own = self._divide_by_holders(parameter, squares).sum()
                    total += own if getattr(parameter, "tensor_model_parallel", False) else own / copies
        for groups in (self._sharding_groups, self._grad_norm_groups):
            xm.all_reduce(xm.REDUCE_SUM, [total], groups=groups, pin_layout=self.pin_layout)
        return total.sqrt()

    def _divide_by_holders(self, parameter: torch.nn.Parameter, squares: torch.Tensor) -> torch.Tensor:
        """Divide the squares of this rank's shard of a parameter by the number of ranks that hold each element."""
        counts = grads.count_row_holders(parameter)
        if counts is None:
            return squares
        own: torch.Tensor = self._shard_tensor(counts).clamp(min=1.0)  # padding rows count as 0 there
        return grads.divide_rows(squares, own)
