"""A save in the background: payload, records, manifest, commit. Each rank has a `Save`, and runs it on a thread.

Rank 0 begins the transaction and tells the others where it is; each rank writes its files and reports what it wrote;
rank 0 waits for all reports, seals the tag, and commits. The verdict, good or bad, reaches everybody.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from xla_ckpt.engine.cancellation import Cancellation
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.disks import Disks
from xla_ckpt.engine.ending import end
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.joint_directory import open_joint
from xla_ckpt.engine.merged import sealed_manifest
from xla_ckpt.engine.opening import AgreedSave, open_save
from xla_ckpt.engine.order import Order, Timing
from xla_ckpt.engine.other_disk import OTHERS_WAIT_FOR, OtherDisk, check_parity, commit_on_others, say_sealed
from xla_ckpt.engine.parity import ParityRound
from xla_ckpt.engine.phases import SAVE, Phases
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.rank_timings import Measured, kept
from xla_ckpt.engine.report import SaveReport
from xla_ckpt.engine.save_messages import Begun, EarlierTag, Part
from xla_ckpt.engine.seal import Ending
from xla_ckpt.engine.sharing import earlier_tag, share_files
from xla_ckpt.engine.stale import remember
from xla_ckpt.engine.unchanged import note_saved
from xla_ckpt.engine.write import check_space, write_files, write_objects
from xla_ckpt.errors import CheckpointError, RankFailedError, naming
from xla_ckpt.job.job import Job
from xla_ckpt.job.round import LEAD, Round
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.record import Record
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.plan.sharing import SharedPlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.snapshot.freezing import Freezing
from xla_ckpt.snapshot.take import Snapshot
from xla_ckpt.storage.base import Directory
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.root import logged_after_commit
from xla_ckpt.tags.transaction import Transaction
from xla_ckpt.tree.path import listed

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One rank's part of one save, from the frozen state to the verdict."""

    order: Order
    job: Job
    frozen: Frozen | CheckpointError
    """What is saved, or why this rank could not prepare it: then the others hear of that."""

    timing: Timing = field(default_factory=Timing)
    cancellation: Cancellation = field(default_factory=Cancellation)
    """How the caller gives it up."""

    began: Callable[[], None] = lambda: None
    """Is called when all ranks have begun it."""

    @property
    def freezing(self) -> Freezing | None:
        """When the program may write to what is saved; None if it could not be prepared."""
        return self.frozen.snapshot.freezing if isinstance(self.frozen, Frozen) else None

    @property
    def exchange(self) -> Round:
        """Where this rank talks with the others."""
        return self.job.exchange

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged."""
        return self.job.placement.mesh

    @property
    def phases(self) -> Phases:
        """Where the time goes."""
        return self.timing.phases

    def run(self) -> SaveReport:
        """Write this rank's part, meet the others, and wait for the verdict.

        Raises:
            CheckpointError: The save did not commit; the same error on every rank.
        """
        began = time.perf_counter()
        if self.timing.trace is not None:
            self.exchange.waited = self.phases.waited
        try:
            with self.job.taking_part():
                agreed = open_save(self.order, self.job, self._ready, self.phases)
                self.began()
                with naming(path=self.order.root.path, tag=self.order.tag):
                    sequence, written = self._lead(agreed) if self.exchange.rank == 0 else self._follow(agreed)
        except Exception as error:
            # Raised to who waits for the save; those who watch saves hear of it here.
            self._end(began, 0, SharedPlan(SavePlan(())), error)
            raise
        else:
            with self._after_commit():
                note_saved(self.order.root, self.order.tag, sequence, self._ready().fixed)
        finally:
            self.release()
        return self._end(began, sequence, written)

    def refuse(self, error: BaseException) -> None:
        """Report that it was not run: this rank is alone, and its caller is told why."""
        self._end(time.perf_counter(), 0, SharedPlan(SavePlan(())), error)

    def _end(self, began: float, sequence: int, written: SharedPlan, error: BaseException | None = None) -> SaveReport:
        """The report of this save, which is done now; the trace and the program's functions have it, too."""
        ended = time.perf_counter()
        self.phases.keep(SAVE, began, ended, written.plan.nbytes, about=self.order.tag)
        report = SaveReport(
            path=self.order.root.path,
            tag=self.order.tag,
            sequence=sequence,
            nbytes=written.plan.nbytes,
            files=len(written.plan.files),
            shared=written.nbytes,
            seconds=ended - began,
            stall=self.timing.stall + (self.freezing.stall if self.freezing is not None else 0.0),
            phases=self.phases.report(),
            error=error,
        )
        if error is not None:
            end(report, self.phases, self.timing.trace)
            return report
        logger.info("%s", report.in_words)
        with self._after_commit():
            end(report, self.phases, self.timing.trace)
        return report

    def _after_commit(self) -> AbstractContextManager[None]:
        """Around what follows the commit, and must not make an error of the save."""
        return logged_after_commit(self.order.root.path, self.order.tag)

    def release(self) -> None:
        """Let go of what is saved: the program may write to it."""
        if isinstance(self.frozen, Frozen):
            self.frozen.snapshot.release()

    def tidy(self, *, failed: bool) -> None:
        """Remove what this save and earlier ones left behind; called when the outcome is known.

        That it cannot be removed is logged, unless the save failed, too: then its error has said why, most often. The
        next save tries it again.
        """
        if self.exchange.rank == 0:
            root = self.order.root
            try:
                root.clean()
            except (OSError, CheckpointError) as error:
                level = logging.DEBUG if failed else logging.WARNING
                logger.log(level, "could not clean up in %s after tag %s: %s", root.path, self.order.tag, error)

    def _ready(self) -> Frozen:
        if isinstance(self.frozen, CheckpointError):
            raise self.frozen
        return self.frozen

    def _lead(self, agreed: AgreedSave) -> tuple[int, SharedPlan]:
        """Rank 0's part: the transaction, the records of all, the commit."""
        exchange, transaction = self.exchange, Transaction(self.order.root, self.order.tag)
        try:
            with self._failing_on_all_ranks():
                frozen = self._ready()
                check_parity(disks := agreed.disks, self.order)
                with self.phases.timed("commit"):
                    if self.order.check is not None:
                        self.order.check()
                    self.order.root.hold(exchange.timeout * LEAD, self.cancellation.check)
                    transaction.begin()
                earlier = earlier_tag(self.order, transaction.newest)
                if exchange.size > 1:  # a job of one rank would keep the messages of all its saves
                    begun = Begun(transaction.directory.name, transaction.sequence, earlier)
                    exchange.say("begin", begun.to_json())
                sharing = self._share(frozen, earlier, transaction.directory, agreed)
                record = self._write(frozen, sharing, transaction.directory)
                parts = self._hear_parts(record, sharing.plan)
                records = [part.record for part in parts]
                parity = None if self._parity is None else partial(self._parity.lead, transaction.directory)
                ending = Ending(index=frozen.writing.index, marks=frozen.writing.marks, parity=parity)
                manifest = sealed_manifest(self.order, transaction, records, agreed.odd, self.mesh, disks, ending)
                say_sealed(exchange, disks, transaction.directory)
                self._commit(transaction, parts, disks)
        finally:
            transaction.abandon()
        with self._after_commit():
            if exchange.size > 1:
                exchange.say("verdict", transaction.sequence)
        with self._after_commit():
            remember(self.order.root, manifest)
            self.order.committed(transaction.sequence)
        return transaction.sequence, sharing

    @contextlib.contextmanager
    def _failing_on_all_ranks(self) -> Iterator[None]:
        """Tell all others of an error: whatever it is, no rank may wait for a verdict that never comes."""
        try:
            yield
        except BaseException as error:
            exchange = self.exchange
            problem = as_checkpoint_error(error, "saving", 0)
            problem.at(path=self.order.root.path, tag=self.order.tag)
            if exchange.size > 1:
                problem = exchange.decide(problem) or problem
                for key in ("begin", *OTHERS_WAIT_FOR):
                    if not exchange.has_said(key):
                        exchange.say(key, error=problem)
                if self._parity is not None:
                    self._parity.give_up(problem)
                exchange.say("verdict", error=problem)
            if problem is error:
                raise
            raise problem from error

    def _commit(self, transaction: Transaction, parts: Sequence[Part], disks: Disks) -> None:
        within = self.exchange.timeout * LEAD
        began = time.perf_counter()
        if self.order.root.await_ready(within):
            self.phases.add("helper", time.perf_counter() - began)
        self.cancellation.close()
        given_up = self.exchange.decide() if self.exchange.size > 1 else None
        if given_up is not None:
            raise given_up  # another rank, which has told its caller so
        began = time.perf_counter()
        commit_on_others(self.exchange, disks)
        report = kept([part.measured for part in parts])
        retained = transaction.commit(retention=self.order.retention, report=report, within=within)
        ended = time.perf_counter()
        self.phases.add("commit", ended - began - retained, ended=ended - retained)
        self.phases.add("retain", retained, ended=ended)

    def _follow(self, agreed: AgreedSave) -> tuple[int, SharedPlan]:
        """The part of any other rank: write, report, hear the verdict."""
        exchange, root, sharing = self.exchange, self.order.root, SharedPlan(SavePlan(()))
        draft: str | None = None
        disk = OtherDisk(self.order, exchange, agreed.disks.leader(exchange.rank))
        try:
            frozen = self._ready()
            begun = disk.begun(Begun.from_json(exchange.hear("begin", 0)), self.cancellation.check)
            with contextlib.closing(open_joint(root, draft := begun.draft)) as directory:
                sharing = self._share(frozen, begun.earlier, directory, agreed)
                record = self._write(frozen, sharing, directory, tells_all=exchange.rank in agreed.odd)
                directory.sync()
            self.cancellation.close()  # rank 0 may commit as soon as it has this
            exchange.say(f"record/{exchange.rank}", Part(record, self._measured(sharing.plan)).to_json())
        except BaseException as error:
            # Rank 0 must hear of it; what all ranks raise is rank 0's verdict.
            problem = as_checkpoint_error(error, "saving", exchange.rank)
            exchange.say(f"record/{exchange.rank}", error=problem)
            disk.give_up(problem)
            draft = None  # rank 0 does not ask this rank for parity any more
            if isinstance(error, RankFailedError):
                raise  # it is decided for all, rank 0 included: to wait for its verdict would take the timeout again
        if self._parity is not None and draft is not None:
            self._parity.follow(root, draft)
        disk.end(failed=draft is None)
        with self.phases.timed("meet"):
            return disk.outcome(), sharing

    @property
    def _parity(self) -> ParityRound | None:
        parity = self.order.options.parity
        return None if parity is None else ParityRound(self.exchange, parity, self._crew())

    def _crew(self, progress: Callable[[int], None] = lambda _: None) -> Crew:
        return Crew(workers=self.order.workers, progress=progress, phases=self.phases)

    def _share(
        self, frozen: Frozen, earlier: EarlierTag | None, directory: Directory, agreed: AgreedSave
    ) -> SharedPlan:
        """Decide what this rank writes, and share what need not be written."""
        root, stage = self.order.root, self.mesh.coordinates(self.exchange.rank)["pp"]
        with self.phases.timed("plan"), collector_paused():
            plan = agreed.plan(frozen.writing, stage)
        if root.store.object_store is not None or agreed.disks.several:
            plan = plan.streamed()  # the digests stand in the manifest: nobody there can read all files
        if not self.order.options.share:
            return SharedPlan(plan)
        crew = self._crew(lambda _: self.cancellation.check())
        with self.cancellation.reading(), self.phases.timed("share"):
            verify = self.order.options.parity is not None
            return share_files(plan, frozen, earlier, root, directory, crew, verify=verify)

    def _write(self, frozen: Frozen, sharing: SharedPlan, directory: Directory, *, tells_all: bool = False) -> Record:
        """Write this rank's files; the record of what is in them, and with `tells_all` of all arrays."""
        rank, world, snapshot, plan = self.exchange.rank, self.exchange.size, frozen.snapshot, sharing.plan
        check_space(directory, plan)
        with self.cancellation.reading(), Progress(f"save {self.order.tag}", plan.nbytes, self.order.shown) as bar:

            def dealt(nbytes: int) -> None:
                self.cancellation.check()
                LEASES.renew(self.order.root.path)
                bar(nbytes)

            with collector_paused():
                memory = snapshot.to_write()
            written = write_files(directory, plan, memory, self._crew(dealt), budget=snapshot.budget)
            samples = snapshot.samples() if world > 1 else {}
        self._tell_torn(snapshot)
        written = written.and_shared(sharing.shared)
        files = (*written.files, *write_objects(directory, frozen.objects, rank, world))
        return Record.of(
            written.shards,
            samples,
            common=[path for path in frozen.leaves.paths if frozen.has_in_common(path)],
            says_common=tells_all or frozen.speaks,
            rank=rank,
            files=files,
            arrays=frozen.types((lambda _: True) if tells_all else frozen.reports),
            aliases={alias: target for alias, target in frozen.aliases.items() if frozen.reports(alias)},
            skeleton=frozen.skeleton,
            objects=tuple(range(len(written.files), len(files))),
            parts=frozen.parts,
            module_metadata=frozen.module_metadata,
        )

    def _tell_torn(self, snapshot: Snapshot) -> None:
        """Say which arrays another thread of the program wrote to meanwhile."""
        snapshot.end_watch()
        if snapshot.torn:
            logger.warning(
                "tag %s: the program wrote to %s while the save read it: the tag may hold values of several "
                "instants. No thread may write to a state before save returns",
                self.order.tag,
                listed(list(snapshot.torn)),
            )

    def _hear_parts(self, own: Record, plan: SavePlan) -> list[Part]:
        """What all ranks have written, this one included."""
        parts = [Part(own, self._measured(plan))]
        with self.phases.timed("meet"):
            for rank, said in enumerate(self.exchange.hear_each("record", range(1, self.exchange.size)), 1):
                part = Part.from_json(said)
                parts.append(part)
                parts[-1] = Part(part.record.named_by(parts[self.mesh.first_of_stage(rank)].record), part.measured)
            return parts

    def _measured(self, plan: SavePlan) -> Measured:
        """What this rank has measured so far, for the tag."""
        return Measured(
            rank=self.exchange.rank,
            stall=self.timing.stall,
            nbytes=plan.nbytes,
            files=len(plan.files),
            phases=self.phases.report(),
        )
