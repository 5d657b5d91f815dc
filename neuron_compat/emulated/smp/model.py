"""`DistributedModel`: a transparent module wrapper with SMP's methods, and the partition of each module.

The `partition` contexts record the partition of each module created in them; with ``auto_partition``, modules are
partitioned by their size in bytes. A pipeline rank owns one partition, which the ``local_`` methods return.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from neuron_compat.emulated.model_utils import TransparentModule, preserve_parallel_attributes, preserve_shared_weights
from neuron_compat.emulated.smp.mixed_precision import get_master_weights
from neuron_compat.emulated.smp.step import map_tensors
from neuron_compat.smp import job
from neuron_compat.smp.errors import (
    BwdExecutionNotInStepFnError,
    InvalidPartitionIDError,
    ModelTooSmallError,
    MultipleDistributedModelError,
    SMPInvalidArgumentError,
    SMPUnsupportedError,
    StepFunctionCalledError,
)
from neuron_compat.smp.model_state import ModelStateMixin
from neuron_compat.smp.state_entries import Partitions, StateEntry, find_entry_sharding, find_partition
from xla_ckpt.facade import ParsedRules, ShardingRules, parse_rules

_PARTITION_ATTRIBUTE = "_smp_partition"
"""Key of the partition in a module's ``__dict__``, so that copies of the module keep it."""

_entered_partitions: list[int] = []
"""Partitions of the active contexts; the last one is in effect."""

_original_init: list[Any] = []
"""Original `torch.nn.Module.__init__` while a context is active; empty otherwise."""


@contextlib.contextmanager
def _record_partition(index: int) -> Iterator[None]:
    """Record a partition in each module created in this block."""
    if not _entered_partitions:
        _original_init.append(torch.nn.Module.__init__)
        torch.nn.Module.__init__ = _init_and_record  # type: ignore[assignment]
    _entered_partitions.append(index)
    try:
        yield
    finally:
        _entered_partitions.pop()
        if not _entered_partitions:
            torch.nn.Module.__init__ = _original_init.pop()  # type: ignore[method-assign]


def _init_and_record(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Record the partition, in place of `torch.nn.Module.__init__` within a context."""
    module.__dict__[_PARTITION_ATTRIBUTE] = _entered_partitions[-1]
    _original_init[0](module, *args, **kwargs)


def _get_partition_count() -> int | None:
    """Return the number of partitions; None before `smp.init`, and with ``auto_partition``."""
    counts = job.state.initialized and not job.state.cfg.auto_partition
    return job.state.cfg.pipeline_parallel_degree if counts else None


def _check_partition(index: Any, count: int | None, name: str = "") -> None:
    """Raise an error for an invalid partition index.

    Raises:
        InvalidPartitionIDError: There is no such partition.
    """
    if type(index) is not int or index < 0 or (count is not None and index >= count):
        raise InvalidPartitionIDError(
            "Partition ID must be non-negative, and less than the pipeline parallel degree.",
            leaf=name or None,
            expected="0 or more" if count is None else f"0 to {count - 1}",
            found=repr(index),
        )


def partition(index: int) -> contextlib.AbstractContextManager[None]:
    """Return a context that assigns modules created in it to this partition. The innermost context is in effect.

    With ``auto_partition: True`` it has no effect.

    Raises:
        InvalidPartitionIDError: There is no such partition.
    """
    _check_partition(index, _get_partition_count())
    return _record_partition(index)


def set_partition(module: torch.nn.Module, partition: int, recurse: bool = True) -> None:
    """Assign a module to a partition, including its submodules unless `recurse` is False.

    With ``auto_partition: True`` it has no effect.

    Raises:
        InvalidPartitionIDError: There is no such partition.
        StepFunctionCalledError: The model has already run a step.
    """
    _check_partition(partition, _get_partition_count())
    model = job.state.model
    if model is not None and model._smp.has_stepped and any(module is m for m in model.module.modules()):
        raise StepFunctionCalledError(
            "The smp.step-decorated function needs to be called after using smp.set_partition API"
        )
    for part in module.modules() if recurse else [module]:
        part.__dict__[_PARTITION_ATTRIBUTE] = partition
    if model is not None:
        model.forget_partitions()


# -- the partition of every module


def get_assigned_partitions(model: torch.nn.Module, default: int, count: int) -> Partitions:
    """Return the partitions recorded by the contexts, and `default` for modules created outside of any.

    Raises:
        InvalidPartitionIDError: A context was entered before `smp.init`, and there is no such partition.
    """
    partitions = {
        name: int(module.__dict__.get(_PARTITION_ATTRIBUTE, default)) for name, module in model.named_modules()
    }
    for name, index in partitions.items():
        _check_partition(index, count, name)
    return partitions


def divide_into_partitions(model: torch.nn.Module, count: int) -> Partitions:
    """Partition a model into runs of modules, in the order of their names, with about the same number of bytes.

    The size of a module is the size of its own parameters and buffers; tied ones count once. Each partition gets at
    least one module with a size. A module without parameters or buffers is assigned to the partition of the next module
    inside of it, or otherwise of the last one before it. The same model gives the same partitions on all ranks and in
    every run.

    Raises:
        ModelTooSmallError: There are fewer such modules than partitions.
    """
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            sizes[name] = sum(t.numel() * t.element_size() for t in own if id(t) not in seen)
            seen.update(map(id, own))
    if count > 1 and len(sizes) < count:
        raise ModelTooSmallError(
            f"Model is too small to split into {count} partitions!", found=f"{len(sizes)} modules with parameters"
        )
    of_units = dict(zip(sizes, split_into_runs(list(sizes.values()), count), strict=True))
    partitions: Partitions = {}
    last = 0
    for name, _ in model.named_modules():
        inside = next((unit for unit in sizes if unit == name or unit.startswith(f"{name}.") or not name), None)
        last = of_units[inside] if inside is not None else last
        partitions[name] = last
    return partitions


def split_into_runs(sizes: Sequence[int], count: int) -> list[int]:
    """Return the run, of `count`, of each item. The runs have about the same sum, and none is empty.

    >>> split_into_runs([4, 4, 4, 4], 2), split_into_runs([9, 1, 1], 2), split_into_runs([1, 1, 9], 3)
    ([0, 0, 1, 1], [0, 1, 1], [0, 1, 2])
    """
    run_of: list[int] = []
    left = sum(sizes)
    for run in range(count):
        aim, total, first = left / (count - run), 0, len(run_of)
        while len(run_of) < len(sizes):
            size = sizes[len(run_of)]
            others_need_the_rest = len(sizes) - len(run_of) <= count - run - 1
            enough = total + size - aim > aim - total  # the sum is closer to the target without this one
            if len(run_of) > first and run < count - 1 and (others_need_the_rest or enough):
                break
            total += size
            run_of.append(run)
        left -= total
    return run_of


Self = TypeVar("Self", bound="DistributedModelBase")


class DistributedModelBase(ModelStateMixin, TransparentModule):  # type: ignore[misc]  # SMP's load_state_dict has more arguments
    """Transparent wrapper whose names, parameters and attributes are those of `module`.

    Args:
        rules: Sharding rules for parameters without sharding attributes.
    """

    def __init__(self, module: torch.nn.Module, rules: ParsedRules) -> None:
        super().__init__(module)
        self.training = module.training
        self._rules = rules
        self._partitions: Partitions | None = None

    # -- partitions

    @property
    def partitions(self) -> Partitions:
        """Partition of each module, by name."""
        if self._partitions is None:
            cfg = job.state.cfg
            count = cfg.pipeline_parallel_degree
            if cfg.auto_partition or count == 1:
                self._partitions = divide_into_partitions(self.module, count)
            else:
                self._partitions = get_assigned_partitions(self.module, cfg.default_partition, count)
        return self._partitions

    def enforce_partitions(self, partitions: Partitions) -> None:
        """Use the partitions of a checkpoint. No effect after the first step."""
        self._partitions = dict(partitions)

    def forget_partitions(self) -> None:
        """Clear the partitions, so that they are computed again on next use."""
        self._partitions = None

    def size(self) -> int:
        """Return the size of this rank's parameters in bytes."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def buffer_entries(self) -> list[StateEntry]:
        """Return the buffers, including non-persistent ones."""
        mesh = job.get_rank_info().mesh
        entries: dict[int, StateEntry] = {}
        for name, part in self.module.named_modules():
            for own, buffer in part.named_buffers(recurse=False):
                called = f"{name}.{own}" if name else own
                lies = find_entry_sharding(buffer, called, mesh, self._rules)
                entries.setdefault(
                    id(buffer), StateEntry(called, buffer, (find_partition(name, self.partitions),), lies)
                )
        return list(entries.values())

    # -- this rank's partition

    def local_named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of this rank's partition, with their names."""
        here = job.pp_rank()
        for name, module in self.module.named_modules(memo=memo):
            if find_partition(name, self.partitions) == here:
                yield f"{prefix}.{name}" if prefix and name else prefix or name, module

    def local_modules(self) -> Iterator[torch.nn.Module]:
        """Yield the modules of this rank's partition."""
        for _, module in self.local_named_modules():
            yield module

    def _get_local_ids(self) -> set[int]:
        """Return the ids of parameters and buffers registered in modules of this rank's partition."""
        parts = self.local_modules()
        return {id(t) for m in parts for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}

    def local_named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of this rank's partition, with their names."""
        local = self._get_local_ids()
        for name, parameter in self.module.named_parameters(recurse=recurse):
            if id(parameter) in local:
                yield name, parameter

    def local_parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this rank's partition."""
        for _, parameter in self.local_named_parameters(recurse):
            yield parameter

    def local_named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of this rank's partition, with their names."""
        local = self._get_local_ids()
        for name, buffer in self.module.named_buffers(prefix=prefix, recurse=recurse):
            if id(buffer) in local:
                yield name, buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers of this rank's partition."""
        for _, buffer in self.local_named_buffers(recurse=recurse):
            yield buffer

    def is_local_parameter(self, param: str | torch.Tensor) -> bool:
        """Return True if a parameter, given by value or name, is in this rank's partition."""
        return any(param is p or param == n for n, p in self.local_named_parameters())

    def is_local_buffer(self, buffer: str | torch.Tensor) -> bool:
        """Return True if a buffer, given by value or name, is in this rank's partition."""
        return any(buffer is b or (isinstance(buffer, str) and buffer == n) for n, b in self.local_named_buffers())

    def is_distributed_parameter(self, param: torch.Tensor) -> bool:
        """Return True if a parameter is sharded over tensor-parallel ranks."""
        return any(entry.value is param and entry.is_split for entry in self.entries())

    def cpu(self: Self) -> Self:
        """Move parameters and buffers to the CPU. Every rank already has all partitions."""
        return self.to("cpu")

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch creates new parameters for the move to XLA, without ties and attributes.
        with preserve_shared_weights(self.module), preserve_parallel_attributes(self.module):
            return super()._apply(fn, recurse)


Hook = Callable[[Any, Any], Any]


@dataclass(slots=True)
class TrainingProgress:
    """Training progress of a model."""

    has_stepped: bool = False
    """True after the first step; the partitions no longer change then."""
    needs_spreading: bool = True
    """True if the next step begins by broadcasting the values of the owners, and of the first data-parallel rank."""
    in_step: bool = False
    """True while a function with ``@smp.step`` runs."""
    turn: Any = None
    """Agreement of the ranks on the last step (`replicas.StepPlan`); None before the first one."""
    reduce_kind: str | None = None
    """Group of ranks over which gradients are averaged; None before the first step."""
    unsynced_passes: int = 0
    """Number of steps with a backward pass since gradients were averaged."""


class DistributedModel(DistributedModelBase):
    """Module with SMP's methods. Its names, parameters and attributes are those of the inner module.

    Every rank creates the whole module, and runs it. A pipeline rank owns one partition of it, which `local_state_dict`
    and the other ``local_`` methods return: `smp.partition` assigns modules to partitions, or ``auto_partition``
    divides them evenly by bytes. The model is partitioned immediately.

    Weights are sharded over tensor-parallel ranks by the layers of `neuron_compat.nxd.parallel_layers`, by others whose
    parameters have neuronx-distributed's attributes, or by `shardings`. **The ranks of a tensor-parallel group then
    receive the same batch** (selected by `rdp_rank`), unlike in SMP. In a model without sharded weights they receive
    different batches (selected by `dp_rank`), as in SMP.

    Args:
        module: The module. With ``fp16`` or ``bf16``, its floating-point parameters and buffers are cast to that dtype;
            inputs are cast to it, and outputs to float32.
        trace_device: ``"cpu"`` or ``"gpu"``; nothing is traced.
        trace_execution_times: Accepted.
        trace_memory_usage: Accepted.
        overlapping_allreduce: Accepted: gradients are always averaged at the end of a step.
        backward_passes_per_step: Number of steps after which gradients are averaged over the data-parallel ranks.
        average_grads_across_microbatches: True divides gradients by the number of microbatches in a step.
        bucket_cap_mb: Accepted if it is above 0.
        find_unused_parameters: Accepted: parameters without gradients are always detected.
        broadcast_buffers: True begins each step with the buffers of the first data-parallel rank.
        gradient_as_bucket_view: Accepted.
        shardings: Rules for parameters without sharding attributes, as in `xla_ckpt.save_checkpoint`: (regex, spec).

    Raises:
        NotInitializedError: `smp.init` was not called.
        MultipleDistributedModelError: This process has already wrapped a model.
        SMPInvalidArgumentError: An argument is invalid.
        InvalidPartitionIDError: A context used a partition that does not exist.
        ModelTooSmallError: The model has fewer modules with parameters than partitions.
        xla_ckpt.UnsupportedStateError: The attributes of a parameter contradict each other.
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
        shardings: ShardingRules | None = None,
    ) -> None:
        job.get_rank_info()
        _check_arguments(trace_device, overlapping_allreduce, backward_passes_per_step, bucket_cap_mb)
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
        self._smp = TrainingProgress()
        self._post_partition_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Hook] = OrderedDict()
        if self.narrow_type is not None:
            module.to(self.narrow_type)
        self.entries()  # finds contradictions now, not in the first save
        job.state.model = self

    def __repr__(self) -> str:
        return f"DistributedModel({self.module!r})"

    # -- properties

    @property
    def partitioned(self) -> bool:
        """True, because the model is partitioned immediately."""
        return True

    @property
    def narrow_type(self) -> torch.dtype | None:
        """16-bit dtype that the model computes in; None if it uses the module's own dtype."""
        cfg = job.state.cfg
        return torch.float16 if cfg.fp16 or cfg.fp16_params else torch.bfloat16 if cfg.bf16 else None

    # -- execution

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        job.state.apply_pending_loads()
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
        """Run `torch.autograd.backward` inside of a function with ``@smp.step``.

        With ``fp16`` and a `DistributedOptimizer`, the tensors are multiplied by its loss scale.

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
        """Return a context for steps in which some data-parallel ranks have more batches than others.

        A rank without further batches participates in the others' steps with zero gradients. Gradients are divided by
        the number of all ranks. All ranks of a tensor-parallel group and of a pipeline must have the same number of
        batches.

        Args:
            divide_by_initial_world_size: Must be True.
            enable: False disables the context.
            throw_on_early_termination: Must be False.

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
        from neuron_compat.emulated.smp.step import join_remaining_steps

        yield self
        if enable:
            join_remaining_steps(self)

    def taken(self) -> None:
        self._smp.needs_spreading = True
        masters = get_master_weights(job.state.optimizer)
        if masters is not None:
            masters.take_weights()

    # -- hooks

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` immediately, because the model is partitioned. The handle removes nothing."""
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        hook(self, job.state.optimizer)
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after the first step, or immediately if it has run."""
        handle = RemovableHandle(self._post_step_hooks)
        if self._smp.has_stepped:
            hook(self, job.state.optimizer)
        else:
            self._post_step_hooks[handle.id] = hook
        return handle

    def run_post_step_hooks(self) -> None:
        """Call the hooks registered for the first step."""
        while self._post_step_hooks:
            self._post_step_hooks.popitem(last=False)[1](self, job.state.optimizer)


def _check_arguments(trace_device: Any, overlapping: Any, passes: Any, bucket: Any) -> None:
    """Raise an error for arguments that SMP rejects."""
    if trace_device not in ("cpu", "gpu"):
        raise SMPInvalidArgumentError("Trace_device must be one of `cpu` or `gpu`", found=repr(trace_device))
    if not isinstance(overlapping, bool):
        raise SMPInvalidArgumentError("overlapping_allreduce can only take one of `True` or `False`")
    if type(passes) is not int or passes < 1:
        raise SMPInvalidArgumentError("backward_passes_per_step needs to be an int", expected="1 or more", found=passes)
    if not isinstance(bucket, int | float) or bucket <= 0:
        raise SMPInvalidArgumentError("bucket_cap_mb is a number of MB above 0", found=bucket)


def _cast(value: Any, of: torch.dtype, to: torch.dtype) -> Any:
    """Return the same dicts, lists and tuples, with the tensors of dtype `of` cast to `to`."""
    return map_tensors(value, lambda tensor: tensor.to(to) if tensor.dtype == of else tensor)
