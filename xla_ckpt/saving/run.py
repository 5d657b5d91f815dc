"""Run a save in the background: write files, collect rank results, finalize and commit.

Each rank runs a `SaveTask` on its own thread. Rank 0 is the leader: it begins the transaction, sends the name of the
draft directory to the other ranks, waits for their results, finalizes the checkpoint, and commits. Every rank receives
the same outcome, whether the save succeeds or fails.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from xla_ckpt.core.plan.file_sharing import SharedPlan
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.save_plan import SavePlan
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION, Exchange
from xla_ckpt.distributed.job import Job
from xla_ckpt.errors import CheckpointError, RankFailedError, annotate_errors
from xla_ckpt.features.local_first.host_commit import (
    LEADER_MESSAGES,
    HostLocalCommit,
    check_parity_supported,
    commit_other_disks,
    send_manifest,
)
from xla_ckpt.features.local_first.upload import HostDisks
from xla_ckpt.features.parity.parity import ParityExchange
from xla_ckpt.features.reuse.buffer_cache import record_saved_buffers
from xla_ckpt.features.reuse.reuse import find_base_tag, reuse_files
from xla_ckpt.features.stale import cache_manifest
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.logs import get_logger
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.reports import SAVE, PhaseRecorder, RankTimings, SaveReport, publish_report, select_slowest_ranks
from xla_ckpt.saving.context import Cancellation, PreparedSave, SaveContext, SaveTiming
from xla_ckpt.saving.finalize import FinalFiles
from xla_ckpt.saving.merge import finalize_manifest
from xla_ckpt.saving.rank_protocol import BaseTag, BeginSave, RankResult, SaveAgreement, negotiate_save
from xla_ckpt.saving.write import check_space, open_shared_draft, write_files, write_objects
from xla_ckpt.snapshot.snapshot import Snapshot, SnapshotProgress
from xla_ckpt.storage.base import Directory
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.root import Transaction, log_errors_after_commit

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One rank's part of a save, from the prepared state to the outcome."""

    context: SaveContext
    job: Job
    prepared: PreparedSave | CheckpointError
    """The prepared state, or the error that prevented it, which is sent to the other ranks."""

    timing: SaveTiming = field(default_factory=SaveTiming)
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Lets the caller cancel the save."""

    on_begin: Callable[[], None] = lambda: None
    """Callback for when all ranks have begun the save."""

    @property
    def snapshot_progress(self) -> SnapshotProgress | None:
        """Progress of the snapshot; the program may write to the state when it is done. None if preparing failed."""
        return self.prepared.snapshot.progress if isinstance(self.prepared, PreparedSave) else None

    @property
    def exchange(self) -> Exchange:
        """Message exchange with the other ranks."""
        return self.job.exchange

    @property
    def mesh(self) -> Mesh:
        """Arrangement of the ranks."""
        return self.job.placement.mesh

    @property
    def phases(self) -> PhaseRecorder:
        """Recorder of the time spent in each phase."""
        return self.timing.phases

    def run(self) -> SaveReport:
        """Write this rank's part, wait for the other ranks, and return the report of the save.

        Raises:
            CheckpointError: The save did not commit; the same error on every rank.
        """
        began = time.perf_counter()
        if self.timing.trace is not None:
            self.exchange.on_wait = self.phases.record_wait
        try:
            with self.job.participate():
                agreed = negotiate_save(self.context, self.job, self._get_prepared, self.phases)
                self.on_begin()
                with annotate_errors(path=self.context.root.path, tag=self.context.tag):
                    sequence, written = (
                        self._run_leader(agreed) if self.exchange.rank == 0 else self._run_follower(agreed)
                    )
        except Exception as error:
            # The error is raised to the caller that waits for the save; listeners are notified here.
            self._finish_report(began, 0, SharedPlan(SavePlan(())), error)
            raise
        else:
            with self._log_errors_after_commit():
                record_saved_buffers(
                    self.context.root, self.context.tag, sequence, self._get_prepared().untrained_parameters
                )
        finally:
            self.release()
        return self._finish_report(began, sequence, written)

    def report_refusal(self, error: BaseException) -> None:
        """Report a save that was not run because its only rank could not prepare it; its caller gets the error."""
        self._finish_report(time.perf_counter(), 0, SharedPlan(SavePlan(())), error)

    def _finish_report(
        self, began: float, sequence: int, written: SharedPlan, error: BaseException | None = None
    ) -> SaveReport:
        """Build the report of this finished save, and publish it to the trace and the program's callbacks."""
        ended = time.perf_counter()
        self.phases.record_interval(SAVE, began, ended, written.plan.nbytes, about=self.context.tag)
        report = SaveReport(
            path=self.context.root.path,
            tag=self.context.tag,
            sequence=sequence,
            nbytes=written.plan.nbytes,
            files=len(written.plan.files),
            shared=written.nbytes,
            seconds=ended - began,
            stall=self.timing.stall
            + (self.snapshot_progress.stall_seconds if self.snapshot_progress is not None else 0.0),
            phases=self.phases.report(),
            error=error,
        )
        if error is not None:
            publish_report(report, self.phases, self.timing.trace)
            return report
        logger.info("%s", report.in_words)
        with self._log_errors_after_commit():
            publish_report(report, self.phases, self.timing.trace)
        return report

    def _log_errors_after_commit(self) -> AbstractContextManager[None]:
        """Return a context that logs errors of the work after the commit, because they must not fail the save."""
        return log_errors_after_commit(self.context.root.path, self.context.tag)

    def release(self) -> None:
        """Release the state, so that the program may write to it."""
        if isinstance(self.prepared, PreparedSave):
            self.prepared.snapshot.release()

    def clean_up(self, *, failed: bool) -> None:
        """Remove leftovers of this save and of earlier ones; called when the outcome is known.

        If removal fails, a warning is logged, or a debug message if the save failed, too, because its error usually
        explains why. The next save tries again.
        """
        if self.exchange.rank == 0:
            root = self.context.root
            try:
                root.clean()
            except (OSError, CheckpointError) as error:
                level = logging.DEBUG if failed else logging.WARNING
                logger.log(level, "could not clean up in %s after tag %s: %s", root.path, self.context.tag, error)

    def _get_prepared(self) -> PreparedSave:
        if isinstance(self.prepared, CheckpointError):
            raise self.prepared
        return self.prepared

    def _run_leader(self, agreed: SaveAgreement) -> tuple[int, SharedPlan]:
        """Run rank 0's part: begin the transaction, collect all records, finalize and commit."""
        exchange, transaction = self.exchange, Transaction(self.context.root, self.context.tag)
        try:
            with self._fail_all_ranks():
                frozen = self._get_prepared()
                check_parity_supported(disks := agreed.disks, self.context)
                with self.phases.measure("commit"):
                    if self.context.check_destination is not None:
                        self.context.check_destination()
                    self.context.root.acquire_lease(
                        exchange.timeout * LEADER_TIMEOUT_FRACTION, self.cancellation.raise_if_cancelled
                    )
                    transaction.begin()
                earlier = find_base_tag(self.context, transaction.newest)
                if exchange.size > 1:  # a job of one rank would keep the messages of all its saves in memory
                    begun = BeginSave(transaction.directory.name, transaction.sequence, earlier)
                    exchange.publish("begin", begun.to_json())
                sharing = self._reuse_files(frozen, earlier, transaction.directory, agreed)
                record = self._write_rank_files(frozen, sharing, transaction.directory)
                parts = self._collect_results(record, sharing.plan)
                records = [part.record for part in parts]
                parity = (
                    None
                    if self._parity_exchange is None
                    else partial(self._parity_exchange.run_leader, transaction.directory)
                )
                ending = FinalFiles(index=frozen.planner.index, marks=frozen.planner.marks, write_parity=parity)
                manifest = finalize_manifest(
                    self.context, transaction, records, agreed.mismatched_ranks, self.mesh, disks, ending
                )
                send_manifest(exchange, disks, transaction.directory)
                self._commit(transaction, parts, disks)
        finally:
            transaction.abort()
        with self._log_errors_after_commit():
            if exchange.size > 1:
                exchange.publish("verdict", transaction.sequence)
        with self._log_errors_after_commit():
            cache_manifest(self.context.root, manifest)
            self.context.on_commit(transaction.sequence)
        return transaction.sequence, sharing

    @contextlib.contextmanager
    def _fail_all_ranks(self) -> Iterator[None]:
        """Send an error of any kind to all other ranks, so that no rank waits for an outcome that never comes."""
        try:
            yield
        except BaseException as error:
            exchange = self.exchange
            problem = as_checkpoint_error(error, "saving", 0)
            problem.at(path=self.context.root.path, tag=self.context.tag)
            if exchange.size > 1:
                problem = exchange.decide_outcome(problem) or problem
                for key in ("begin", *LEADER_MESSAGES):
                    if not exchange.has_published(key):
                        exchange.publish(key, error=problem)
                if self._parity_exchange is not None:
                    self._parity_exchange.abort(problem)
                exchange.publish("verdict", error=problem)
            if problem is error:
                raise
            raise problem from error

    def _commit(self, transaction: Transaction, results: Sequence[RankResult], disks: HostDisks) -> None:
        within = self.exchange.timeout * LEADER_TIMEOUT_FRACTION
        began = time.perf_counter()
        if self.context.root.wait_ready(within):
            self.phases.add("helper", time.perf_counter() - began)
        self.cancellation.begin_commit()
        given_up = self.exchange.decide_outcome() if self.exchange.size > 1 else None
        if given_up is not None:
            raise given_up  # from another rank, which has already reported it to its caller
        began = time.perf_counter()
        commit_other_disks(self.exchange, disks)
        report = select_slowest_ranks([part.timings for part in results])
        retained = transaction.commit(retention=self.context.retention, report=report, within=within)
        ended = time.perf_counter()
        self.phases.add("commit", ended - began - retained, ended=ended - retained)
        self.phases.add("retain", retained, ended=ended)

    def _run_follower(self, agreed: SaveAgreement) -> tuple[int, SharedPlan]:
        """Run any other rank's part: write, send the result, and wait for the outcome."""
        exchange, root, sharing = self.exchange, self.context.root, SharedPlan(SavePlan(()))
        draft: str | None = None
        disk = HostLocalCommit(self.context, exchange, agreed.disks.get_leader(exchange.rank))
        try:
            frozen = self._get_prepared()
            begun = disk.begin(BeginSave.from_json(exchange.receive("begin", 0)), self.cancellation.raise_if_cancelled)
            with contextlib.closing(open_shared_draft(root, draft := begun.draft)) as directory:
                sharing = self._reuse_files(frozen, begun.base, directory, agreed)
                record = self._write_rank_files(
                    frozen, sharing, directory, report_all=exchange.rank in agreed.mismatched_ranks
                )
                directory.sync()
            self.cancellation.begin_commit()  # rank 0 may commit as soon as it has this
            exchange.publish(f"record/{exchange.rank}", RankResult(record, self._get_timings(sharing.plan)).to_json())
        except BaseException as error:
            # Rank 0 must receive the error; all ranks then raise the outcome that rank 0 publishes.
            problem = as_checkpoint_error(error, "saving", exchange.rank)
            exchange.publish(f"record/{exchange.rank}", error=problem)
            disk.abort(problem)
            draft = None  # rank 0 no longer asks this rank for parity
            if isinstance(error, RankFailedError):
                raise  # decided for all ranks, including rank 0: waiting for its outcome would take the timeout again
        if self._parity_exchange is not None and draft is not None:
            self._parity_exchange.run_follower(root, draft)
        disk.finish(failed=draft is None)
        with self.phases.measure("meet"):
            return disk.wait_for_outcome(), sharing

    @property
    def _parity_exchange(self) -> ParityExchange | None:
        parity = self.context.options.parity
        return None if parity is None else ParityExchange(self.exchange, parity, self._make_io_context())

    def _make_io_context(self, progress: Callable[[int], None] = lambda _: None) -> IoContext:
        return IoContext(workers=self.context.workers, progress=progress, phases=self.phases)

    def _reuse_files(
        self, prepared: PreparedSave, base: BaseTag | None, directory: Directory, agreed: SaveAgreement
    ) -> SharedPlan:
        """Plan this rank's files, and reuse files of the base tag that need not be written again."""
        root, stage = self.context.root, self.mesh.coordinates(self.exchange.rank)["pp"]
        with self.phases.measure("plan"), pause_gc():
            plan = agreed.plan_rank(prepared.planner, stage)
        if root.store.object_store is not None or agreed.disks.is_multi_disk:
            plan = plan.to_streaming()  # digests go into the manifest, because no single rank can read all files there
        if not self.context.options.share:
            return SharedPlan(plan)
        crew = self._make_io_context(lambda _: self.cancellation.raise_if_cancelled())
        with self.cancellation.track_memory_reads(), self.phases.measure("share"):
            verify = self.context.options.parity is not None
            return reuse_files(plan, prepared, base, root, directory, crew, verify=verify)

    def _write_rank_files(
        self, prepared: PreparedSave, shared_plan: SharedPlan, directory: Directory, *, report_all: bool = False
    ) -> RankRecord:
        """Write this rank's files, and return the record of their contents; with `report_all`, of all arrays."""
        rank, world, snapshot, plan = self.exchange.rank, self.exchange.size, prepared.snapshot, shared_plan.plan
        check_space(directory, plan)
        with (
            self.cancellation.track_memory_reads(),
            ProgressBar(f"save {self.context.tag}", plan.nbytes, self.context.show_progress) as bar,
        ):

            def dealt(nbytes: int) -> None:
                self.cancellation.raise_if_cancelled()
                LEASES.renew(self.context.root.path)
                bar(nbytes)

            with pause_gc():
                memory = snapshot.materialize()
            written = write_files(directory, plan, memory, self._make_io_context(dealt), budget=snapshot.budget)
            samples = snapshot.compute_samples() if world > 1 else {}
        self._warn_torn(snapshot)
        written = written.add_shared(shared_plan.shared_files)
        files = (*written.files, *write_objects(directory, prepared.objects, rank, world))
        return RankRecord.from_shards(
            written.shards,
            samples,
            common_leaves=[path for path in prepared.leaves.paths if prepared.is_shared_leaf(path)],
            reports_common=report_all or prepared.is_reporting_rank,
            rank=rank,
            files=files,
            arrays=prepared.collect_array_facts((lambda _: True) if report_all else prepared.is_reported_here),
            aliases={alias: target for alias, target in prepared.aliases.items() if prepared.is_reported_here(alias)},
            skeleton=prepared.skeleton,
            objects=tuple(range(len(written.files), len(files))),
            parts=prepared.structure_fingerprints,
            module_metadata=prepared.module_metadata,
        )

    def _warn_torn(self, snapshot: Snapshot) -> None:
        """Log a warning that names the arrays that another thread of the program modified during the save."""
        snapshot.detect_torn_writes()
        if snapshot.torn:
            logger.warning(
                "tag %s: the program wrote to %s while the save read it: the tag may hold values of several "
                "instants. No thread may write to a state before save returns",
                self.context.tag,
                format_leaves(list(snapshot.torn)),
            )

    def _collect_results(self, own: RankRecord, plan: SavePlan) -> list[RankResult]:
        """Receive the results of all ranks, and return them with this rank's own."""
        parts = [RankResult(own, self._get_timings(plan))]
        with self.phases.measure("meet"):
            for rank, message in enumerate(self.exchange.receive_each("record", range(1, self.exchange.size)), 1):
                part = RankResult.from_json(message)
                parts.append(part)
                parts[-1] = RankResult(
                    part.record.resolve_names(parts[self.mesh.first_of_stage(rank)].record), part.timings
                )
            return parts

    def _get_timings(self, plan: SavePlan) -> RankTimings:
        """Return this rank's timings so far, to be stored in the tag."""
        return RankTimings(
            rank=self.exchange.rank,
            stall=self.timing.stall,
            nbytes=plan.nbytes,
            files=len(plan.files),
            phases=self.phases.report(),
        )
