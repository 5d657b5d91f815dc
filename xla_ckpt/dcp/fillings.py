"""What a load of DCP's fills: the program's tensors, or parts of them, and the memory that bytes are read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from xla_ckpt.arrays.adopted import Adoptable, adoptable
from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import Adapters, new_array, require
from xla_ckpt.arrays.torch_elements import (
    DENSE,
    bytes_of,
    check_writable,
    cut,
    dtype_of,
    torch_dtype,
    writing_to,
)
from xla_ckpt.dcp.source import Opened
from xla_ckpt.dcp.tensor import check_planned
from xla_ckpt.errors import IncompatibleCheckpointError, naming
from xla_ckpt.lightweight import lightweight
from xla_ckpt.plan.restore_plan import Want
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.snapshot.memory import Slabs


@lightweight(kw_only=True)
class FilledTensor:
    """A tensor of the program, or a part of one, that a load fills."""

    value: torch.Tensor
    install: Callable[[], torch.Tensor]
    """The tensor that has what was read."""

    direct: bool = False
    """Whether that is `value` itself; else it is copied into it."""

    key: str = ""
    boxes: tuple[Box, ...] = ()
    """What is read for it: regions of the stored tensor."""

    memory: Callable[[Slabs], Sequence[memoryview]] = lambda _: ()
    item: ReadItem | None = None
    """The item that the planner is told of when it is filled."""

    def finish(self, planner: LoadPlanner) -> None:
        """Put what was read in place. Gradients are off."""
        tensor = self.install()
        if not self.direct:
            with writing_to([self.value]):
                self.value.copy_(tensor)
        elif not self.value.is_inference():
            # As an in-place operation does: a backward pass over the old value has to be refused.
            torch.autograd.graph.increment_version(self.value)
        if self.item is not None:
            planner.commit_tensor(self.item, self.value)


def fillings(
    opened: Opened, tensors: Tensors, kept: Mapping[Destination, Kept], planner: LoadPlanner
) -> list[FilledTensor]:
    """What is filled: tensors as wholes, where the planner is DCP's own; else what it gives for each item.

    Raises:
        UsageError: Something could not be written to. It is said before any tensor has another value.
    """
    plain, adapters, filled = _is_plain(planner), Adapters(), list[FilledTensor]()
    for destination, items in tensors.items():
        source = kept.get(destination)
        if plain:
            value = planner.lookup_tensor(items[0].dest_index)  # type: ignore[attr-defined]  # `_is_plain`
            check_planned(value, destination[0])
            value = value.detach()
            if source is not None and tuple(value.shape) == tuple(source.value.shape):
                filled.append(_from_kept(destination[0], source, value))
                continue
            if source is None and sum(prod(item.lengths) for item in items) == value.numel():
                filled.append(_all(opened, items[0], value, adapters.require(value, destination[0])))
                continue
        filled += [_part(opened, item, planner, source) for item in items]
    return filled


Destination = tuple[str, tuple[int, ...]]
"""(key, offset) of a local tensor in the program's state dict."""

Tensors = Mapping[Destination, Sequence[ReadItem]]
"""What is read into each local tensor."""


def by_destination(items: Sequence[ReadItem]) -> Tensors:
    """What the items of a plan read, tensor by tensor."""
    groups: dict[Destination, list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            groups.setdefault((item.dest_index.fqn, tuple(item.dest_index.offset or ())), []).append(item)
    return groups


@dataclass(frozen=True, slots=True)
class Kept:
    """What was read once, until it is put in place."""

    value: torch.Tensor
    memory: Adoptable | None
    """What an XLA device on the CPU adopts."""


def memory_for(
    opened: Opened, tensors: Tensors, slabs: Slabs
) -> tuple[dict[Destination, Kept], list[Want], list[memoryview]]:
    """Host memory for the local tensors that are read as wholes, and what is read into it."""
    kept, wants, slots = dict[Destination, Kept](), list[Want](), list[memoryview]()
    for destination, members in tensors.items():
        key = members[0].storage_index.fqn
        stored, dims = opened.tensor(key).dtype, range(len(members[0].lengths))
        shape = tuple(max(item.dest_offsets[d] + item.lengths[d] for item in members) for d in dims)
        box = Box.whole(shape).moved(destination[1] or (0,) * len(shape))
        whole_of_it = sum(prod(item.lengths) for item in members) == box.size
        # A planner of the program's may put stored elements somewhere else.
        if not whole_of_it or not all(
            item.storage_index.fqn == key and want_of(item).box.start == tuple(map(add, box.start, item.dest_offsets))
            for item in members
        ):
            continue
        kind = torch_dtype(stored)
        assert kind is not None, "what the metadata says has been read with torch's types"
        memory = Adoptable(kind, shape, slabs) if adoptable(kind, shape) else None
        value = torch.empty(shape, dtype=kind, device="cpu") if memory is None else memory.tensor()
        kept[destination] = Kept(value, memory)
        wants.append(Want(key, box, len(slots)))
        slots.append(bytes_of(kept[destination].value))
    return kept, wants, slots


def _is_plain(planner: LoadPlanner) -> bool:
    """Whether a planner takes tensors from the state dict as they are. A class of the program's may change that."""
    names = ("lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor")
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name) for name in names
    )


def _check_writable(value: torch.Tensor, key: str) -> None:
    """Refuse what cannot be written to, before other tensors have their values."""
    if type(value) in DENSE and not value.is_contiguous():
        with naming(leaf=key):
            check_writable(value)


def _from_kept(key: str, kept: Kept, value: torch.Tensor) -> FilledTensor:
    """A tensor of the program that gets what is in memory already."""
    _check_writable(value, key)
    if value.device.type != "xla":
        return FilledTensor(value=value, install=lambda: kept.value)
    from xla_ckpt.arrays.xla import from_host

    return FilledTensor(value=value, install=lambda: from_host(kept.value, kept.memory, value.device))


def _all(opened: Opened, item: ReadItem, value: torch.Tensor, adapter: ArrayAdapter) -> FilledTensor:
    """All of a local tensor, of which `item` fills a part."""
    key = item.storage_index.fqn
    _check_writable(value, key)
    origin = tuple(item.dest_index.offset or (0,) * value.dim())
    local = adapter.place(value, key) or whole(tuple(value.shape))
    stored = opened.tensor(key).dtype
    direct = adapter.dtype(value, key) == stored
    target = (
        adapter.into(value, local, owned=False) if direct else new_array(stored, whole(tuple(value.shape)), "torch")
    )
    boxes = tuple(box.moved(origin) for box in target.boxes) if any(origin) else target.boxes
    return FilledTensor(value=value, install=target.install, direct=direct, key=key, boxes=boxes, memory=target.memory)


def _part(opened: Opened, item: ReadItem, planner: LoadPlanner, kept: Kept | None) -> FilledTensor:
    """What the planner gives for an item."""
    key, value = item.storage_index.fqn, planner.resolve_tensor(item).detach()
    _check_writable(value, key)
    shape = tuple(value.shape)
    if shape != tuple(item.lengths):
        raise IncompatibleCheckpointError(
            "the planner gave a tensor of another shape than it has planned",
            leaf=key,
            expected=list(item.lengths),
            found=list(value.shape),
        )
    if kept is not None:
        start = tuple(item.dest_offsets)
        tensor = cut(kept.value, Box(start, tuple(map(add, start, shape))))
        return FilledTensor(value=value, install=lambda: tensor, item=item)
    stored, want = opened.tensor(key).dtype, want_of(item)
    direct = value.device.type == "cpu" and value.is_contiguous() and dtype_of(value, key) == stored
    target = (
        require(value, key).into(value, whole(shape), owned=False)
        if direct
        else new_array(stored, whole(shape), "torch")
    )
    boxes = (want.box,) if want.box.size else ()
    return FilledTensor(
        value=value, install=target.install, direct=direct, key=key, boxes=boxes, memory=target.memory, item=item
    )


def want_of(item: ReadItem) -> Want:
    """The region of the stored tensor that an item reads."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    stop = tuple(a + n for a, n in zip(start, item.lengths, strict=True))
    return Want(item.storage_index.fqn, Box(start, stop), 0)
