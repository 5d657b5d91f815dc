"""Emulate many XLA devices on CPUs: torch_xla's queries and collectives over gloo, one process for each device.

Under torchrun every process has its own XLA client with one device: `xr.world_size()` is 1, and XLA's collectives
reach no other process. `emulate()` replaces torch_xla's queries and collectives with ones for the whole job, over
gloo. Sums are computed in the order of the ranks, so that every rank gets the same bits in every run. It is for tests
and continuous integration: every collective ends the lazy graph and copies through host memory.

Emulated are `torch_xla.runtime`'s ``global_ordinal``, ``world_size``, ``global_device_count``, ``process_index``,
``process_count``, ``local_ordinal`` and ``local_process_count``, and `torch_xla.core.xla_model`'s ``all_reduce``,
``all_gather``, ``reduce_scatter``, ``collective_permute``, ``collective_broadcast``, ``all_to_all`` and
``rendezvous``, with what torch_xla builds on them (`reduce_gradients`, `optimizer_step`, `mesh_reduce`, the
bucketized forms, `ZeroRedundancyOptimizer`, the process groups of ``init_process_group("xla")``, also with ``xla://``
and ``pjrt://``). Unsupported: ``send`` and ``recv``, and collectives inside of a compiled graph.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch

from neuron_compat.lazy_imports import import_module

Groups: TypeAlias = Sequence[Sequence[int]] | None
Tensors: TypeAlias = Any
"""A tensor, or a list of tensors."""

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Emulation:
    """Replaced functions of torch_xla; `undo` (or leaving the ``with`` block) restores the originals."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Emulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def replace(self, module: Any, **functions: Callable[..., Any]) -> None:
        """Replace functions of a module."""
        for name, function in functions.items():
            original = getattr(module, name)
            self._originals.append((module, name, original))
            setattr(module, name, functools.wraps(original)(function))

    def undo(self) -> None:
        """Restore all originals."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        _active.clear()


_active: list[Emulation] = []
"""Active emulation, if any."""


def emulate(*, join: bool = True) -> Emulation:
    """Make torch_xla's queries and collectives cover all processes of this torchrun job, or only in a ``with`` block.

    Further calls replace nothing. The device is the CPU, unless ``PJRT_DEVICE`` selects another one.

    Args:
        join: Join the process group (gloo) if the program has not done so yet. With False, the program calls
            ``init_process_group`` itself, with any backend and `init_method`; otherwise the first collective joins.
            ``NEURON_COMPAT_EMULATE=1`` means False.

    Raises:
        RuntimeError: There is no process group, and no torchrun environment to create one from; or a process group was
            created before the emulation, by a torch_xla that did not know the other processes.
    """
    distributed: Any = torch.distributed
    if not _active:
        if not distributed.is_initialized() and "RANK" not in os.environ:
            raise RuntimeError(
                "neuron_compat.emulate(), which NEURON_COMPAT_EMULATE=1 calls, needs torchrun, or an initialised "
                "torch.distributed; a single process needs no emulation"
            )
        _active.append(_patch_torch_xla(*_get_rank_and_world_size()))
    if join:
        _ensure_process_group()
    return _active[0]


def _get_rank_and_world_size() -> tuple[int, int]:
    """Return (this rank, number of ranks) of the process group, or from torchrun's environment before there is one."""
    distributed: Any = torch.distributed
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not distributed.is_initialized():
        return int(os.environ["RANK"]), launched
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1 and launched > 1 and "xla" in str(distributed.get_backend()):
        raise RuntimeError(
            f"the process group has 1 rank, and torchrun started {launched}: torch_xla did not know the others when "
            "init_process_group was called; import neuron_compat (or call emulate) before that"
        )
    return rank, world


def _ensure_process_group() -> None:
    """Create the process group if the program has not."""
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")


def _patch_torch_xla(rank: int, world: int) -> Emulation:
    """Replace torch_xla's functions by the emulation."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    xm, xr = import_module("torch_xla.core.xla_model"), import_module("torch_xla.runtime")
    emulation = Emulation()
    emulation.replace(
        xr,
        global_ordinal=lambda: rank,
        process_index=lambda: rank,
        world_size=lambda: world,
        global_device_count=lambda: world,
        process_count=lambda: world,
        local_ordinal=lambda: int(os.environ.get("LOCAL_RANK", rank)),
        local_process_count=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", world)),
    )
    emulation.replace(
        xm,
        all_reduce=_all_reduce,
        all_gather=_all_gather,
        reduce_scatter=_reduce_scatter,
        collective_permute=_collective_permute,
        collective_broadcast=_collective_broadcast,
        all_to_all=_all_to_all,
        rendezvous=_rendezvous,
    )
    return emulation


def _find_group(groups: Groups) -> tuple[tuple[int, ...], Any]:
    """Return (ranks of this process's group in order, process group) for XLA's list of replica groups."""
    _ensure_process_group()
    distributed: Any = torch.distributed
    world, rank = distributed.get_world_size(), distributed.get_rank()
    known = tuple(tuple(g) for g in groups) if groups else (tuple(range(world)),)
    members = next((g for g in known if rank in g), None)
    if members is None:
        raise RuntimeError(f"rank {rank} is in none of the replica groups {known}")
    return members, _create_process_group(members)


@functools.cache
def _create_process_group(members: tuple[int, ...]) -> Any:
    """Create a gloo group. Only its members do so, because the stages of a pipeline have different lists of groups."""
    distributed: Any = torch.distributed
    # torch_xla replaces torch.distributed.new_group by a function without this argument.
    return distributed.distributed_c10d.new_group(list(members), backend="gloo", use_local_synchronization=True)


def _gather(value: torch.Tensor, groups: Groups) -> list[torch.Tensor]:
    """Return the values of all ranks in the group, in its order, on the CPU."""
    members, group = _find_group(groups)
    values = gather_tensors(value.detach().cpu(), group)
    by_rank = dict(zip(sorted(members), values, strict=True))  # a process group orders its ranks itself
    return [by_rank[r] for r in members]


def _get_group_index(groups: Groups) -> int:
    """Return the index of this process in its group."""
    distributed: Any = torch.distributed
    return _find_group(groups)[0].index(distributed.get_rank())


def _reduce(kind: str, value: torch.Tensor, scale: float, groups: Groups) -> torch.Tensor:
    """Return the reduced and scaled value of the group, on the CPU."""
    total = functools.reduce(_REDUCTIONS[kind], _gather(value, groups))
    return total if scale == 1.0 else total * scale


def _apply_to_each(inputs: Tensors, output: Tensors, function: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Apply `function` to a tensor or to each of a list, writing to `output` if it is given."""
    if isinstance(inputs, torch.Tensor):
        result = function(inputs).to(inputs.device)
        return result if output is None else output.copy_(result)
    results = [function(v).to(v.device) for v in inputs]
    if output is None:
        return results
    return [o.copy_(r) for o, r in zip(output, results, strict=True)]


@torch.no_grad()
def _all_reduce(
    reduce_type: str, inputs: Tensors, scale: float = 1.0, groups: Groups = None, pin_layout: bool = True
) -> Tensors:
    if isinstance(inputs, torch.Tensor):
        return _reduce(reduce_type, inputs, scale, groups).to(inputs.device)
    for tensor in inputs:
        tensor.copy_(_reduce(reduce_type, tensor, scale, groups).to(tensor.device))
    return inputs


@torch.no_grad()
def _all_gather(
    value: Tensors,
    dim: int = 0,
    groups: Groups = None,
    output: Tensors = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Tensors:
    return _apply_to_each(value, output, lambda v: torch.cat(_gather(v, groups), dim))


@torch.no_grad()
def _reduce_scatter(
    reduce_type: str,
    input: Tensors,  # noqa: A002  # XLA's name
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Tensors = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Tensors:
    def one(value: torch.Tensor) -> torch.Tensor:
        if value.shape[scatter_dim] % shard_count:
            raise ValueError(f"dim {scatter_dim} of {list(value.shape)} does not divide into {shard_count} shards")
        return (
            _reduce(reduce_type, value, scale, groups)
            .chunk(shard_count, scatter_dim)[_get_group_index(groups)]
            .contiguous()
        )

    return _apply_to_each(input, output, one)


@torch.no_grad()
def _collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    distributed: Any = torch.distributed
    values = _gather(value, None)
    rank = distributed.get_rank()
    source = next((a for a, b in pairs if b == rank), None)
    return (torch.zeros_like(values[rank]) if source is None else values[source]).to(value.device)


@torch.no_grad()
def _collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    at = _find_group(groups)[0].index(root_ordinal)
    for tensor in tensors:
        tensor.copy_(_gather(tensor, groups)[at].to(tensor.device))


@torch.no_grad()
def _all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    index = _get_group_index(groups)
    parts = [v.chunk(split_count, split_dimension)[index] for v in _gather(value, groups)]
    return torch.cat(parts, concat_dimension).to(value.device)


def _rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    distributed: Any = torch.distributed
    _, group = _find_group([list(replicas)] if replicas else None)
    messages: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(messages, (tag, payload), group=group)
    if any(t != tag for t, _ in messages):
        raise RuntimeError(f"ranks meet at different rendezvous: {sorted({t for t, _ in messages})}")
    return [p for _, p in messages]


def gather_tensors(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the values of all ranks in a process group, in its order, on the device of `value`."""
    distributed: Any = torch.distributed
    data = value.contiguous().reshape(-1).view(torch.uint8)  # as bytes, because gloo does not support all dtypes
    received = [torch.empty_like(data) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(received, data, group=group)
    return [part.view(value.dtype).reshape(value.shape) for part in received]
