"""Carrying out a load: choose the tag, check everything, read, install."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.adapters import pickles
from xla_ckpt.adapters.base import Target
from xla_ckpt.adapters.plain import resolver
from xla_ckpt.adapters.stored import Loading, Stored, incompatible
from xla_ckpt.api.job import Job
from xla_ckpt.api.progress import Progress
from xla_ckpt.coord.verdict import agree
from xla_ckpt.engine.background import SAVES
from xla_ckpt.engine.read import check, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, StorageError
from xla_ckpt.plan.restore_plan import RestorePlan, Want, plan_restore
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.tags.directory import entries, no_such_tag, open_tag
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.weave import Make

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
    strict: bool
    workers: int
    trust: bool
    progress: bool | None
    report: LoadReport

    def load(self, tag: str | None) -> Any:
        """Load `tag`, or the newest that is not damaged.

        Raises:
            CheckpointError: As `xla_ckpt.load_checkpoint` documents; the same on every rank.
        """
        began = time.monotonic()
        SAVES.wait(self.root)
        if tag is not None:
            result = self._load_tag(tag)
        else:
            tag, result = self._load_newest()
        self.report.path, self.report.tag = self.root, tag
        self.report.seconds = time.monotonic() - began
        return result

    def _load_newest(self) -> tuple[str, Any]:
        first: CheckpointError | None = None
        for entry in reversed(entries(self.root)):
            try:
                return entry.tag, self._load_tag(entry.tag)
            except CorruptCheckpointError as error:
                logger.error("tag %s is damaged, trying the one before it: %s", entry.tag, error)  # noqa: TRY400
                self.report.corrupt_tags.append(entry.tag)
                first = first or error
        if first is not None:
            raise first
        raise no_such_tag(self.root, None)

    def _load_tag(self, tag: str) -> Any:
        exchange = self.job.exchange
        reader = agree(exchange, "opening", lambda: TagReader(open_tag(self.root, tag), self.root, tag))
        with reader:
            ready = agree(exchange, "checking", lambda: self._check(reader))
            arrays = agree(exchange, "reading", lambda: self._read(reader, *ready))
            return agree(exchange, "installing", lambda: self._install(ready[0], arrays, ready[1]))

    def _check(self, reader: TagReader) -> tuple[list[Loading], Make]:
        try:
            parts, make = self.prepare(self._stored(reader))
            problems = [p for part in parts for p in part.problems]
            if problems and self.strict:
                raise incompatible(problems)
        except CheckpointError as error:
            error.at(path=self.root, tag=reader.tag)
            raise
        for problem in problems:
            logger.warning("tag %s: not loaded: %s", reader.tag, problem)
        self.report.skipped = [str(p) for p in problems]
        return parts, make

    def _stored(self, reader: TagReader) -> Stored:
        def read_object(index: int, leaf: str) -> Any:
            numbers = reader.manifest.objects
            if not 0 <= index < len(numbers):
                raise FormatError("the skeleton names an object that is not stored", leaf=leaf, found=index)
            return pickles.load(reader.head(numbers[index]), leaf, trust=self.trust)

        return Stored(reader.manifest, paths.ROOT, reader.manifest.skeleton, read_object, resolver(self.trust))

    def _read(self, reader: TagReader, parts: Sequence[Loading], _: Make) -> dict[str, Target]:
        """Fill the memory of all targets: verified before anything that is in use is overwritten."""
        targets = {path: target for part in parts for path, target in part.targets.items()}
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
        plan = plan_restore(reader.manifest, wants)
        in_use = RestorePlan(tuple(r for r in plan.reads if r.slot in live))
        fresh = RestorePlan(tuple(r for r in plan.reads if r.slot not in live))
        total = plan.read_bytes + in_use.read_bytes
        try:
            with Progress(f"load {reader.tag}", total, self.progress) as bar:
                read_into(reader, fresh, slots, workers=self.workers, progress=bar)
                check(reader, in_use, workers=self.workers, progress=bar)
                read_into(reader, in_use, slots, workers=self.workers, progress=bar)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise StorageError.of(error, "reading a tag", path=self.root, tag=reader.tag) from error
        self.report.arrays = len(targets)
        self.report.needed_bytes, self.report.read_bytes = plan.needed_bytes, total
        return targets

    @staticmethod
    def _install(parts: Sequence[Loading], targets: Mapping[str, Target], make: Make) -> Any:
        arrays = {path: target.install() for path, target in targets.items()}
        for part in parts:
            part.finish(arrays)
        return make(arrays)
