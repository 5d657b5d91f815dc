"""DCP's `StorageReader` on this library's engine: nothing is run to read it, and every byte is verified first.

Before any tensor of the program is changed, each rank reads all bytes that it needs once and compares them with their
digests. DCP tells all ranks whether one of them failed. Then the bytes are copied into the tensors, if the first
reading has kept them, or are read a second time.
"""

from __future__ import annotations

import dataclasses
import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.futures import Future

from xla_ckpt.arrays.adopted import Adoptable, adoptable
from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import Adapters, new_array, require
from xla_ckpt.arrays.torch_host import DENSE, bytes_of, check_writable, cut, dtype_of, torch_dtype
from xla_ckpt.dcp.named import Named
from xla_ckpt.dcp.source import Opened, Places, open_source
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.read import check_reads, read_into
from xla_ckpt.errors import (
    ChangedTagError,
    IncompatibleCheckpointError,
    UsageError,
    naming,
    storage_errors,
)
from xla_ckpt.layouts.dcp.stock import stock_metadata
from xla_ckpt.lightweight import lightweight
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.state.guard import GUARD
from xla_ckpt.storage.door import PathLike
from xla_ckpt.storage.pool import READERS
from xla_ckpt.storage.undisturbed import undisturbed


class StorageReader(Named, StockReader):
    """Reads checkpoints of `torch.distributed.checkpoint`: stock DCP's, those of `xla_ckpt.dcp`, and tags of this
    library in the layout ``dcp``.

    For ``dcp.load(..., storage_reader=StorageReader(path))``, with any planner. ``.metadata`` is a pickle, and is read
    without running any of it. So are the values that are no tensors, unless `trust_pickle` says that they may be of any
    class. What this library wrote is verified by its digests before a tensor is changed, on all ranks.

    Args:
        checkpoint_id: The directory.
        trust_pickle: Whether values that are no tensors may be of any class. Loading them may run code.
        read_once: Whether what is verified is kept until it is put in place. It takes host memory for all that this
            rank loads, and is faster where the tensors are small or on an accelerator. By default `xla_ckpt.dcp.load`
            keeps 128 MiB at most, or more if most bytes go to an accelerator, and stock's `load` reads twice.
        num_workers: Threads that read, at most.
    """

    load_id = ""
    """Names this load in the metadata that planners and loggers of DCP's get."""

    # Stock's base class has no `__init__`, so classes that programs derive from it do not call one.
    read_once: bool | None = None
    _opened: Opened | None = None
    _places: Places | None = None
    _failure: BaseException | None = None
    overwriting: Callable[[], None] | None = None
    """Called when every byte that this rank needs is verified, and no tensor of the program is changed yet."""

    def __init__(
        self,
        checkpoint_id: PathLike | None = None,
        *,
        trust_pickle: bool = False,
        read_once: bool | None = None,
        num_workers: int = READERS,
    ) -> None:
        super().__init__()
        self.trust_pickle = trust_pickle
        self.read_once = read_once
        self.num_workers = num_workers
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.close()
        self._name(checkpoint_id)
        self.load_id = uuid.uuid4().hex

    @property
    def _crew(self) -> Crew:
        return Crew(workers=self.num_workers)

    def close(self) -> None:
        """Release the directory. A load does it when it is done."""
        self._values: dict[str, bytes] = {}
        self._kept: dict[_Destination, _Kept] = {}
        if self._places is not None:
            self._places.close()
            self._places = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, as DCP describes it.

        Raises:
            NoCheckpointError: There is none.
            CorruptCheckpointError: It is damaged.
            UntrustedObjectError: It names something else than DCP's own classes. Nothing of it has run.
        """
        if "rank" in kwargs and self._failure is not None:
            # DCP swallows what the first call raised, and asks for the metadata of one rank. `set_up_storage_reader`
            # raises it again, which all ranks hear of.
            return Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
        self.close()
        self._failure = None
        try:
            if self._path is None:
                raise UsageError("nobody has said where the checkpoint is", hint="Give checkpoint_id, the directory.")
            with storage_errors("opening a checkpoint", path=self._path), naming(path=self._path):
                self._opened = open_source(self._path)
        except BaseException as error:
            self._failure = error
            raise
        opened = self._opened.contents
        about = StorageMeta(checkpoint_id=self._path, save_id=opened.save_id, load_id=self.load_id)
        return dataclasses.replace(stock_metadata(opened), storage_meta=about)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._ready()
        tensors = _by_destination(plan.items)
        starts: dict[str, set[tuple[int, ...]]] = {}
        for item in chain.from_iterable(tensors.values()):
            starts.setdefault(item.storage_index.fqn, set()).add(tuple(item.storage_index.offset or ()))
        with storage_errors("reading a checkpoint", path=self._path), naming(path=self._path):
            with collector_paused():
                self._places = places = opened.places(starts)
                wants, slots, slabs = list[Want](), list[memoryview](), Slabs()
                if self.read_once:
                    self._kept, wants, slots = _memory(opened, tensors, slabs)
                others = [items for destination, items in tensors.items() if destination not in self._kept]
                checked = dict.fromkeys(map(_want, chain.from_iterable(others)))
                read = plan_restore(places.tag.manifest, wants)
                seen = plan_restore(places.tag.manifest, list(checked))
            self.planned()
            read_into(places.tag, read, slots, self._crew, slabs=slabs)
            check_reads(places.tag, seen, self._crew)
            places.check_crcs()
            self._values = {
                item.storage_index.fqn: opened.value(item.storage_index.fqn, trust=self.trust_pickle)
                for item in plan.items
                if item.type == LoadItemType.BYTE_IO
            }
        return dataclasses.replace(plan, storage_data=opened.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # A job that saves the same checkpoint anew may have replaced it between two ranks' looks.
        versions = {plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}
        if len(versions) > 1:
            raise ChangedTagError(
                "the checkpoint was replaced while the ranks opened it, and they have found different versions",
                path=self._path,
                hint="Load it again.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self._places
        assert places is not None, "prepare_local_plan comes first"
        GUARD.wait()  # a save of this library may not have copied yet what is overwritten now
        if self.overwriting is not None:
            self.overwriting()
        with undisturbed():
            self._overwrite(places, plan, planner)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _overwrite(self, places: Places, plan: LoadPlan, planner: LoadPlanner) -> None:
        with collector_paused():
            fillings = _fillings(places.opened, _by_destination(plan.items), self._kept, planner)
            slabs = Slabs()
            wants: list[Want] = []
            slots: list[memoryview] = []
            for filling in fillings:
                for box, memory in zip(filling.boxes, filling.memory(slabs), strict=True):
                    wants.append(Want(filling.key, box, len(slots)))
                    slots.append(memory)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn]))
        with storage_errors("reading a checkpoint", path=self._path), naming(path=self._path):
            planned = plan_restore(places.tag.manifest, wants)
            read_into(places.tag, planned, slots, self._crew, slabs=slabs)
            with torch.no_grad(), collector_paused():
                for filling in fillings:
                    filling.finish(planner)

    def _ready(self) -> Opened:
        if self._opened is None:
            raise UsageError("the checkpoint is not open", path=self._path, hint="read_metadata() opens it.")
        return self._opened


class FileSystemReader(StorageReader):
    """`StorageReader` with the arguments of DCP's `FileSystemReader`, for programs that make one.

    Raises (on construction):
        UsageError: Extensions are given, which change what is stored.
    """

    def __init__(self, path: PathLike, _extension_registry: Any = None) -> None:
        if _extension_registry is not None:
            raise UsageError(
                "extensions that change what is stored are not supported",
                path=str(path),
                hint="Use torch.distributed.checkpoint.FileSystemReader.",
            )
        super().__init__(path)


@lightweight(kw_only=True)
class _Filling:
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
    """Memory for them."""

    item: ReadItem | None = None
    """The item that the planner is told of when it is filled."""

    def finish(self, planner: LoadPlanner) -> None:
        """Put what was read in place. Gradients are off."""
        tensor = self.install()
        if not self.direct:
            with torch.inference_mode() if self.value.is_inference() else nullcontext():
                self.value.copy_(tensor)
        elif not self.value.is_inference():
            # As an in-place operation does: a backward pass over the old value has to be refused.
            torch.autograd.graph.increment_version(self.value)
        if self.item is not None:
            planner.commit_tensor(self.item, self.value)


def _fillings(
    opened: Opened, tensors: _Tensors, kept: Mapping[_Destination, _Kept], planner: LoadPlanner
) -> list[_Filling]:
    """What is filled: tensors as wholes, where the planner is DCP's own; else what it gives for each item.

    Raises:
        UsageError: Something could not be written to. It is said before any tensor has another value.
    """
    plain, adapters, fillings = _is_plain(planner), Adapters(), []
    for destination, items in tensors.items():
        source = kept.get(destination)
        if plain:
            value = planner.lookup_tensor(items[0].dest_index).detach()  # type: ignore[attr-defined]  # `_is_plain`
            if source is not None and tuple(value.shape) == tuple(source.value.shape):
                fillings.append(_from_kept(destination[0], source, value))
                continue
            if source is None and sum(prod(item.lengths) for item in items) == value.numel():
                fillings.append(_all(opened, items[0], value, adapters.require(value, destination[0])))
                continue
        fillings += [_part(opened, item, planner, source) for item in items]
    return fillings


_Destination = tuple[str, tuple[int, ...]]
"""(key, offset) of a local tensor in the program's state dict."""

_Tensors = Mapping[_Destination, Sequence[ReadItem]]
"""What is read into each local tensor."""


def _by_destination(items: Sequence[ReadItem]) -> _Tensors:
    groups: dict[_Destination, list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            groups.setdefault((item.dest_index.fqn, tuple(item.dest_index.offset or ())), []).append(item)
    return groups


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was read once, until it is put in place."""

    value: torch.Tensor
    memory: Adoptable | None
    """What an XLA device on the CPU adopts."""


def _memory(
    opened: Opened, tensors: _Tensors, slabs: Slabs
) -> tuple[dict[_Destination, _Kept], list[Want], list[memoryview]]:
    """Host memory for the local tensors that are read as wholes, and what is read into it."""
    kept, wants, slots = dict[_Destination, _Kept](), list[Want](), list[memoryview]()
    for destination, members in tensors.items():
        key = members[0].storage_index.fqn
        stored, dims = opened.tensor(key).dtype, range(len(members[0].lengths))
        shape = tuple(max(item.dest_offsets[d] + item.lengths[d] for item in members) for d in dims)
        box = Box.whole(shape).moved(destination[1] or (0,) * len(shape))
        whole_of_it = sum(prod(item.lengths) for item in members) == box.size
        # A planner of the program's may put stored elements somewhere else.
        if not whole_of_it or not all(
            item.storage_index.fqn == key and _want(item).box.start == tuple(map(add, box.start, item.dest_offsets))
            for item in members
        ):
            continue
        kind = torch_dtype(stored)
        assert kind is not None, "what the metadata says has been read with torch's types"
        memory = Adoptable(kind, shape, slabs) if adoptable(kind, shape) else None
        kept[destination] = _Kept(torch.empty(shape, dtype=kind) if memory is None else memory.tensor(), memory)
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
    """Refuse what cannot be written to, before other tensors have their values.

    Raises:
        UsageError: Elements of it share memory.
    """
    if type(value) in DENSE and not value.is_contiguous():
        with naming(leaf=key):
            check_writable(value)


def _from_kept(key: str, kept: _Kept, value: torch.Tensor) -> _Filling:
    """A tensor of the program that gets what is in memory already."""
    _check_writable(value, key)
    if value.device.type != "xla":
        return _Filling(value=value, install=lambda: kept.value)
    from xla_ckpt.arrays.xla import from_host

    return _Filling(value=value, install=lambda: from_host(kept.value, kept.memory, value.device))


def _all(opened: Opened, item: ReadItem, value: torch.Tensor, adapter: ArrayAdapter) -> _Filling:
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
    return _Filling(value=value, install=target.install, direct=direct, key=key, boxes=boxes, memory=target.memory)


def _part(opened: Opened, item: ReadItem, planner: LoadPlanner, kept: _Kept | None) -> _Filling:
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
        return _Filling(value=value, install=lambda: tensor, item=item)
    stored, want = opened.tensor(key).dtype, _want(item)
    direct = value.device.type == "cpu" and value.is_contiguous() and dtype_of(value, key) == stored
    target = (
        require(value, key).into(value, whole(shape), owned=False)
        if direct
        else new_array(stored, whole(shape), "torch")
    )
    boxes = (want.box,) if want.box.size else ()
    return _Filling(
        value=value, install=target.install, direct=direct, key=key, boxes=boxes, memory=target.memory, item=item
    )


def _want(item: ReadItem) -> Want:
    """The region of the stored tensor that an item reads."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    stop = tuple(a + n for a, n in zip(start, item.lengths, strict=True))
    return Want(item.storage_index.fqn, Box(start, stop), 0)
