"""A save in the background: payload, records, manifest, commit. Each rank has a `Save`, and runs it on a thread.

Rank 0 makes the directory and tells the others where it is; each rank writes its files and reports what it wrote;
rank 0 waits for all reports, writes the manifest, and commits. The verdict, good or bad, reaches everybody.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from xla_ckpt.engine.cancellation import Cancellation
from xla_ckpt.engine.collector import collector_paused
from xla_ckpt.engine.ending import end
from xla_ckpt.engine.index import Index, indexed
from xla_ckpt.engine.measured import Measured, kept
from xla_ckpt.engine.parity_round import ParityRound
from xla_ckpt.engine.phases import IMPORT, SAVE, Phases, as_line, rate
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.report import SaveReport
from xla_ckpt.engine.shared_directory import check_written, open_shared
from xla_ckpt.engine.stages import Stages
from xla_ckpt.engine.stale import remember, stale_since
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.trace import Trace
from xla_ckpt.engine.write import WRITERS, check_space, write_files, write_objects
from xla_ckpt.errors import (
    CheckpointError,
    DivergentReplicasError,
    RankFailedError,
    SaveError,
    naming,
)
from xla_ckpt.job.call import Job
from xla_ckpt.job.opening import Call
from xla_ckpt.job.verdict import LEAD, Deadline, Round, as_checkpoint_error
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.records import Head, Manifest
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.merge import DRIFTED, Duplicate, Record, Replicas, first_stored, merge
from xla_ckpt.plan.parity import Parity
from xla_ckpt.plan.same_arrays import check_same, fingerprint, odd_ones
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.snapshot.freezing import Freezing
from xla_ckpt.snapshot.take import Snapshot
from xla_ckpt.storage.base import Directory, Store, write_small
from xla_ckpt.tags import commit as tags
from xla_ckpt.tags.cleaning import clean
from xla_ckpt.tags.directory import MANIFEST
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tree.path import listed

logger = logging.getLogger(__name__)

Stale = Literal["warn", "raise", "ignore"]
"""What a save does that has the model of the save before it, although training went on."""


class Writing(Protocol):
    """How one rank writes its state in a layout (`xla_ckpt.layouts.base.Layout.writing` makes it)."""

    @property
    def whole(self) -> frozenset[str]:
        """Leaves that are stored as the whole tensor that a rank has in memory, padding included."""

    @property
    def plan(self) -> SavePlan:
        """What this rank writes, if no other pipeline stage stores it. Decided once, when it is first asked for."""

    @property
    def marks(self) -> Mapping[str, bytes]:
        """Small files that rank 0 writes when all else is durable."""

    @property
    def index(self) -> Index:
        """What rank 0 makes from the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has of the state that is saved: frozen, and described."""

    leaves: Sequence[Leaf]
    writing: Writing
    snapshot: Snapshot
    skeleton: Any
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    speaks: bool = True
    """Whether this rank reports type and shape of its leaves for its whole pipeline stage."""

    alone: tuple[str, ...] = ()
    """Prefixes of the leaf paths that this rank reports in any case: nobody else has them."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> digest of its plain values, which all ranks have in common."""

    def reports(self, path: str) -> bool:
        """Whether this rank reports type and shape of a leaf."""
        return self.speaks or path.startswith(self.alone)

    def has_in_common(self, path: str) -> bool:
        """Whether all ranks of this pipeline stage have a leaf."""
        return not path.startswith(self.alone)

    def types(self, which: Callable[[str], bool]) -> dict[str, tuple[str, tuple[int, ...], Any]]:
        """(dtype, global shape, spec) of some leaves, by leaf path."""
        with collector_paused():
            return {leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec) for leaf in self.leaves if which(leaf.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One rank's part of one save, from the frozen state to the verdict."""

    store: Store
    tag: str
    job: Job
    part: Part | CheckpointError
    """What is saved, or why this rank could not prepare it: then the others hear of that."""

    call: Call
    """What the program asked for."""

    pinned: bool = False
    num_kept: int | None = None
    replicas: Replicas = "equal"
    stale: Stale = "warn"
    workers: int = WRITERS
    parity: Parity | None = None
    """What the tag survives, if it is to have parity."""

    shown: bool | None = None
    """Whether a progress bar is shown; None decides by itself."""

    phases: Phases = field(default_factory=Phases)
    stall: float = 0.0
    """Seconds that the caller waited before this was begun."""

    trace: Trace | None = None
    """Where a trace goes, if one is wanted."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    """How the caller gives it up."""

    @property
    def freezing(self) -> Freezing | None:
        """When the program may write to what is saved; None if it could not be prepared."""
        return self.part.snapshot.freezing if isinstance(self.part, Part) else None

    @property
    def exchange(self) -> Round:
        """Where this rank talks with the others."""
        return self.job.exchange

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged."""
        return self.job.placement.mesh

    def run(self) -> SaveReport:
        """Write this rank's part, meet the others, and wait for the verdict.

        Raises:
            CheckpointError: The save did not commit; the same error on every rank.
        """
        began = time.perf_counter()
        if self.trace is not None:
            self.exchange.waited = self.phases.waited
        try:
            with self.job.taking_part():
                odd = self._begin()
                with naming(path=self.store.path, tag=self.tag):
                    sequence, written = self._lead(odd) if self.exchange.rank == 0 else self._follow(odd)
        except Exception as error:
            # Raised to who waits for the save; those who watch saves hear of it here.
            self._end(began, 0, SavePlan(()), error)
            raise
        finally:
            self.release()
        return self._end(began, sequence, written)

    def _end(self, began: float, sequence: int, written: SavePlan, error: Exception | None = None) -> SaveReport:
        """The report of this save, which is done now; the trace and the program's functions have it, too."""
        ended = time.perf_counter()
        self.phases.keep(SAVE, began, ended, written.nbytes, about=self.tag)
        report = SaveReport(
            path=self.store.path,
            tag=self.tag,
            sequence=sequence,
            nbytes=written.nbytes,
            files=len(written.files),
            seconds=ended - began,
            stall=self.stall + (self.freezing.stall if self.freezing is not None else 0.0),
            phases=self.phases.report(),
            error=error,
        )
        if error is None:
            logger.info(
                "saved tag %s in %.2f s (%s), of which the caller waited %.1f ms: %s",
                self.tag,
                report.seconds,
                rate(report.nbytes, report.seconds),
                1e3 * report.stall,
                as_line(dict(report.phases)),
            )
        end(report, self.phases, self.trace)
        return report

    def release(self) -> None:
        """Let go of what is saved: the program may write to it."""
        if isinstance(self.part, Part):
            self.part.snapshot.release()

    def tidy(self) -> None:
        """Remove what this save and earlier ones left behind; called when the outcome is known.

        That it cannot be removed is logged. The next save tries it again.
        """
        if self.exchange.rank == 0:
            try:
                clean(self.store)
            except OSError as error:
                logger.warning("could not clean up in %s after tag %s: %s", self.store.path, self.tag, error)

    def _begin(self) -> Sequence[int]:
        """Begin together with all ranks; those that have other arrays than the first of their pipeline stage."""
        if self.exchange.rank == 0:
            tags.expect(self.store)  # only now: the caller no longer waits
        with self.phases.timed("meet"):
            odd: list[int] = self.job.begin(self.call, self._fingerprint, partial(odd_ones, mesh=self.mesh))
        return odd

    def _fingerprint(self) -> str:
        """What arrays this rank has, as far as its whole pipeline stage has the same."""
        part = self._ready()
        return fingerprint(part.types(part.has_in_common)) if self.exchange.size > 1 else ""

    def _lead(self, odd: Sequence[int]) -> tuple[int, SavePlan]:
        """Rank 0's part: the directory, the records of all, the manifest, the commit."""
        exchange = self.exchange
        draft: tags.Draft | None = None
        try:
            part = self._ready()
            with self.phases.timed("commit"):
                self.store.prepare()
                LEASES.hold(self.store, exchange.timeout * LEAD)
                draft = tags.begin(self.store, self.tag)
            directory = draft.directory
            if exchange.size > 1:  # a job of one rank would keep the messages of all its saves
                exchange.say("begin", directory.name)
            plan = self._plan(part)
            mine = self._write(part, plan, directory)
            with self.phases.timed("meet"):
                told = self._hear_records()
            records = [mine, *(record for record, _ in told)]
            for record in records:
                check_written(directory, record.rank, record.files)
            check_same([record.arrays for record in records], odd, self.mesh)
            manifest = self._manifest(records, directory, draft.sequence)
            self._look_back(manifest, draft)
            manifest = indexed(directory, self.store.path, manifest, part.writing.index)
            with collector_paused():
                text = manifest_json.dump(manifest)
            write_small(directory, MANIFEST, text)
            if self._parity is not None:
                self._parity.lead(directory, manifest, text)
            directory.sync()
            # A reader of another library takes the marks for a finished tag: they come when all else is durable.
            for name, data in part.writing.marks.items():
                write_small(directory, name, data)
            directory.sync()
            self._await_orbax()
            self.cancellation.close()
            report = kept([self._measured(plan), *(measured for _, measured in told)])
            given_up = exchange.decide() if exchange.size > 1 else None
            if given_up is not None:
                raise given_up  # another rank, which has told its caller so
            began = time.perf_counter()
            LEASES.check(self.store, draft.sequence)
            retained = tags.commit(draft, pinned=self.pinned, num_kept=self.num_kept, report=report)
            LEASES.note(self.store, self.tag, draft.sequence)
            remember(self.store, manifest)
            self.phases.add("commit", time.perf_counter() - began - retained)
            self.phases.add("retain", retained)
        except Exception as error:
            # Whatever it is, no rank may wait for a verdict that never comes.
            problem = as_checkpoint_error(error, "saving", 0)
            problem.at(path=self.store.path, tag=self.tag)
            if exchange.size > 1:
                problem = exchange.decide(problem) or problem
                if draft is None:
                    exchange.say("begin", error=problem)
                if self._parity is not None:
                    self._parity.give_up(problem)
                exchange.say("verdict", error=problem)
                self._stages.tell_failure(problem)
            if problem is error:
                raise
            raise problem from error
        finally:
            if draft is not None:
                tags.abandon(draft)
        if exchange.size > 1:
            exchange.say("verdict", draft.sequence)
        return draft.sequence, plan

    def _follow(self, odd: Sequence[int]) -> tuple[int, SavePlan]:
        """The part of any other rank: write, report, hear the verdict."""
        exchange, plan, name = self.exchange, SavePlan(()), ""
        try:
            part = self._ready()
            name = exchange.hear("begin", 0)
            directory = open_shared(self.store, name)
            try:
                plan = self._plan(part)
                record = self._write(part, plan, directory, tells_all=exchange.rank in odd)
                directory.sync()
            finally:
                directory.close()
            self.cancellation.close()  # rank 0 may commit as soon as it has this
            exchange.say(f"record/{exchange.rank}", [record.to_json(), self._measured(plan).to_json()])
        except Exception as error:
            # Rank 0 must hear of it; what all ranks raise is rank 0's verdict.
            problem = as_checkpoint_error(error, "saving", exchange.rank)
            exchange.say(f"record/{exchange.rank}", error=problem)
            self._stages.tell_failure(problem)
            name = ""  # rank 0 does not ask this rank for parity any more
            if isinstance(error, RankFailedError):
                raise  # it is decided for all, rank 0 included: to wait for its verdict would take the timeout again
        if self._parity is not None and name:
            self._parity.follow(self.store, name)
        with self.phases.timed("meet"):
            sequence = _hear_verdict(exchange)
        return sequence, plan

    def _ready(self) -> Part:
        if isinstance(self.part, CheckpointError):
            raise self.part
        return self.part

    @property
    def _parity(self) -> ParityRound | None:
        return ParityRound(self.exchange, self.parity, self.workers, self.phases) if self.parity is not None else None

    @property
    def _stages(self) -> Stages:
        return Stages(self.exchange, self.mesh)

    def _plan(self, part: Part) -> SavePlan:
        return self._stages.plan(part.writing, [leaf.path for leaf in part.leaves], self.phases)

    def _write(self, part: Part, plan: SavePlan, directory: Directory, *, tells_all: bool = False) -> Record:
        """Write this rank's files; the record of what is in them, and with `tells_all` of all arrays."""
        rank, world = self.exchange.rank, self.exchange.size
        check_space(directory, plan)
        with self.cancellation.reading(), Progress(f"save {self.tag}", plan.nbytes, self.shown) as bar:

            def dealt(nbytes: int) -> None:
                self.cancellation.check()
                bar(nbytes)

            written = write_files(
                directory,
                plan,
                part.snapshot.memory,
                workers=self.workers,
                progress=dealt,
                phases=self.phases,
                budget=part.snapshot.budget,
            )
            samples = part.snapshot.samples() if world > 1 else {}
        self._tell_torn(part.snapshot)
        files = (*written.files, *write_objects(directory, part.objects, rank, world))
        return Record(
            rank=rank,
            files=files,
            shards=written.shards,
            arrays=part.types((lambda _: True) if tells_all else part.reports),
            aliases={alias: target for alias, target in part.aliases.items() if part.reports(alias)},
            skeleton=part.skeleton,
            objects=tuple(range(len(written.files), len(files))),
            samples=samples,
            parts=part.parts,
        )

    def _tell_torn(self, snapshot: Snapshot) -> None:
        """Say which arrays another thread of the program wrote to meanwhile."""
        snapshot.end_watch()
        if snapshot.torn:
            logger.warning(
                "tag %s: the program wrote to %s while the save read it: the tag may hold values of several "
                "instants. No thread may write to a state before save returns",
                self.tag,
                listed(list(snapshot.torn)),
            )

    def _hear_records(self) -> list[tuple[Record, Measured]]:
        deadline = Deadline(self.exchange.timeout * LEAD)
        told = (self.exchange.hear(f"record/{rank}", rank, deadline) for rank in range(1, self.exchange.size))
        return [(Record.from_json(record), Measured.from_json(measured)) for record, measured in told]

    def _measured(self, plan: SavePlan) -> Measured:
        """What this rank has measured so far, for the tag."""
        return Measured(
            rank=self.exchange.rank,
            stall=self.stall,
            nbytes=plan.nbytes,
            files=len(plan.files),
            phases=self.phases.report(),
        )

    def _await_orbax(self) -> None:
        """Wait until orbax is imported, which only the first commits of a process have to do."""
        began = time.perf_counter()
        span = tags.ready(self.store)
        if span is not None and span.ended > began:
            self.phases.add("import", time.perf_counter() - began)
        if span is not None and span.ended > self.phases.origin:
            self.phases.keep_foreign(IMPORT, span.began, span.ended, span.thread, span.thread_name)

    def _manifest(self, records: Sequence[Record], directory: Directory, sequence: int) -> Manifest:
        with collector_paused():
            merged = merge(records, self.mesh, self.replicas)
        for warning in merged.warnings:
            logger.warning("tag %s: %s", self.tag, warning)
        head = new_head(self.tag, sequence, pinned=self.pinned)
        with collector_paused():
            manifest = merged.manifest(head, self.mesh, len(records))
        if merged.duplicates:
            reader = TagReader(directory, self.store.path, self.tag, manifest)
            try:
                different = _different_copies(reader, merged.duplicates)
            finally:
                reader.close_files()
            manifest = self._with_first(manifest, different)
        return manifest

    def _look_back(self, manifest: Manifest, draft: tags.Draft) -> None:
        """Find out whether this repeats the tag before it.

        Raises:
            SaveError: It does, and the caller wants to know.
        """
        if self.stale == "ignore":
            return
        reader = TagReader(draft.directory, self.store.path, self.tag, manifest)
        try:
            found = stale_since(self.store, draft.newest, reader)
        finally:
            reader.close_files()
        if found is None:
            return
        before, evidence = found
        error = SaveError(
            f"the model has the same bytes as in tag {before}, although training seems to have gone on: {evidence}",
            hint="Is this the model that is trained, and does its optimizer have its parameters? If all is as it "
            "should be, say stale='ignore'.",
        )
        if self.stale == "raise":
            raise error
        logger.warning("tag %s: %s", self.tag, error)

    def _with_first(self, manifest: Manifest, different: Sequence[Duplicate]) -> Manifest:
        """The manifest, in which arrays are marked of which two ranks wrote different copies. It has the first one.

        Raises:
            DivergentReplicasError: There are such arrays, and replicas have to be equal.
        """
        if not different:
            return manifest
        if self.replicas == "equal":
            raise _differ(different[0])
        ranks = {twice.leaf: twice.ranks for twice in reversed(different)}
        lines = [f"  {leaf}: rank {a} against rank {b}" for leaf, (a, b) in ranks.items()]
        logger.warning("tag %s: %s", self.tag, "\n".join([first_stored(len(lines)), *lines]))
        marked = {leaf: replace(manifest.arrays[leaf], divergent=True) for leaf in ranks}
        return replace(manifest, arrays={**manifest.arrays, **marked})


def _hear_verdict(exchange: Round) -> int:
    """The commit number, from rank 0.

    Raises:
        CheckpointError: The save did not commit; the same error on every rank.
        RankFailedError: Likewise; or rank 0 was lost while it committed, and nobody knows whether the tag is there.
    """
    try:
        return int(exchange.hear("verdict", 0))
    except RankFailedError as error:
        if error.rank != 0 or exchange.decide(error) is not None:
            raise
    # Rank 0 began to commit before this rank gave up on it. What became of that, rank 0 alone can say.
    try:
        return int(exchange.hear("verdict", 0, Deadline(exchange.timeout * (1 - LEAD))))
    except RankFailedError as error:
        if exchange.decide(error) is not None:
            raise
        raise RankFailedError(
            "rank 0 began to commit, and did not say how that ended",
            rank=0,
            expected="its answer within the timeout and a fifth of it",
            hint="It died or hangs. The tag is there, complete, or it is not there: xla_ckpt.list_tags says so.",
        ) from None


def new_head(tag: str, sequence: int, *, pinned: bool) -> Head:
    """The head of a tag that is committed now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return Head(tag=tag, sequence=sequence, pinned=pinned, created=now)


def _different_copies(reader: TagReader, duplicates: Sequence[Duplicate]) -> list[Duplicate]:
    """Those regions of which ranks that did not know of each other wrote different bytes."""
    return [
        twice
        for twice in duplicates
        if len({reader.digests(f, at, twice.nbytes) for f, at in zip(twice.files, twice.offsets, strict=True)}) > 1
    ]


def _differ(twice: Duplicate) -> DivergentReplicasError:
    return DivergentReplicasError(
        f"two ranks hold different values of the region {twice.box}",
        leaf=twice.leaf,
        expected=f"the bytes of rank {twice.ranks[0]}",
        found=f"others on rank {twice.ranks[1]}",
        hint=f"Check mesh and shardings: one of them is likely not what the rank really holds. {DRIFTED}",
    )
