"""DCP's `StorageReader` on this library's engine: nothing is run to read it, and every byte is verified first.

Before any tensor of the program is changed, each rank reads all bytes that it needs once and compares them with their
digests. DCP tells all ranks whether one of them failed. Then the bytes are copied into the tensors, if the first
reading has kept them, or are read a second time.
"""

from __future__ import annotations

import dataclasses
import io
import uuid
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.futures import Future

from xla_ckpt.dcp.fillings import Destination, Kept, by_destination, fillings, memory_for, want_of
from xla_ckpt.dcp.named import Named
from xla_ckpt.dcp.source import Opened, open_source
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.read import check_reads, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import ChangedTagError, UsageError, naming, storage_errors
from xla_ckpt.layouts.dcp.index import stock_metadata
from xla_ckpt.plan.restore_plan import Want, plan_restore
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
    _tag: TagReader | None = None
    _failure: BaseException | None = None
    _keys: Sequence[str] = ()
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
        self._kept: dict[Destination, Kept] = {}
        if self._tag is not None:
            self._tag.close_files()
            self._tag = None
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
            opened = self._opened.stored
            about = StorageMeta(checkpoint_id=self._path, save_id=opened.save_id, load_id=self.load_id)
            self._keys = (*opened.tensors, *opened.objects)
            return dataclasses.replace(stock_metadata(opened), storage_meta=about)
        except BaseException as error:
            self._failure = error
            raise

    def keys(self) -> Sequence[str]:
        """The keys that are stored, as far as the metadata was read."""
        return self._keys

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._ready()
        tensors = by_destination(plan.items)
        starts: dict[str, set[tuple[int, ...]]] = {}
        for item in chain.from_iterable(tensors.values()):
            starts.setdefault(item.storage_index.fqn, set()).add(tuple(item.storage_index.offset or ()))
        with storage_errors("reading a checkpoint", path=self._path), naming(path=self._path):
            with collector_paused():
                self._tag = tag = opened.locate(starts)
                wants, slots, slabs = list[Want](), list[memoryview](), Slabs()
                if self.read_once:
                    self._kept, wants, slots = memory_for(opened, tensors, slabs)
                others = [items for destination, items in tensors.items() if destination not in self._kept]
                checked = dict.fromkeys(map(want_of, chain.from_iterable(others)))
                read = plan_restore(tag.manifest, wants)
                seen = plan_restore(tag.manifest, list(checked))
            self.planned()
            read_into(tag, read, slots, self._crew, slabs=slabs)
            check_reads(tag, seen, self._crew)
            opened.check_crcs()
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
        GUARD.wait()  # a save of this library may not have copied yet what is overwritten now
        if self.overwriting is not None:
            self.overwriting()
        with undisturbed():
            self._overwrite(plan, planner)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _overwrite(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        tag = self._tag
        assert tag is not None, "prepare_local_plan comes first"
        with collector_paused():
            filled = fillings(self._ready(), by_destination(plan.items), self._kept, planner)
            slabs = Slabs()
            wants: list[Want] = []
            slots: list[memoryview] = []
            for filling in filled:
                for box, memory in zip(filling.boxes, filling.memory(slabs), strict=True):
                    wants.append(Want(filling.key, box, len(slots)))
                    slots.append(memory)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn]))
        with storage_errors("reading a checkpoint", path=self._path), naming(path=self._path):
            planned = plan_restore(tag.manifest, wants)
            read_into(tag, planned, slots, self._crew, slabs=slabs)
            with torch.no_grad(), collector_paused():
                for filling in filled:
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
