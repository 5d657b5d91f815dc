"""DCP's `StorageWriter` on this library's engine: one directory that appears complete and verified, or not at all.

The coordinator makes a draft of the directory when it plans. All ranks write into it, and report: what they wrote with
which digests, or the error that they met. The coordinator hears all reports in `finish`, writes ``.metadata`` and the
digests, and gives the draft its name. An error of a rank is a report, and not raised there: DCP would then not call
the coordinator any more, and nobody would remove the draft.
"""

from __future__ import annotations

import dataclasses
import uuid
import weakref
from collections.abc import Mapping, Sequence
from itertools import filterfalse
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xla_ckpt.dcp.named import Named
from xla_ckpt.dcp.orders import OF_REPORT, WriteOrder, WriteReport, report_of, result_of
from xla_ckpt.dcp.overwriting import check_target
from xla_ckpt.dcp.replicas import Held, Place, compare, replicas_of
from xla_ckpt.dcp.written import is_tensor, planned, tensors_of, write_values
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.joint_directory import check_written, open_joint
from xla_ckpt.engine.phases import Phases
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
from xla_ckpt.job.process_group import REACH, communicator
from xla_ckpt.job.round import Deadline, Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.layouts.dcp.index import pickled
from xla_ckpt.layouts.dcp.metadata import MAX_STEPS, METADATA
from xla_ckpt.layouts.digests import DIGESTS, dump_digests, record_of
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, above
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tags.root import Kind
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.transaction import Transaction

logger = get_logger(__name__)

VERSION = "1.0.0"
"""What DCP writes as the version of its metadata."""

_COMMITTED = "committed"
"""What rank 0 says in the job's store when a checkpoint is in place."""


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
            check_target(self._path, store, name, overwrite=self.overwrite)
            with undisturbed():  # what a signal handler raises comes when somebody can remove the draft
                self._draft = Transaction(root_of(store), name, Kind.CHECKPOINT).begin()
                # DCP tells a writer nothing of a rank that fails before it writes: then the draft goes with the writer.
                self._forget = weakref.finalize(self, self._draft.abandon)
        draft, fate = self._draft.directory.name, f"dcp/{self.save_id}"
        self._fate = _round(fate, len(plans))
        return [
            dataclasses.replace(
                plan,
                storage_data=WriteOrder(
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
            results = [result_of(WriteReport(rank=rank, error=problem.to_json()))]
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
        return above(self._path)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's part; one result for each item, behind the report."""
        order = plan.storage_data
        if not isinstance(order, WriteOrder):
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
            tensors = tensors_of(plan.items, planner)
            samples: dict[Place, Held] = {}
            if order.world > 1:
                final = {item.index for item in plan.items}
                dropped = tensors_of([item for item in self._planned if item.index not in final], planner)
                samples = dict(tensor.sampled(written=True) for tensor in tensors)
                samples |= dict(tensor.sampled(written=False) for tensor in dropped)
            stem = f"{order.rank + 1:05d}-of-{order.world:05d}"
            files, results = planned(tensors, stem)
        self.planned()
        memory = {(str(i), 0): tensor.shard.data for i, tensor in enumerate(tensors)}
        crew = Crew(workers=self.num_workers, phases=self.phases or Phases())
        owns_draft = self._draft is not None
        with storage_errors("saving", rank=order.rank, path=self._path):
            directory = self._draft.directory if self._draft is not None else open_joint(root_of(store), draft)
            try:
                records = list(write_files(directory, files, memory, crew).files)
                self.nbytes, self.files = files.nbytes, len(records)
                written, record = write_values(directory, stem, [*filterfalse(is_tensor, plan.items)], planner)
                directory.sync()
            finally:
                if not owns_draft:
                    directory.close()
        records += [] if record is None else [record]
        return [result_of(WriteReport(rank=order.rank, files=tuple(records), samples=samples)), *results, *written]

    def _sealing(self, draft: Transaction, metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, bytes]:
        """The files that make a draft a checkpoint, when all ranks have written what they report.

        Raises:
            CheckpointError: A rank has failed, or what the ranks have written does not fit together.
        """
        reports = [report_of(rank, of_rank) for rank, of_rank in enumerate(results)]
        if (error := next((report.error for report in reports if report.error is not None), None)) is not None:
            raise from_json(dict(error))
        if len(reports) > 1:
            compare([report.samples for report in reports], self.replicas)
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        for key, path in paths.items():
            if len(path) > MAX_STEPS:
                raise UnsupportedStateError(f"the state is nested deeper than {MAX_STEPS} containers", leaf=key[:80])
        for report in reports:
            check_written(draft.directory, report.rank, report.files)
        stored = {r.index: r.storage_data for of_rank in results for r in of_rank if r.index != OF_REPORT}
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
        if str(getattr(serialization_format, "value", serialization_format)) not in ("None", "torch_save"):
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
