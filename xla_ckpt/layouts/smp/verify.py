"""Reading all parts of a set, or of a directory of sets, to see whether they are there, whole, and of one save.

There are no digests, but each record of a zip has a CRC-32, which neither torch nor SMP looks at. Where this library
wrote the files, a note beside each says which save it is part of.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import closing
from functools import partial

from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError, storage_errors
from xla_ckpt.layouts.nxd.rank_files import StoredTensor
from xla_ckpt.layouts.nxd.verify import check_zips
from xla_ckpt.layouts.smp.one_save import less_others
from xla_ckpt.layouts.smp.parts import Parts
from xla_ckpt.layouts.smp.scan import open_directory, scan
from xla_ckpt.layouts.smp.tags import SmpTag
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.nested import leaves


def verify_smp(store: Store, found: SmpTag, codec: ValueCodec, workers: int = READERS) -> VerifyReport:
    """Read every part.

    All parts have to be there and of one save, the zips have to agree with their CRCs, and the parts have to add up to
    whole arrays, as far as they alone tell.

    Raises:
        StorageError: The directory cannot be opened.
    """
    began = time.monotonic()
    report = VerifyReport(path=store.path, tag=found.tag, digests=False)
    with storage_errors("opening a checkpoint", path=store.path, tag=found.tag):
        directory = open_directory(store, found)
    with closing(directory):
        if found.directory and not found.complete:
            report.problems.append(CorruptCheckpointError("its save did not end: neither newest nor a file says so"))
        with contextlib.suppress(CorruptCheckpointError):  # of two saves: what is read below tells so
            found = less_others(directory, found)
        parts = Parts(directory, found.files, codec)
        check_zips(report, directory, found.files, workers)
        damaged = {problem.file for problem in report.problems}
        for file in found.files:
            if file not in damaged:
                noted(report, partial(_count, parts, file, report))
        # Damage in one part does not hide that another is missing, or of another save.
        told = {(problem.problem, problem.file) for problem in report.problems}
        noted(report, partial(_check_sums, parts, found, told))
    for problem in report.problems:
        problem.at(path=store.path, tag=found.tag)
    report.seconds = time.monotonic() - began
    return report


def _count(parts: Parts, file: str, report: VerifyReport) -> None:
    report.arrays += sum(isinstance(leaf, StoredTensor) for leaf in leaves(parts.tree(file)))


def _check_sums(parts: Parts, found: SmpTag, told: set[tuple[str, str | None]]) -> None:
    """Check that the parts add up. What the report tells already is not told again."""
    try:
        scan(parts, found, Hints())
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the files alone do not say how arrays were split, or are of a kind that is not read: no damage
    except CorruptCheckpointError as error:
        if (error.problem, error.file) not in told:
            raise
