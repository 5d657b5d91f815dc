"""Carrying out a save: payload, records, manifest, commit. Runs on a background thread of every rank.

Rank 0 opens the directory and tells the others where it is; each rank writes its files and reports what it wrote;
rank 0 waits for all reports, writes the manifest, and commits. The verdict, good or bad, reaches everybody.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xla_ckpt import dtypes
from xla_ckpt.coord.verdict import Round, as_checkpoint_error
from xla_ckpt.engine.tag_reader import MANIFEST
from xla_ckpt.engine.write import WRITERS, Memory, Progress, write_files
from xla_ckpt.errors import CheckpointError, FormatError, SaveError
from xla_ckpt.format import manifest_json
from xla_ckpt.format.digest import digest
from xla_ckpt.format.manifest import ArrayRecord, FileRecord, Head, Manifest, array_record
from xla_ckpt.layout.box import Box
from xla_ckpt.plan.save_plan import SavePlan, Written, shards_by_leaf
from xla_ckpt.storage.local import LocalDirectory, write_small


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
    plan: SavePlan
    memory: Memory
    """Bytes of the local shards; must not change until the job is done."""

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    """Leaf path -> (dtype, global shape) of the leaves that this rank knows."""

    aliases: Mapping[str, str]
    skeleton: Any
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    mesh: str | None = None
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


def run_save(job: SaveJob, exchange: Round, commit: Committer) -> SaveReport:
    """Carry out this rank's part, and wait for the verdict.

    `commit` is called on rank 0 only.

    Raises:
        CheckpointError: The save did not commit; the same error on every rank.
    """
    began = time.monotonic()
    facts = {"path": job.root, "tag": job.tag}
    try:
        sequence = _lead(job, exchange, commit) if exchange.rank == 0 else _follow(job, exchange)
    except CheckpointError as error:
        error.at(**facts)
        raise
    return SaveReport(job.root, job.tag, sequence, job.plan.nbytes, len(job.plan.files), time.monotonic() - began)


def _lead(job: SaveJob, exchange: Round, commit: Committer) -> int:
    def write(directory: LocalDirectory, sequence: int) -> None:
        exchange.say("directory", directory.path)
        records = [_write_part(job, directory, exchange.rank, exchange.size)]
        records += [exchange.hear(f"record/{rank}", rank) for rank in range(1, exchange.size)]
        manifest = merge(job, records, sequence, exchange.size)
        write_small(directory, MANIFEST, manifest_json.dump(manifest))
        directory.sync()

    try:
        sequence = commit(job.root, job.tag, write, pinned=job.pinned, num_kept=job.num_kept)
    except Exception as error:
        # Whatever it is, no rank may wait for a verdict that never comes.
        problem = as_checkpoint_error(error, "saving", 0)
        exchange.say("directory", error=problem)
        exchange.say("verdict", error=problem)
        if problem is error:
            raise
        raise problem from error
    exchange.say("verdict", sequence)
    return sequence


def _follow(job: SaveJob, exchange: Round) -> int:
    try:
        path = exchange.hear("directory", 0)
        directory = LocalDirectory(path)
        try:
            record = _write_part(job, directory, exchange.rank, exchange.size)
            directory.sync()
        finally:
            directory.close()
        exchange.say(f"record/{exchange.rank}", record)
    except Exception as error:
        # Rank 0 must hear of it; what all ranks raise is rank 0's verdict.
        exchange.say(f"record/{exchange.rank}", error=as_checkpoint_error(error, "saving", exchange.rank))
    sequence: int = exchange.hear("verdict", 0)
    return sequence


def _write_part(job: SaveJob, directory: LocalDirectory, rank: int, world: int) -> dict[str, Any]:
    """Write this rank's files; the JSON record of what is in them."""
    written = write_files(directory, job.plan, job.memory, workers=job.workers, progress=job.progress)
    files = list(written.files)
    objects = []
    for i, data in enumerate(job.objects):
        path = f"objects/{rank + 1:05d}-of-{world:05d}-{i + 1:05d}.pickle"
        write_small(directory, path, data)
        objects.append(len(files))
        files.append(FileRecord(path, len(data), len(data), digest(data)))
    return {
        "files": [[f.path, f.size, f.head, f.digest] for f in files],
        "shards": [[leaf, box.start, box.stop, file, offset] for leaf, box, file, offset in written.shards],
        "arrays": {leaf: [dtype, list(shape)] for leaf, (dtype, shape) in job.arrays.items()},
        "aliases": dict(job.aliases),
        "objects": objects,
        "skeleton": job.skeleton,
    }


def merge(job: SaveJob, records: Sequence[Mapping[str, Any]], sequence: int, world: int) -> Manifest:
    """The manifest of all ranks' records. Pure but for the clock.

    Raises:
        SaveError: The ranks' records do not make up a whole state.
    """
    written = [
        Written(
            tuple(FileRecord(*f) for f in record["files"]),
            tuple((leaf, Box(tuple(a), tuple(b)), file, offset) for leaf, a, b, file, offset in record["shards"]),
        )
        for record in records
    ]
    files, shards = shards_by_leaf(written)
    arrays: dict[str, ArrayRecord] = {}
    aliases: dict[str, str] = {}
    for record in records:
        for leaf, (dtype, shape) in record["arrays"].items():
            if leaf not in arrays:
                try:
                    arrays[leaf] = array_record(dtypes.dtype(dtype), tuple(shape), shards.get(leaf, ()))
                except FormatError as error:
                    raise SaveError(
                        f"the ranks together did not write this array exactly once: {error.problem}", leaf=leaf,
                        expected=error.expected, found=error.found,
                        hint="Ranks disagree about who holds what: check mesh, shardings and the calls of all ranks.",
                    ) from error  # fmt: skip
        aliases.update(record["aliases"])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    head = Head(job.tag, sequence, job.pinned, now)
    return Manifest(
        head, records[0]["skeleton"], arrays, tuple(files), aliases, tuple(records[0]["objects"]),
        mesh=job.mesh, world=world,
    )  # fmt: skip


def check_writable(root: str) -> None:
    """Fail early where a save could not even begin.

    Raises:
        OSError: The directory cannot be made or written.
    """
    os.makedirs(root, exist_ok=True)
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(13, "no permission to write there", root)
