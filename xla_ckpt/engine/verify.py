"""Reading a whole tag to see whether it is what was saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xla_ckpt.engine.read import READERS, check_reads
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, StorageError
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.restore_plan import Read, RestorePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.tags.directory import MANIFEST
from xla_ckpt.tree.skeleton import array_paths

ORBAX_FILES = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"})
"""What orbax leaves in a tag; nothing here depends on it."""


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found."""

    path: str
    tag: str
    problems: list[CheckpointError] = field(default_factory=list)
    """Everything that is wrong, each with file and leaf."""

    strangers: list[str] = field(default_factory=list)
    """Files in the tag directory that belong to nobody. They do no harm."""

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


def verify_tag(
    reader: TagReader,
    *,
    marks: frozenset[str] = frozenset(),
    workers: int = READERS,
    progress: Callable[[int], None] = lambda _: None,
) -> VerifyReport:
    """Read everything that the manifest lists. `marks` are files of the tag's layout that it does not list."""
    began = time.monotonic()
    manifest = reader.manifest
    report = VerifyReport(reader.root, reader.tag, arrays=len(manifest.arrays), files=len(manifest.files))
    sound: set[int] = set()
    for number, record in enumerate(manifest.files):
        try:
            reader.head(number)
            sound.add(number)
        except CheckpointError as error:
            report.problems.append(error)
        except OSError as error:
            report.problems.append(
                StorageError.of(error, "reading a file", path=reader.root, tag=reader.tag, file=record.path)
            )
    reads = [r for r in _reads(manifest) if r.file in sound]
    reads.sort(key=lambda r: (r.file, r.offset))
    lock = threading.Lock()

    def note(error: CheckpointError) -> None:
        with lock:
            report.problems.append(error)

    check_reads(reader, RestorePlan(tuple(reads)), workers=workers, progress=progress, on_problem=note)
    report.nbytes = sum(r.nbytes for r in reads)
    for leaf in array_paths(manifest.skeleton, ""):
        if manifest.array(leaf) is None:
            note(CheckpointError("the skeleton names an array that is not stored", tag=reader.tag, leaf=leaf))
    known = {f.path for f in manifest.files} | ORBAX_FILES | {MANIFEST} | marks
    report.strangers = [name for name in reader.directory.files() if name not in known]
    report.seconds = time.monotonic() - began
    return report


def _reads(manifest: Manifest) -> Iterator[Read]:
    """Every region once: also the padding and the copies that some layouts have, and no restore would read."""
    leaves: dict[tuple[int, int], str] = {}
    for leaf, array in manifest.arrays.items():
        for s in array:
            if manifest.files[s.file].regions:
                leaves.setdefault((s.file, s.offset), leaf)
            elif s.box.size:
                yield Read(leaf, 0, s.file, s.offset, s.box, s.box, s.box, array.dtype.itemsize)
    for number, file in enumerate(manifest.files):
        for offset, nbytes in file.regions:
            box = Box.whole((nbytes,))
            yield Read(leaves.get((number, offset), "a copy of an array"), 0, number, offset, box, box, box, 1)
