"""DCP `StorageWriter` on this library's engine: an atomic commit of one verified directory.

The coordinator creates a draft directory when it plans. All ranks write into it, and report the files and checksums
that they wrote, or their error. In `finish` the coordinator compares samples of replicas, writes ``.metadata`` and the
checksums, and renames the draft. A rank's error is part of its report and is not raised on that rank first, because DCP
would not call the coordinator again, and the draft would not be removed.

DCP's planners treat plain tensors with one key on several ranks as replicas, and keep one of them. If they are shards
of one tensor, as in tensor parallelism, the others would be lost, so differing samples raise an error.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xla_ckpt.arrays.torch_elements import get_tensor_dtype
from xla_ckpt.core.checksum import BlockDigester
from xla_ckpt.core.files.dcp_file import DcpChunk, DcpFile
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.merge import ReplicaPolicy, describe_divergence
from xla_ckpt.core.plan.rank_consistency import MAX_LISTED_RANKS
from xla_ckpt.core.plan.save_plan import FilePlan, RegionSource
from xla_ckpt.core.plan.save_plan import SavePlan as FilePlans
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.dcp.checkpoint_id import CheckpointIdMixin
from xla_ckpt.dcp.stager import copy_to_host
from xla_ckpt.dcp.tensor import check_can_plan
from xla_ckpt.display import join_lines
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import Deadline, Exchange
from xla_ckpt.distributed.torch_store import STORE_TIMEOUT_SECONDS, get_torch_communicator
from xla_ckpt.errors import (
    CheckpointError,
    DivergentReplicasError,
    RankFailedError,
    SaveError,
    UnsupportedStateError,
    UsageError,
    annotate_errors,
    from_json,
    wrap_os_errors,
)
from xla_ckpt.formats.dcp.metadata import MAX_PATH_DEPTH, METADATA_FILE
from xla_ckpt.formats.dcp.metadata_writer import dump_metadata
from xla_ckpt.formats.dcp.writing import make_chunk
from xla_ckpt.formats.digests import DIGESTS, dump_digests, make_file_record
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions, resolve_options
from xla_ckpt.progress import IoContext
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.saving.write import WRITER_THREADS, check_written_files, open_shared_draft, write_files
from xla_ckpt.snapshot.shards import HostShard, compute_sample_fingerprint
from xla_ckpt.storage.base import Directory, Store, write_file
from xla_ckpt.storage.resolve import PathLike, is_working_directory, open_parent
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind

logger = get_logger(__name__)

METADATA_VERSION = "1.0.0"
"""Version that DCP writes into its metadata."""

_COMMITTED_KEY = "committed"
"""Value that rank 0 publishes in the job's store after the commit of a checkpoint."""


class StorageWriter(CheckpointIdMixin, StockWriter):
    """A writer of `torch.distributed.checkpoint` checkpoints: with checksums, durable, and committed by one rename.

    Use it as ``dcp.save(..., storage_writer=StorageWriter(path))`` or with ``dcp.async_save``, with any planner. Stock
    readers can load the checkpoints. An existing checkpoint at the path is replaced atomically: readers see the old or
    the new one. If any rank fails, nothing is committed, all files are removed, and all ranks raise DCP's
    `CheckpointException`, which contains the error (`xla_ckpt.dcp.save` raises the error itself).

    Args:
        checkpoint_id: The directory of the checkpoint.
        options: Only `replicas` is supported, for tensors that several ranks have under one key. ``"equal"`` compares
            samples of them, and a difference raises `DivergentReplicasError`; ``"first"`` stores one of them, with a
            warning that lists differing keys. Other fields raise an error. By default the options of `default_options`.
        overwrite: True to replace an existing checkpoint; otherwise it raises a `UsageError`.
        num_workers: Maximum number of writer threads.
    """

    save_id = ""
    """ID of this save in the metadata, as in stock's writer."""

    # Stock's base class has no `__init__`, so derived classes of programs do not call one.
    _rank: int | None = None
    _planned_items: Sequence[WriteItem] = ()
    _draft: Transaction | None = None
    _outcome_exchange: Exchange | None = None
    _finalizer: weakref.finalize[..., Any] | None = None
    phases: PhaseRecorder | None = None
    """Phases of this rank's writing, for timings."""
    nbytes = 0
    """Number of tensor bytes that this rank has written in this save."""
    files = 0
    """Number of files with tensors that this rank has written in this save."""

    def __init__(
        self,
        checkpoint_id: PathLike | None = None,
        *,
        options: SaveOptions | None = None,
        overwrite: bool = True,
        num_workers: int = WRITER_THREADS,
    ) -> None:
        super().__init__()
        self.replicas = get_replicas_option(options)
        self.overwrite = overwrite
        self.num_workers = num_workers
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.abandon()
        self._set_path(checkpoint_id)
        self.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def abandon(self) -> None:
        """Remove the uncommitted files of a save."""
        with defer_signals():
            if self._finalizer is not None:
                self._finalizer()
            self._draft = self._finalizer = None

    def ended(self, error: CheckpointError, seconds: float) -> None:
        """Determine the outcome of a save in which a collective failed: return if it was committed.

        torch's collectives fail earlier on some ranks than on others, and only some ranks may have received the commit.

        Args:
            error: The error on this rank.
            seconds: Maximum number of seconds to wait for rank 0 to publish the outcome of a commit that it has begun.

        Raises:
            CheckpointError: If it was not committed. All ranks that have begun to write raise the same error.
            RankFailedError: If it was not committed, or if rank 0 was lost during the commit, so that the outcome is
                unknown.
        """
        decided = error if self._outcome_exchange is None else self._outcome_exchange.decide_outcome(error)
        if decided is not None:
            raise decided from error.__cause__
        assert self._outcome_exchange is not None
        try:
            self._outcome_exchange.receive(_COMMITTED_KEY, 0, Deadline(seconds))
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
        self._outcome_exchange = None
        self.nbytes = self.files = 0
        self._rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "with use_collectives=False each rank writes metadata of its own, and nobody decides for all ranks",
                path=self._path,
                hint="Leave use_collectives out.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._resolve_path()
        self.save_id = uuid.uuid4().hex  # stock's planners may return the task of another save, which has another ID
        self._planned_items = plan.items
        return dataclasses.replace(plan, storage_data=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store, name = self._resolve_path()
        with wrap_os_errors("beginning a save", path=self._path), annotate_errors(path=self._path):
            check_overwrite_target(self._path, store, name, overwrite=self.overwrite)
            with defer_signals():  # defer signal handlers until the draft can be removed
                self._draft = Transaction(open_root(store), name, TransactionKind.CHECKPOINT).begin()
                # DCP does not notify a writer if a rank fails before writing: then the draft is removed with the
                # writer.
                self._finalizer = weakref.finalize(self, self._draft.abort)
        draft, fate = self._draft.directory.name, f"dcp/{self.save_id}"
        self._outcome_exchange = _create_outcome_exchange(fate, len(plans))
        return [
            dataclasses.replace(
                plan,
                storage_data=RankWriteTask(
                    draft_name=draft,
                    exchange_name=fate,
                    rank=rank,
                    world=len(plans),
                    save_id=plan.storage_data if isinstance(plan.storage_data, str) else None,
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = self._rank or 0
        try:
            results = self._write_part(plan, planner)
        except Exception as error:
            # Sent to the coordinator, which raises it on all ranks and removes the draft.
            problem = as_checkpoint_error(error, "saving", rank, path=self._path)
            results = [create_report_result(RankWriteReport(rank=rank, error=problem.to_json()))]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = self._draft
        if draft is None:
            raise SaveError("a save is finished that was never begun", path=self._path)
        try:
            with wrap_os_errors("saving", path=self._path), annotate_errors(path=self._path):
                with pause_gc():
                    files = self._build_final_files(draft, metadata, results)
                self._commit(draft, files)
        finally:
            self.abandon()

    def _resolve_path(self) -> tuple[Store, str]:
        """Return the store that contains the checkpoint, and its name there.

        Raises:
            UsageError: If there is no directory.
        """
        if self._path is None:
            raise UsageError("nobody has said where the checkpoint goes", hint="Give checkpoint_id, the directory.")
        return open_parent(self._path)

    def _write_part(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's part. Return the report, followed by one result for each item.

        Raises:
            UsageError: If the planner has replaced the task of this writer.
        """
        order = plan.storage_data
        if not isinstance(order, RankWriteTask):
            raise UsageError(
                "the planner has replaced what this writer told the rank",
                expected="SavePlan.storage_data as create_global_plan got it",
                found=type(order).__name__,
            )
        store, name = self._resolve_path()
        # A planner that caches plans (enable_plan_caching) returns the task of an earlier save, with its draft name.
        draft = open_root(store).get_draft_name(name)
        if order.save_id in (None, self.save_id):
            draft = order.draft_name
            self._outcome_exchange = _create_outcome_exchange(order.exchange_name, order.world)
        with pause_gc():
            tensors = resolve_tensors(plan.items, planner)
            samples: dict[ChunkKey, ReplicaSample] = {}
            if order.world > 1:
                final = {item.index for item in plan.items}
                dropped = resolve_tensors([item for item in self._planned_items if item.index not in final], planner)
                samples = dict(tensor.create_sample(written=True) for tensor in tensors)
                samples |= dict(tensor.create_sample(written=False) for tensor in dropped)
            stem = f"{order.rank + 1:05d}-of-{order.world:05d}"
            files, results = plan_files(tensors, stem)
        self.planned()
        memory = {(str(i), 0): tensor.shard.data for i, tensor in enumerate(tensors)}
        crew = IoContext(workers=self.num_workers, phases=self.phases or PhaseRecorder())
        owns_draft = self._draft is not None
        with wrap_os_errors("saving", rank=order.rank, path=self._path):
            directory = self._draft.directory if self._draft is not None else open_shared_draft(open_root(store), draft)
            try:
                records = list(write_files(directory, files, memory, crew).files)
                self.nbytes, self.files = files.nbytes, len(records)
                written, record = write_values(directory, stem, [*filterfalse(is_tensor_item, plan.items)], planner)
                directory.sync()
            finally:
                if not owns_draft:
                    directory.close()
        records += [] if record is None else [record]
        return [
            create_report_result(RankWriteReport(rank=order.rank, files=tuple(records), samples=samples)),
            *results,
            *written,
        ]

    def _build_final_files(
        self, draft: Transaction, metadata: Metadata, results: list[list[WriteResult]]
    ) -> dict[str, bytes]:
        """Build the files that complete a draft, after all ranks have written the reported files.

        Raises:
            CheckpointError: If a rank has failed, or the files of the ranks are inconsistent.
        """
        reports = [find_report(rank, of_rank) for rank, of_rank in enumerate(results)]
        if (error := next((report.error for report in reports if report.error is not None), None)) is not None:
            raise from_json(dict(error))
        if len(reports) > 1:
            compare_replicas([report.samples for report in reports], self.replicas)
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        for key, path in paths.items():
            if len(path) > MAX_PATH_DEPTH:
                raise UnsupportedStateError(
                    f"the state is nested deeper than {MAX_PATH_DEPTH} containers", leaf=key[:80]
                )
        for report in reports:
            check_written_files(draft.directory, report.rank, report.files)
        stored = {r.index: r.storage_data for of_rank in results for r in of_rank if r.index != REPORT_INDEX}
        complete = dataclasses.replace(
            metadata, version=METADATA_VERSION, storage_data=stored, storage_meta=self.storage_meta()
        )
        text = dump_metadata(complete)
        digests = dump_digests(
            [*(record for report in reports for record in report.files), make_file_record(METADATA_FILE, text)]
        )
        return {METADATA_FILE: text, DIGESTS: digests}

    def _commit(self, draft: Transaction, files: Mapping[str, bytes]) -> None:
        draft.seal(files)
        if self._outcome_exchange is not None and (given_up := self._outcome_exchange.decide_outcome()) is not None:
            raise given_up  # another rank has published and raised it
        draft.commit()
        if self._outcome_exchange is not None:
            try:
                self._outcome_exchange.publish(_COMMITTED_KEY)
            except Exception as error:
                # The checkpoint is committed, so no rank may receive another outcome.
                logger.warning("that %s is saved could not be told to all ranks: %s", self._path, error)


class FileSystemWriter(StorageWriter):
    """A `StorageWriter` with the arguments of the DCP `FileSystemWriter`.

    Arguments that only tune stock's writer have no effect.

    Raises:
        UsageError: If unsupported files are requested: compressed ones, or only safetensors (on construction).
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
        if str(getattr(serialization_format, "value", serialization_format)) not in ("None", "torch_save"):
            raise UsageError(
                "this serialization format is not supported",
                path=str(path),
                found=str(serialization_format),
                hint="What is written is torch.save's format and safetensors in one. For Hugging Face's directories: "
                "xla_ckpt.export_hf.",
            )
        super().__init__(path, overwrite=overwrite, num_workers=max(thread_count, WRITER_THREADS))


def _create_outcome_exchange(name: str, world: int) -> Exchange | None:
    """Create the exchange in which ranks agree on the outcome if a torch collective fails; None for a single
    process.
    """
    return Exchange(get_torch_communicator(), name, STORE_TIMEOUT_SECONDS) if world > 1 else None


def is_tensor_item(item: WriteItem) -> bool:
    """Return True if an item is a tensor, or a part of one."""
    return item.type != WriteItemType.BYTE_IO


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor item of a plan, with its data on this rank."""

    item: WriteItem
    value: torch.Tensor
    shard: HostShard
    """Its bytes."""

    @property
    def chunk(self) -> DcpChunk:
        """The item's region as a DCP chunk."""
        assert self.item.tensor_data is not None
        stored, key = self.item.tensor_data.chunk, self.item.index.fqn
        stop = tuple(low + n for low, n in zip(stored.offsets, stored.sizes, strict=True))
        with annotate_errors(leaf=key):
            return make_chunk(key, get_tensor_dtype(self.value), Box(tuple(stored.offsets), stop))

    def create_sample(self, *, written: bool) -> tuple[ChunkKey, ReplicaSample]:
        """Create a sample of the item for replica comparison, with its key."""
        key, shape = self.item.index.fqn, tuple(self.value.shape)
        loose = may_differ(key, self.value.dtype is torch.uint8, shape)
        described = _describe_tensor(self.value.dtype, shape)
        return (key, tuple(self.item.index.offset or ())), ReplicaSample(
            described, compute_sample_fingerprint([self.shard.data]), written, loose
        )


def resolve_tensors(items: Sequence[WriteItem], planner: SavePlanner) -> list[TensorItem]:
    """Return the tensor items of a plan with their data from the planner.

    Raises:
        UnsupportedStateError: If a tensor differs from the description that the planner sent to the other ranks.
    """
    tensors = [*filter(is_tensor_item, items)]
    values = [(item.index.fqn, _resolve_tensor(item, planner)) for item in tensors]
    shards = copy_to_host(values)
    return [TensorItem(item, value, shard) for item, (_, value), shard in zip(tensors, values, shards, strict=True)]


def _resolve_tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    value: Any = planner.resolve_data(item)
    if isinstance(value, torch.Tensor):
        check_can_plan(value, item.index.fqn)
    shard = getattr(value, "__get_tensor_shard__", None)  # some planners return the whole sharded tensor
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
            expected=_describe_tensor(*wanted), found=_describe_tensor(*actual),
            hint="The planner's create_local_plan and resolve_data have to agree.",
        )  # fmt: skip
    return value.detach()


def plan_files(tensors: Sequence[TensorItem], stem: str) -> tuple[FilePlans, list[WriteResult]]:
    """Plan the files of tensors, and the location of each tensor. The leaf of a region is the number of its tensor."""
    # Readers of safetensors support one region per name in a file: a second one is written to another file.
    again: Counter[str] = Counter()
    by_file: dict[int, list[tuple[int, TensorItem]]] = {}
    for i, tensor in enumerate(tensors):
        key = tensor.item.index.fqn
        by_file.setdefault(again[key], []).append((i, tensor))
        again[key] += 1
    plans, results = [], []
    for number, members in sorted(by_file.items()):
        name = f"{stem}-{number + 1}" if number else stem
        codec = DcpFile(f"~{name}", tuple(tensor.chunk for _, tensor in members))
        sources = tuple(
            RegionSource(leaf=str(i), shard_index=0, offset=0, nbytes=len(t.shard.data)) for i, t in members
        )
        plans.append(FilePlan(path=f"{name}.safetensors", layout=codec, sources=sources))
        results += [
            _create_write_result(tensor.item.index, plans[-1].path, offset, nbytes)
            for (_, tensor), (offset, nbytes) in zip(members, codec.zip_ranges, strict=True)
        ]
    return FilePlans(tuple(plans)), results


def _describe_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def write_values(
    directory: Directory, stem: str, items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[WriteResult], FileRecord | None]:
    """Write values other than tensors sequentially into one file.

    Raises:
        UnsupportedStateError: If a value cannot be pickled.
    """
    if not items:
        return [], None
    path = f"objects-{stem}.distcp"
    data, results, regions, digests = bytearray(), [], [], []
    for item in items:
        try:
            value: Any = planner.resolve_data(item)
        # exceptions of pickle, which do not contain the key
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UnsupportedStateError(
                f"it cannot be pickled: {error}",
                leaf=item.index.fqn,
                hint="Store plain values, tensors, or an object with state_dict().",
            ) from error
        if not isinstance(value, io.BytesIO):
            raise UnsupportedStateError("the planner gave no bytes", leaf=item.index.fqn, found=type(value).__name__)
        text = value.getvalue()
        results.append(_create_write_result(item.index, path, len(data), len(text)))
        if text:
            regions.append((len(data), len(text)))
            digester = BlockDigester(len(text))
            digester.update(memoryview(text))
            digests += digester.digests
        data += text
    write_file(directory, path, bytes(data))
    record = FileRecord(
        path=path, size=len(data), framing_bytes=0, regions=tuple(regions), block_digests=tuple(digests)
    )
    return results, record


def _create_write_result(index: MetadataIndex, path: str, offset: int, nbytes: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=nbytes, storage_data=_StorageInfo(path, offset, nbytes))


ChunkKey = tuple[str, tuple[int, ...]]
"""(key, offset in the global tensor) of a planned write."""

_REPLICAS_HINT = (
    "Tensor parallelism that nobody declared is the likely cause, or pipeline stages that use the same keys: give "
    "DTensors, or xla_ckpt.dcp.sharded(state_dict, model, mesh), with shardings= where the model does not say it. "
    "If the ranks have really drifted apart, options=SaveOptions(replicas='first') of xla_ckpt.dcp.save or "
    "of StorageWriter stores the first one, and says of which tensors."
)

_BATCH_NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last components of keys whose values may differ between data-parallel ranks: local statistics of BatchNorm layers."""


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """A sample of a value on one rank, for replica comparison."""

    description: str
    """Dtype and shape."""

    digest: int
    """Digest of some of its bytes."""

    written: bool
    is_unchecked: bool = False
    """True if a difference only causes a warning."""


def may_differ(key: str, is_bytes: bool, shape: Sequence[int]) -> bool:
    """Return True if data-parallel ranks may have different values under a key.

    These are the statistics of a BatchNorm, and rows of bytes, which are states of random generators.
    """
    return key.rpartition(".")[2] in _BATCH_NORM_STATISTICS or (is_bytes and len(shape) == 1)


def get_replicas_option(options: SaveOptions | None) -> ReplicaPolicy:
    """Return the policy for replicas that differ, the only supported option of a save through DCP.

    Raises:
        UsageError: If the caller sets another option, which would have no effect.
    """
    if isinstance(options, SaveOptions) and options != SaveOptions(replicas=options.replicas):
        raise UsageError("of the options of a save, xla_ckpt.dcp heeds replicas alone", found=repr(options))
    return resolve_options(SaveOptions, options).replicas


def compare_replicas(rank_samples: Sequence[Mapping[ChunkKey, ReplicaSample]], replicas: ReplicaPolicy) -> None:
    """Compare the samples of all ranks.

    Raises:
        DivergentReplicasError: If two ranks have different values under one key, which must be equal.
    """
    stored: dict[ChunkKey, tuple[int, ReplicaSample]] = {}
    for rank, samples in enumerate(rank_samples):
        stored.update({place: (rank, one) for place, one in samples.items() if one.written})
    different: dict[str, tuple[int, ReplicaSample, int, ReplicaSample]] = {}
    for rank, samples in enumerate(rank_samples):
        for place, one in samples.items():
            owner, kept = stored.get(place, (rank, one))
            if (one.description, one.digest) != (kept.description, kept.digest):
                different.setdefault(place[0], (owner, kept, rank, one))
    strict = {key: difference for key, difference in different.items() if not difference[1].is_unchecked}
    if strict and replicas == "equal":
        key, (owner, kept, rank, one) = next(iter(strict.items()))
        others = f" ({len(strict) - 1} more keys differ, too)" if len(strict) > 1 else ""
        raise DivergentReplicasError(
            f"two ranks hold different tensors under one key, of which DCP keeps one{others}",
            leaf=key,
            rank=rank,
            expected=f"{kept.description} with the bytes of rank {owner}, which would be stored",
            found=f"{'other bytes' if kept.description == one.description else one.description} on rank {rank}",
            hint=_REPLICAS_HINT,
        )
    if different:
        lines = [f"  {key}: rank {rank} against rank {owner}" for key, (owner, _, rank, _) in different.items()]
        more = [f"  and {len(lines) - MAX_LISTED_RANKS} more"] if len(lines) > MAX_LISTED_RANKS else []
        logger.warning("%s", join_lines([describe_divergence(len(lines)), *lines[:MAX_LISTED_RANKS], *more]))


REPORT_INDEX = MetadataIndex("~xla_ckpt report")
"""Index of the write result that contains a rank's report instead of an item of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWriteTask:
    """The task that the coordinator sends to a rank."""

    draft_name: str
    """Name of the draft directory."""

    exchange_name: str
    """Name of the exchange in which the ranks agree on the outcome if one of them is lost."""

    rank: int
    world: int
    save_id: str | None
    """ID of the rank's save that the task is for. Planners that cache plans may return an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWriteReport:
    """The report that a rank sends to the coordinator."""

    rank: int
    files: tuple[FileRecord, ...] = ()
    samples: Mapping[ChunkKey, ReplicaSample] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


def create_report_result(report: RankWriteReport) -> WriteResult:
    """Convert a report to a DCP write result, which is sent to the coordinator."""
    return WriteResult(index=REPORT_INDEX, size_in_bytes=0, storage_data=report)


def find_report(rank: int, results: Sequence[WriteResult]) -> RankWriteReport:
    """Return the report among the results of a rank.

    Raises:
        SaveError: If there is no report.
    """
    for result in results:
        if isinstance(result.storage_data, RankWriteReport):
            return result.storage_data
    raise SaveError("a rank wrote with another StorageWriter", rank=rank)


_DCP_FILE = re.compile(
    r"\.metadata(\.tmp)?|__\d+\.metadata(\.tmp)?|\.manager_metadata|.*\.distcp|.*\.safetensors|"
    r"model\.safetensors\.index\.json|" + re.escape(DIGESTS)
)
"""Names of files in a DCP checkpoint."""

_DCP_ONLY_FILE = re.compile(r"\.metadata|__\d+\.metadata|.*\.distcp|" + re.escape(DIGESTS))
"""Names of files that only occur in DCP checkpoints: a directory with other files, but none of these, is not
replaced."""


def check_overwrite_target(path: str | None, store: Store, name: str, *, overwrite: bool) -> None:
    """Check that a path may be overwritten: only a DCP checkpoint, and not the current working directory.

    Args:
        path: The path, for error messages.
        store: The store that contains it.
        name: Its name in the store.
        overwrite: False to reject an existing checkpoint as well.

    Raises:
        UsageError: If the path may not be overwritten.
    """
    if path is not None and is_working_directory(path):
        raise UsageError(
            "the checkpoint would replace the directory in which this program works",
            path=path,
            hint="Give the checkpoint a directory of its own.",
        )
    if not store.has(name):
        return
    names = store.list_names(name)
    other = [n for n in names if not _DCP_FILE.fullmatch(n) or store.is_directory(f"{name}/{n}")]
    if open_root(store).is_native_tag(name):
        problem, hint = "there is a tag of this library", "Choose another path, or delete the tag."
    elif not store.is_directory(name):
        problem, hint = "there is a file", "A checkpoint is a directory."
    elif other or (names and not any(map(_DCP_ONLY_FILE.fullmatch, names))):
        problem = "the directory holds something else than a checkpoint of DCP's, which would be lost"
        hint = "Give the checkpoint a directory of its own."
        names = other or names
    elif names and not overwrite:
        # Programs match this wording of stock DCP.
        problem, hint = "Checkpoint already exists, and overwrite=False", "Choose another path."
    else:
        return
    raise UsageError(problem, path=path, found=", ".join(names[:8]) or None, hint=hint)
