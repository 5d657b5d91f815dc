"""Reading a whole tag to see whether it is what was saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.parity_check import verify_parity
from xla_ckpt.engine.read import check_reads
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, storage_errors
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.restore_plan import RestorePlan, whole_reads
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import COMMITTED, MANIFEST, REPORT, UPLOAD
from xla_ckpt.tree.skeleton import array_paths

OF_COMMITS = frozenset({"_CHECKPOINT_METADATA", COMMITTED, REPORT, UPLOAD})
"""What a commit leaves in a tag; nothing here depends on it."""


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found."""

    path: str
    tag: str
    problems: list[CheckpointError] = field(default_factory=list)
    """Everything that is wrong, each with file and leaf."""

    strangers: list[str] = field(default_factory=list)
    """Files in the tag directory that neither the manifest nor the layout knows. They do no harm."""

    arrays: int = 0
    files: int = 0
    nbytes: int = 0
    """Bytes that were read and compared with their digests."""

    seconds: float = 0.0
    digests: bool = True
    """Whether there are digests. Tags of other libraries have none, and at most checksums of their own."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
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
        from xla_ckpt.tables import html, render

        return html.fragment(render.verdict({**self.to_json(), "repaired": [], "unverified": 0}))


def noted(report: VerifyReport, action: Callable[[], object]) -> None:
    """Do something, and add the error that it raises to the report."""
    try:
        with storage_errors("reading a file"):
            action()
    except CheckpointError as error:
        report.problems.append(error)


def verify_tag(reader: TagReader, *, marks: frozenset[str] = frozenset(), workers: int = READERS) -> VerifyReport:
    """Read everything that belongs to a tag. `marks` are files of its layout that the manifest does not list."""
    began = time.monotonic()
    report = verify_payload(reader, workers=workers)
    with storage_errors("reading the parity", path=reader.root, tag=reader.tag):
        files = reader.directory.files()
        problems, of_parity = verify_parity(reader.directory, reader.manifest, files)
    report.problems += [problem.at(path=reader.root, tag=reader.tag) for problem in problems]
    known = {f.path for f in reader.manifest.files} | OF_COMMITS | {MANIFEST} | marks | of_parity
    report.strangers = [name for name in files if name not in known]
    report.seconds = time.monotonic() - began
    return report


def verify_payload(reader: TagReader, *, workers: int = READERS) -> VerifyReport:
    """Read everything that the manifest lists."""
    manifest = reader.manifest
    report = VerifyReport(path=reader.root, tag=reader.tag, arrays=len(manifest.arrays), files=len(manifest.files))
    report.problems, report.nbytes = verify_files(reader, range(len(manifest.files)), Crew(workers=workers))
    for leaf in array_paths(manifest.skeleton, ""):
        if leaf not in manifest.unknown and manifest.array(leaf) is None:
            problem = "the skeleton names an array that is not stored"
            report.problems.append(CheckpointError(problem, tag=reader.tag, leaf=leaf))
    return report


def verify_files(reader: TagReader, numbers: Iterable[int], crew: Crew) -> tuple[list[CheckpointError], int]:
    """Read some files that the manifest lists, by their numbers there, and compare all bytes with their digests.

    Returns:
        What is wrong, each with the `file`, and how many bytes of arrays were read.
    """
    problems: list[CheckpointError] = []
    sound: set[int] = set()
    for number in numbers:
        file = reader.manifest.files[number].path
        try:
            with storage_errors("reading a file", path=reader.root, tag=reader.tag, file=file):
                reader.head(number)
        except CheckpointError as error:
            problems.append(error)
        else:
            sound.add(number)
    reads = _reads(reader.manifest, sound)
    lock = threading.Lock()

    def note(error: CheckpointError) -> None:
        with lock:
            problems.append(error)

    check_reads(reader, reads, crew, on_problem=note)
    return problems, reads.needed_bytes


def _reads(manifest: Manifest, files: set[int]) -> RestorePlan:
    """A read of every region in some files. Some layouts have padding and copies, which no restore would read."""
    arrays = manifest.arrays
    of_cell = np.repeat(np.arange(len(arrays)), np.diff(arrays.first))
    # Where files list their regions, they say all of them; else the cells of arrays are regions.
    listed = np.array([bool(file.regions) for file in manifest.files], np.bool_)
    sound = np.isin(np.arange(len(manifest.files)), list(files))
    cells = np.flatnonzero(sound[arrays.file] & ~listed[arrays.file] & (arrays.cell_bytes() > 0))
    names = {
        (file, offset): arrays.names[row]
        for file, offset, row in zip(arrays.file.tolist(), arrays.offset.tolist(), of_cell.tolist(), strict=True)
        if listed[file]
    }
    regions = [(n, *region) for n, file in enumerate(manifest.files) if n in files for region in file.regions]
    file, offset, nbytes = np.array(regions, np.int64).reshape(-1, 3).T
    leaves = [arrays.names[row] for row in of_cell[cells].tolist()]
    return whole_reads(
        [*leaves, *(names.get((n, at), "a copy of an array") for n, at, _ in regions)],
        slot=np.zeros(len(cells) + len(regions), np.int64),
        file=np.concatenate([arrays.file[cells], file]),
        offset=np.concatenate([arrays.offset[cells], offset]),
        shard=np.concatenate([arrays.cell_bytes()[cells], nbytes]),
    )
