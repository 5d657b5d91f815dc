"""``@smp.step``: run a function once for each microbatch, and synchronize the ranks around it.

There is no pipeline: every pipeline rank calls the function on the whole model, with the batch and the random numbers
of pipeline rank 0. All of them therefore compute the same values, and each saves the partition that it owns. Batches
are split into microbatches, and the outputs are collected in a `StepOutput`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from neuron_compat.emulated import random
from neuron_compat.emulated.smp import replicas
from neuron_compat.emulated.smp.mixed_precision import get_master_weights
from neuron_compat.emulated.smp.replicas import StepPlan
from neuron_compat.smp import comm, job
from neuron_compat.smp.errors import (
    DistributedModelNotWrappedError,
    InvalidStepOutputError,
    SMPInvalidArgumentError,
    SMPValidationError,
    TensorSplitError,
)
from neuron_compat.smp.rank_sync import run_on_all_ranks
from xla_ckpt.facade import map_leaves
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)


class StepOutput:
    """Outputs of a step for one returned tensor, one for each microbatch.

    Raises:
        InvalidStepOutputError: The outputs are not a list or a tuple.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        if not isinstance(outputs, list | tuple):
            raise InvalidStepOutputError(
                f"StepOutput only accepts list or tuple, but get {type(outputs)}", found=type(outputs).__name__
            )
        self._outputs: Any = outputs

    def __getitem__(self, index: int) -> Any:
        return self._outputs[index]

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"

    @property
    def outputs(self) -> Any:
        """Outputs of the microbatches, in order."""
        return self._outputs

    def reduce_mean(self) -> Any:
        """Return the mean of the outputs."""
        return self.process_outputs(lambda values: sum(values) / len(values))

    def reduce_sum(self) -> Any:
        """Return the sum of the outputs."""
        return self.process_outputs(sum)

    def concat(self) -> torch.Tensor:
        """Concatenate the outputs along dim 0, as in the batch."""
        whole: torch.Tensor = self.process_outputs(lambda values: torch.cat(list(values), dim=0))
        return whole

    def stack(self) -> torch.Tensor:
        """Stack the outputs along a new first dim."""
        stacked: torch.Tensor = self.process_outputs(lambda values: torch.stack(list(values)))
        return stacked

    def process_outputs(self, func: Callable[[Any], Any]) -> Any:
        """Return the result of a function of the list of outputs."""
        return func(self._outputs)

    def map(self, func: Callable[[Any], Any]) -> StepOutput:
        """Apply a function to each output in place, and return this object."""
        self._outputs = [func(output) for output in self._outputs]
        return self

    def add_output(self, out: Any) -> None:
        """Append an output."""
        self._outputs.append(out)

    def clear(self) -> None:
        """Remove all outputs."""
        self._outputs = None


def build_step_output(outputs: list[Any]) -> Any:
    """Build the return value of a step: the structure returned for a microbatch, with a `StepOutput` per tensor."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(outputs)
    if isinstance(first, dict):
        return {key: build_step_output([output[key] for output in outputs]) for key in first}
    if isinstance(first, list | tuple):
        inside = [build_step_output([output[i] for output in outputs]) for i in range(len(first))]
        if hasattr(first, "_fields"):
            return type(first)(*inside)
        return inside if isinstance(first, list) else tuple(inside)
    return outputs


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same dicts, lists and tuples, with `function` applied to each tensor."""
    return _map_leaves(value, lambda inner: function(inner) if isinstance(inner, torch.Tensor) else inner)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same dicts, lists and tuples, with `function` applied to each leaf."""
    return map_leaves(value, lambda _, leaf: function(leaf), is_leaf=_is_other_mapping, keep_classes=True)


def _is_other_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, dict)


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in dicts, lists and tuples, in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def split_microbatches(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: Sequence[str],
    axes: Mapping[str, int],
    count: int,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of a function for each microbatch.

    Args:
        func: The function, for the names of its arguments.
        whole: Names of arguments that are not split.
        axes: Name -> the dim along which an argument is split; 0 for the others.

    Raises:
        TensorSplitError: A tensor is not divisible.
    """
    names = [p.name for p in inspect.signature(func).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [*zip([*names, *("an argument" for _ in args[len(names) :])], args, strict=False), *kwargs.items()]
    microbatches = []
    for number in range(count):
        parts = [
            _slice_argument(value, name, count, number, axes.get(name, 0), is_split=name not in whole)
            for name, value in named
        ]
        given = len(args)
        microbatches.append((tuple(parts[:given]), dict(zip(kwargs, parts[given:], strict=True))))
    return microbatches


def _slice_argument(value: Any, name: str, count: int, number: int, axis: int, *, is_split: bool) -> Any:
    """Return the slice of an argument for one microbatch."""

    def one(inner: Any) -> Any:
        if hasattr(inner, "smp_slice"):
            return inner.smp_slice(count, number, axis)
        if isinstance(inner, StepOutput):
            return inner.outputs[number]
        if not is_split or count == 1:
            return inner
        if not isinstance(inner, torch.Tensor):
            if not isinstance(inner, _UNSPLIT_TYPES) and not callable(inner):
                _warn_unsplit(type(inner).__name__)
            return inner
        return _slice_tensor(inner, name, count, number, axis)

    return _map_leaves(value, one)


_UNSPLIT_TYPES = (str, int, float, complex, bytes, bytearray, type(None), torch.device, torch.dtype, argparse.Namespace)
"""Types that are never split."""


@functools.cache
def _warn_unsplit(kind: str) -> None:
    logger.warning(
        "An object of type %s is passed to each microbatch as it is. If it holds tensors that are to be split, give it "
        "a method smp_slice(num_mb, mb, axis), or pass a dict of them.",
        kind,
    )


def _slice_tensor(tensor: torch.Tensor, name: str, count: int, number: int, axis: int) -> torch.Tensor:
    """Return the slice of a tensor for one microbatch, as a view."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise TensorSplitError(
            f"a tensor in {name} has no dim {axis}, along which it would be split into microbatches",
            found=f"shape {list(tensor.shape)}",
            hint=f'Name it: @smp.step(non_split_inputs=["{name}"]), or its dim in input_split_axes.',
        )
    size = tensor.shape[axis]
    if size % count:
        raise TensorSplitError(
            f"a batch does not divide into microbatches: {name} has {size} along dim {axis}",
            expected=f"a multiple of {count} (microbatches)",
            found=size,
            hint="Choose another batch size, or leave out the last batch (drop_last=True of a DataLoader).",
        )
    part: torch.Tensor = tensor.narrow(axis, number * (size // count), size // count)
    return part


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepFunction:
    """Function with ``@smp.step``; see `step`."""

    def __init__(
        self,
        func: Callable[..., Any],
        non_split_inputs: list[str] | None,
        input_split_axes: dict[str, int] | None,
        detach_outputs: bool,
    ) -> None:
        self.func = func
        self.non_split_inputs = non_split_inputs or []
        self.input_split_axes = input_split_axes or {}
        self.detach_outputs = detach_outputs
        self.__name__ = getattr(func, "__name__", "step")
        self.__doc__ = func.__doc__
        self._checked = False
        _check_names(func, non_split_inputs, input_split_axes)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind the function to an object, as methods are."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        job.get_rank_info()
        model = job.state.model
        if model is None:
            raise DistributedModelNotWrappedError(
                "The model needs to be wrapped with smp.DistributedModel before calling a smp.step-decorated function"
            )
        job.state.apply_pending_loads()
        with _share_rng_states(model):
            batches = _prepare_step(model, lambda: self._split_batch(model, args, kwargs))
            outputs = []
            with _accumulate_gradients(model):
                for batch_args, batch_kwargs in batches:
                    output = self.func(*batch_args, **batch_kwargs)
                    outputs.append(map_tensors(output, lambda t: t.detach()) if self.detach_outputs else output)
        return build_step_output(outputs)

    def _split_batch(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """Return the arguments for each microbatch."""
        args, kwargs = _take_first_stage_tensors(args, kwargs)
        if not self._checked:
            _check_same_batch(model, list_tensors((args, kwargs)))
            self._checked = True
        return split_microbatches(
            self.func, args, kwargs, self.non_split_inputs, self.input_split_axes, job.num_microbatches()
        )


def step(
    func: Callable[..., Any] | None = None,
    non_split_inputs: list[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorate a function to run once for each microbatch, accumulating gradients.

    Tensors in its arguments, also in dicts, lists and tuples, are split into ``microbatches`` equal parts along dim 0.
    Objects with a method ``smp_slice(num_mb, mb, axis)`` split themselves; from a `StepOutput`, each microbatch
    receives its own output. All other values are passed unchanged. At the end, gradients are divided by the number of
    microbatches (unless the model has ``average_grads_across_microbatches=False``), and with ``ddp`` averaged over the
    data-parallel ranks.

    The ranks of a pipeline receive the batch of its first rank. If the weights of the model are sharded, the ranks of a
    tensor-parallel group must receive the same batch, selected by `rdp_rank`. Otherwise they are data-parallel, and
    their batches are selected by `dp_rank`.

    Args:
        func: The function.
        non_split_inputs: Names of its arguments that are passed to each microbatch without splitting.
        input_split_axes: Name of an argument -> the dim along which it is split.
        detach_outputs: True detaches the returned tensors.

    Returns:
        A function that returns the values of `func`, with a `StepOutput` in place of each tensor, and a list of the
        values for all microbatches in place of any other value.

    Raises:
        SMPInvalidArgumentError: `func` has no such argument.
    """

    def decorated(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)

    return decorated if func is None else decorated(func)


def _check_names(func: Callable[..., Any], whole: Any, axes: Any) -> None:
    """Raise an error for names that are not arguments of the function."""
    if whole is not None and not isinstance(whole, list):
        raise SMPInvalidArgumentError("Non-split inputs must be a list.", found=type(whole).__name__)
    if axes is not None and not isinstance(axes, dict):
        raise SMPInvalidArgumentError("input_split_axes must be a dict.", found=type(axes).__name__)
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for what, names in (("Non-split inputs list", whole or []), ("Input split axes dict", axes or {})):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise SMPInvalidArgumentError(
                f"{what} {names} contains a non-argument of {getattr(func, '__name__', func)}.",
                expected=", ".join(known),
                found=", ".join(map(str, unknown)),
            )


# -- around the microbatches


def _prepare_step(model: Any, batches: Callable[[], list[Arguments]]) -> list[Arguments]:
    """Return the microbatches after synchronizing parameters; raise the same error on all ranks if one fails."""
    microbatches: list[Arguments] = []
    error: Exception | None = None
    try:
        microbatches = batches()
    except Exception as caught:  # sent to all ranks, and raised on all of them
        error = caught
    progress = model._smp
    reduces = bool(job.state.cfg.ddp) and progress.unsynced_passes + 1 >= model.backward_passes_per_step
    turn = replicas.agree_on_step(broadcasts=progress.needs_spreading, reduces=reduces, failed=error is not None)
    _sync_before_step(model, turn, error)
    progress.turn = turn
    return microbatches


def _sync_before_step(model: Any, plan: StepPlan, error: Exception | None = None) -> None:
    """Synchronize all ranks before a step, including those without a batch."""
    if plan.failed:

        def fail() -> None:
            if error is not None:
                raise error

        run_on_all_ranks("world", "smp.step", fail)
    if plan.broadcasts:
        broadcast_state(model, plan)
    elif job.state.cfg.ddp and model.broadcast_buffers:
        replicas.broadcast_from_replica(model.buffer_entries(), plan.alive)
    model._smp.needs_spreading = False
    model._smp.has_stepped = True


def broadcast_state(model: Any, plan: StepPlan) -> None:
    """Broadcast parameters and buffers among all ranks that hold the same ones."""
    entries = model.entries()
    known = {id(e.value) for e in entries if e.is_tensor}
    entries += [entry for entry in model.buffer_entries() if id(entry.value) not in known]
    masters = get_master_weights(job.state.optimizer)
    if masters is not None:  # the parameters are rounded from them
        lies = {id(e.value): e for e in entries}
        entries += [replace(lies[id(narrow)], value=master) for narrow, master in masters if id(narrow) in lies]
    replicas.broadcast_from_owners(entries)
    if job.state.cfg.ddp:
        replicas.broadcast_from_replica(entries, plan.alive)


def get_reduce_kind(model: Any) -> str:
    """Return the group to average gradients over. It includes tensor-parallel ranks if no weights are sharded."""
    progress = model._smp
    if progress.reduce_kind is None:
        progress.reduce_kind = "rdp" if any(entry.is_split for entry in model.entries()) else "dp"
    kind: str = progress.reduce_kind
    return kind


@contextlib.contextmanager
def _accumulate_gradients(model: Any) -> Iterator[None]:
    """Accumulate the gradients of the block's microbatches, divided by their number and averaged over ranks."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    progress = model._smp
    for parameter in parameters:
        parameter.grad = None
    progress.in_step = True
    done = False
    try:
        yield
        done = True
    finally:
        progress.in_step = False
        if not done:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
    had_backward = any(p.grad is not None for p in parameters)
    _add_previous_gradients(model, parameters, before)
    _finish_step(model, parameters, progress.turn, had_backward)
    model.run_post_step_hooks()


@torch.no_grad()
def _add_previous_gradients(
    model: Any, parameters: list[torch.nn.Parameter], before: list[torch.Tensor | None]
) -> None:
    """Divide the gradients by the number of microbatches, and add the previous gradients."""
    count = job.num_microbatches() if model.average_grads_across_microbatches else 1
    for parameter, earlier in zip(parameters, before, strict=True):
        if parameter.grad is not None and count > 1:
            parameter.grad.div_(count)
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _finish_step(model: Any, parameters: list[torch.nn.Parameter], plan: StepPlan, had_backward: bool) -> None:
    """Average the gradients if this step is due to."""
    progress = model._smp
    progress.unsynced_passes += had_backward
    if plan.reduces and job.state.cfg.ddp:
        _average_gradients(model, parameters, had_backward)
        progress.unsynced_passes = 0 if had_backward else progress.unsynced_passes
    optimizer = job.state.optimizer
    if had_backward and hasattr(optimizer, "update_master_grads"):
        optimizer.update_master_grads()


def _average_gradients(model: Any, parameters: list[torch.nn.Parameter], had_backward: bool) -> None:
    """Average the gradients over the ranks that hold the same parameters, if there are several."""
    kind = get_reduce_kind(model)
    if len(job.get_rank_info().groups[kind]) > 1:
        replicas.check_gradients_dense(list(model.named_parameters()))
        replicas.average_gradients(parameters, kind, had_backward)


def join_remaining_steps(model: Any) -> None:
    """Participate in the steps of other ranks until none has a batch; then copy the parameters of the last ones."""
    last = model._smp.turn
    while True:
        turn = replicas.agree_on_step(alive=False)
        if not turn.alive:
            break
        last = turn
        _sync_before_step(model, turn)
        if turn.reduces:
            parameters = [p for p in model.module.parameters() if p.requires_grad]
            before = [p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None
            _average_gradients(model, parameters, had_backward=False)
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
    if last is not None and len(last.alive) < job.size():
        replicas.broadcast_from_replica(model.entries(), last.alive)


# -- the same batch and the same random numbers


def _take_first_stage_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments with the tensors of the pipeline's first rank."""
    if job.pp_size() == 1:
        return args, kwargs
    tensors = list_tensors((args, kwargs))
    if job.pp_rank() == 0:
        comm.broadcast([t.detach().cpu() for t in tensors], comm.PP_GROUP)
        return args, kwargs
    theirs = comm.recv_from(0, comm.RankType.PP_RANK)
    if len(theirs) != len(tensors):
        raise SMPInvalidArgumentError(
            "the ranks of a pipeline call a step with different arguments",
            expected=f"{len(theirs)} tensors, as on pp_rank 0",
            found=f"{len(tensors)} on pp_rank {job.pp_rank()}",
            hint="Give all ranks of a pipeline the same data: that of their dp_rank.",
        )
    moved = iter([t.to(own.device).requires_grad_(own.requires_grad) for t, own in zip(theirs, tensors, strict=True)])
    taken: Arguments = map_tensors((args, kwargs), lambda _: next(moved))
    return taken


@contextlib.contextmanager
def _share_rng_states(model: Any) -> Iterator[None]:
    """Use the random states of the pipeline's first rank within the block."""
    if job.pp_size() == 1:
        yield
        return
    first = next(model.module.parameters(), None)
    states = random.get_rng_states(include_xla=first is not None and first.device.type == "xla")
    if job.pp_rank() == 0:
        comm.broadcast(states, comm.PP_GROUP)
        yield
        return
    random.set_rng_states(comm.recv_from(0, comm.RankType.PP_RANK))
    try:
        yield
    finally:
        random.set_rng_states(states)


def _check_same_batch(model: Any, tensors: list[torch.Tensor]) -> None:
    """Raise an error if the ranks of a tensor-parallel group have different batches, and weights are sharded over them.

    Raises:
        SMPValidationError: The batches differ, so that sums would mix them.
    """
    if job.tp_size() == 1 or get_reduce_kind(model) == "dp":
        return

    def digest() -> str:
        total = hashlib.sha256()
        for tensor in tensors:
            total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    digests = run_on_all_ranks("tp", "smp.step", digest)
    if len(set(digests)) > 1:
        raise SMPValidationError(
            "the ranks of a tensor-parallel group were given different batches",
            expected="the same batch, since the model's weights are split over them",
            found=f"{len(set(digests))} different ones on ranks {', '.join(map(str, job.get_tp_group()))}",
            hint="Choose the data by smp.rdp_rank() and smp.rdp_size(), not by smp.dp_rank() and smp.dp_size().",
        )
