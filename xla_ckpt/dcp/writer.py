"""DCP's `StorageWriter` on this library's engine: one directory that appears complete and verified, or not at all.

The coordinator makes a draft of the directory when it plans. All ranks write into it, and report: what they wrote with
which digests, or the error that they met. The coordinator hears all reports in `finish`, writes ``.metadata`` and the
digests, and gives the draft its name. An error of a rank is a report, and not raised there: DCP would then not call
the coordinator any more, and nobody would remove the draft.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import re
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xla_ckpt.arrays.torch_host import dtype_of
from xla_ckpt.dcp.memory import in_host_memory
from xla_ckpt.dcp.named import Named
from xla_ckpt.dcp.replicas import Held, Place, compare, may_differ, replicas_of
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.shared_directory import check_written, open_shared
from xla_ckpt.engine.write import WRITERS, write_files
from xla_ckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveError,
    UnsupportedStateError,
    UsageError,
    from_json,
    naming,
    storage_errors,
)
from xla_ckpt.files.distcp import Chunk, Distcp
from xla_ckpt.job.process_group import REACH, communicator
from xla_ckpt.job.verdict import Deadline, Round, as_checkpoint_error
from xla_ckpt.layouts.dcp.chunks import chunk_of
from xla_ckpt.layouts.dcp.digests import DIGESTS, dump_digests, record_of
from xla_ckpt.layouts.dcp.metadata import MAX_STEPS, METADATA
from xla_ckpt.layouts.dcp.stock import pickled
from xla_ckpt.manifest.digest import block_size, digest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.options import SaveOptions
from xla_ckpt.plan.file_plan import FilePlan, RegionSource
from xla_ckpt.plan.save_plan import SavePlan as FilePlans
from xla_ckpt.sharding.box import Box
from xla_ckpt.snapshot.sample import sample
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.storage.base import Directory, Store, write_small
from xla_ckpt.storage.door import PathLike, above, is_working_directory
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tags.root import Kind, Transaction
from xla_ckpt.tags.roots import root_of

logger = logging.getLogger(__name__)

VERSION = "1.0.0"
"""What DCP writes as the version of its metadata."""

_COMMITTED = "committed"
"""What rank 0 says in the job's store when a checkpoint is in place."""

_REPORT = MetadataIndex("~xla_ckpt report")
"""Index of the result that is a rank's report, and no item of the state."""

_OF_DCP = re.compile(
    r"\.metadata(\.tmp)?|__\d+\.metadata(\.tmp)?|\.manager_metadata|.*\.distcp|.*\.safetensors|"
    r"model\.safetensors\.index\.json|" + re.escape(DIGESTS)
)
"""Names of files that make up a checkpoint of DCP's."""

_SURELY_DCP = re.compile(r"\.metadata|__\d+\.metadata|.*\.distcp|" + re.escape(DIGESTS))
"""Names of files that nothing else has: a directory with others, but without one of these, is not replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the coordinator tells a rank."""

    draft: str
    """Name of the directory that is filled."""

    fate: str
    """What the round is called in which the ranks agree how the save ended, if one of them is lost."""

    rank: int
    world: int
    answers: str | None
    """The save of that rank that it is for. Planners that keep plans may give an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a rank tells the coordinator."""

    rank: int
    files: tuple[FileRecord, ...] = ()
    samples: Mapping[Place, Held] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


class StorageWriter(Named, StockWriter):
    """Writes checkpoints of `torch.distributed.checkpoint`: digested, durable, and committed by one rename.

    For ``dcp.save(..., storage_writer=StorageWriter(path))`` and ``dcp.async_save``, with any planner. Stock readers
    load what it writes. A checkpoint that has that path is replaced in one step: whoever looks finds the old or the new
    one. If any rank fails, nothing is committed and nothing is left behind, and all ranks raise DCP's
    `CheckpointException`, which holds the error (`xla_ckpt.dcp.save` raises the error itself).

    Args:
        checkpoint_id: The directory that is to hold the checkpoint.
        options: Its `replicas` count: ``"equal"``, tensors that several ranks hold under one key are compared, by
            samples, and a difference is a `DivergentReplicasError`; ``"first"``, one of them is stored, and a warning
            says of which they are. Others of its fields are refused. By default those of `default_options`.
        overwrite: Whether a checkpoint that is there already is replaced; else it is a `UsageError`.
        num_workers: Threads that write, at most.
    """

    save_id = ""
    """Names this save in the metadata, as stock's writer does."""

    # Stock's base class has no `__init__`, so classes that programs derive from it do not call one.
    _rank: int | None = None
    _planned: Sequence[WriteItem] = ()
    _draft: Transaction | None = None
    _fate: Round | None = None
    _forget: weakref.finalize[..., Any] | None = None
    phases: Phases | None = None
    """Where the time of this rank's writing goes."""
    nbytes = 0
    """Bytes of tensors that this rank has written in this save."""
    files = 0
    """Files with tensors that this rank has written in this save."""

    def __init__(
        self,
        checkpoint_id: PathLike | None = None,
        *,
        options: SaveOptions | None = None,
        overwrite: bool = True,
        num_workers: int = WRITERS,
    ) -> None:
        super().__init__()
        self.replicas = replicas_of(options)
        self.overwrite = overwrite
        self.num_workers = num_workers
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.abandon()
        self._name(checkpoint_id)
        self.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def abandon(self) -> None:
        """Remove what a save has written that was not committed."""
        with undisturbed():
            if self._forget is not None:
                self._forget()
            self._draft = self._forget = None

    def ended(self, error: CheckpointError, seconds: float) -> None:
        """Find out how a save ended in which a collective failed: returns if it committed.

        torch's collectives fail on some ranks sooner than on others, and only some may have been told of the commit.

        Args:
            error: What this rank has met.
            seconds: How long it waits, at most, for rank 0 to say how a commit ended that it has begun.

        Raises:
            CheckpointError: It did not commit. All ranks that have begun to write raise the same.
            RankFailedError: Likewise; or rank 0 was lost while it committed, and nobody knows how that ended.
        """
        decided = error if self._fate is None else self._fate.decide(error)
        if decided is not None:
            raise decided from error.__cause__
        assert self._fate is not None
        try:
            self._fate.hear(_COMMITTED, 0, Deadline(seconds))
        except RankFailedError:
            raise RankFailedError(
                "rank 0 began to commit, and did not say how that ended",
                path=self._path,
                rank=0,
                hint="It died or hangs. The checkpoint is there, complete, or it is not there: look for it.",
                details=str(error),
            ) from error.__cause__
        logger.warning("%s is saved; ranks were lost after that: %s", self._path, error)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.abandon()
        self._fate = None
        self.nbytes = self.files = 0
        self._rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "with use_collectives=False each rank writes metadata of its own, and nobody decides for all ranks",
                path=self._path,
                hint="Leave use_collectives out.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._place()
        self.save_id = uuid.uuid4().hex  # stock's planners may give the order of another save: this tells them apart
        self._planned = plan.items
        return dataclasses.replace(plan, storage_data=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store, name = self._place()
        with storage_errors("beginning a save", path=self._path), naming(path=self._path):
            self._check_target(store, name)
            with undisturbed():  # what a signal handler raises comes when somebody can remove the draft
                self._draft = Transaction(root_of(store), name, Kind.CHECKPOINT).begin()
                # DCP tells a writer nothing of a rank that fails before it writes: then the draft goes with the writer.
                self._forget = weakref.finalize(self, self._draft.abandon)
        draft, fate = self._draft.directory.name, f"dcp/{self.save_id}"
        self._fate = _round(fate, len(plans))
        return [
            dataclasses.replace(
                plan,
                storage_data=_Order(
                    draft=draft,
                    fate=fate,
                    rank=rank,
                    world=len(plans),
                    answers=plan.storage_data if isinstance(plan.storage_data, str) else None,
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = self._rank or 0
        try:
            results = self._write(plan, planner)
        except Exception as error:
            # It travels to the coordinator, which raises it on all ranks and removes the draft.
            problem = as_checkpoint_error(error, "saving", rank, path=self._path)
            results = [_result_of(_Report(rank=rank, error=problem.to_json()))]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = self._draft
        if draft is None:
            raise SaveError("a save is finished that was never begun", path=self._path)
        try:
            with storage_errors("saving", path=self._path), naming(path=self._path):
                with collector_paused():
                    files = self._sealing(draft, metadata, results)
                self._commit(draft, files)
        finally:
            self.abandon()

    def _place(self) -> tuple[Store, str]:
        """The store that holds the checkpoint, and its name there."""
        if self._path is None:
            raise UsageError("nobody has said where the checkpoint goes", hint="Give checkpoint_id, the directory.")
        return above(self._path, follow=True)

    def _check_target(self, store: Store, name: str) -> None:
        """Refuse to replace anything that is no checkpoint of DCP's, and the directory in which the program works.

        Raises:
            UsageError: Something else has that name.
        """
        if self._path is not None and is_working_directory(self._path):
            raise UsageError(
                "the checkpoint would replace the directory in which this program works",
                path=self._path,
                hint="Give the checkpoint a directory of its own.",
            )
        if not store.has(name):
            return
        names = store.names(name)
        other = [n for n in names if not _OF_DCP.fullmatch(n) or store.is_directory(f"{name}/{n}")]
        if root_of(store).is_ours(name):
            problem, hint = "there is a tag of this library", "Choose another path, or delete the tag."
        elif not store.is_directory(name):
            problem, hint = "there is a file", "A checkpoint is a directory."
        elif other or (names and not any(map(_SURELY_DCP.fullmatch, names))):
            problem = "the directory holds something else than a checkpoint of DCP's, which would be lost"
            hint = "Give the checkpoint a directory of its own."
            names = other or names
        elif names and not self.overwrite:
            # Programs look for these words of stock's.
            problem, hint = "Checkpoint already exists, and overwrite=False", "Choose another path."
        else:
            return
        raise UsageError(problem, path=self._path, found=", ".join(names[:8]) or None, hint=hint)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's part; one result for each item, behind the report."""
        order = plan.storage_data
        if not isinstance(order, _Order):
            raise UsageError(
                "the planner has replaced what this writer told the rank",
                expected="SavePlan.storage_data as create_global_plan got it",
                found=type(order).__name__,
            )
        store, name = self._place()
        # A planner that keeps plans (enable_plan_caching) gives the order of an earlier save, with that one's draft.
        draft = root_of(store).draft_of(name)
        if order.answers in (None, self.save_id):
            draft = order.draft
            self._fate = _round(order.fate, order.world)
        with collector_paused():
            tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
            objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
            values = [(item.index.fqn, _resolved(item, planner)) for item in tensors]
            shards = in_host_memory(values)
            samples: dict[Place, Held] = {}
            if order.world > 1:
                samples = self._samples(plan, planner, [*zip(tensors, values, shards, strict=True)])
            files, results = _planned(tensors, values, shards, f"{order.rank + 1:05d}-of-{order.world:05d}")
        self.planned()
        memory = {(str(i), 0): shard.data for i, shard in enumerate(shards)}
        crew = Crew(workers=self.num_workers, phases=self.phases or Phases())
        owns_draft = self._draft is not None
        with storage_errors("saving", rank=order.rank, path=self._path):
            directory = self._draft.directory if self._draft is not None else open_shared(root_of(store), draft)
            try:
                records = list(write_files(directory, files, memory, crew).files)
                self.nbytes, self.files = files.nbytes, len(records)
                written, record = _write_objects(directory, order, objects, planner)
                directory.sync()
            finally:
                if not owns_draft:
                    directory.close()
        records += [] if record is None else [record]
        return [_result_of(_Report(rank=order.rank, files=tuple(records), samples=samples)), *results, *written]

    def _samples(
        self, plan: SavePlan, planner: SavePlanner, writing: Sequence[tuple[WriteItem, tuple[str, Any], HostShard]]
    ) -> dict[Place, Held]:
        """What this rank planned to write, as samples; of what another rank writes, too."""
        final = {item.index for item in plan.items}
        dropped = [i for i in self._planned if i.type != WriteItemType.BYTE_IO and i.index not in final]
        values = [(item.index.fqn, _resolved(item, planner)) for item in dropped]
        samples = {_place_of(item): _described(item, value, shard, True) for item, (_, value), shard in writing}
        for item, (_, value), shard in zip(dropped, values, in_host_memory(values), strict=True):
            samples[_place_of(item)] = _described(item, value, shard, False)
        return samples

    def _sealing(self, draft: Transaction, metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, bytes]:
        """The files that make a draft a checkpoint, when all ranks have written what they report.

        Raises:
            CheckpointError: A rank has failed, or what the ranks have written does not fit together.
        """
        reports = [_report(rank, of_rank) for rank, of_rank in enumerate(results)]
        failed = next((report for report in reports if report.error is not None), None)
        if failed is not None:
            assert failed.error is not None
            raise from_json(dict(failed.error))
        if len(reports) > 1:
            compare([report.samples for report in reports], self.replicas)
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        for key, path in paths.items():
            if len(path) > MAX_STEPS:
                raise UnsupportedStateError(f"the state is nested deeper than {MAX_STEPS} containers", leaf=key[:80])
        for report in reports:
            check_written(draft.directory, report.rank, report.files)
        stored = {r.index: r.storage_data for of_rank in results for r in of_rank if r.index != _REPORT}
        complete = dataclasses.replace(metadata, version=VERSION, storage_data=stored, storage_meta=self.storage_meta())
        text = pickled(complete)
        digests = dump_digests([*(record for report in reports for record in report.files), record_of(METADATA, text)])
        return {METADATA: text, DIGESTS: digests}

    def _commit(self, draft: Transaction, files: Mapping[str, bytes]) -> None:
        draft.seal(files)
        if self._fate is not None and (given_up := self._fate.decide()) is not None:
            raise given_up  # another rank, which has told its caller so
        draft.commit()
        if self._fate is not None:
            try:
                self._fate.say(_COMMITTED)
            except Exception as error:
                # Whatever it is, the checkpoint is in place, and no rank may be told otherwise.
                logger.warning("that %s is saved could not be told to all ranks: %s", self._path, error)


class FileSystemWriter(StorageWriter):
    """`StorageWriter` with the arguments of DCP's `FileSystemWriter`, for programs that make one.

    Those that only tune stock's writer do nothing here.

    Raises (on construction):
        UsageError: Files are wanted that this writer does not make: compressed ones, or safetensors alone.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
    ) -> None:
        if _extensions:
            raise UsageError(
                "extensions that change what is stored are not supported",
                path=str(path),
                hint="Save without them, or with torch.distributed.checkpoint.FileSystemWriter, which has no digests.",
            )
        if getattr(serialization_format, "name", "TORCH_SAVE") != "TORCH_SAVE":
            raise UsageError(
                "this serialization format is not supported",
                path=str(path),
                found=str(serialization_format),
                hint="What is written is torch.save's format and safetensors in one. For Hugging Face's directories: "
                "xla_ckpt.export_hf.",
            )
        super().__init__(path, overwrite=overwrite, num_workers=max(thread_count, WRITERS))


def _round(name: str, world: int) -> Round | None:
    """Where the ranks of a save agree how it ended, if a collective of torch's fails; None in a process alone."""
    return Round(communicator(), name, REACH) if world > 1 else None


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The tensor of an item, as the planner gives it.

    Raises:
        UnsupportedStateError: It is not what the planner told the other ranks of.
    """
    value: Any = planner.resolve_data(item)
    shard = getattr(value, "__get_tensor_shard__", None)  # some planners give the whole sharded tensor
    value = value if shard is None else shard(item.index)
    described = item.tensor_data
    assert described is not None
    key = item.index.fqn
    if not isinstance(value, torch.Tensor):
        raise UnsupportedStateError("the planner gave no tensor", leaf=key, found=type(value).__name__)
    wanted, actual = (described.properties.dtype, tuple(described.chunk.sizes)), (value.dtype, tuple(value.shape))
    if wanted != actual:
        raise UnsupportedStateError(
            "a tensor is not what the metadata would say of it: it could not be loaded", leaf=key,
            expected=_description(*wanted), found=_description(*actual),
            hint="The planner's create_local_plan and resolve_data have to agree.",
        )  # fmt: skip
    return value.detach()


def _planned(
    items: Sequence[WriteItem], values: Sequence[tuple[str, torch.Tensor]], shards: Sequence[HostShard], stem: str
) -> tuple[FilePlans, list[WriteResult]]:
    """The files of some tensors, and where each will lie. The leaf of a region is the number of its item."""
    # Readers of safetensors know one region of a name in a file: a second one goes to a further file.
    again: Counter[str] = Counter()
    by_file: dict[int, list[int]] = {}
    for i, (key, _) in enumerate(values):
        by_file.setdefault(again[key], []).append(i)
        again[key] += 1
    plans, results = [], []
    for number, members in sorted(by_file.items()):
        name = f"{stem}-{number + 1}" if number else stem
        codec = Distcp(f"~{name}", tuple(_chunk(items[i], values[i][1]) for i in members))
        sources = tuple(RegionSource(leaf=str(i), shard=0, offset=0, nbytes=len(shards[i].data)) for i in members)
        plans.append(FilePlan(path=f"{name}.safetensors", codec=codec, sources=sources))
        results += [
            _result(items[i].index, plans[-1].path, offset, nbytes)
            for i, (offset, nbytes) in zip(members, codec.spans, strict=True)
        ]
    return FilePlans(tuple(plans)), results


def _chunk(item: WriteItem, value: torch.Tensor) -> Chunk:
    assert item.tensor_data is not None
    stored = item.tensor_data.chunk
    stop = tuple(low + n for low, n in zip(stored.offsets, stored.sizes, strict=True))
    with naming(leaf=item.index.fqn):
        return chunk_of(item.index.fqn, dtype_of(value), Box(tuple(stored.offsets), stop))


def _place_of(item: WriteItem) -> Place:
    return item.index.fqn, tuple(item.index.offset or ())


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _described(item: WriteItem, value: torch.Tensor, shard: HostShard, written: bool) -> Held:
    shape = tuple(value.shape)
    loose = may_differ(item.index.fqn, value.dtype is torch.uint8, shape)
    return Held(_description(value.dtype, shape), sample([shard.data]), written, loose)


def _write_objects(
    directory: Directory, order: _Order, items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[WriteResult], FileRecord | None]:
    """Write what is no tensor into one file, one thing behind the other."""
    if not items:
        return [], None
    path = f"objects-{order.rank + 1:05d}-of-{order.world:05d}.distcp"
    data, results, regions, digests = bytearray(), [], [], []
    for item in items:
        try:
            value: Any = planner.resolve_data(item)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises; it names no key
            raise UnsupportedStateError(
                f"it cannot be pickled: {error}",
                leaf=item.index.fqn,
                hint="Store plain values, tensors, or an object with state_dict().",
            ) from error
        if not isinstance(value, io.BytesIO):
            raise UnsupportedStateError("the planner gave no bytes", leaf=item.index.fqn, found=type(value).__name__)
        text = value.getvalue()
        results.append(_result(item.index, path, len(data), len(text)))
        if text:
            regions.append((len(data), len(text)))
            step = block_size(len(text))
            digests += [digest(text[at : at + step]) for at in range(0, len(text), step)]
        data += text
    write_small(directory, path, bytes(data))
    record = FileRecord(
        path=path, size=len(data), head=0, digest=digest(b""), regions=tuple(regions), digests=tuple(digests)
    )
    return results, record


def _result(index: MetadataIndex, path: str, offset: int, nbytes: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=nbytes, storage_data=_StorageInfo(path, offset, nbytes))


def _result_of(report: _Report) -> WriteResult:
    return WriteResult(index=_REPORT, size_in_bytes=0, storage_data=report)


def _report(rank: int, results: Sequence[WriteResult]) -> _Report:
    for result in results:
        if isinstance(result.storage_data, _Report):
            return result.storage_data
    raise SaveError("a rank wrote with another StorageWriter", rank=rank)
