"""Verify a checkpoint: read all of its files and compare every byte with its digest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.restore_plan import RestorePlan, plan_whole_shards
from xla_ckpt.core.tree.skeleton import find_arrays
from xla_ckpt.errors import CheckpointError, wrap_os_errors
from xla_ckpt.features.parity.parity import verify_parity
from xla_ckpt.loading.read import verify_reads
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, REPORT_FILE, UPLOAD_FILE

COMMIT_FILES = frozenset({"_CHECKPOINT_METADATA", ORBAX_COMMITTED_FILE, REPORT_FILE, UPLOAD_FILE})
"""Files that a commit leaves in a tag; nothing here depends on them."""


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """Result of `verify`."""

    path: str
    tag: str
    problems: list[CheckpointError] = field(default_factory=list)
    """All problems, each with file and leaf."""

    strangers: list[str] = field(default_factory=list)
    """Files in the tag directory that neither the manifest nor the layout lists. They are ignored."""

    arrays: int = 0
    files: int = 0
    nbytes: int = 0
    """Number of bytes that were read and compared with their digests."""

    seconds: float = 0.0
    digests: bool = True
    """True if there are digests. Tags of other libraries have none, and at most checksums of their own."""

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "path": self.path,
            "tag": self.tag,
            "ok": self.ok,
            "arrays": self.arrays,
            "files": self.files,
            "nbytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "strangers": self.strangers,
            "digests": self.digests,
            "problems": [{"message": str(p), **p.to_json()} for p in self.problems],
        }

    def _repr_html_(self) -> str:
        from xla_ckpt.rendering import html, reports

        return html.render_html(reports.render_verification({**self.to_json(), "repaired": [], "unverified": 0}))


def collect_problem(report: VerifyReport, action: Callable[[], object]) -> None:
    """Run an action, and add the error that it raises to the report."""
    try:
        with wrap_os_errors("reading a file"):
            action()
    except CheckpointError as error:
        report.problems.append(error)


def verify_tag(reader: TagReader, *, marks: frozenset[str] = frozenset(), workers: int = READ_THREADS) -> VerifyReport:
    """Verify all files of a tag. `marks` are marker files of its layout that the manifest does not list."""
    began = time.monotonic()
    report = verify_payload(reader, workers=workers)
    with wrap_os_errors("reading the parity", path=reader.root, tag=reader.tag):
        files = reader.directory.list_files()
        problems, of_parity = verify_parity(reader.directory, reader.manifest, files)
    report.problems += [problem.at(path=reader.root, tag=reader.tag) for problem in problems]
    known = {f.path for f in reader.manifest.files} | COMMIT_FILES | {MANIFEST_FILE} | marks | of_parity
    report.strangers = [name for name in files if name not in known]
    report.seconds = time.monotonic() - began
    return report


def verify_payload(reader: TagReader, *, workers: int = READ_THREADS) -> VerifyReport:
    """Verify all files that the manifest lists."""
    manifest = reader.manifest
    report = VerifyReport(path=reader.root, tag=reader.tag, arrays=len(manifest.arrays), files=len(manifest.files))
    report.problems, report.nbytes = verify_files(reader, range(len(manifest.files)), IoContext(workers=workers))
    for leaf in find_arrays(manifest.skeleton, ""):
        if leaf not in manifest.unreadable and manifest.find_array(leaf) is None:
            problem = "the skeleton names an array that is not stored"
            report.problems.append(CheckpointError(problem, tag=reader.tag, leaf=leaf))
    return report


def verify_files(reader: TagReader, numbers: Iterable[int], io: IoContext) -> tuple[list[CheckpointError], int]:
    """Verify files of the manifest, given by index, and compare all bytes with their digests.

    Returns:
        The problems, each with its `file`, and the number of array bytes that were read.
    """
    problems: list[CheckpointError] = []
    sound: set[int] = set()
    for number in numbers:
        file = reader.manifest.files[number].path
        try:
            with wrap_os_errors("reading a file", path=reader.root, tag=reader.tag, file=file):
                reader.read_head(number)
        except CheckpointError as error:
            problems.append(error)
        else:
            sound.add(number)
    reads = _plan_reads(reader.manifest, sound)
    lock = threading.Lock()

    def note(error: CheckpointError) -> None:
        with lock:
            problems.append(error)

    verify_reads(reader, reads, io, on_problem=note)
    return problems, reads.needed_bytes


def _plan_reads(manifest: Manifest, files: set[int]) -> RestorePlan:
    """Plan a read of every region in some files, including padding and copies, which no restore would read."""
    arrays = manifest.arrays
    of_cell = np.repeat(np.arange(len(arrays)), np.diff(arrays.first_shard))
    # If files list their regions, the list is complete; otherwise the shards of arrays are the regions.
    listed = np.array([bool(file.regions) for file in manifest.files], np.bool_)
    sound = np.isin(np.arange(len(manifest.files)), list(files))
    cells = np.flatnonzero(sound[arrays.file] & ~listed[arrays.file] & (arrays.compute_shard_bytes() > 0))
    names = {
        (file, offset): arrays.names[row]
        for file, offset, row in zip(arrays.file.tolist(), arrays.offset.tolist(), of_cell.tolist(), strict=True)
        if listed[file]
    }
    regions = [(n, *region) for n, file in enumerate(manifest.files) if n in files for region in file.regions]
    file, offset, nbytes = np.array(regions, np.int64).reshape(-1, 3).T
    leaves = [arrays.names[row] for row in of_cell[cells].tolist()]
    return plan_whole_shards(
        [*leaves, *(names.get((n, at), "a copy of an array") for n, at, _ in regions)],
        slot=np.zeros(len(cells) + len(regions), np.int64),
        file=np.concatenate([arrays.file[cells], file]),
        offset=np.concatenate([arrays.offset[cells], offset]),
        shard_bytes=np.concatenate([arrays.compute_shard_bytes()[cells], nbytes]),
    )
