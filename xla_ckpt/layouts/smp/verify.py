"""Reading all parts of a set, or of a directory of sets, to see whether they are there, whole, and of one save.

There are no digests, but each record of a zip has a CRC-32, which neither torch nor SMP looks at. Where this library
wrote the files, a note beside each says which save it is part of.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from functools import partial

from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError, storage_errors
from xla_ckpt.layouts.nxd.rank_files import StoredTensor
from xla_ckpt.layouts.smp.one_save import less_others
from xla_ckpt.layouts.smp.parts import PartFiles
from xla_ckpt.layouts.smp.scan import open_set_directory, scan_smp
from xla_ckpt.layouts.smp.tags import SmpTag
from xla_ckpt.layouts.torch_save.zip_reader import check_zip
from xla_ckpt.layouts.verifying import check_files, foreign_report
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tree.nested import leaves


def verify_smp(store: Store, tag: SmpTag, workers: int = READERS) -> VerifyReport:
    """Read every part.

    All parts have to be there and of one save, the zips have to agree with their CRCs, and the parts have to add up to
    whole arrays, as far as they alone tell.

    Raises:
        StorageError: The directory cannot be opened.
    """
    with foreign_report(store, tag.tag) as report:
        with storage_errors("opening a checkpoint", path=store.path, tag=tag.tag):
            directory = open_set_directory(store, tag)
        with closing(directory):
            if tag.directory and not tag.complete:
                unfinished = "its save did not end: neither newest nor a file says so"
                report.problems.append(CorruptCheckpointError(unfinished))
            with contextlib.suppress(CorruptCheckpointError):  # of two saves: what is read below tells so
                tag = less_others(directory, tag)
            parts = PartFiles(directory, tag.files)
            check_files(report, tag.files, partial(check_zip, directory), workers)
            damaged = {problem.file for problem in report.problems}
            for file in tag.files:
                if file not in damaged:
                    noted(report, partial(_count, parts, file, report))
            # Damage in one part does not hide that another is missing, or of another save.
            reported = {(problem.problem, problem.file) for problem in report.problems}
            noted(report, partial(_check_sums, parts, tag, reported))
    return report


def _count(parts: PartFiles, file: str, report: VerifyReport) -> None:
    report.arrays += sum(isinstance(leaf, StoredTensor) for leaf in leaves(parts.tree(file)))


def _check_sums(parts: PartFiles, tag: SmpTag, reported: set[tuple[str, str | None]]) -> None:
    """Check that the parts add up. What the report has already is not added again."""
    try:
        scan_smp(parts, tag, Hints())
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the files alone do not say how arrays were split, or are of a kind that is not read: no damage
    except CorruptCheckpointError as error:
        if (error.problem, error.file) not in reported:
            raise
