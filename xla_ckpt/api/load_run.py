"""Carrying out a load: choose the tag, check everything, read, install."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.api.progress import Progress
from xla_ckpt.arrays.base import Target
from xla_ckpt.engine.background import SAVES
from xla_ckpt.engine.read import check, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.job.current import Job
from xla_ckpt.job.shared_reads import agree_on_shares, exchange_shares
from xla_ckpt.job.verdict import LEAD, Deadline, Round, agree
from xla_ckpt.layouts import tags_of_all as foreign
from xla_ckpt.layouts.hints import Wanted
from xla_ckpt.plan.restore_plan import RestorePlan, Want, plan_restore
from xla_ckpt.sharding.rules import Parsed
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.state import pickles
from xla_ckpt.state.loading import Loading, Problem, Stored, incompatible
from xla_ckpt.state.placing import Layouts
from xla_ckpt.state.values import resolver
from xla_ckpt.tags.directory import no_such_tag
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.skeleton import Make

logger = logging.getLogger(__name__)

Prepare = Callable[[Stored], tuple[list[Loading], Make]]
"""Checks a stored state against what the caller wants: parts to load, and the result from all restored arrays."""


@dataclass(slots=True)
class LoadReport:
    """What a load did; pass one as ``report=`` to have it filled."""

    path: str = ""
    tag: str = ""
    skipped: list[str] = field(default_factory=list)
    """With ``strict=False``: what did not fit and was left alone, with the reason."""

    corrupt_tags: list[str] = field(default_factory=list)
    """Newer tags that were passed over because they are damaged."""

    arrays: int = 0
    """Arrays that were restored."""

    needed_bytes: int = 0
    """Bytes of those."""

    read_bytes: int = 0
    """Bytes that were read from the storage for them."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One load, with the newest good tag if none is named."""

    root: str
    job: Job
    prepare: Prepare
    rules: Parsed
    strict: bool
    workers: int
    trust: bool
    progress: bool | None
    report: LoadReport
    wanted: Callable[[Layouts], Wanted]
    """What the targets say about their arrays, for tags that do not say everything themselves."""

    share: bool = False
    """Whether ranks that need the same bytes read them together."""

    def load(self, tag: str | None) -> Any:
        """Load `tag`, or the newest that is not damaged.

        Raises:
            CheckpointError: As `xla_ckpt.load_checkpoint` documents; the same on every rank.
        """
        began = time.monotonic()
        exchange = self.job.exchange
        try:
            with self.job.taking_part():
                self.job.tidy()
                agree(exchange, "waiting", lambda: SAVES.wait(self.root))
                if tag is not None:
                    result = self._load_tag(tag, exchange.within("tag"))
                else:
                    tag, result = self._load_newest()
        except CheckpointError as error:
            error.at(path=self.root)
            raise
        self.report.path, self.report.tag = self.root, tag
        self.report.seconds = time.monotonic() - began
        return result

    def _load_newest(self) -> tuple[str, Any]:
        first: CheckpointError | None = None
        for tag in self._tags():
            try:
                return tag, self._load_tag(tag, self.job.exchange.within(tag))
            except CorruptCheckpointError as error:
                logger.error("tag %s is damaged and passed over: %s", tag, error)  # noqa: TRY400
                self.report.corrupt_tags.append(tag)
                first = first or error
        if first is not None:
            raise first
        raise no_such_tag(self.root, None)

    def _tags(self) -> list[str]:
        """All tags, newest first, as rank 0 sees them: another rank may look a moment later."""
        exchange = self.job.exchange
        if exchange.size == 1:
            return self._newest_first()
        if exchange.rank == 0:
            try:
                exchange.say("tags", self._newest_first())
            except CheckpointError as error:
                exchange.say("tags", error=error)
        tags: list[str] = exchange.hear("tags", 0)
        return tags

    def _newest_first(self) -> list[str]:
        both = foreign.all_tags(self.root)
        names = [t.tag for part in both for t in part]
        if (theirs := foreign.passed_over(*both)) is not None:
            logger.warning(
                "%s: neuronx-distributed's tag %s has a newer time stamp than %s, which is taken for the newest: name "
                "the tag if it is not", self.root, theirs, names[-1],
            )  # fmt: skip
        return names[::-1]

    def _load_tag(self, tag: str, exchange: Round) -> Any:
        reader = self._open(tag, exchange)
        with reader:
            ready = agree(exchange, "checking", lambda: self._prepare(reader))
            unwanted = self._unwanted(ready[0], exchange)
            agree(exchange, "comparing", lambda: self._check(reader, ready[0], unwanted))
            arrays = self._read(reader, ready[0], exchange)
            return agree(exchange, "installing", lambda: self._install(ready[0], arrays, ready[1]))

    def _open(self, tag: str, exchange: Round) -> TagReader:
        found = foreign.find(self.root, tag)
        if found is None:
            return agree(exchange, "opening", lambda: foreign.ours(self.root, tag))
        wanted = agree(exchange, "describing", lambda: self.wanted(Layouts(self.job.placement, self.rules)))
        wanted = self._of_all_stages(wanted, exchange)
        return agree(exchange, "opening", lambda: foreign.open_tag(self.root, found, wanted))

    def _of_all_stages(self, wanted: Wanted, exchange: Round) -> Wanted:
        """The same, with the optimizer's groups of all pipeline stages: foreign optimizers number their parameters."""
        mesh = self.job.placement.mesh
        if mesh.pp == 1 or exchange.size == 1:
            return wanted
        first = [mesh.rank({"pp": stage}) for stage in range(mesh.pp)]
        if exchange.rank in first:
            groups = None if wanted.groups is None else [list(g) for g in wanted.groups]
            exchange.say(f"groups/{exchange.rank}", groups)
        if exchange.rank == 0:
            deadline = Deadline(exchange.timeout * LEAD)
            heard = [exchange.hear(f"groups/{rank}", rank, deadline) for rank in first]
            united: list[list[str]] | None = None
            if None not in heard:
                united = [[] for _ in range(max(map(len, heard)))]
                for groups in heard:
                    for n, names in enumerate(groups):
                        united[n] += [name for name in names if name not in united[n]]
            exchange.say("groups", united)
        return replace(wanted, groups=exchange.hear("groups", 0))

    def _prepare(self, reader: TagReader) -> tuple[list[Loading], Make]:
        try:
            return self.prepare(self._stored(reader))
        except CheckpointError as error:
            error.at(path=self.root, tag=reader.tag)
            raise

    def _unwanted(self, parts: Sequence[Loading], exchange: Round) -> list[Problem]:
        """What is stored and not wanted here; over pipeline stages, what none of them wants."""
        mine = {p.leaf: p for part in parts for p in part.unwanted}
        if self.job.placement.mesh.pp == 1 or exchange.size == 1:
            return list(mine.values())
        exchange.say(f"unwanted/{exchange.rank}", list(mine))
        if exchange.rank == 0:
            deadline = Deadline(exchange.timeout * LEAD)
            for rank in range(1, exchange.size):
                theirs = set(exchange.hear(f"unwanted/{rank}", rank, deadline))
                mine = {leaf: p for leaf, p in mine.items() if leaf in theirs}
            exchange.say("unwanted", [[p.leaf, p.text] for p in mine.values()])
        return [Problem(leaf, text) for leaf, text in exchange.hear("unwanted", 0)]

    def _check(self, reader: TagReader, parts: Sequence[Loading], unwanted: Sequence[Problem]) -> None:
        problems = [*(p for part in parts for p in part.problems), *unwanted]
        if problems and self.strict:
            raise incompatible(problems).at(path=self.root, tag=reader.tag)
        for problem in problems:
            logger.warning("tag %s: not loaded: %s", reader.tag, problem)
        self.report.skipped = [str(p) for p in problems]

    def _stored(self, reader: TagReader) -> Stored:
        def read_object(index: int, leaf: str) -> Any:
            if reader.foreign_object is not None:
                return reader.foreign_object(index, leaf, self.trust)
            return pickles.load(reader.pickled(index), leaf, trust=self.trust)

        layouts = Layouts(self.job.placement, self.rules)
        return Stored(reader.manifest, paths.ROOT, reader.manifest.skeleton, read_object, resolver(self.trust), layouts)

    def _read(self, reader: TagReader, parts: Sequence[Loading], exchange: Round) -> dict[str, Target]:
        """Fill the memory of all targets: verified before anything that is in use is overwritten."""
        targets = {path: target for part in parts for path, target in part.targets.items()}
        slots, wants, live = _memory(targets)
        plan = agree(exchange, "planning", lambda: plan_restore(reader.manifest, wants))
        mine, share, rows = plan, None, []
        if self.share and exchange.size > 1:
            # What each rank has of its own is not the same bytes, though path and box are the same.
            common = [w for w in wants if (r := reader.manifest.array(w.leaf)) is not None and not r.own]
            share = agree_on_shares(exchange, common)
            rows = share.rows(len(slots))
            itemsize = {path: target.dtype.itemsize for path, target in targets.items()}
            slabs = Slabs()
            slots += [slabs.take(want.box.size * itemsize[want.leaf]).data for _, want in rows]
            more = plan_restore(reader.manifest, [want for _, want in rows])
            mine = RestorePlan((*share.alone(plan).reads, *more.reads))
        in_use = RestorePlan(tuple(r for r in mine.reads if r.slot in live))
        fresh = RestorePlan(tuple(r for r in mine.reads if r.slot not in live))
        total = mine.read_bytes + in_use.read_bytes
        with Progress(f"load {reader.tag}", total, self.progress) as bar:

            def verify() -> None:
                read_into(reader, fresh, slots, workers=self.workers, progress=bar)
                check(reader, in_use, workers=self.workers, progress=bar)

            agree(exchange, "reading", lambda: self._storage(reader, verify))
            again = functools.partial(read_into, reader, in_use, slots, workers=self.workers, progress=bar)
            agree(exchange, "overwriting", lambda: self._storage(reader, again))
        if share is not None:
            exchange_shares(share, slots, rows, itemsize)
        self.report.arrays = len(targets)
        self.report.needed_bytes, self.report.read_bytes = plan.needed_bytes, total
        return targets

    def _storage(self, reader: TagReader, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise StorageError.of(error, "reading a tag", path=self.root, tag=reader.tag) from error

    @staticmethod
    def _install(parts: Sequence[Loading], targets: Mapping[str, Target], make: Make) -> Any:
        arrays = {path: target.install() for path, target in targets.items()}
        for part in parts:
            part.finish(arrays)
        return make(arrays)


def _memory(targets: Mapping[str, Target]) -> tuple[list[memoryview], list[Want], set[int]]:
    """Memory of all wanted boxes, the wishes, and which of the memory is in use."""
    slots: list[memoryview] = []
    wants: list[Want] = []
    live: set[int] = set()
    slabs = Slabs()
    for path, target in targets.items():
        for box, memory in zip(target.boxes, target.memory(slabs), strict=True):
            if target.live:
                live.add(len(slots))
            wants.append(Want(path, box, len(slots)))
            slots.append(memory)
    return slots, wants, live


def check_mode(replica_read: str) -> bool:
    """Whether replicas share their reads.

    Raises:
        UsageError: It is neither ``each`` nor ``share``.
    """
    if replica_read not in ("each", "share"):
        raise UsageError("replica_read is 'each' or 'share'", found=repr(replica_read))
    return replica_read == "share"
