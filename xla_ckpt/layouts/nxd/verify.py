"""Reading a whole tag of neuronx-distributed's to see whether it is complete, and what its zips say it is.

There are no digests, but each record of a zip has a CRC-32, which neither torch nor neuronx-distributed looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    storage_errors,
)
from xla_ckpt.layouts.nxd.rank_files import RankFiles, Scan, StoredTensor, check_grid
from xla_ckpt.layouts.nxd.scan import AS_NXD, Around, scan_nxd
from xla_ckpt.layouts.nxd.tags import LEGACY_OPTIMIZER, NxdTag
from xla_ckpt.layouts.torch_save.zip_reader import check_zip, read
from xla_ckpt.layouts.verifying import check_files, foreign_report
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tree.nested import leaves


def verify_nxd(store: Store, tag: NxdTag, workers: int = READERS, around: Around = AS_NXD) -> VerifyReport:
    """Read every file of a tag.

    The files of all ranks and all tensors have to be there, the zips have to agree with their CRCs, and the parts of
    the ranks have to add up to whole arrays, as far as the tag alone tells.

    Raises:
        StorageError: The tag cannot be opened.
    """
    with foreign_report(store, tag.tag) as report:
        if not tag.complete:
            report.problems.append(CorruptCheckpointError("there is no done marker: the save may not have ended"))
        with storage_errors("opening a tag", path=store.path, tag=tag.tag):
            directory = store.open(tag.tag)
        with closing(directory):
            files = Scan(directory, tag.below)
            noted(report, files.check_optimizer)
            noted(report, lambda: _check_trees(files, tag, report))
            zips = sorted(name for name in files.names if name.endswith(".pt") or (tag.legacy and _is_legacy(name)))
            check_files(report, zips, partial(check_zip, directory), workers)
            if not report.problems:
                noted(report, partial(_check_sums, files, tag, around))
    return report


def _check_trees(files: Scan, tag: NxdTag, report: VerifyReport) -> None:
    """Check that every rank has its files, and that every tensor that they name is there."""
    grids = _legacy_grids(files, report) if tag.legacy else files.present()
    for kind, grid in grids.items():
        noted(report, partial(check_grid, kind, grid))
        for tree in _trees(files, grid, report):
            for leaf in leaves(tree):
                if not isinstance(leaf, StoredTensor):
                    continue
                report.arrays += 1
                # A folder without any tensor is what avoid_saving_lower_precision_weights leaves.
                if leaf.at is None and leaf.file.rpartition("/")[0] in files.folders:
                    noted(report, partial(files.place, leaf))
    for name in ("scheduler.pt", "user_content.pt"):
        for path in {name, f"{files.below}{name}"} & files.names:
            noted(report, partial(_check_pickle, files, path))


def _is_legacy(name: str) -> bool:
    """Whether a file of the older layout is a rank's, or that of a ZeRO-1 optimizer beside it."""
    return "." not in name or LEGACY_OPTIMIZER.fullmatch(name) is not None


def _legacy_grids(files: Scan, report: VerifyReport) -> dict[str, RankFiles]:
    grids = {"tag": files.legacy_files()}

    def add_optimizer() -> None:
        if (optimizer := files.legacy_optimizer()) is not None:
            grids["optim"] = optimizer

    noted(report, add_optimizer)
    return grids


def _check_sums(files: Scan, tag: NxdTag, around: Around) -> None:
    try:
        scan_nxd(files, tag, Hints(), around)
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the tag alone does not say how its arrays were split, which is no damage


def _check_pickle(files: Scan, name: str) -> None:
    try:
        read(files.directory, name)
    except UntrustedObjectError:
        return  # objects of the program's own classes are no damage


def _trees(files: Scan, grid: RankFiles, report: VerifyReport) -> Iterator[Any]:
    for at, path in sorted(grid.paths.items()):
        try:
            yield files.tree(path, at)
        except CheckpointError as error:
            report.problems.append(error)
