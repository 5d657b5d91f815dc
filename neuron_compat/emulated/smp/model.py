"""`DistributedModel`: a module with SMP's calls, which owns the partition of this pipeline rank."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from neuron_compat.emulated.smp.master_weights import masters_of
from neuron_compat.emulated.smp.microbatches import mapped
from neuron_compat.emulated.smp.wrapper import Wrapper
from neuron_compat.smp import job
from neuron_compat.smp.errors import (
    BwdExecutionNotInStepFnError,
    MultipleDistributedModelError,
    SMPInvalidArgumentError,
    SMPUnsupportedError,
)
from xla_ckpt.facade import Rules, parse_rules

Hook = Callable[[Any, Any], Any]


@dataclass(slots=True)
class Progress:
    """How far a model has come."""

    has_stepped: bool = False
    """Whether a step was made: from then on the partitions stay."""
    needs_spreading: bool = True
    """Whether the next step begins with the values of the owners, and of the first data-parallel rank."""
    in_step: bool = False
    """Whether a function with ``@smp.step`` runs."""
    turn: Any = None
    """What the ranks agreed on for the last step (`replicas.Turn`); None before the first one."""
    reduce_kind: str | None = None
    """The ranks over which gradients are averaged; None before the first step."""
    unsynced_passes: int = 0
    """Steps with a backward pass since gradients were averaged."""


class DistributedModel(Wrapper):
    """A module with SMP's calls. Its names, parameters and attributes are the module's own.

    Every rank makes the whole module, and runs it. A pipeline rank owns a partition of it, which is what
    `local_state_dict` and the other ``local_`` methods are about: `smp.partition` says which, or, with
    ``auto_partition``, an even division by bytes. It is partitioned at once.

    Weights are split over tensor-parallel ranks by the layers of `neuron_compat.nxd.parallel_layers`, or by others
    whose parameters have neuronx-distributed's attributes, or as `shardings` says. **The ranks of a tensor-parallel
    group then get the same batch** (that of their `rdp_rank`), unlike in SMP. In a model without such weights they get
    batches of their own (of their `dp_rank`), as in SMP.

    Args:
        module: The module. With ``fp16`` or ``bf16`` its floating-point parameters and buffers become of that type;
            inputs are cast to it, and outputs to float32.
        trace_device: ``"cpu"`` or ``"gpu"``; nothing is traced.
        trace_execution_times: Accepted.
        trace_memory_usage: Accepted.
        overlapping_allreduce: Accepted: gradients are averaged at the end of a step in any case.
        backward_passes_per_step: The number of steps after which gradients are averaged over the data-parallel ranks.
        average_grads_across_microbatches: Whether a step divides gradients by the number of its microbatches.
        bucket_cap_mb: Accepted, if it is above 0.
        find_unused_parameters: Accepted: parameters without gradients are found in any case.
        broadcast_buffers: Whether each step begins with the buffers of the first data-parallel rank.
        gradient_as_bucket_view: Accepted.
        shardings: Rules for parameters that do not say themselves how they are split, as in
            `xla_ckpt.save_checkpoint`: (regular expression, spec).

    Raises:
        NotInitializedError: `smp.init` was not called.
        MultipleDistributedModelError: This process has wrapped a model already.
        SMPInvalidArgumentError: An argument makes no sense.
        InvalidPartitionIDError: A context named a partition that is not there.
        ModelTooSmallError: The model has fewer modules with parameters than partitions are asked for.
        xla_ckpt.UnsupportedStateError: A parameter's attributes contradict each other.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        trace_memory_usage: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        *,
        shardings: Rules | None = None,
    ) -> None:
        job.ranks()
        _check(trace_device, overlapping_allreduce, backward_passes_per_step, bucket_cap_mb)
        if not isinstance(module, torch.nn.Module):
            raise SMPInvalidArgumentError("a DistributedModel wraps a torch.nn.Module", found=type(module).__name__)
        if job.state.model is not None:
            raise MultipleDistributedModelError(
                "Using DistributedModel wrapper more than once in a process is not supported yet",
                hint="smp.reset() forgets the model and the optimizer.",
            )
        super().__init__(module, parse_rules(shardings))
        self.trace_device = trace_device
        self.trace_execution_times = trace_execution_times
        self.trace_memory_usage = trace_memory_usage
        self.overlapping_allreduce = overlapping_allreduce
        self.backward_passes_per_step = backward_passes_per_step
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._smp = Progress()
        self._post_partition_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Hook] = OrderedDict()
        if self.narrow_type is not None:
            module.to(self.narrow_type)
        self.entries()  # finds contradictions now, not in the first save
        job.state.model = self

    def __repr__(self) -> str:
        return f"DistributedModel({self.module!r})"

    # -- what it is

    @property
    def partitioned(self) -> bool:
        """Whether the model is partitioned: at once."""
        return True

    @property
    def narrow_type(self) -> torch.dtype | None:
        """The 16-bit type that the model computes in; None if it is the module's own."""
        cfg = job.state.cfg
        return torch.float16 if cfg.fp16 or cfg.fp16_params else torch.bfloat16 if cfg.bf16 else None

    # -- running it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        job.state.apply_pending()
        narrow = self.narrow_type
        if narrow is None:
            return self.module(*args, **kwargs)
        output = self.module(*_cast(args, torch.float32, narrow), **_cast(kwargs, torch.float32, narrow))
        return _cast(output, narrow, torch.float32)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """`torch.autograd.backward`, inside of a function with ``@smp.step``.

        With ``fp16`` and a `DistributedOptimizer` the tensors are scaled by its loss scale.

        Raises:
            BwdExecutionNotInStepFnError: It is called outside of such a function.
        """
        if not self._smp.in_step:
            raise BwdExecutionNotInStepFnError(
                "smp.DistributedModel's backward can only be run inside smp.step annotated function"
            )
        scale = getattr(job.state.optimizer, "loss_scale", 1.0) if job.state.cfg.fp16 else 1.0
        if scale != 1.0:
            tensors = tensors * scale if isinstance(tensors, torch.Tensor) else [t * scale for t in tensors]
        torch.autograd.backward(tensors, grad_tensors)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[DistributedModel]:
        """A context for steps in which some data-parallel ranks have more batches than others.

        A rank whose batches have run out takes part in the others' steps with gradients of zero. Gradients are divided
        by the number of all ranks. All ranks of a tensor-parallel group and of a pipeline have the same number of
        batches.

        Args:
            divide_by_initial_world_size: True.
            enable: False makes it a context without effect.
            throw_on_early_termination: False.

        Raises:
            SMPUnsupportedError: Another value is given.
        """
        if not divide_by_initial_world_size or throw_on_early_termination:
            raise SMPUnsupportedError(
                "join() divides gradients by the number of all ranks, and raises nothing when one of them ends",
                expected="divide_by_initial_world_size=True, throw_on_early_termination=False",
            )
        if enable and (job.state.cfg.shard_optimizer_state or self.narrow_type is not None):
            raise SMPUnsupportedError(
                "in join() a rank without batches does not step, so no other rank may need it for that",
                expected="neither shard_optimizer_state nor fp16 or bf16",
            )
        from neuron_compat.emulated.smp.stepping import shadow

        yield self
        if enable:
            shadow(self)

    def taken(self) -> None:
        self._smp.needs_spreading = True
        masters = masters_of(job.state.optimizer)
        if masters is not None:
            masters.take_weights()

    # -- hooks

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once the model is partitioned: at once. The handle removes nothing more."""
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        hook(self, job.state.optimizer)
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after the first step; at once, if that has been made."""
        handle = RemovableHandle(self._post_step_hooks)
        if self._smp.has_stepped:
            hook(self, job.state.optimizer)
        else:
            self._post_step_hooks[handle.id] = hook
        return handle

    def run_post_step_hooks(self) -> None:
        """Call the hooks that wait for the first step."""
        while self._post_step_hooks:
            self._post_step_hooks.popitem(last=False)[1](self, job.state.optimizer)


def _check(trace_device: Any, overlapping: Any, passes: Any, bucket: Any) -> None:
    """Refuse arguments that SMP refuses."""
    if trace_device not in ("cpu", "gpu"):
        raise SMPInvalidArgumentError("Trace_device must be one of `cpu` or `gpu`", found=repr(trace_device))
    if not isinstance(overlapping, bool):
        raise SMPInvalidArgumentError("overlapping_allreduce can only take one of `True` or `False`")
    if type(passes) is not int or passes < 1:
        raise SMPInvalidArgumentError("backward_passes_per_step needs to be an int", expected="1 or more", found=passes)
    if not isinstance(bucket, int | float) or bucket <= 0:
        raise SMPInvalidArgumentError("bucket_cap_mb is a number of MB above 0", found=bucket)


def _cast(value: Any, of: torch.dtype, to: torch.dtype) -> Any:
    """The same dicts, lists and tuples with the tensors of a type in them as another one."""
    return mapped(value, lambda tensor: tensor.to(to) if tensor.dtype == of else tensor)
