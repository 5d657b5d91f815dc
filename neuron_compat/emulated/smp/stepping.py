"""``@smp.step``: a function that is called once for each microbatch, and what the ranks of the job do around that.

There is no pipeline: every pipeline rank calls the function with the batch of pipeline rank 0, and with its random
numbers, on the whole model. So all of them compute the same, and each keeps what its partition owns.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from neuron_compat.emulated import random
from neuron_compat.emulated.smp import replicas
from neuron_compat.emulated.smp.master_weights import masters_of
from neuron_compat.emulated.smp.microbatches import as_step_output, leaves, mapped, split
from neuron_compat.emulated.smp.replicas import Turn
from neuron_compat.smp import comm, job
from neuron_compat.smp.errors import DistributedModelNotWrappedError, SMPInvalidArgumentError, SMPValidationError
from neuron_compat.smp.meeting import together

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepFunction:
    """A function with ``@smp.step``; see `step`."""

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
        """Bound to an object, as functions of a class are."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        job.ranks()
        model = job.state.model
        if model is None:
            raise DistributedModelNotWrappedError(
                "The model needs to be wrapped with smp.DistributedModel before calling a smp.step-decorated function"
            )
        job.state.apply_pending()
        with _same_random_numbers(model):
            batches = _begin(model, lambda: self._batches(model, args, kwargs))
            outputs = []
            with _gradients(model):
                for batch_args, batch_kwargs in batches:
                    output = self.func(*batch_args, **batch_kwargs)
                    outputs.append(mapped(output, lambda t: t.detach()) if self.detach_outputs else output)
        return as_step_output(outputs)

    def _batches(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """The arguments for each microbatch."""
        args, kwargs = _of_first_stage(args, kwargs)
        if not self._checked:
            _check_tensor_parallel(model, leaves((args, kwargs)))
            self._checked = True
        return split(self.func, args, kwargs, self.non_split_inputs, self.input_split_axes, job.num_microbatches())


def step(
    func: Callable[..., Any] | None = None,
    non_split_inputs: list[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """A decorator: the function is called once for each microbatch, and gradients add up over them.

    Tensors among its arguments, in dicts, lists and tuples, too, are split into ``microbatches`` equal parts along dim
    0. Objects with a method ``smp_slice(num_mb, mb, axis)`` split themselves; a `StepOutput` gives each microbatch its
    own. Everything else is passed as it is. When all are done, gradients are divided by their number (unless the model
    has ``average_grads_across_microbatches=False``), and with ``ddp`` averaged over the data-parallel ranks.

    Ranks of a pipeline get the batch of the first of them. Ranks of a tensor-parallel group have to be given the same
    batch, if the model's weights are split over them; their data is that of their `rdp_rank`. Where nothing is split,
    they are data-parallel, and their data is that of their `dp_rank`.

    Args:
        func: The function.
        non_split_inputs: Names of its arguments that are passed whole to each microbatch.
        input_split_axes: Name of an argument -> the dim along which it is split.
        detach_outputs: Whether what it returns is detached.

    Returns:
        A function that returns what `func` does, with a `StepOutput` in the place of each tensor, and a list with the
        value of each microbatch in the place of any other value.

    Raises:
        SMPInvalidArgumentError: `func` has no such argument.
    """

    def decorated(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)

    return decorated if func is None else decorated(func)


def _check_names(func: Callable[..., Any], whole: Any, axes: Any) -> None:
    """Refuse names of arguments that the function does not have."""
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


def _begin(model: Any, batches: Callable[[], list[Arguments]]) -> list[Arguments]:
    """The microbatches, and the same parameters on all ranks; or one error on all of them."""
    microbatches: list[Arguments] = []
    error: Exception | None = None
    try:
        microbatches = batches()
    except Exception as caught:  # told to all ranks, and raised on all of them
        error = caught
    progress = model._smp
    reduces = bool(job.state.cfg.ddp) and progress.unsynced_passes + 1 >= model.backward_passes_per_step
    turn = replicas.turn(spreads=progress.needs_spreading, reduces=reduces, failed=error is not None)
    _take_part(model, turn, error)
    progress.turn = turn
    return microbatches


def _take_part(model: Any, turn: Turn, error: Exception | None = None) -> None:
    """What all ranks do before a step, those without a batch included."""
    if turn.failed:

        def fail() -> None:
            if error is not None:
                raise error

        together("world", "smp.step", fail)
    if turn.spreads:
        spread(model, turn)
    elif job.state.cfg.ddp and model.broadcast_buffers:
        replicas.take_from_replica(model.buffer_entries(), turn.alive)
    model._smp.needs_spreading = False
    model._smp.has_stepped = True


def spread(model: Any, turn: Turn) -> None:
    """Give all ranks that hold the same parameters and buffers the values of one of them."""
    entries = model.entries()
    known = {id(e.value) for e in entries if e.is_tensor}
    entries += [entry for entry in model.buffer_entries() if id(entry.value) not in known]
    masters = masters_of(job.state.optimizer)
    if masters is not None:  # they are what the parameters are rounded from
        lies = {id(e.value): e for e in entries}
        entries += [replace(lies[id(narrow)], value=master) for narrow, master in masters if id(narrow) in lies]
    replicas.take_from_owners(entries)
    if job.state.cfg.ddp:
        replicas.take_from_replica(entries, turn.alive)


def reduce_kind(model: Any) -> str:
    """The ranks over which gradients are averaged. Where nothing is split, tensor-parallel ranks have own batches."""
    progress = model._smp
    if progress.reduce_kind is None:
        progress.reduce_kind = "rdp" if any(entry.is_split for entry in model.entries()) else "dp"
    kind: str = progress.reduce_kind
    return kind


@contextlib.contextmanager
def _gradients(model: Any) -> Iterator[None]:
    """Gradients of the microbatches in the block, divided by their number and averaged, on top of those before it."""
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
    _add_up(model, parameters, before)
    _finish(model, parameters, progress.turn, had_backward)
    model.run_post_step_hooks()


@torch.no_grad()
def _add_up(model: Any, parameters: list[torch.nn.Parameter], before: list[torch.Tensor | None]) -> None:
    """Divide the gradients by the number of microbatches, and add those that were there before."""
    count = job.num_microbatches() if model.average_grads_across_microbatches else 1
    for parameter, earlier in zip(parameters, before, strict=True):
        if parameter.grad is not None and count > 1:
            parameter.grad.div_(count)
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _finish(model: Any, parameters: list[torch.nn.Parameter], turn: Turn, had_backward: bool) -> None:
    """Average the gradients, if this step does."""
    progress = model._smp
    progress.unsynced_passes += had_backward
    if turn.reduces and job.state.cfg.ddp:
        _average(model, parameters, had_backward)
        progress.unsynced_passes = 0 if had_backward else progress.unsynced_passes
    optimizer = job.state.optimizer
    if had_backward and hasattr(optimizer, "update_master_grads"):
        optimizer.update_master_grads()


def _average(model: Any, parameters: list[torch.nn.Parameter], had_backward: bool) -> None:
    """Average the gradients over the ranks that hold the same parameters, where there are several."""
    kind = reduce_kind(model)
    if len(job.ranks().groups[kind]) > 1:
        replicas.check_dense(list(model.named_parameters()))
        replicas.average(parameters, kind, had_backward)


def shadow(model: Any) -> None:
    """Take part in the steps of other ranks until none has a batch; then take over the parameters of the last ones."""
    last = model._smp.turn
    while True:
        turn = replicas.turn(alive=False)
        if not turn.alive:
            break
        last = turn
        _take_part(model, turn)
        if turn.reduces:
            parameters = [p for p in model.module.parameters() if p.requires_grad]
            before = [p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None
            _average(model, parameters, had_backward=False)
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
    if last is not None and len(last.alive) < job.size():
        replicas.take_from_replica(model.entries(), last.alive)


# -- the same batch and the same random numbers


def _of_first_stage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments with the tensors that the first rank of the pipeline was given."""
    if job.pp_size() == 1:
        return args, kwargs
    tensors = leaves((args, kwargs))
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
    taken: Arguments = mapped((args, kwargs), lambda _: next(moved))
    return taken


@contextlib.contextmanager
def _same_random_numbers(model: Any) -> Iterator[None]:
    """In the block, the ranks of a pipeline draw the random numbers of its first rank."""
    if job.pp_size() == 1:
        yield
        return
    first = next(model.module.parameters(), None)
    states = random.states(of_xla=first is not None and first.device.type == "xla")
    if job.pp_rank() == 0:
        comm.broadcast(states, comm.PP_GROUP)
        yield
        return
    random.continue_with(comm.recv_from(0, comm.RankType.PP_RANK))
    try:
        yield
    finally:
        random.continue_with(states)


def _check_tensor_parallel(model: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse ranks of a tensor-parallel group that were given different batches, where weights are split over them.

    Raises:
        SMPValidationError: They were: their sums would mix the batches.
    """
    if job.tp_size() == 1 or reduce_kind(model) == "dp":
        return

    def digest() -> str:
        total = hashlib.sha256()
        for tensor in tensors:
            total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    digests = together("tp", "smp.step", digest)
    if len(set(digests)) > 1:
        raise SMPValidationError(
            "the ranks of a tensor-parallel group were given different batches",
            expected="the same batch, since the model's weights are split over them",
            found=f"{len(set(digests))} different ones on ranks {', '.join(map(str, job.get_tp_group()))}",
            hint="Choose the data by smp.rdp_rank() and smp.rdp_size(), not by smp.dp_rank() and smp.dp_size().",
        )
