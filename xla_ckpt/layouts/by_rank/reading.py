"""Opening tags of rank files, and verifying them: the same steps for all layouts."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedStateError,
    storage_errors,
)
from xla_ckpt.layouts.by_rank.content import manifest_of
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.tags import RankTag
from xla_ckpt.layouts.scanned import directory_to_scan
from xla_ckpt.layouts.torch_save.zip_reader import check_zip
from xla_ckpt.layouts.verifying import check_files, foreign_report
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tree.nested import leaves

logger = get_logger(__name__)


def open_ranks(layout: RankLayout, store: Store, tag: RankTag, hints: Hints) -> TagReader:
    """A reader of a tag, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, of two saves, or do not add up.
        UnsupportedStateError: They are of a kind that is not read.
        UntrustedObjectError: A file names a class that is neither a tensor nor a plain value.
        IncompatibleCheckpointError: The stored optimizer is not the one that is wanted.
    """
    with directory_to_scan(store, tag.tag, lambda: tag.opened(store)) as directory:
        files = layout.files(store, tag, directory)
        if not tag.complete and files.unfinished:
            logger.warning("%s", files.unfinished.format(tag=tag.tag))
        manifest, objects = manifest_of(files, tag.tag, files.content(hints), hints)
        return TagReader(files.compared(files.directory, files.names), store.path, tag.tag, manifest, objects)


def verify_ranks(layout: RankLayout, store: Store, tag: RankTag, workers: int = READERS) -> VerifyReport:
    """Read every file of a tag.

    The files of all ranks and all tensors have to be there, the zips have to agree with their CRC-32s, which neither
    torch nor the program looks at that wrote them, and the parts of the ranks have to add up to whole arrays, as far as
    the tag alone tells.

    Raises:
        StorageError: The tag cannot be opened.
    """
    with foreign_report(store, tag.tag) as report:
        try:
            with storage_errors("opening a tag", path=store.path, tag=tag.tag):
                directory = tag.opened(store)
        except CorruptCheckpointError as error:
            report.problems.append(error)
            return report
        with closing(directory):
            files = layout.files(store, tag, directory)
            if not tag.complete and files.unfinished:
                report.problems.append(CorruptCheckpointError(files.unfinished.format(tag=tag.tag)))
            for check in files.checks():
                noted(report, check)
            check_files(report, files.zips(), partial(check_zip, directory), workers)
            damaged = {problem.file for problem in report.problems}
            for file, at in files.rank_files().items():
                if file not in damaged:
                    noted(report, partial(_look_at, files, file, at, report))
            # Damage in one file does not hide that another is missing, or of another save.
            noted(report, partial(_add_up, files, report))
    return report


def _look_at(files: RankFiles, file: str, at: RankAt, report: VerifyReport) -> None:
    """Check that every tensor that a rank file names is there."""
    damaged = {problem.file for problem in report.problems}
    for leaf in leaves(files.tree(file, at)):
        if isinstance(leaf, StoredTensor):
            report.arrays += 1
            if leaf.file not in damaged and not files.left_out(leaf):
                noted(report, partial(files.place, leaf))


def _add_up(files: RankFiles, report: VerifyReport) -> None:
    """Check that the parts add up. What the report has already is not added again."""
    reported = {(problem.problem, problem.file) for problem in report.problems}
    try:
        files.content(Hints())
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the files alone do not say how arrays were split, or are of a kind that is not read: no damage
    except CheckpointError as error:
        if (error.problem, error.file) not in reported:
            raise
