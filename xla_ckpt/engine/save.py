"""Carrying out a save: payload, records, manifest, commit. Runs on a background thread of every rank.

Rank 0 opens the directory and tells the others where it is; each rank writes its files and reports what it wrote;
rank 0 waits for all reports, writes the manifest, and commits. The verdict, good or bad, reaches everybody.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xla_ckpt.engine.tag_reader import MANIFEST, TagReader
from xla_ckpt.engine.write import WRITERS, Memory, Progress, write_files, write_objects
from xla_ckpt.errors import (
    CheckpointError,
    DivergentReplicasError,
    RankFailedError,
    StorageError,
    UsageError,
)  # fmt: skip
from xla_ckpt.job.verdict import LEAD, Deadline, Round, as_checkpoint_error
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import digest, to_hex
from xla_ckpt.manifest.records import Head, Manifest
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.merge import Duplicate, Record, Sample, merge
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.local import LocalDirectory, write_small

logger = logging.getLogger(__name__)

ONE_DIRECTORY = "All hosts must see the same directory under the checkpoint path, such as a shared file system."
"""What to do about hosts that do not."""


class Committer(Protocol):
    """Makes a directory, lets `write` fill it, and commits it as a tag (`xla_ckpt.tags.lazy.save_tag`)."""

    def __call__(
        self, root: str, tag: str, write: Callable[[LocalDirectory, int], None], *, pinned: bool, num_kept: int | None
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One rank's part of a save."""

    root: str
    tag: str
    leaves: Sequence[Leaf]
    plan: SavePlan
    """What this rank writes, if no other pipeline stage stores it."""

    memory: Memory
    """Bytes of the local shards; must not change until the job is done."""

    skeleton: Any
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    named: Callable[[str], bool] = lambda path: True
    """Which leaves this rank reports type and shape of."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> digest of its plain values, which all ranks have in common."""

    samples: Callable[[], Mapping[str, Sample]] = dict
    """Digests of a few bytes of each replicated leaf."""

    last: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that rank 0 writes when all else is durable."""

    mesh: Mesh = field(default_factory=Mesh)
    pinned: bool = False
    num_kept: int | None = None
    workers: int = WRITERS
    progress: Progress = field(default=lambda _: None)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a finished save did, on this rank."""

    path: str
    tag: str
    sequence: int
    """Commit number."""

    nbytes: int
    """Array bytes that this rank wrote."""

    files: int
    """Payload files that this rank wrote."""

    seconds: float
    """From the start of the background work to the commit."""

    stall: float = 0.0
    """Seconds that the caller waited for the snapshot."""


def run_save(job: SaveJob | CheckpointError, exchange: Round, commit: Committer, **facts: str) -> SaveReport:
    """Carry out this rank's part, and wait for the verdict.

    `commit` is called on rank 0 only. A `job` that is an error is one that this rank could not even prepare: the
    others hear of it.

    Raises:
        CheckpointError: The save did not commit; the same error on every rank.
    """
    began = time.monotonic()
    try:
        if exchange.rank == 0:
            sequence, written = _lead(job, exchange, commit, **facts)
        else:
            sequence, written = _follow(job, exchange, **facts)
    except CheckpointError as error:
        error.at(**facts)
        raise
    return SaveReport(
        facts["path"], facts["tag"], sequence, written.nbytes, len(written.files), time.monotonic() - began
    )


def _lead(
    job: SaveJob | CheckpointError, exchange: Round, commit: Committer, path: str, tag: str
) -> tuple[int, SavePlan]:
    done: list[SavePlan] = []
    begun = False

    def write(job: SaveJob, directory: LocalDirectory, sequence: int) -> None:
        nonlocal begun
        begun = True
        exchange.say("begin", [tag, os.path.basename(directory.path), str(job.mesh)])
        plan = _untied(job, exchange)
        records = [_write_part(job, plan, directory, exchange)]
        deadline = Deadline(exchange.timeout * LEAD)
        records += [
            Record.from_json(exchange.hear(f"record/{rank}", rank, deadline)) for rank in range(1, exchange.size)
        ]
        _check_files(records, directory)
        manifest = _manifest(job, records, directory, sequence)
        write_small(directory, MANIFEST, manifest_json.dump(manifest))
        directory.sync()
        if exchange.size > 1 and exchange.has("abort"):
            exchange.hear("abort", 0)  # raises
        for name, data in job.last.items():
            write_small(directory, name, data)
        directory.sync()
        done.append(plan)

    try:
        if isinstance(job, CheckpointError):
            raise job
        ready = job
        sequence = commit(
            path, tag, lambda directory, number: write(ready, directory, number),
            pinned=job.pinned, num_kept=job.num_kept,
        )  # fmt: skip
    except Exception as error:
        # Whatever it is, no rank may wait for a verdict that never comes.
        problem = as_checkpoint_error(error, "saving", 0)
        problem.at(path=path, tag=tag)
        if exchange.size > 1:
            if not begun:
                exchange.say("begin", error=problem)
            exchange.say("verdict", error=problem)
        if problem is error:
            raise
        raise problem from error
    exchange.say("verdict", sequence)
    return sequence, done[0]


def _follow(job: SaveJob | CheckpointError, exchange: Round, path: str, tag: str) -> tuple[int, SavePlan]:
    plan, out_of_step = SavePlan(()), None
    key = f"record/{exchange.rank}"
    try:
        if isinstance(job, CheckpointError):
            raise job
        theirs, name, mesh = exchange.hear("begin", 0)
        if (theirs, mesh) != (tag, str(job.mesh)):
            out_of_step = UsageError(
                "the ranks make different calls", rank=exchange.rank, expected=f"a save of tag {theirs} over {mesh}",
                found=f"tag {tag} over {job.mesh}", hint="All ranks must make the same calls in the same order. "
                "If a rank left one out, this job stays out of step: restart it.",
            )  # fmt: skip
            raise out_of_step
        directory = _open(os.path.join(path, name))
        try:
            plan = _untied(job, exchange)
            record = _write_part(job, plan, directory, exchange)
            directory.sync()
        finally:
            directory.close()
        exchange.say(key, record.to_json())
    except Exception as error:
        # Rank 0 must hear of it; what all ranks raise is rank 0's verdict.
        exchange.say(key, error=as_checkpoint_error(error, "saving", exchange.rank))
        if out_of_step is not None and exchange.has("verdict"):
            raise out_of_step from None  # the verdict may be that of a call which this rank never made
    try:
        sequence: int = exchange.hear("verdict", 0)
    except RankFailedError as error:
        if error.rank == 0:
            _give_up(error, exchange)
        raise
    return sequence, plan


def _give_up(error: RankFailedError, exchange: Round) -> None:
    """Tell rank 0, which may only be slow: it must not commit what others have given up."""
    try:
        if not exchange.has("verdict"):
            exchange.say("abort", error=error)
    except RankFailedError:
        pass  # it holds the store, and is gone with it


def _open(path: str) -> LocalDirectory:
    try:
        return LocalDirectory(path)
    except FileNotFoundError as error:
        raise StorageError.of(
            error, "opening the directory that rank 0 made", file=path, hint=ONE_DIRECTORY
        ) from error  # fmt: skip


def _check_files(records: Sequence[Record], directory: LocalDirectory) -> None:
    """Another host may have found a directory of that name on a disk of its own, and have written there."""
    for record in records:
        for file in record.files:
            try:
                size = os.stat(file.path, dir_fd=directory.fd).st_size
            except FileNotFoundError:
                size = None
            if size != file.size:
                raise StorageError(
                    "what this rank has written is not in the directory that rank 0 made", rank=record.rank,
                    file=file.path, expected=f"{file.size} bytes", found="no file" if size is None else f"{size} bytes",
                    hint=ONE_DIRECTORY,
                )  # fmt: skip


def _untied(job: SaveJob, exchange: Round) -> SavePlan:
    """The save plan without what an earlier pipeline stage holds, too: a tied parameter is stored once.

    The first rank of each stage publishes the names of its leaves; the others of its stage have the same ones.
    """
    if job.mesh.pp == 1 or exchange.size == 1:
        return job.plan
    stage = job.mesh.coordinates(exchange.rank)["pp"]
    if exchange.rank == job.mesh.rank({"pp": stage}):
        exchange.say(f"names/{stage}", [to_hex(digest(leaf.path.encode())) for leaf in job.leaves])
    earlier = {name for s in range(stage) for name in exchange.hear(f"names/{s}", job.mesh.rank({"pp": s}))}
    tied = frozenset(leaf.path for leaf in job.leaves if to_hex(digest(leaf.path.encode())) in earlier)
    return job.plan.minus(tied)


def _write_part(job: SaveJob, plan: SavePlan, directory: LocalDirectory, exchange: Round) -> Record:
    """Write this rank's files; the record of what is in them."""
    rank, world = exchange.rank, exchange.size
    written = write_files(directory, plan, job.memory, workers=job.workers, progress=job.progress)
    files = (*written.files, *write_objects(directory, job.objects, rank, world))
    objects = tuple(range(len(written.files), len(files)))
    arrays = {leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec) for leaf in job.leaves if job.named(leaf.path)}
    aliases = {alias: target for alias, target in job.aliases.items() if job.named(alias)}
    samples = job.samples() if world > 1 else {}
    return Record(rank, files, written.shards, arrays, aliases, job.skeleton, objects, samples, job.parts)


def _manifest(job: SaveJob, records: Sequence[Record], directory: LocalDirectory, sequence: int) -> Manifest:
    merged = merge(records, job.mesh)
    for warning in merged.warnings:
        logger.warning("tag %s: %s", job.tag, warning)
    manifest = merged.manifest(new_head(job.tag, sequence, pinned=job.pinned), job.mesh, len(records))
    if merged.duplicates:
        reader = TagReader(directory, job.root, job.tag, manifest)
        try:
            _check_copies(reader, merged.duplicates)
        finally:
            reader.close_files()
    return manifest


def new_head(tag: str, sequence: int, *, pinned: bool) -> Head:
    """The head of a tag that is committed now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return Head(tag, sequence, pinned, now)


def _check_copies(reader: TagReader, duplicates: Sequence[Duplicate]) -> None:
    """Ranks that did not know of each other may write the same region, but not different bytes."""
    for twice in duplicates:
        tables = [reader.digests(f, at, twice.nbytes) for f, at in zip(twice.files, twice.offsets, strict=True)]
        if tables[0] != tables[1]:
            raise DivergentReplicasError(
                f"two ranks hold different values of the region {twice.box}", leaf=twice.leaf,
                expected=f"the bytes of rank {twice.ranks[0]}", found=f"others on rank {twice.ranks[1]}",
                hint="Check mesh and shardings: one of them is likely not what the rank really holds.",
            )  # fmt: skip


def check_writable(root: str) -> None:
    """Fail early where a save could not even begin.

    Raises:
        OSError: The directory cannot be made or written.
    """
    os.makedirs(root, exist_ok=True)
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(13, "no permission to write there", root)
