"""What a load does on each rank, step by step.

All ranks take each step together, and the error of one of them is raised on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from xla_ckpt.api.wish import LoadWish
from xla_ckpt.display import join_lines
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.report import LoadReport
from xla_ckpt.engine.restore import Filling, Sharing, fill
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    RankFailedError,
    naming,
    storage_errors,
)
from xla_ckpt.job.job import Job
from xla_ckpt.job.peers import check_can_share
from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import LateLoss, agreed, of_lead, put_together
from xla_ckpt.layouts.listing import find_foreign, newest_last
from xla_ckpt.layouts.no_tag import no_tag
from xla_ckpt.layouts.opening import open_tag
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.hints import Hints, united_groups
from xla_ckpt.plan.masters import stores_masters, with_masters
from xla_ckpt.state.frozen_base import united_base
from xla_ckpt.state.loading import Stored
from xla_ckpt.state.loadings import Loadings
from xla_ckpt.state.members import Like, Objects
from xla_ckpt.state.problems import Problem, incompatible
from xla_ckpt.state.proof import Proof, prove
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.values import resolver
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.local_first import LocalFirst
from xla_ckpt.tags.upload_rules import newest_first
from xla_ckpt.tree import path as paths

logger = get_logger(__name__)

Answer = TypeVar("Answer")

Candidate = tuple[str, bool]
"""A tag that may be read, and whether that is the one in the directory of ``local=``."""

SEARCHES = 8
"""How often the newest tag is looked for, if the one that was found is always replaced or removed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load on one rank, and what it needs."""

    store: Store
    near: LocalFirst | None
    """The directory of ``local=``, if there is one."""

    several: bool
    """Whether hosts have disks of their own there. Then all tags are in the object store, and a disk has parts."""

    job: Job
    content: Objects | Like
    wish: LoadWish
    phases: Phases

    def newest(self) -> tuple[Any, LoadReport]:
        """Load the newest tag that is not damaged. Other jobs may replace and remove tags meanwhile."""
        return self._first_good(None)

    def one(self, tag: str) -> tuple[Any, LoadReport]:
        """Load a tag by its name: if it is in both places, from the nearer one, unless it is damaged there."""
        return self._first_good(tag) if self.near else self._one(False, tag, self.job.exchange.within("tag"))

    def _first_good(self, name: str | None) -> tuple[Any, LoadReport]:
        damaged: dict[Candidate, CorruptCheckpointError] = {}
        changed: list[CheckpointError] = []
        load, todo = self, self._newest_first("tags", name)
        while todo:
            tag, is_near = todo.pop(0)
            try:
                value, report = load._one(is_near, tag, self.job.exchange.within(f"{len(changed)}/{tag}/{is_near}"))
            except CorruptCheckpointError as error:
                if todo:  # else the error itself is raised
                    passed = "read from the other place" if todo[0][0] == tag else "passed over"
                    logger.error("tag %s is damaged and %s: %s", tag, passed, error)  # noqa: TRY400
                damaged[tag, is_near] = error
            except (ChangedTagError, NoCheckpointError) as error:
                changed.append(error)
                if len(changed) == SEARCHES:
                    raise
                logger.warning("tag %s was replaced or removed meanwhile; the newest is looked for again", tag)
                load = replace(self, store=self.store.look())
                todo = [one for one in load._newest_first(f"tags/{len(changed)}", name) if one not in damaged]
            else:
                return value, replace(report, corrupt_tags=tuple(other for other, _ in damaged if other != tag))
        if damaged:
            raise _all_damaged(damaged)
        raise no_tag(self.store, name)

    def _one(self, is_near: bool, tag: str, exchange: Round) -> tuple[Any, LoadReport]:
        """Load one tag: open it, check it against the targets, plan, read and verify, install."""
        near = self.near if is_near and not self.several else None
        store = self.store if near is None else near.store
        with self.phases.timed("open"):
            if near is not None:
                with agreed(exchange, "reading the journal of the upload"):
                    near.check_whole(tag)
            reader, hints = self._open(store, tag, exchange)
            if is_near and self.near is not None and self.several:
                reader.directory = self.near.nearer(reader.directory, tag, reader.manifest.head)
        with reader:
            self._check_version(reader, exchange)
            reader = self._with_masters(reader, hints, exchange)
            with self.phases.timed("check"):
                with agreed(exchange, "checking"), naming(path=reader.root, tag=reader.tag), collector_paused():
                    loadings = self.content.loadings(self._stored(reader))
                unwanted = self._unwanted(loadings, exchange)
                fits = self._anything_fits(loadings, exchange)
                other_base = self._other_base(loadings, exchange)
                with agreed(exchange, "comparing"):
                    skipped = self._compare(reader, loadings, [*unwanted, *other_base], fits=fits)
            late_loss = LateLoss(exchange)
            with naming(path=reader.root, tag=reader.tag), loadings.handing_over(exchange) as hand_over:
                how = Filling(
                    exchange=exchange,
                    phases=self.phases,
                    hand_over=hand_over,
                    alone=loadings.alone,
                    sharing=self._sharing(exchange),
                    late_loss=late_loss,
                    workers=self.wish.workers,
                    shown=self.job.shows(self.wish.options.progress),
                )
                needed, read = fill(reader, loadings.targets, how)
                with self.phases.timed("install"), late_loss.agreed("installing"), collector_paused():
                    value = loadings.install()
            if late_loss.error is not None:
                raise _loaded_without(late_loss.error, reader)
            left = [problem for part in loadings.parts for problem in part.left]
            for problem in left:
                logger.warning("tag %s: not loaded: %s", reader.tag, problem)
            self._tell(reader, loadings)  # only now: a tag that turns out to be damaged is passed over
            proof = self._proof(reader, loadings, exchange) if self.wish.options.prove else Proof()
        report = LoadReport(
            path=store.path,
            tag=tag,
            skipped=(*skipped, *map(str, left)),
            arrays=len(loadings.targets),
            needed_bytes=needed,
            read_bytes=read,
            proven_bytes=proof.nbytes,
            unproven=proof.unproven,
        )
        return value, report

    def _sharing(self, exchange: Round) -> Sharing | None:
        """How ranks read together, if they do."""
        if self.wish.options.replica_read != "share" or exchange.size == 1:
            return None
        check_can_share()
        from xla_ckpt.job.shared_reads import SharedReads  # this loads torch

        return SharedReads()

    def _proof(self, reader: TagReader, loadings: Loadings, exchange: Round) -> Proof:
        """Compare what is installed with the tag."""
        crew = Crew(workers=self.wish.workers, phases=self.phases)
        naming_tag = storage_errors("reading a tag", path=reader.root, tag=reader.tag)
        with agreed(exchange, "proving"), naming_tag, collector_paused():
            proof = prove(reader, loadings, crew)
        for array in proof.unproven:
            logger.warning("tag %s: not proven: %s", reader.tag, array)
        return proof

    def _newest_first(self, key: str, name: str | None) -> list[Candidate]:
        """All tags, newest first, or those of one name, as rank 0 sees them: another rank may look a moment later."""
        return [(tag, is_near) for tag, is_near in of_lead(self.job.exchange, key, lambda: self._candidates(name))]

    def _candidates(self, name: str | None) -> list[Candidate]:
        near = [] if self.near is None else self.near.whole_entries()
        far = newest_last(self.store)
        # Where each disk has a part: first what the disks have, then all from the object store, if that is damaged.
        parts = [(entry, is_near) for entry in reversed(far) for is_near in (True, False)]
        both = parts if self.several else newest_first(near, far)
        return [(entry.tag, is_near) for entry, is_near in both if name in (None, entry.tag)]

    def _open(self, store: Store, tag: str, exchange: Round) -> tuple[TagReader, Hints | None]:
        """A reader of the tag. Files of some layouts do not say everything: the targets say the rest, in hints."""
        # Ranks that look at different moments may see different tags, and would wait for different messages.
        hints: Hints | None = None
        if of_lead(exchange, "asks", lambda: _asks(store, tag)):
            hints = self._of_all_stages(self._hints(exchange), exchange)
        with contextlib.ExitStack() as unless_all_have:
            with agreed(exchange, "opening"):
                reader = unless_all_have.enter_context(open_tag(store, tag, hints))
            unless_all_have.pop_all()
        # Where another rank could not open it, it is closed: retention leaves a tag alone that is open.
        return reader, hints

    def _hints(self, exchange: Round) -> Hints:
        """What the targets of this rank say."""
        with agreed(exchange, "describing"):
            return self.content.hints(StateShardings(self.job.placement, self.wish.rules))

    def _with_masters(self, reader: TagReader, hints: Hints | None, exchange: Round) -> TagReader:
        """The same tag with master weights in the place of weights, where the targets are of their type."""
        if not stores_masters(reader.manifest):
            return reader
        return reader.with_manifest(with_masters(reader.manifest, hints or self._hints(exchange)))

    def _check_version(self, reader: TagReader, exchange: Round) -> None:
        """Refuse a tag of which this rank and rank 0 have opened two versions: parts of both would be loaded."""
        if exchange.size == 1:
            return
        if exchange.rank == 0:
            exchange.say("version", reader.version)
        with agreed(exchange, "opening the same version"):
            if exchange.hear("version", 0) != reader.version:
                raise ChangedTagError(
                    "the tag was replaced while the ranks opened it, and they have found different versions",
                    path=reader.root,
                    tag=reader.tag,
                    hint="Load it again.",
                )

    def _of_all_stages(self, hints: Hints, exchange: Round) -> Hints:
        """The same, with the optimizer's groups of all pipeline stages: foreign optimizers number their parameters."""
        mesh = self.job.placement.mesh
        if mesh.pp == 1:
            return hints
        first = [mesh.rank({"pp": stage}) for stage in range(mesh.pp)]
        groups = None if hints.groups is None else [list(g) for g in hints.groups]
        return replace(hints, groups=put_together(exchange, "groups", groups, united_groups, first))

    def _stored(self, reader: TagReader) -> Stored:
        return Stored(
            manifest=reader.manifest,
            prefix=paths.ROOT,
            skeleton=reader.manifest.skeleton,
            read_object=partial(reader.object, trust=self.wish.trust),
            resolve=resolver(self.wish.trust),
            shardings=StateShardings(self.job.placement, self.wish.rules),
            cast=self.wish.cast,
            strict=self.wish.strict,
        )

    def _unwanted(self, loadings: Loadings, exchange: Round) -> list[Problem]:
        """What is stored and not wanted here; over pipeline stages, what none of them wants."""
        own = {p.leaf: p for part in loadings.parts for p in part.unwanted}
        if self.job.placement.mesh.pp == 1:
            return list(own.values())

        def by_nobody(of_ranks: list[list[str]]) -> list[list[str]]:
            everywhere = set(own).intersection(*of_ranks)
            return [[p.leaf, p.text] for leaf, p in own.items() if leaf in everywhere]

        common = put_together(exchange, "unwanted", list(own), by_nobody, range(exchange.size))
        return [Problem(leaf, text) for leaf, text in common]

    def _anything_fits(self, loadings: Loadings, exchange: Round) -> bool:
        """Whether an array of some rank fits."""
        fits = bool(loadings.targets)
        return fits if self.wish.strict else bool(put_together(exchange, "fits", fits, any, range(exchange.size)))

    def _other_base(self, loadings: Loadings, exchange: Round) -> list[Problem]:
        """That the ranks have another base than the tag names, if it names one."""
        if loadings.base is None:
            return []
        here = put_together(exchange, "base", loadings.base.own, united_base, range(exchange.size))
        return loadings.base.problems(here)

    def _tell(self, reader: TagReader, loadings: Loadings) -> None:
        """Say once for each pipeline stage which of its arrays were stored from replicas that differed.

        And once for the job that it leaves a scheduler or an optimizer behind.
        """
        divergence = reader.divergence(loadings.targets)
        if divergence is not None and self.job.placement.speaks:
            logger.warning("tag %s: %s", reader.tag, divergence)
        left = self.content.left_behind(reader.manifest.skeleton) if isinstance(self.content, Objects) else None
        if left is not None and self.job.exchange.rank == 0:
            logger.warning("tag %s: %s", reader.tag, left)

    def _compare(
        self, reader: TagReader, loadings: Loadings, unwanted: Sequence[Problem], *, fits: bool
    ) -> tuple[str, ...]:
        """What does not fit, and is left alone."""
        problems = [*(p for part in loadings.parts for p in part.problems), *unwanted]
        refused = [problem for problem in problems if not problem.stays]
        if refused and (self.wish.strict or (not fits and reader.manifest.arrays)):
            objects = self.content if isinstance(self.content, Objects) else None
            ranks = self.job.placement.world
            # Of another library's tag the optimizer is looked at only if it is asked for.
            may_store = reader.foreign_objects is not None or stores_masters(reader.manifest)
            masters = objects is not None and objects.optimizer is None and may_store
            error = incompatible(
                refused,
                fits=fits,
                optional=objects is not None,
                ranks=ranks,
                misfit=reader.misfit,
                without_rule=reader.without_rule,
                masters=masters,
            )
            raise error.at(path=reader.root, tag=reader.tag)
        if refused:
            fitting = len(loadings.targets)
            logger.warning("tag %s: arrays that fit and are loaded: %d. Others stay as they are:", reader.tag, fitting)
        for problem in problems:
            logger.warning("tag %s: not loaded: %s", reader.tag, problem)
        return tuple(map(str, problems))


def _asks(store: Store, tag: str) -> bool:
    """Whether the files of a tag do not say everything."""
    foreign = find_foreign(store, tag)
    return foreign is not None and foreign[0].asks


def _all_damaged(damaged: Mapping[Candidate, CorruptCheckpointError]) -> CorruptCheckpointError:
    """The error for a root in which no tag is good: that of the newest one, which names the others."""
    (_, newest), *others = damaged.items()
    if others:
        lines = [f"  tag {tag}: {error.problem}" for (tag, _), error in others]
        beside = join_lines(["All other tags are damaged, too:", *lines])
        newest.details = "\n".join(filter(None, (newest.details, beside)))
    return newest


def _loaded_without(lost: RankFailedError, reader: TagReader) -> RankFailedError:
    """The error for a rank that was lost when this one had all that it needs: its objects are not left in between."""
    return RankFailedError(
        f"{lost.problem}; this rank's objects have the values of tag {reader.tag}, all of them verified",
        path=reader.root,
        tag=reader.tag,
        rank=lost.rank,
        hint=lost.hint,
    )
